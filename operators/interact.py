"""`Interact`: episodes in the place of answers."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, cast

import torch
from pydantic import Field, field_validator

from flowrl import columns as c
from flowrl.core import references
from flowrl.core.operator import Granularity, Operator
from flowrl.core.ports import INJECTED
from flowrl.core.protocols import Requests, Rollout
from flowrl.core.roles import Reads, Role
from flowrl.data.column_math import objects
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.data.tokenizer import assemble
from flowrl.data.transcript import Check, Message
from flowrl.episodes.chat import Desk, Limits
from flowrl.episodes.environment import Environment, Row
from flowrl.episodes.play import Played, Stage, World, play
from flowrl.episodes.tools import Toolbox
from flowrl.errors import DataError, ParameterError
from flowrl.operators.engines import Sampler
from flowrl.records import EpisodeBatch
from flowrl.spec import Spec


class Conversable(Protocol):
    """What episodes start from."""

    @property
    def uid(self) -> c.Uid: ...
    @property
    def row_id(self) -> c.RowId: ...
    @property
    def data_source(self) -> c.DataSource: ...
    @property
    def ground_truth(self) -> c.GroundTruth: ...
    @property
    def extra_info(self) -> c.ExtraInfo: ...
    @property
    def raw_prompt(self) -> c.RawPrompt: ...


class TakesRequests(Rollout, Requests, Protocol):
    """A rollout engine that takes requests one by one."""


class Episodes(Spec):
    """What is played, and how long it may get; see `Interact`, where these parameters come first."""

    world: Callable[..., Any] | str | None = None
    max_turns: int = Field(default=8, ge=1)
    context: int = Field(default=4096, ge=2)
    timeout: float = Field(default=60.0, gt=0)
    tools: tuple[Callable[..., Any], ...] = ()
    parser: Literal["hermes", "json"] | Callable[..., Any] = "hermes"
    check: Check = "loose"
    failed: Literal["error", "leave"] = "error"
    tries: int = Field(default=2, ge=1)
    concurrency: int | None = Field(default=None, ge=1)


class Interact(Sampler, Episodes, Operator):
    """One episode per row: the policy answers, a world replies, the policy goes on.

    It stands in the place of `Generate`, and writes what that writes, with rewards. All episodes of a batch go on at
    once: while one waits for its world, the others are computed. What was sampled is never tokenised again, and the
    mask is True on sampled tokens alone; see `flowrl.data.transcript`.

    Args:
        world: an `Environment` class, or an agent (``async def agent(chat, row)``, which returns the score), or where
            to find one: ``"triage.py:Triage"``. None is no world but tools: an episode ends with the first answer that
            calls none.
        max_turns: answers in an episode.
        context: tokens in an episode, prompt included.
        timeout: seconds that the world may take between two answers.
        tools: typed functions that the policy may call; see `flowrl.episodes.tools`. The chat template tells the policy
            of them where it reads ``tools``; otherwise the prompt has to.
        parser: how calls are written: ``"hermes"``, ``"json"``, or a function from text to calls.
        check: how the chat template is held against what is there, when a reply follows: ``"strict"``, ``"loose"``
            (without white space) or ``"off"``.
        failed: what becomes of an episode whose world fails in every try: ``"error"``, or ``"leave"``: its row is
            masked, has no reward, and is counted.
        tries: how often an episode is begun whose world fails, each time by the same random numbers.
        concurrency: how many episodes are under way at a time; None is all.
        temperature, top_k, top_p, max_new_tokens, stop_token_ids, stop, ignore_eos: of each answer; see `Sampler`.
        rollout: the engine.

    Returns:
        the columns of `Generate`, of which `response_text` is the last answer; `token_level_scores` with each turn's
        reward on its last token; `turns`, the number of answers (int64 ``[batch]``); `conversation`, the messages.

    Raises:
        EpisodeError: the world fails, and `failed` is ``"error"``.
        DataError: a prompt leaves no room for an answer.
        SyncError: the engine holds no valid receipt for its weights.
    """

    references: ClassVar[frozenset[str]] = frozenset({"world"})
    granularity: ClassVar[Granularity] = "row"
    rollout: Reads[TakesRequests] = Role("rollout")

    def __post_init__(self) -> None:
        if isinstance(self.world, str):
            references.check(self.world, classes=True)
        elif self.world is not None:
            refuse_no_world(self.world)
        if self.world is None and not self.tools:
            raise ParameterError("there is no world and no tool, so every episode is one answer: write Generate(...).")
        self._toolbox  # noqa: B018 (refuses tools that are none)

    @field_validator("world", mode="before")
    @classmethod
    def _refuse_no_world(cls, world: Any) -> Any:
        if isinstance(world, Environment):
            name = type(world).__name__
            raise ValueError(f"it is an object, and each episode makes its own; give its class: Interact({name})")
        return world

    @cached_property
    def _toolbox(self) -> Toolbox | None:
        return Toolbox(self.tools, self.parser) if self.tools else None

    def __call__(self, prompts: Conversable, key: Key = INJECTED, metrics: Metrics = INJECTED) -> EpisodeBatch:
        engine = self.rollout
        world = references.resolve(self.world) if isinstance(self.world, str) else self.world
        if world is not None:
            refuse_no_world(world)
        limits = Limits(self.max_turns, self.context, self.timeout)
        stage = Stage(cast("World | None", world), limits, self.check, self._toolbox, self.tries, self.concurrency)
        columns = (prompts.row_id, prompts.uid, prompts.raw_prompt, prompts.ground_truth, prompts.extra_info)
        rows = [Row(*values) for values in zip(*columns, prompts.data_source, strict=True)]
        desk, start = Desk(engine, engine.tokenizer, self.sampling, key), time.perf_counter()
        played = play(desk, rows, stage)
        for one in played:
            if one.fault is not None and self.failed == "error":
                raise one.fault
        report(played, desk.waited, time.perf_counter() - start, metrics)
        return self._columns(rows, played)

    def _columns(self, rows: Sequence[Row], played: Sequence[Played]) -> EpisodeBatch:
        tokenizer, receipt = self.rollout.tokenizer, self.rollout.receipt
        assert receipt is not None  # the engine answers to nobody without one
        told = [_Told.of(row, one, tokenizer.eos_id) for row, one in zip(rows, played, strict=True)]
        prompts, prompt_mask = tokenizer.pad_left([one.prompt for one in told])
        width = max((len(one.ids) for one in told), default=0)
        responses = torch.full((len(told), width), tokenizer.pad_id)
        present = torch.zeros(len(told), width, dtype=torch.bool)
        sampled, log_probs, scores = present.clone(), torch.zeros(len(told), width), torch.zeros(len(told), width)
        for i, one in enumerate(told):
            length = len(one.ids)
            responses[i, :length], present[i, :length] = torch.tensor(one.ids, dtype=torch.int64), True
            sampled[i, :length], log_probs[i, :length] = torch.tensor(one.sampled), torch.tensor(one.log_probs)
            for place, reward in one.rewards.items():
                scores[i, place] = reward
        input_ids, attention_mask, position_ids = assemble(prompts, prompt_mask, responses, present)
        return EpisodeBatch(
            prompts=prompts,
            responses=responses,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            response_mask=sampled,
            rollout_log_probs=log_probs,
            response_text=objects(one.text for one in told),
            temperature=torch.full((len(told),), self.temperature),
            policy_version=torch.full((len(told),), receipt.version, dtype=torch.int64),
            token_level_scores=scores,
            turns=torch.tensor([len(one.rewards) for one in told], dtype=torch.int64),
            conversation=objects(one.conversation for one in told),
        )


class _Told(NamedTuple):
    """A row of what is written; of an episode that failed, or had no answer, the prompt alone."""

    prompt: Sequence[int]
    ids: Sequence[int] = ()
    sampled: Sequence[bool] = ()
    log_probs: Sequence[float] = ()
    rewards: Mapping[int, float] = MappingProxyType({})
    text: str = ""
    conversation: Sequence[Message] = ()

    @classmethod
    def of(cls, row: Row, played: Played, filler: int) -> Self:
        transcript = played.chat.transcript
        if transcript is None:
            return cls([filler])
        if not transcript.answers and played.ended == "context":
            raise DataError(
                f"the prompt of row {row.row_id!r} has {len(transcript.ids)} tokens, which leaves no room for an "
                f"answer within context={played.chat.limits.context}; raise context, or drop long prompts."
            )
        prompt = transcript.ids[: transcript.prompt_length]
        if not transcript.answers or played.fault is not None:
            return cls(prompt)
        ends = [a.start + len(a.ids) - transcript.prompt_length for a in transcript.answers]
        return cls(
            prompt,
            transcript.ids[transcript.prompt_length :][: ends[-1]],  # a reply that was not answered is nobody's context
            transcript.sampled[: ends[-1]],
            transcript.log_probs[: ends[-1]],
            {end - 1: reward for end, reward in zip(ends, played.chat.rewards, strict=True)},
            transcript.answers[-1].text,
            transcript.messages,
        )


def report(played: Sequence[Played], waited: float, seconds: float, metrics: Metrics) -> None:
    """Report how episodes went.

    Args:
        played: all of a batch.
        waited, seconds: how long nothing was computed, as all of them waited for their worlds; and how long it took.
        metrics: where to.
    """
    whole = [one for one in played if one.fault is None and one.chat.rewards]
    rewarded = any(one.chat.rewarded for one in played)  # else another node scores what was said
    for one in whole:
        turns = len(one.chat.rewards)
        assert one.chat.transcript is not None
        length = sum(len(answer.ids) for answer in one.chat.transcript.answers)
        metrics.mean("episodes/turns", turns)
        metrics.max("episodes/turns_max", turns)
        metrics.sum("response_length/total", length)
        metrics.mean("response_length/mean", length)
        metrics.max("response_length/max", length)
        metrics.mean("episodes/cut", one.chat.cut, turns)
        if rewarded:
            reward = sum(one.chat.rewards)
            metrics.mean("reward/mean", reward)
            metrics.min("reward/min", reward)
            metrics.max("reward/max", reward)
    metrics.sum("episodes/failed", sum(one.fault is not None for one in played))
    metrics.sum("episodes/tried_again", sum(one.tries - 1 for one in played))
    metrics.sum("episodes/tool_calls", sum(one.chat.tool_calls for one in played))
    metrics.sum("episodes/tool_errors", sum(one.chat.tool_errors for one in played))
    for why in ("turns", "context"):
        metrics.sum(f"episodes/out_of_{why}", sum(one.ended == why for one in played))
    metrics.mean("episodes/waiting", waited, seconds)


def refuse_no_world(world: Callable[..., Any]) -> None:
    """Refuse what is neither an `Environment` class nor an agent.

    Raises:
        ParameterError: naming it.
    """
    if isinstance(world, type) and issubclass(world, Environment):
        name = world.__name__
        if world.step is Environment.step:
            raise ParameterError(f"{name} does not say what it replies; define step(self, answer) -> Reply in it.")
        try:
            inspect.signature(world).bind()
        except TypeError as error:
            raise ParameterError(
                f"{name}() cannot be made without arguments ({error}), and each episode makes one so; give them "
                f"defaults, or read what it needs of the row in reset(self, row)."
            ) from None
        return
    if inspect.iscoroutinefunction(world):
        return
    raise ParameterError(
        f"the world is {world!r}; expected a class that derives from Environment, or an agent: async def "
        f"agent(chat, row)."
    )

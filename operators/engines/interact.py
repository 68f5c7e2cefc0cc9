"""`Interact`: episodes in the place of answers."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, cast

import torch
from pydantic import Field, field_validator

from flowrl import columns as c
from flowrl.core.operators import references
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.core.operators.roles import Reads, Role, RoleRef
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.data.now import Now
from flowrl.data.proto.column_math import objects
from flowrl.data.text.tokenizer import ChatTokenizer, assemble
from flowrl.data.text.transcript import Check, Message
from flowrl.episodes.chat import Limits, RequestBroker
from flowrl.episodes.environment import Environment, Row
from flowrl.episodes.play import EnvironmentOrAgent, EpisodeResult, EpisodeSetup, play
from flowrl.episodes.processes import call_tool, environment_server, reference_of
from flowrl.episodes.rehearsal import rehearse
from flowrl.episodes.summary import summarize
from flowrl.episodes.tools import Toolbox
from flowrl.errors import DataError, ParameterError
from flowrl.operators.engines.engines import Sampler, contexts_told, oldest_version
from flowrl.protocols.protocols import Rollout, StreamingRollout
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


class TakesRequests(Rollout, StreamingRollout, Protocol):
    """A rollout engine that takes requests one by one."""


class Episodes(Spec):
    """What is played, and how long it may get; see `Interact`, where these parameters come first."""

    environment: Callable[..., Any] | str | None = None
    max_turns: int = Field(default=8, ge=1)
    context: int = Field(default=4096, ge=2)
    timeout: float = Field(default=60.0, gt=0)
    tools: tuple[Callable[..., Any], ...] = ()
    parser: Literal["hermes", "json"] | Callable[..., Any] = "hermes"
    check: Check = "loose"
    failed: Literal["error", "leave"] = "error"
    tries: int = Field(default=2, ge=1)
    concurrency: int | None = Field(default=None, ge=1)
    chat_template_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    processes: bool = False


class Interact(Sampler, Episodes, Operator):
    """One episode per row: the policy answers, an environment replies, the policy goes on.

    It stands in the place of `Generate`, and writes what that writes, with rewards. All episodes of a batch go on at
    once: while one waits for its environment, the others are computed. What was sampled is never tokenised again, and
    the mask is True on sampled tokens alone; see `flowrl.data.text.transcript`.

    Args:
        environment: an `Environment` class, or an agent (``async def agent(chat, row)``, which returns the score), or
            where to find one: ``"triage.py:Triage"``. None is no environment but tools: an episode ends with the first
            answer that calls none.
        max_turns: answers in an episode.
        context: tokens in an episode, prompt included.
        timeout: seconds that the environment may take between two answers.
        tools: typed functions that the policy may call; see `flowrl.episodes.tools`. The chat template tells the policy
            of them where it reads ``tools``; otherwise the prompt has to.
        parser: how calls are written: ``"hermes"``, ``"json"``, or a function from text to calls.
        check: how the chat template is held against what is there, when a reply follows: ``"strict"``, ``"loose"``
            (without white space) or ``"off"``.
        failed: what becomes of an episode whose environment fails in every try: ``"error"``, or ``"leave"``: its row is
            masked, has no reward, and is counted.
        tries: how often an episode is begun whose environment fails, each time by the same random numbers.
        concurrency: how many episodes are under way at a time; None is all.
        chat_template_kwargs: arguments of the chat template, the same as those of the data, such as
            ``{"enable_thinking": False}``; a row with others of its own is refused when the data is read.
        processes: play each episode's environment in a process of its own, and make each call of a plain tool in one,
            so that those that hang or crash are killed with all that they have started; see
            `flowrl.episodes.processes`. They are imported there, and so have to be at the top level of a module or
            file.
        temperature, top_k, top_p, max_new_tokens, stop_token_ids, stop, ignore_eos: of each answer; see `Sampler`.
        rollout: the engine.

    Returns:
        the columns of `Generate`, of which `response_text` is the last answer; `token_level_scores` with each turn's
        reward on its last token; `turns`, the number of answers (int64 ``[batch]``); `turn_ids`, which of them a token
        is of; `conversation`, the messages; `episode`, its account (see `flowrl.episodes.summary`).

    Raises:
        EpisodeError: the environment fails, and `failed` is ``"error"``.
        DataError: a prompt leaves no room for an answer.
        SyncError: the engine holds no valid receipt for its weights.
    """

    references: ClassVar[frozenset[str]] = frozenset({"environment"})
    granularity: ClassVar[Granularity] = "row"
    rollout: Reads[TakesRequests] = Role("rollout")

    def __post_init__(self) -> None:
        if isinstance(self.environment, str):
            references.check(self.environment, classes=True)
        if self.environment is None and not self.tools:
            raise ParameterError(
                "there is no environment and no tool, so every episode is one answer: write Generate(...)."
            )
        self._toolbox  # noqa: B018 (refuses tools that are none)
        if self.processes and not isinstance(self.environment, str) and not self._apart(self.environment):
            raise ParameterError(
                "processes=True, and nothing would run in one: the environment is no Environment class, and no tool is "
                "plain; an agent and coroutines stay in this process. Leave processes out."
            )

    @field_validator("environment", mode="before")
    @classmethod
    def _refuse_no_environment(cls, environment: Any) -> Any:
        if environment is not None and not isinstance(environment, str):
            refuse_no_environment(environment)
        return environment

    @field_validator("tools", mode="before")
    @classmethod
    def _refuse_one_tool(cls, tools: Any) -> Any:
        if callable(tools):
            raise ValueError(f"expected a list of functions: tools=[{getattr(tools, '__name__', tools)}]")
        return tools

    @cached_property
    def _toolbox(self) -> Toolbox | None:
        return Toolbox(self.tools, self.parser) if self.tools else None

    def _apart(self, environment: Any) -> tuple[str, ...]:
        """Where processes of their own find the environment and the plain tools."""
        plain = (tool for tool in self.tools if not inspect.iscoroutinefunction(tool))
        return tuple(
            reference_of(thing)
            for thing in (environment, *plain)
            if thing is not environment or isinstance(environment, type)
        )

    def rehearse(self, tokenizer_of: Callable[[str], ChatTokenizer | None]) -> None:
        """Try the chat template of the model that answers; see `flowrl.episodes.rehearsal`."""
        if (tokenizer := tokenizer_of(cast(RoleRef, self.rollout).name)) is not None:
            rehearse(tokenizer, self.check, self._toolbox, self.environment is not None, self.chat_template_kwargs)

    def __call__(
        self, prompts: Conversable, key: Key = INJECTED, metrics: Metrics = INJECTED, now: Now = INJECTED
    ) -> EpisodeBatch:
        engine = self.rollout
        environment = references.resolve(self.environment) if isinstance(self.environment, str) else self.environment
        if environment is not None:
            refuse_no_environment(environment)
        server = environment_server(self._apart(environment)) if self.processes else None
        toolbox = self._toolbox
        if server is not None and toolbox is not None:
            toolbox = Toolbox(self.tools, self.parser, partial(call_tool, server))
        limits = Limits(self.max_turns, self.context, self.timeout)
        stage = EpisodeSetup(
            cast("EnvironmentOrAgent | None", environment),
            limits,
            self.check,
            toolbox,
            self.tries,
            self.concurrency,
            self.chat_template_kwargs,
            server,
        )
        columns = (prompts.row_id, prompts.uid, prompts.raw_prompt, prompts.ground_truth, prompts.extra_info)
        rows = [Row(*values) for values in zip(*columns, prompts.data_source, strict=True)]
        desk, start = RequestBroker(engine, engine.tokenizer, self.sampling, key), time.perf_counter()
        with contexts_told(engine, metrics):
            played = play(desk, rows, stage)
        for one in played:
            if one.fault is not None and self.failed == "error":
                raise one.fault
        now.waits.extend([*desk.environments.told(), *desk.idle.told()])
        report(played, desk.idle.seconds, time.perf_counter() - start, metrics)
        return self._columns(rows, played)

    def _columns(self, rows: Sequence[Row], played: Sequence[EpisodeResult]) -> EpisodeBatch:
        tokenizer, receipt = self.rollout.tokenizer, self.rollout.receipt
        assert receipt is not None  # the engine answers to nobody without one
        told = [_Told.of(row, one, tokenizer.eos_id) for row, one in zip(rows, played, strict=True)]
        prompts, prompt_mask = tokenizer.pad_left([one.prompt for one in told])
        width = max((len(one.ids) for one in told), default=0)
        responses = torch.full((len(told), width), tokenizer.pad_id)
        present = torch.zeros(len(told), width, dtype=torch.bool)
        sampled, log_probs, scores = present.clone(), torch.zeros(len(told), width), torch.zeros(len(told), width)
        versions = torch.full_like(responses, -1)
        ends = present.clone()  # the last token of each turn
        for i, one in enumerate(told):
            length = len(one.ids)
            responses[i, :length], present[i, :length] = torch.tensor(one.ids, dtype=torch.int64), True
            sampled[i, :length], log_probs[i, :length] = torch.tensor(one.sampled), torch.tensor(one.log_probs)
            versions[i, :length][sampled[i, :length]] = torch.tensor(one.versions, dtype=torch.int64)
            for place, reward in one.rewards.items():
                scores[i, place], ends[i, place] = reward, True
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
            policy_version=oldest_version(versions, sampled, receipt.version),
            token_version=versions,
            token_level_scores=scores,
            turns=torch.tensor([len(one.rewards) for one in told], dtype=torch.int64),
            turn_ids=torch.where(sampled, ends.cumsum(1) - ends.long(), -1),
            conversation=objects(one.conversation for one in told),
            episode=objects(map(summarize, played)),
        )


class _Told(NamedTuple):
    """A row of what is written; of an episode that failed, or had no answer, the prompt alone."""

    prompt: Sequence[int]
    ids: Sequence[int] = ()
    sampled: Sequence[bool] = ()
    log_probs: Sequence[float] = ()
    versions: Sequence[int] = ()  # of those that were sampled
    rewards: Mapping[int, float] = MappingProxyType({})
    text: str = ""
    conversation: Sequence[Message] = ()

    @classmethod
    def of(cls, row: Row, played: EpisodeResult, filler: int) -> Self:
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
            list(itertools.chain.from_iterable(played.chat.versions)),
            {end - 1: reward for end, reward in zip(ends, played.chat.rewards, strict=True)},
            transcript.answers[-1].text,
            transcript.messages,
        )


def _refuse_other_call(function: Callable[..., Any], name: str, given: Sequence[str]) -> None:
    """Refuse what cannot be called with these arguments.

    Raises:
        ParameterError: naming both.
    """
    try:
        inspect.signature(function).bind(*given)
    except TypeError as error:
        raise ParameterError(
            f"{name}{inspect.signature(function)} cannot be called as episodes do ({error}); define "
            f"{name.rpartition('.')[2]}({', '.join(given)})."
        ) from None


def report(played: Sequence[EpisodeResult], waited: float, seconds: float, metrics: Metrics) -> None:
    """Report how episodes went.

    Args:
        played: all of a batch.
        waited, seconds: how long nothing was computed, as all of them waited for their environments; and how long it
            took.
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
        metrics.mean("episodes/cut", sum(one.chat.cuts), turns)
        if rewarded:
            reward = sum(one.chat.rewards)
            metrics.mean("reward/mean", reward)
            metrics.min("reward/min", reward)
            metrics.max("reward/max", reward)
    metrics.sum("episodes/failed", sum(one.fault is not None for one in played))
    metrics.sum("episodes/unanswered", sum(one.fault is None and not one.chat.rewards for one in played))
    metrics.sum("episodes/tried_again", sum(one.tries - 1 for one in played))
    metrics.sum("episodes/tool_calls", sum(one.chat.tool_calls for one in played))
    metrics.sum("episodes/tool_errors", sum(one.chat.tool_errors for one in played))
    for why in ("turns", "context"):
        metrics.sum(f"episodes/out_of_{why}", sum(one.ended == why for one in played))
    metrics.mean("episodes/waiting", waited, seconds)
    metrics.max("timing/waiting", waited)


def refuse_no_environment(environment: Any) -> None:
    """Refuse what is neither an `Environment` class nor an agent.

    Raises:
        ParameterError: naming it.
    """
    if isinstance(environment, type) and issubclass(environment, Environment):
        name = environment.__name__
        if environment.step is Environment.step:
            raise ParameterError(f"{name} does not say what it replies; define step(self, answer) -> Reply in it.")
        try:
            inspect.signature(environment).bind()
        except TypeError as error:
            raise ParameterError(
                f"{name}() cannot be made without arguments ({error}), and each episode makes one so; give them "
                f"defaults, or read what it needs of the row in reset(self, row)."
            ) from None
        for method, given in (("reset", ["row"]), ("step", ["answer"]), ("close", [])):
            _refuse_other_call(getattr(environment, method), f"{name}.{method}", ["self", *given])
        return
    if inspect.iscoroutinefunction(environment):
        _refuse_other_call(environment, environment.__name__, ["chat", "row"])
        return
    if isinstance(environment, Environment):
        name = type(environment).__name__
        raise ParameterError(f"it is an object, and each episode makes its own; give its class: Interact({name}).")
    raise ParameterError(
        f"the environment is {environment!r}; expected a class that derives from Environment, or an agent: async def "
        f"agent(chat, row)."
    )

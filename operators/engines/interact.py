"""`Interact`: multi-turn episodes."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, Protocol, cast

import torch
from pydantic import Field, field_validator

from flowrl import columns as c
from flowrl import references
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.core.operators.roles import Reads, Role, RoleRef
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.data.now import Now
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.data.text.transcript import Check
from flowrl.episodes.chat import Chat, Limits, Rewrites
from flowrl.episodes.endpoint.endpoint import Endpoint
from flowrl.episodes.environment import Environment, Row
from flowrl.episodes.parsers import call_format
from flowrl.episodes.play import EnvironmentOrAgent, EpisodeResult, EpisodeSetup, play
from flowrl.episodes.processes import call_tool, environment_server, reference_of
from flowrl.episodes.rehearsal import rehearse
from flowrl.episodes.requests.broker import RequestBroker
from flowrl.episodes.sequences import OtherSide, RowRecord
from flowrl.episodes.summary import summarize
from flowrl.episodes.tools import Toolbox
from flowrl.errors import ParameterError, offer
from flowrl.operators.engines.engines import Sampler, report_contexts
from flowrl.operators.engines.episode_rows import episode_batch, version_of
from flowrl.protocols.protocols import Rollout, StreamingRollout
from flowrl.records import EpisodeBatch
from flowrl.spec import Spec


class EpisodePrompts(Protocol):
    """The columns that episodes read."""

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


class InteractiveRollout(Rollout, StreamingRollout, Protocol):
    """A rollout engine that accepts requests one by one."""


class Episodes(Spec):
    """Parameters of episodes; see `Interact`, whose first parameters these are."""

    environment: Callable[..., Any] | str | None = None
    max_turns: int = Field(default=8, ge=1)
    context: int = Field(default=4096, ge=2)
    timeout: float = Field(default=60.0, gt=0)
    tools: tuple[Callable[..., Any], ...] = ()
    parser: str | Callable[..., Any] = "hermes"
    check: Check = "loose"
    failed: Literal["error", "leave"] = "error"
    tries: int = Field(default=2, ge=1)
    concurrency: int | None = Field(default=None, ge=1)
    chat_template_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    processes: bool = False
    rewrites: Rewrites = "refuse"
    max_segments: int | None = Field(default=None, ge=1)
    others_sampling: Mapping[str, Sampler] = Field(default_factory=dict)


class Interact(Sampler, Episodes, Operator):
    """Play one episode per row: the policy responds, an environment replies, and so on.

    Use it in place of `Generate`: it writes the same columns, and rewards. The episodes of a batch run concurrently:
    while one waits for its environment, the engine computes the others. Sampled text is never tokenized again, and the
    mask is True on sampled tokens only; see `flowrl.data.text.transcript`.

    Args:
        environment: an `Environment` class, or an agent (``async def agent(chat, row)``, which returns the score), or
            a reference to one: ``"triage.py:Triage"``, or an `Endpoint` for programs that speak OpenAI's API. None
            plays with tools only: an episode ends with the first response that calls no tool.
        max_turns: maximum number of responses in an episode.
        context: maximum number of tokens in an episode, prompt included; with `rewrites`, in each of its segments.
        timeout: seconds that the environment may take between two responses.
        tools: typed functions that the policy may call; see `flowrl.episodes.tools`. A chat template that reads
            ``tools`` lists them; otherwise the prompt must.
        parser: format of tool calls: a name in `flowrl.episodes.parsers.PARSERS`, such as ``"qwen3_coder"``; a parser
            of vLLM, ``"vllm:NAME"``; or a function from text to calls.
        check: how to compare the chat template with the transcript when a reply follows: ``"strict"``, ``"loose"``
            (ignores whitespace) or ``"off"``.
        failed: what to do with an episode whose environment fails in every try: ``"error"`` raises; ``"leave"`` masks
            its row, gives it no reward and counts it.
        tries: maximum number of attempts per episode, all with the same random numbers.
        concurrency: maximum number of concurrent episodes; None is no limit.
        chat_template_kwargs: arguments of the chat template, such as ``{"enable_thinking": False}``; they must equal
            those of the data, and rows with other arguments are refused when the data is read.
        processes: run each episode's environment, and each call of a plain tool, in a separate process. Those that hang
            or crash are killed with all processes that they started; see `flowrl.episodes.processes`. They must be
            importable, at the top level of a module or file.
        rewrites: what to do where the next prompt does not continue what was said, because the template rewrites
            earlier turns or the agent calls ``chat.rewrite()``: ``"refuse"`` is an error; ``"segment"`` begins a new
            segment, see `flowrl.data.segments`. An episode remains one row.
        max_segments: maximum number of segments in an episode, which then ends; None is no limit.
        others_sampling: how other engines sample, by name, such as ``{"judge": Sampler(temperature=0.0)}``; the default
            is as the policy does.
        temperature, top_k, top_p, max_new_tokens, stop_token_ids, stop, ignore_eos, min_p, repetition_penalty,
            presence_penalty, frequency_penalty: for each response; see `Sampler`. A repetition penalty counts the
            conversation so far as the prompt.
        rollout: the engine.
        others: further engines, which an agent, environment or tool may ask: ``await chat.ask("user", messages)`` with
            ``{"user": Role("user")}``; see `Chat.ask` and `flowrl.episodes.current_chat`. `max_turns` and
            `context` limit each of them, too. `Sampled` makes rows of what they sampled.

    Returns:
        The columns of `Generate`, with the last response as `response_text`; `token_level_scores`, with the reward of
        each turn on its last token; `turns`, the number of responses (int64 ``[batch]``); `turn_ids`, the turn of each
        token (int64 ``[batch response]``, -1 off the mask); `conversation`, the messages; `episode`, a summary (see
        `flowrl.episodes.summary`); `asked`, for `Sampled`.

    Raises:
        EpisodeError: the environment fails, and `failed` is ``"error"``.
        DataError: a prompt leaves no room for a response.
        SyncError: the engine has no valid receipt for its weights.
    """

    references: ClassVar[frozenset[str]] = frozenset({"environment"})
    granularity: ClassVar[Granularity] = "row"
    rollout: Reads[InteractiveRollout] = Role("rollout")
    others: Reads[Mapping[str, InteractiveRollout]] = Field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.environment, str):
            references.check(self.environment, classes=True)
        if self.environment is None and not self.tools:
            raise ParameterError(
                "Interact has neither an environment nor tools, so every episode would be a single response. Pass "
                "Interact(environment) or Interact(tools=[...]), or use Generate(...).",
                code="episode.invalid-environment",
            )
        self._refuse_unfit_endpoint(self.environment)
        self._toolbox  # noqa: B018 (refuses invalid tools)
        if self.max_segments is not None and self.rewrites == "refuse":
            raise ParameterError(
                f"max_segments={self.max_segments} has no effect with rewrites='refuse', where an episode is a single "
                f"segment. Pass rewrites='segment', or leave max_segments out.",
                code="episode.single-segment",
                given=self.max_segments,
            )
        if unknown := [name for name in self.others_sampling if name not in self.others]:
            raise ParameterError(
                f"others_sampling has {unknown[0]!r}, which is no other engine of the episodes; "
                f"{offer(unknown[0], self.others, 'others has')}",
                code="episode.unknown-engine",
                name=unknown[0],
                known=sorted(self.others),
            )
        if self.processes and not isinstance(self.environment, str) and not self._isolated(self.environment):
            raise ParameterError(
                "processes=True has no effect: only Environment classes and plain tools run in separate processes, "
                "agents and coroutines in the main one. Leave processes out.",
                code="episode.nothing-isolated",
            )

    def _refuse_unfit_endpoint(self, environment: Any) -> None:
        """Refuse tools and a parser beside an `Endpoint`, which has its own."""
        if not isinstance(environment, Endpoint):
            return
        if self.tools:
            raise _invalid(
                "Interact has tools, but a program at an Endpoint runs its own. Leave tools out, and let the program "
                "send the schemas of its tools.",
                "Endpoint",
            )
        if self.parser != "hermes":
            raise _invalid(
                f"Interact has parser={self.parser!r}, but an Endpoint parses the calls of its policy. Pass "
                f"Interact(Endpoint(..., parser={self.parser!r})) instead.",
                "Endpoint",
            )

    def resolved(self) -> Any:
        """The environment or agent, resolved if it is a reference."""
        if not isinstance(self.environment, str):
            return self.environment
        environment = references.resolve(self.environment)
        refuse_invalid_environment(environment)
        self._refuse_unfit_endpoint(environment)
        return environment

    @field_validator("environment", mode="before")
    @classmethod
    def _refuse_invalid_environment(cls, environment: Any) -> Any:
        if environment is not None and not isinstance(environment, str):
            refuse_invalid_environment(environment)
        return environment

    @field_validator("parser")
    @classmethod
    def _refuse_unknown_parser(cls, parser: Any) -> Any:
        call_format(parser)
        return parser

    @field_validator("tools", mode="before")
    @classmethod
    def _refuse_one_tool(cls, tools: Any) -> Any:
        if callable(tools):
            raise ValueError(f"expected a list of functions: tools=[{getattr(tools, '__name__', tools)}]")
        return tools

    @cached_property
    def _toolbox(self) -> Toolbox | None:
        return Toolbox(self.tools, self.parser) if self.tools else None

    def _isolated(self, environment: Any) -> tuple[str, ...]:
        """References to the environment and the plain tools, which can run in separate processes."""
        plain = (tool for tool in self.tools if not inspect.iscoroutinefunction(tool))
        return tuple(
            reference_of(each)
            for each in (environment, *plain)
            if each is not environment or isinstance(environment, type)
        )

    def rehearse(self, tokenizer_of: Callable[[str], ChatTokenizer | None]) -> None:
        """Test the chat template of the policy; see `flowrl.episodes.rehearsal`."""
        if (tokenizer := tokenizer_of(cast(RoleRef, self.rollout).name)) is not None:
            replies, arguments = self.environment is not None, self.chat_template_kwargs
            rehearse(tokenizer, self.check, self._toolbox, replies, arguments, self.rewrites)
            if isinstance(environment := self.resolved(), Endpoint):
                call_format(environment.parser).refuse_missing()

    def __call__(
        self, prompts: EpisodePrompts, key: Key = INJECTED, metrics: Metrics = INJECTED, now: Now = INJECTED
    ) -> EpisodeBatch:
        engine = self.rollout
        environment = self.resolved()
        server = environment_server(self._isolated(environment)) if self.processes else None
        toolbox = self._toolbox
        if server is not None and toolbox is not None:
            toolbox = Toolbox(self.tools, self.parser, partial(call_tool, server))
        broker, start = RequestBroker(engine, engine.tokenizer, self.sampling, key), time.perf_counter()
        setup = EpisodeSetup(
            cast("EnvironmentOrAgent | None", environment),
            Limits(self.max_turns, self.context, self.timeout, self.rewrites, self.max_segments),
            self.check,
            toolbox,
            self.tries,
            self.concurrency,
            self.chat_template_kwargs,
            server,
            self._brokers(broker),
        )
        columns = (prompts.row_id, prompts.uid, prompts.raw_prompt, prompts.ground_truth, prompts.extra_info)
        rows = [Row(*values) for values in zip(*columns, prompts.data_source, strict=True)]
        with report_contexts(engine, metrics):
            results = play(broker, rows, setup)
        for result in results:
            if result.fault is not None and self.failed == "error":
                raise result.fault
        now.waits.extend([*broker.environments.recorded(), *broker.loop.idle.recorded()])
        report(results, broker.loop.idle.seconds, time.perf_counter() - start, metrics)
        return self._columns(rows, results)

    def _brokers(self, policy: RequestBroker) -> dict[str, RequestBroker]:
        """How episodes ask the other engines; those with one engine share its loop."""
        found, loops = {}, {id(self.rollout): policy.loop}
        for name, engine in self.others.items():
            sampling = self.others_sampling.get(name, self).sampling
            key, loop = policy.key.derive("ask", name), loops.get(id(engine))
            found[name] = RequestBroker(engine, engine.tokenizer, sampling, key, name, loop)
            loops[id(engine)] = found[name].loop
        return found

    def _columns(self, rows: Sequence[Row], results: Sequence[EpisodeResult]) -> EpisodeBatch:
        receipt = self.rollout.receipt
        assert receipt is not None  # an engine without a receipt generates nothing
        versions = {name: version_of(engine, name) for name, engine in self.others.items()}
        pairs = [*zip(rows, results, strict=True)]
        return episode_batch(
            [RowRecord.of(row, result, self.rollout.tokenizer.eos_id) for row, result in pairs],
            [summarize(result) for result in results],
            [OtherSide.all(row, result, versions) for row, result in pairs],
            self.rollout.tokenizer,
            torch.full((len(rows),), self.temperature),
            torch.full((len(rows),), receipt.version),
        )


def _refuse_other_call(function: Callable[..., Any], name: str, arguments: Sequence[str]) -> None:
    """Refuse a function that cannot be called with these positional arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ParameterError(
            f"Episodes cannot call {name}{inspect.signature(function)} with {', '.join(arguments) or 'no arguments'} "
            f"({error}). Define {name.rpartition('.')[2]}({', '.join(arguments)}).",
            code="episode.invalid-environment",
            name=name,
            expected=arguments,
        ) from None


def report(results: Sequence[EpisodeResult], waited: float, seconds: float, metrics: Metrics) -> None:
    """Report on the episodes of a batch, which took `seconds`, of which the engine was idle for `waited`."""
    complete = [result for result in results if result.fault is None and result.chat.rewards]
    rewarded = any(result.chat.rewarded for result in results)  # otherwise another node computes the rewards
    segmented = any(result.chat.limits.rewrites == "segment" for result in results)
    for one in complete:
        turns = len(one.chat.rewards)
        length = sum(len(answer.ids) for answer in one.chat.answers)
        metrics.mean("episodes/turns", turns)
        metrics.max("episodes/turns_max", turns)
        metrics.sum("response_length/total", length)
        metrics.mean("response_length/mean", length)
        metrics.max("response_length/max", length)
        metrics.mean("episodes/cut", sum(one.chat.cuts), turns)
        if segmented:
            segments = [segment for segment in one.chat.segments if segment.own]
            read = sum(segment.own[-1].start + len(segment.own[-1].ids) for segment in segments) - length
            metrics.mean("episodes/segments", len(segments))
            metrics.max("episodes/segments_max", len(segments))
            metrics.mean("episodes/context_per_token", read, length)
        if rewarded:
            reward = sum(one.chat.rewards)
            metrics.mean("reward/mean", reward)
            metrics.min("reward/min", reward)
            metrics.max("reward/max", reward)
    metrics.sum("episodes/failed", sum(one.fault is not None for one in results))
    metrics.sum("episodes/unanswered", sum(one.fault is None and not one.chat.rewards for one in results))
    metrics.sum("episodes/tried_again", sum(one.tries - 1 for one in results))
    metrics.sum("episodes/tool_calls", sum(one.chat.tool_calls for one in results))
    metrics.sum("episodes/tool_errors", sum(one.chat.tool_errors for one in results))
    for name in sorted({name for one in results for name in one.chat.counts}):
        metrics.sum(f"episodes/{name}", sum(one.chat.counts.get(name, 0) for one in results))
    _report_others([one.chat for one in complete], metrics)
    for limit in ("turns", "context", "segments") if segmented else ("turns", "context"):
        metrics.sum(f"episodes/out_of_{limit}", sum(one.ended == limit for one in results))
    metrics.mean("episodes/waiting", waited, seconds)
    metrics.max("timing/waiting", waited)


def _report_others(chats: Sequence[Chat], metrics: Metrics) -> None:
    """Report on what the other engines answered in these episodes."""
    for other, asked in (pair for chat in chats for pair in chat.others.items()):
        answers = len(asked.rewards)
        metrics.mean(f"others/{other}/answers", answers)
        metrics.mean(f"others/{other}/length", sum(len(answer.ids) for answer in asked.answers), answers)
        metrics.mean(f"others/{other}/cut", sum(asked.cuts), answers)
        if asked.rewarded:
            metrics.mean(f"others/{other}/reward", sum(asked.rewards))


def refuse_invalid_environment(environment: Any) -> None:
    """Refuse what is neither an `Environment` class nor an agent."""
    if isinstance(environment, Endpoint):
        return
    if isinstance(environment, type) and issubclass(environment, Environment):
        name = environment.__name__
        if environment.step is Environment.step:
            raise _invalid(f"{name} has no step method. Define step(self, answer) -> Reply in it.", name)
        try:
            inspect.signature(environment).bind()
        except TypeError as error:
            raise _invalid(
                f"Episodes create their environment by {name}(), which needs arguments ({error}). Give them defaults, "
                f"or read what depends on the row in reset(self, row).",
                name,
            ) from None
        for method, arguments in (("reset", ["row"]), ("step", ["answer"]), ("close", [])):
            _refuse_other_call(getattr(environment, method), f"{name}.{method}", ["self", *arguments])
        return
    if inspect.iscoroutinefunction(environment):
        _refuse_other_call(environment, environment.__name__, ["chat", "row"])
        return
    if isinstance(environment, Environment):
        name = type(environment).__name__
        raise _invalid(f"The environment is an instance of {name}, expected its class. Pass Interact({name}).", name)
    raise _invalid(
        f"The environment is {environment!r}. Pass a subclass of Environment, or an agent: async def agent(chat, row).",
        repr(environment),
    )


def _invalid(message: str, name: str) -> ParameterError:
    return ParameterError(message, code="episode.invalid-environment", name=name)

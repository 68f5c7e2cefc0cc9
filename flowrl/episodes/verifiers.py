"""Adapts environments of the verifiers library (0.4): their tasks, messages and rewards; tokens stay exact."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from flowrl.episodes.chat import Chat, EpisodeOver
from flowrl.episodes.environment import Row
from flowrl.errors import EpisodeError
from flowrl.lazy import package


def prompts(env: Any, number: int) -> Iterator[Mapping[str, Any]]:
    """The first tasks of an environment as rows of a prompt file; `play` finds a task by its index."""
    for index, task in enumerate(itertools.islice(env.taskset, number)):
        yield {"prompt": _opening(task) or task.data.prompt_text, "extra_info": {"index": index}}


async def play(env: Any, chat: Chat, row: Row) -> float:
    """Play the task of a row as the only agent of an environment; returns the sum of its weighted rewards.

    ``async def agent(chat, row): return await play(ENV, chat, row)`` is an agent for ``Interact``.

    The index of the task is the row's ``extra_info["index"]``; see `prompts`. `env` is from
    ``verifiers.v1.load_environment(config)``.
    """
    task = next(itertools.islice(env.taskset, int(row.extra_info["index"]), None), None)
    if task is None:
        index = row.extra_info["index"]
        raise EpisodeError(
            f"{type(env).__name__} has no task with index {index}. Write the prompts with prompts(env, n).",
            code="episode.unknown-task",
            environment=type(env).__name__,
            index=index,
        )
    episode = _of().Episode(task=_trace_task(task))
    agents = _of().Agents(env.config, lambda name, config: _Seat(chat, name, config, episode))
    if len(vars(agents)["_agents"]) > 1:
        names = ", ".join(vars(agents)["_agents"])
        raise EpisodeError(
            f"{type(env).__name__} has the agents {names}; expected one, which the policy plays. Use an environment "
            f"with a single agent.",
            code="episode.unsupported-task",
            environment=type(env).__name__,
            agents=tuple(vars(agents)["_agents"]),
        )
    await env.setup(agents)
    await env.run(task, agents)
    episode.ok = True
    await env.finalize(task, episode)
    return float(sum(trace.reward for trace in episode.traces))


def _trace_task(task: Any) -> Any:
    return _of().TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)


def _opening(task: Any) -> list[dict[str, Any]]:
    """The messages that a task starts with; none if its user opens the conversation."""
    data = task.data
    prompt = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else None
    prompt = [message.model_dump(exclude_none=True) for message in data.prompt or ()] if prompt is None else prompt
    return [*([{"role": "system", "content": data.system_prompt}] if prompt and data.system_prompt else []), *prompt]


class _Seat:
    """An agent of verifiers that the policy plays."""

    def __init__(self, chat: Chat, name: str, config: Any, episode: Any) -> None:
        self._chat, self._name, self._config, self._episode = chat, name, config, episode

    async def run(self, task: Any) -> Any:
        """One answer to a task."""
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[_Interaction]:
        """A conversation about a task, scored at its end."""
        needs = {
            "a container": task.NEEDS_CONTAINER,
            "tools of a server": task.toolsets(task.config),
            "stops": task.hooks("stop"),
            "interceptors": _of(".utils.decorators").discover_decorated(task, "intercept"),
        }
        if unsupported := [what for what, there in needs.items() if there]:
            raise EpisodeError(
                f"The task {type(task).__name__} needs {', '.join(unsupported)}, which flowrl does not support. Use "
                f"tasks that consist of messages and rewards.",
                code="episode.unsupported-task",
                task=type(task).__name__,
                needs=unsupported,
            )
        info = _of().AgentInfo(config=self._config, name=self._name)
        trace = _of().Trace(task=_trace_task(task), agent=info, state=_of(".state").state_cls(type(task))())
        yield _Interaction(self._chat, task, trace)
        await task.score(trace)
        trace.ok = trace.is_completed = True
        self._episode.traces.append(trace)


class _Interaction:
    """A conversation with the interface of verifiers."""

    def __init__(self, chat: Chat, task: Any, trace: Any) -> None:
        self._chat, self._opens, self.trace = chat, _opening(task), trace

    async def turn(self, message: Any = None) -> Any:
        """The policy's answer to a message, or to the messages that the task starts with."""
        given = [{"role": "user", "content": message}] if isinstance(message, str) else message or []
        messages = [*self._opens, *(m if isinstance(m, dict) else m.model_dump(exclude_none=True) for m in given)]
        self._opens = []
        try:
            answer = await self._chat.answer(messages)
        except EpisodeOver as over:
            self.trace.stop("max_turns" if over.why == "turns" else "max_total_tokens")
            return _of().Segment([], terminated=True)
        reply = _of().AssistantMessage(content=answer.text)
        before = [*self.trace.messages, *_of().Request(messages=messages).messages]
        ended = "length" if answer.cut else "stop"
        response = _of().Response(
            id=f"turn {answer.turn}", created=int(time.time()), model="policy", message=reply, finish_reason=ended
        )
        node = _of(".graph").prepare_turn(self.trace, before).commit(response)
        self.trace.calls.append(_of(".trace").ModelCall(node=node, finish_reason=ended))
        return _of().Segment([reply])


def _of(module: str = "") -> Any:
    """A module of verifiers, imported on first use."""
    return package(f"verifiers.v1{module}", "verifiers")

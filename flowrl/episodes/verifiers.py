"""Environments of the verifiers library (0.4): their tasks, messages and rewards; the policy's tokens stay exact."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from flowrl.episodes.chat import Chat, EpisodeOver
from flowrl.episodes.environment import Row
from flowrl.episodes.text_env import package
from flowrl.errors import EpisodeError


def prompts(env: Any, number: int) -> Iterator[Mapping[str, Any]]:
    """The first tasks of an environment as rows of a file of prompts, a line each; `play` finds a task by its index."""
    for index, task in enumerate(itertools.islice(env.taskset, number)):
        yield {"prompt": _opening(task) or task.data.prompt_text, "extra_info": {"index": index}}


async def play(env: Any, chat: Chat, row: Row) -> float:
    """Play the task of a row as the one agent of an environment; returns its rewards, weighted, in all.

    ``async def agent(chat, row): return await play(ENV, chat, row)`` is an agent for ``Interact``.

    Args:
        env: of verifiers, as ``verifiers.v1.load_environment(config)`` gives it.
        chat: what answers.
        row: whose ``extra_info["index"]`` says which task; see `prompts`.

    Raises:
        EpisodeError: the environment has several agents, or its task wants what runs beside the conversation: a
            container, tools of a server, stops or interceptors.
    """
    task = next(itertools.islice(env.taskset, int(row.extra_info["index"]), None), None)
    if task is None:
        raise EpisodeError(f"{type(env).__name__} has no task of index {row.extra_info['index']}; see prompts(env, n).")
    episode = _of().Episode(task=_told(task))
    agents = _of().Agents(env.config, lambda name, config: _Seat(chat, name, config, episode))
    if len(vars(agents)["_agents"]) > 1:
        names = ", ".join(vars(agents)["_agents"])
        raise EpisodeError(f"{type(env).__name__} has the agents {names}; expected one, which the policy plays.")
    await env.setup(agents)
    await env.run(task, agents)
    episode.ok = True
    await env.finalize(task, episode)
    return float(sum(trace.reward for trace in episode.traces))


def _told(task: Any) -> Any:
    return _of().TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)


def _opening(task: Any) -> list[dict[str, Any]]:
    """The messages that a task begins with; none where its user opens the conversation."""
    data = task.data
    said = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else None
    said = [message.model_dump(exclude_none=True) for message in data.prompt or ()] if said is None else said
    return [*([{"role": "system", "content": data.system_prompt}] if said and data.system_prompt else []), *said]


class _Seat:
    """An agent of verifiers whose answers are the policy's."""

    def __init__(self, chat: Chat, name: str, config: Any, episode: Any) -> None:
        self._chat, self._name, self._config, self._episode = chat, name, config, episode

    async def run(self, task: Any) -> Any:
        """One answer to a task."""
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[_Interaction]:
        """A conversation about a task, which is scored at its end."""
        beside = {
            "a container": task.NEEDS_CONTAINER,
            "tools of a server": task.toolsets(task.config),
            "stops": task.hooks("stop"),
            "interceptors": _of(".utils.decorators").discover_decorated(task, "intercept"),
        }
        if wanted := [what for what, there in beside.items() if there]:
            raise EpisodeError(
                f"{type(task).__name__} wants {', '.join(wanted)}, which verifiers runs beside a conversation and this "
                f"does not; expected a task of messages and rewards."
            )
        info = _of().AgentInfo(config=self._config, name=self._name)
        trace = _of().Trace(task=_told(task), agent=info, state=_of(".state").state_cls(type(task))())
        yield _Interaction(self._chat, task, trace)
        await task.score(trace)
        trace.ok = trace.is_completed = True
        self._episode.traces.append(trace)


class _Interaction:
    """A conversation as verifiers holds one."""

    def __init__(self, chat: Chat, task: Any, trace: Any) -> None:
        self._chat, self._opens, self.trace = chat, _opening(task), trace

    async def turn(self, message: Any = None) -> Any:
        """What the policy says to a message, or to the messages that the task begins with."""
        given = [{"role": "user", "content": message}] if isinstance(message, str) else message or []
        messages = [*self._opens, *(m if isinstance(m, dict) else m.model_dump(exclude_none=True) for m in given)]
        self._opens = []
        try:
            answer = await self._chat.answer(messages)
        except EpisodeOver as over:
            self.trace.stop("max_turns" if over.why == "turns" else "max_total_tokens")
            return _of().Segment([], terminated=True)
        said = _of().AssistantMessage(content=answer.text)
        before = [*self.trace.messages, *_of().Request(messages=messages).messages]
        ended = "length" if answer.cut else "stop"
        response = _of().Response(
            id=f"turn {answer.turn}", created=int(time.time()), model="policy", message=said, finish_reason=ended
        )
        node = _of(".graph").prepare_turn(self.trace, before).commit(response)
        self.trace.calls.append(_of(".trace").ModelCall(node=node, finish_reason=ended))
        return _of().Segment([said])


def _of(module: str = "") -> Any:
    """A module of verifiers, imported where it is first used."""
    return package(f"verifiers.v1{module}", "verifiers")

"""A policy that follows a script, instead of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowrl.data.keys import Key
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.data.text.transcript import Check
from flowrl.episodes.chat import Limits, Rewrites
from flowrl.episodes.environment import Answer, Environment, Reply, Row
from flowrl.episodes.play import EpisodeResult, EpisodeSetup, play
from flowrl.episodes.requests.broker import RequestBroker
from flowrl.episodes.tools import Toolbox
from flowrl.protocols.protocols import Request, Response, Sampling
from flowrl.workers.fork_server import ForkServer
from tests.support.templates import tokenizer_of

KEY = Key.of(1)
SAMPLING = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=256)
NAME = "qwen2.5"

Script = Callable[[str, int], str]
"""The text of a response by row id and turn."""


def say(name: str, turn: int) -> str:
    return f"{name} says {turn}"


class Three(Environment):
    """Three turns; the reward of each is its number."""

    async def step(self, answer: Answer) -> Reply:
        return Reply(f"and {answer.turn}?", reward=float(answer.turn), done=answer.turn == 2)


class Scripted:
    """Samples one token per step, with responses from a script.

    Args:
        script: texts of the responses.
        tokenizer: for the texts.
    """

    def __init__(self, script: Script, tokenizer: ChatTokenizer) -> None:
        self._script, self._tokenizer = script, tokenizer
        self.requests: list[Request] = []
        self.dropped: list[str] = []
        self.steps = 0
        self.most = 0  # requests that were under way at once
        self._under_way: dict[str, tuple[list[int], int]] = {}
        self._done: dict[str, Response] = {}

    def submit(self, request: Request) -> None:
        assert request.name not in self._under_way and request.name not in self._done
        row = request.name.partition("~")[0]  # further requests of an episode that are in flight at once
        turn = next(turn for turn in range(100) if KEY.response(row, turn) == request.key)
        self.requests.append(request)
        ids = self._tokenizer.encode(self._script(row, turn))
        ids = ids if ids[-1] in self._tokenizer.ends else [*ids, self._tokenizer.turn_end]
        self._under_way[request.name] = (ids[: request.sampling.max_new_tokens], 0)
        self.most = max(self.most, len(self._under_way))

    def step(self) -> list[str]:
        self.steps += 1
        ended = []
        for name, (ids, count) in list(self._under_way.items()):
            self._under_way[name] = (ids, count + 1)
            if count + 1 == len(ids):
                del self._under_way[name]
                how: Any = "stop" if ids[-1] in self._tokenizer.ends else "length"
                self._done[name] = Response(ids, [-0.25] * len(ids), [3] * len(ids), how)
                ended.append(name)
        return ended

    def take(self, name: str) -> Response:
        return self._done.pop(name)

    def drop(self, name: str) -> None:
        self._under_way.pop(name, None)
        self._done.pop(name, None)
        self.dropped.append(name)


def row(number: int, content: str = "go") -> Row:
    return Row(f"row-{number}", f"group-{number // 2}", [{"role": "user", "content": content}], number, {}, "test")


def played(
    environment: Any,
    script: Script,
    count: int = 1,
    turns: int = 4,
    context: int = 1000,
    seconds: float = 30.0,
    tries: int = 1,
    tools: Any = (),
    concurrency: int | None = None,
    rows: Any = None,
    toolbox: Toolbox | None = None,
    server: ForkServer | None = None,
    rewrites: Rewrites = "refuse",
    segments: int | None = None,
    name: str = NAME,
    tokenizer: ChatTokenizer | None = None,
    check: Check = "strict",
) -> tuple[list[EpisodeResult], Scripted]:
    """The episodes of some rows, and the scripted policy."""
    tokenizer = tokenizer or tokenizer_of(name)
    engine = Scripted(script, tokenizer)
    desk = RequestBroker(engine, tokenizer, SAMPLING, KEY)
    toolbox = Toolbox(tools, "hermes") if tools else toolbox
    limits = Limits(turns, context, seconds, rewrites, segments)
    stage = EpisodeSetup(environment, limits, check, toolbox, tries, concurrency, server=server)
    return play(desk, rows or [row(i) for i in range(count)], stage), engine

"""`Endpoint`: an agent that is any program which speaks OpenAI's chat completions or responses."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from flowrl import references
from flowrl.episodes.calls import call_user_code
from flowrl.episodes.chat import Chat, EpisodeOver
from flowrl.episodes.endpoint.program import ProgramResult, run_program
from flowrl.episodes.endpoint.server import endpoint_server
from flowrl.episodes.endpoint.session import Session
from flowrl.episodes.environment import Row
from flowrl.episodes.parsers import call_format
from flowrl.errors import EpisodeError
from flowrl.spec import Spec

_SHOWN = 1000
"""Characters of a program's last output in an error."""

_MAX_ROW = (1 << 17) - len("FLOWRL_ROW=") - 1
"""Maximum characters of a row as JSON: Linux passes no longer variable to a program (MAX_ARG_STRLEN)."""


class Endpoint(Spec):
    """An agent that speaks OpenAI's API: ``Interact(Endpoint(["python", "agent.py"]))``.

    Each episode has a key for a server on the loopback. A request continues the recorded tokens of the longest
    conversation that it repeats, see `flowrl.episodes.endpoint.messages`; otherwise it begins a segment, which
    ``Interact(rewrites="segment")`` allows. The limits of `Interact` hold: `timeout` is the time until the next
    request, or the end of the program.

    Args:
        agent: a command, which finds ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``FLOWRL_ROW`` (JSON) in its
            environment; or a function of the URL, the key and the `Row`, which returns the score. A plain function runs
            in a thread, and a string is a reference to a function.
        score: where the score of a command comes from: the last line of its ``"stdout"``, which is a number or an
            object with a number ``"score"``, as JSON; None for a later reward function, or for scores that the program
            sends with ``POST /v1/score``.
        parser: the format of the calls that the policy writes, for requests with tools; see `Interact`.
        concurrency: how many requests of an episode the policy answers at once, with ``rewrites="segment"``.
        strict: refuse requests whose temperature, top_p or other sampling differs from the node's, which else has no
            effect and is counted.
        logs: a folder that keeps the whole output of commands, a file for each row and try. Without it, the run keeps
            the end of each output in the row's summary of the episode.
    """

    references: ClassVar[frozenset[str]] = frozenset({"agent"})
    commands: ClassVar[frozenset[str]] = frozenset({"agent"})
    agent: tuple[str, ...] | str | Callable[..., Any]
    score: Literal["stdout"] | None = "stdout"
    parser: str | Callable[..., Any] = "hermes"
    concurrency: int = Field(default=8, ge=1)
    strict: bool = False
    logs: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.agent, str):
            references.check(self.agent)

    @field_validator("agent", mode="after")
    @classmethod
    def _refuse_invalid_agent(cls, agent: Any) -> Any:
        if agent == ():
            raise ValueError('expected a command, such as ["python", "agent.py"]')
        if callable(agent):
            try:
                inspect.signature(agent).bind("url", "key", "row")
            except TypeError:
                raise ValueError("expected a function of three arguments: the URL, the key and the row") from None
        return agent

    @field_validator("parser")
    @classmethod
    def _refuse_unknown_parser(cls, parser: Any) -> Any:
        call_format(parser)
        return parser

    async def __call__(self, chat: Chat, row: Row) -> float | None:
        """Play an episode; returns the score.

        Raises:
            EpisodeError: the command fails, or has no score; or the row is too large for its environment.
            EpisodeOver: it fails after a request beyond a limit of the episode.
        """
        server = endpoint_server()
        session = Session(chat, row, call_format(self.parser), self.concurrency, self.strict)
        key = server.open(session)
        try:
            if isinstance(self.agent, tuple):
                score = await self._score_of_command(self.agent, server.url, key, row, session)
            else:
                agent = references.resolve(self.agent) if isinstance(self.agent, str) else self.agent
                score = await self._score_of_function(agent, server.url, key, row, session)
            if score is not None and not chat.answers:
                raise _unanswered(session)
            return score
        finally:
            server.close(key)
            await session.close()

    async def _score_of_function(
        self, agent: Callable[..., Any], url: str, key: str, row: Row, session: Session
    ) -> float | None:
        try:
            score: float | None = await call_user_code(
                partial(agent, url, key, row), blocks=not inspect.iscoroutinefunction(agent)
            )
        except Exception:
            if session.ended_by is not None:  # the error of the request that the limit has refused
                raise EpisodeOver(session.ended_by) from None
            raise
        return score

    async def _score_of_command(
        self, command: tuple[str, ...], url: str, key: str, row: Row, session: Session
    ) -> float | None:
        if len(written := row_json(row)) > _MAX_ROW:
            raise EpisodeError(
                f"The row has {len(written)} characters as JSON, and a program's FLOWRL_ROW at most {_MAX_ROW}. Pass a "
                f"function, which gets any row: Endpoint('agent.py:play').",
                code="episode.large-row",
                found=len(written),
                expected=_MAX_ROW,
            )
        loopback = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"]))
        environment = {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": key,
            "FLOWRL_ROW": written,
            **{name: loopback for name in ("NO_PROXY", "no_proxy")},
        }
        name = re.sub(r"[^\w.#-]", "_", f"{row.row_id}-{row.attempt}")

        def keep(ended: ProgramResult) -> None:
            session.chat.program = ended.kept()

        ended = await run_program(command, environment, None if self.logs is None else Path(self.logs), name, keep)
        if ended.status != 0:
            if session.ended_by is not None:
                raise EpisodeOver(session.ended_by)
            raise self._failed(command, ended, session)
        return None if self.score is None else self._score(ended, session)

    def _failed(self, command: tuple[str, ...], ended: ProgramResult, session: Session) -> EpisodeError:
        return EpisodeError(
            f"{command[0]} exited with {ended.status}; expected 0. Its last output: "
            f"{(ended.stderr or ended.stdout).strip()[-_SHOWN:]!r}.{_last_refused(session)}",
            code="episode.agent-exit",
            status=ended.status,
            refused=None if session.refused is None else session.refused.code,
        )

    def _score(self, ended: ProgramResult, session: Session) -> float | None:
        line = next((line for line in reversed(ended.stdout.splitlines()) if line.strip()), "")
        try:
            written = json.loads(line)
        except (ValueError, RecursionError):
            written = None
        score = written.get("score") if isinstance(written, Mapping) else written
        if isinstance(score, int | float) and not isinstance(score, bool):
            return float(score)
        if session.ended_by is not None:
            raise EpisodeOver(session.ended_by)
        raise EpisodeError(
            f"The last line of the program's output is {line[-_SHOWN:]!r}; expected a score as JSON, such as 1.0 or "
            f'{{"score": 1.0}}. Print it last, or pass Endpoint(score=None) and let a reward function score.',
            code="episode.no-score",
            found=line[-_SHOWN:],
        )


def _last_refused(session: Session) -> str:
    return f" Its last refused request: {session.refused.message}" if session.refused else ""


def _unanswered(session: Session) -> EpisodeError:
    return EpisodeError(
        f"The agent has a score, but the policy answered no request of it.{_last_refused(session)} Send requests to "
        f"the URL of the episode with its key: OPENAI_BASE_URL and OPENAI_API_KEY, or the arguments of a function.",
        code="episode.reward-before-answer",
    )


def row_json(row: Row) -> str:
    """A row as JSON, with its seed."""
    return json.dumps({**row._asdict(), "messages": list(row.messages), "seed": row.seed}, default=str)

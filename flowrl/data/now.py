"""`Now`: in which step and round an operator runs, and on which part of the rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flowrl.data.balance import Share
from flowrl.data.waits import Wait
from flowrl.errors import BindError


class Round(NamedTuple):
    """Which round of a step an operator runs in.

    Args:
        number: 0 is the first; keys of later ones are others.
        wanted: groups that are still missing; None where nothing counts them, as in a call by hand.
        sizes: of the groups that were collected, in rows, where all rounds are over and too few were.
    """

    number: int = 0
    wanted: int | None = None
    sizes: tuple[int, ...] = ()


ONLY = Round()
"""The round of what runs once."""


class Collected(NamedTuple):
    """The groups that were taken in a round: how many rows each has, in their order."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Now:
    """In which step an operator runs, and on what; an operator takes it by ``now: Now = INJECTED``.

    Args:
        step: how many steps are done: 0 in the first. A validation has that of the step after which it runs.
        round: of the step, where a gate collects in rounds.
        share: the rows of this rank, where several ranks share the batch; else None.
        ahead: by how many versions generation may be ahead of what the operator trains: 0 on-policy.
        waits: the operator adds what it waited for outside of its process, and the trace shows it.
    """

    step: int
    round: Round = ONLY
    share: Share | None = None
    ahead: int = 0
    waits: list[Wait] = field(default_factory=list)


class NowByHand(Now):
    """That of a call outside of a job, on all rows: nothing says which step it is.

    Args:
        node: which is called.
        parameter: by which it takes this.
    """

    def __init__(self, node: str, parameter: str) -> None:
        super().__init__(step=-1)
        self.__dict__["_message"] = (
            f"{node} asks which step it is, and no job is active; call it inside `with job.eager():`, or pass "
            f"{parameter}=Now(0)."
        )

    def __getattribute__(self, name: str) -> Any:
        if name == "step":
            raise BindError(self._message)
        return super().__getattribute__(name)

    __repr__ = object.__repr__

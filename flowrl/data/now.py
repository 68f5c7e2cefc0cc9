"""`Now`: the step and round in which an operator runs, and its part of the rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flowrl.data.balance import Shard
from flowrl.data.waits import Wait
from flowrl.errors import BindError


class Round(NamedTuple):
    """A round of a step.

    Args:
        missing: how many groups are still missing; None if nothing counts them, as in a direct call.
        sizes: rows of each collected group, if all rounds are over and groups are missing; else empty.
    """

    number: int = 0
    missing: int | None = None
    sizes: tuple[int, ...] = ()


ONLY = Round()
"""The round of a node that runs once."""


class Collected(NamedTuple):
    """How many rows each group has that a gate passed in a round, in order."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Now:
    """The step in which an operator runs, and its rows; an operator takes it as ``now: Now = INJECTED``.

    Args:
        step: number of finished steps: 0 in the first. A validation has that of the step after which it runs.
        round: of the step, if a gate collects in rounds.
        shard: the rows of this rank, if several ranks split the batch; else None.
        lag: by how many versions generation may be ahead of what the operator trains: 0 on-policy.
        waits: the operator appends what it waited for outside its process, and the trace shows it.
    """

    step: int
    round: Round = ONLY
    shard: Shard | None = None
    lag: int = 0
    waits: list[Wait] = field(default_factory=list)


class NowByHand(Now):
    """`Now` of a call outside a job, on all rows; its step is unknown."""

    def __init__(self, node: str, parameter: str) -> None:
        super().__init__(step=-1)
        self.__dict__.update(_node=node, _parameter=parameter)

    def __getattribute__(self, name: str) -> Any:
        if name == "step":
            raise BindError(
                f"{self._node} reads the step number, but no job is active. Call it inside `with job.eager():`, or "
                f"pass {self._parameter}=Now(0).",
                code="session.no-job",
                node=self._node,
                parameter=self._parameter,
            )
        return super().__getattribute__(name)

    __repr__ = object.__repr__

"""Rounds: how often a part of a step has run, and what is still wanted of it."""

from __future__ import annotations

from typing import NamedTuple


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

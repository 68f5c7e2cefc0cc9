"""`Paired`: held-out responses of two configurations, paired by prompt, with an exact sign test."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from flowrl.look.files import Record
from flowrl.look.recorded_run import RecordedRun
from flowrl.run.recording.statistics import PASSED


@dataclass(frozen=True)
class Pair:
    """A held-out prompt.

    Args:
        prompt: its messages.
        ground_truth: its answer.
        before, after: the mean score of each side, over runs and samples.
        responses: a response of each side.
    """

    prompt: object
    ground_truth: object
    before: float
    after: float
    responses: tuple[str, str]

    @property
    def changed(self) -> bool:
        """Whether one side solves it and the other does not."""
        return (self.before > PASSED) != (self.after > PASSED)


@dataclass(frozen=True)
class Paired:
    """The newest validation of both sides.

    Args:
        validation: its name.
        steps: after how many steps, for each side.
        pairs: by prompt.
        alone: prompts that only one side has.
    """

    validation: str
    steps: tuple[int, int]
    pairs: Sequence[Pair]
    alone: int

    @cached_property
    def better(self) -> int:
        """Prompts on which the second side scores higher."""
        return sum(pair.after > pair.before for pair in self.pairs)

    @cached_property
    def worse(self) -> int:
        """Prompts on which it scores lower."""
        return sum(pair.after < pair.before for pair in self.pairs)

    @property
    def equal(self) -> int:
        """Prompts on which both score the same."""
        return len(self.pairs) - self.better - self.worse

    @property
    def p(self) -> float:
        """The exact two-sided sign test: how probable so uneven a split is if both sides are equally good."""
        return sign_test(self.better, self.worse)

    @property
    def changed(self) -> list[Pair]:
        """The prompts that changed sides: solved by one configuration only."""
        return [pair for pair in self.pairs if pair.changed]


def sign_test(better: int, worse: int) -> float:
    """The two-sided p-value of a split of ``better + worse`` differences; ties do not count."""
    n, few = better + worse, min(better, worse)
    tail = sum(math.comb(n, k) for k in range(few + 1))
    return float(min(1.0, 2 * tail / 2**n))


def pair(before: Sequence[RecordedRun], after: Sequence[RecordedRun]) -> Paired | None:
    """The newest responses of two sides to the prompts of a validation that both have; None without one."""
    sides = [[newest(run) for run in runs] for runs in (before, after)]
    shared = [name for name in sides[0][0] if all(name in run for side in sides for run in side)]
    if not shared:
        return None
    name = shared[0]
    found = [_by_prompt([row for run in side for row in run[name]]) for side in sides]
    pairs = [_pair(found[0][key], found[1][key]) for key in found[0] if key in found[1]]
    steps = tuple(max(row["step"] for row in side[0][name]) for side in sides)
    return Paired(name, (steps[0], steps[1]), pairs, len(found[0].keys() ^ found[1].keys()))


def newest(run: RecordedRun) -> dict[str, list[Record]]:
    """The rows of the newest validation of each name."""
    found: dict[str, list[Record]] = {}
    for row in run.predictions:
        rows = found.setdefault(str(row.get("validation")), [])
        if rows and rows[-1]["step"] != row["step"]:
            rows.clear()
        rows.append(row)
    return found


def _by_prompt(rows: Sequence[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for row in rows:
        if row.get("score") is not None:
            key = json.dumps([row.get("prompt"), row.get("ground_truth")], sort_keys=True)
            found.setdefault(key, []).append(row)
    return found


def _pair(before: Sequence[Record], after: Sequence[Record]) -> Pair:
    first, second = (statistics.fmean(row["score"] for row in rows) for rows in (before, after))
    responses = str(before[0].get("response", "")), str(after[0].get("response", ""))
    return Pair(before[0].get("prompt"), before[0].get("ground_truth"), first, second, responses)

"""`Cost`: the seconds of a node on one rank, fitted to measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

_ROUNDS = 20  # of reweighting, which turns least squares into least absolute deviations
_NOISE = 0.02  # relative; smaller differences count as equal
_ALIKE = 1.3  # a cost explains measurements about as well as the best with up to this much of its error
_VARIED = 1.5  # numbers of rows that differ by this factor tell fixed costs from growing ones
_PRIOR = 20.0  # penalty on terms that do not grow with rows: the data must support them

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Load(NamedTuple):
    """The input of one rank.

    `padded` counts tokens as if every row were as long as the longest; `longest` is the response tokens of the longest
    row: the decode steps of a node that generates. An update counts its rows and tokens once per epoch, and `updates`
    are its optimizer steps.
    """

    rows: int = 0
    tokens: int = 0
    padded: int = 0
    longest: int = 0
    updates: int = 0


@dataclass(frozen=True)
class Cost:
    """The seconds of a node on one rank, each coefficient non-negative.

    `fixed` is for any input; `row`, `token` and `padded` for each row, token, and token with padding; `decode` for each
    token of the longest response; `update` for each optimizer step.

    Args:
        others: costs that explain the measurements about as well, so that other loads have a range of seconds.
    """

    fixed: float = 0.0
    row: float = 0.0
    token: float = 0.0
    padded: float = 0.0
    decode: float = 0.0
    update: float = 0.0
    others: tuple[Cost, ...] = field(default=(), compare=False, repr=False)

    @property
    def terms(self) -> tuple[float, ...]:
        """All coefficients: the fixed one, and one for each number of a `Load`."""
        return self.fixed, self.row, self.token, self.padded, self.decode, self.update

    def seconds(self, load: Load) -> float:
        """The seconds for a load."""
        return sum(each * number for each, number in zip(self.terms, (1, *load), strict=True))

    def range(self, load: Load) -> tuple[float, float, float]:
        """The least, the usual and the most seconds for a load."""
        usual = self.seconds(load)
        every = [usual, *(other.seconds(load) for other in self.others)]
        return min(every), usual, max(every)

    def times(self, factor: float, low: float = 1.0, high: float = 1.0) -> Cost:
        """This many times the cost, or as unlikely from `low` to `high` times that."""
        every = [(self, part * factor) for part in (low, high) if part != 1.0]
        every += [(other, part * factor) for other in self.others for part in (low, high)]
        return _cost((factor * each for each in self.terms), tuple(_scaled(one, part) for one, part in every))

    def plus(self, fixed: float = 0.0, update: float = 0.0) -> Cost:
        """With further seconds of a call, and of an optimizer step."""
        others = tuple(other.plus(fixed, update) for other in self.others)
        return replace(self, fixed=self.fixed + fixed, update=self.update + update, others=others)

    @staticmethod
    def fit(loads: Sequence[Load], seconds: Sequence[float], least: float = 0.0) -> Cost:
        """Fit the cost with the least median of relative errors.

        If the loads hardly differ, they cannot determine the fixed part; then all time but `least` (the overhead of any
        node) counts as growing with rows and tokens.
        """
        times = np.maximum(np.asarray(seconds, dtype=np.float64) - least, 1e-9)
        terms = np.array([[1.0, *load] for load in loads], dtype=np.float64)
        units = np.median(terms, axis=0)
        known = np.flatnonzero(units > 0)
        grows = (known > 0) & (known < 4)
        penalty: Floats = np.where(grows, 0.0, _PRIOR * grows.any())
        shares = terms[:, known] / units[known]
        each: Floats = np.where(grows, 1.0, 0.0) if grows.any() else np.ones(len(known))
        each *= np.median(times / np.maximum(shares @ each, 1e-9))
        for _ in range(_ROUNDS):
            usual = np.maximum(shares @ each, 1e-9)
            error = np.abs(times / usual - 1.0)
            noise = max(float(np.median(error)), _NOISE)
            weight = 1.0 / (usual * np.sqrt(np.maximum(error, _NOISE)))
            unit = float(np.median(usual))
            each = _non_negative(shares * unit * weight[:, None], times * weight, noise * penalty) * unit
        limit = _ALIKE * max(float(np.median(np.abs(times / np.maximum(shares @ each, 1e-9) - 1.0))), _NOISE)
        others = _others(shares, times, limit, known > 0 if _is_alike(terms[:, 1]) else known >= 0)

        def cost(each: Floats, others: tuple[Cost, ...] = ()) -> Cost:
            found = np.zeros(len(Load._fields) + 1)
            found[known] = each / units[known]
            found[0] += least
            return _cost(found.tolist(), others)

        return cost(each, tuple(map(cost, others)) if grows.any() else ())


def _cost(terms: Iterable[float], others: tuple[Cost, ...] = ()) -> Cost:
    """The cost with these coefficients, in their order."""
    fixed, row, token, padded, decode, update = terms
    return Cost(fixed, row, token, padded, decode, update, others)


def _scaled(cost: Cost, factor: float) -> Cost:
    return _cost(factor * each for each in cost.terms)


def _is_alike(rows: Floats) -> bool:
    """Whether the numbers of rows hardly differ, so that a fixed cost cannot be distinguished from one that grows."""
    return bool(rows.max(initial=0.0) < _VARIED * rows.min(initial=np.inf))


def _others(shares: Floats, times: Floats, limit: float, allowed: np.ndarray[Any, np.dtype[np.bool_]]) -> list[Floats]:
    """Non-negative coefficients of some terms only, each with a median relative error up to `limit`."""
    found = []
    relative = shares / times[:, None]
    for some in _subsets(np.flatnonzero(allowed).tolist()):
        own = relative[:, some]
        square = own.T @ own
        square += 1e-9 * np.trace(square) * np.eye(len(some))
        part = np.linalg.solve(square, own.sum(0))
        each = np.zeros(shares.shape[1])
        each[some] = part
        if (part >= 0).all() and np.median(np.abs(shares @ each / times - 1.0)) <= limit:
            found.append(each)
    return found


def _subsets(members: Sequence[int]) -> list[list[int]]:
    """All subsets but the empty one."""
    return [list(some) for count in range(1, len(members) + 1) for some in combinations(members, count)]


def _non_negative(terms: Floats, target: Floats, penalty: Floats) -> Floats:
    """The x >= 0 that minimizes ``|terms x - target|² + penalty x²``, over all subsets of terms."""
    square, image = terms.T @ terms + np.diag(penalty), terms.T @ target
    square += 1e-9 * np.trace(square) * np.eye(len(square))
    best, least = np.zeros(len(image)), 0.0
    for some in _subsets(range(len(image))):
        part = np.linalg.solve(square[np.ix_(some, some)], image[some])
        loss = float(part @ square[np.ix_(some, some)] @ part - 2 * part @ image[some])
        if (part >= 0).all() and loss < least:
            best, least = np.zeros(len(image)), loss
            best[some] = part
    return best

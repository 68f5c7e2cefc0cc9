"""`Cost`: the seconds of a node on one rank, fitted to measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

_ROUNDS = 20  # of reweighting, which turns least squares into least absolute deviations
_NOISE = 0.02  # relative; smaller differences count as equal
_PRIOR = 20.0  # penalty on terms that do not grow with rows: the data must support them

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Load(NamedTuple):
    """The input of one rank.

    `padded` counts tokens as if every row were as long as the longest; `longest` is the response tokens of the longest
    row: the decode steps of a node that generates.
    """

    rows: int = 0
    tokens: int = 0
    padded: int = 0
    longest: int = 0


@dataclass(frozen=True)
class Cost:
    """The seconds of a node on one rank, each coefficient non-negative.

    `fixed` is for any input; `row`, `token` and `padded` for each row, token, and token with padding; `decode` for each
    token of the longest response.
    """

    fixed: float = 0.0
    row: float = 0.0
    token: float = 0.0
    padded: float = 0.0
    decode: float = 0.0

    def seconds(self, load: Load) -> float:
        """The seconds for a load."""
        grows = self.row * load.rows + self.token * load.tokens + self.padded * load.padded
        return self.fixed + grows + self.decode * load.longest

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
        found = np.zeros(5)
        found[known] = each / units[known]
        found[0] += least
        return Cost(*found.tolist())


def _non_negative(terms: Floats, target: Floats, penalty: Floats) -> Floats:
    """The x >= 0 that minimizes ``|terms x - target|² + penalty x²``, over all subsets of terms."""
    square, image = terms.T @ terms + np.diag(penalty), terms.T @ target
    square += 1e-9 * np.trace(square) * np.eye(len(square))
    best, least = np.zeros(len(image)), 0.0
    for count in range(1, len(image) + 1):
        for some in map(list, combinations(range(len(image)), count)):
            part = np.linalg.solve(square[np.ix_(some, some)], image[some])
            loss = float(part @ square[np.ix_(some, some)] @ part - 2 * part @ image[some])
            if (part >= 0).all() and loss < least:
                best, least = np.zeros(len(image)), loss
                best[some] = part
    return best

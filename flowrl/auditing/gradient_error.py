"""Compare two gradients: scale, angle and error, with intervals for sampled ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT = 1e-5
"""Smaller values count as 0: columns are float32, so sums over all runs are accurate to about 1e-7."""

_RESAMPLES = 500
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A number with its 95 % interval; without sampling, the bounds equal the number."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:
            return _short(self.value)
        return f"{_short(self.value)} [{_short(self.low)}, {_short(self.high)}]"


def _short(x: float) -> str:
    return "0" if abs(x) < EXACT else "1" if abs(x - 1) < EXACT else f"{x:.3g}"


@dataclass(frozen=True)
class GradientComparison:
    """The comparison of an expected gradient with a true one.

    Args:
        scale: the component along the true gradient, in units of it; a learning rate can compensate a positive one.
        cosine: of the angle between the two.
        bias: the orthogonal component, in units of the one along; no learning rate can compensate it.
        error: the difference of the two, in units of the true one.
        size: of the expected gradient, in units of the true one.
    """

    scale: Interval
    cosine: Interval
    bias: Interval
    error: Interval
    size: Interval

    @property
    def follows_nothing(self) -> bool:
        """Whether the expected gradient may be 0."""
        return self.size.low < EXACT

    @property
    def against(self) -> bool:
        """Whether it points away from the true one."""
        return not self.follows_nothing and self.scale.high < 0

    @property
    def biased(self) -> bool:
        """Whether it points elsewhere with certainty."""
        return not self.follows_nothing and (self.against or self.bias.low > EXACT)

    def __str__(self) -> str:
        if self.follows_nothing:
            return "follows nothing: its mean is 0" if self.size.high < EXACT else "too noisy to tell: sample more"
        if self.against:
            return "points against the true gradient"
        if self.biased:
            return f"biased by {percent(self.bias)}"
        return "unbiased" if self.bias.high < EXACT else f"no bias found, and less than {100 * self.bias.high:.2g} %"


def percent(x: Interval) -> str:
    """An interval of fractions in percent."""
    value, low, high = ("0" if abs(share) < EXACT else _short(100 * share) for share in (x.value, x.low, x.high))
    return f"{value} %" if x.low == x.high else f"{value} % [{low}, {high}]"


def compare_gradients(expected: Tensor, true: Tensor, radius: float = 0.0) -> GradientComparison:
    """Compare `expected` with `true`, of one shape; `radius` bounds the error of `expected`."""
    length, unit = float(true.norm()), float(expected.norm())
    along = float((expected * true).sum()) / length**2 if length else 0.0
    across = float((expected - along * true).norm())
    angle = math.atan2(across, along * length)
    turn = 0.0 if radius == 0 else math.asin(radius / unit) if radius < unit else math.pi
    low, high = max(0.0, angle - turn), min(math.pi, angle + turn)
    of_error, error = radius / length if length else math.inf, float((expected - true).norm()) / (length or 1.0)
    size = unit / length if length else math.inf
    return GradientComparison(
        scale=_around(along, of_error),
        cosine=Interval(math.cos(angle), math.cos(high), math.cos(low)),
        bias=_tangents(angle, low, high),
        error=_around(error, of_error, 0.0),
        size=_around(size, of_error, 0.0),
    )


def _around(value: float, by: float, least: float = -math.inf) -> Interval:
    return Interval(value, max(least, value - by), value + by)


def _tangents(angle: float, low: float, high: float) -> Interval:
    """Absolute tangents of angles from 0 to pi: 0 at both ends, infinite at a right angle."""
    ends = [abs(math.tan(one)) for one in (low, high)]
    upright = low <= math.pi / 2 <= high
    return Interval(abs(math.tan(angle)), min(ends), math.inf if upright and low < high else max(ends))


def radius_of(samples: Tensor, seed: int) -> float:
    """The 95 % bound on the distance of the mean of `samples` (float64 ``[runs ...]``, equally likely) from the
    expectation, by the bootstrap (Efron 1979)."""
    flat = samples.flatten(1)
    generator = torch.Generator().manual_seed(seed)
    resampled = torch.randint(len(flat), (_RESAMPLES, len(flat)), generator=generator)
    counts = torch.zeros(_RESAMPLES, len(flat), dtype=torch.float64)
    counts.scatter_add_(1, resampled, torch.ones_like(resampled, dtype=torch.float64))
    off = counts @ flat / len(flat) - flat.mean(0)
    return float(off.norm(dim=1).quantile(_CONFIDENCE))

"""The error of an expected gradient: scale, cosine and bias relative to the true gradient."""

from __future__ import annotations

import math

import pytest
import torch

from flowrl.auditing.gradient_error import Interval, compare_gradients, percent, radius_of

TRUE = torch.tensor([2.0, 0.0], dtype=torch.float64)


def vector(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize(
    ("expected", "scale", "cosine", "bias", "error", "printed"),
    [
        (vector(2, 0), 1.0, 1.0, 0.0, 0.0, "unbiased"),
        (vector(0.5, 0), 0.25, 1.0, 0.0, 0.75, "unbiased"),
        (vector(2, 2), 1.0, math.sqrt(0.5), 1.0, 1.0, "biased by 100 %"),
        (vector(-2, 0), -1.0, -1.0, 0.0, 2.0, "points against the true gradient"),
        (vector(-2, 2), -1.0, -math.sqrt(0.5), 1.0, math.sqrt(5), "points against the true gradient"),
        (vector(1e-9, 0), 0.0, 1.0, 0.0, 1.0, "follows nothing: its mean is 0"),
    ],
)
def test_scale_cosine_bias_and_error_of_an_exact_gradient_match_values_by_hand(
    expected: torch.Tensor, scale: float, cosine: float, bias: float, error: float, printed: str
) -> None:
    found = compare_gradients(expected, TRUE)
    numbers = [found.scale.value, found.cosine.value, found.bias.value, found.error.value]
    assert numbers == pytest.approx([scale, cosine, bias, error], abs=1e-6)
    assert all(one.low == one.high for one in (found.scale, found.cosine, found.bias, found.error))
    assert str(found) == printed


def test_a_gradient_known_within_a_radius_has_intervals() -> None:
    found = compare_gradients(vector(2, 0.4), TRUE, radius=0.5)
    assert not found.biased  # the ball of 0.5 has gradients along the true one in it
    assert found.bias.low == 0.0
    assert "no bias found" in str(found)
    far = compare_gradients(vector(2, 2), TRUE, radius=0.5)
    assert far.biased
    assert far.bias.low < 1.0 < far.bias.high
    assert compare_gradients(vector(0.1, 0.1), TRUE, radius=0.5).follows_nothing
    assert str(compare_gradients(vector(0.1, 0.1), TRUE, radius=0.5)) == "too noisy to tell: sample more"
    assert compare_gradients(vector(0, 2), TRUE, radius=0.1).bias.high == math.inf


@pytest.mark.parametrize("seed", range(5))
def test_every_point_of_the_ball_is_within_the_intervals(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    true, found = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    bounds = compare_gradients(found, true, radius=0.6)
    for _ in range(200):
        off = torch.randn(4, generator=generator, dtype=torch.float64)
        inside = compare_gradients(found + 0.6 * off / off.norm(), true)
        for name in ("scale", "cosine", "bias", "error", "size"):
            bound = getattr(bounds, name)
            assert bound.low - 1e-9 <= getattr(inside, name).value <= bound.high + 1e-9


def test_the_radius_is_that_of_the_mean_of_normal_samples() -> None:
    samples = torch.randn(400, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert radius_of(samples, 0) == pytest.approx(1.96 / 20, rel=0.15)
    assert radius_of(torch.ones(10, 2, 3, dtype=torch.float64), 0) == 0.0


def test_intervals_print_three_significant_digits_and_percent() -> None:
    assert str(Interval(0.1234, 0.1234, 0.1234)) == "0.123"
    assert str(Interval(0.1234, 0.1, 0.2)) == "0.123 [0.1, 0.2]"
    assert percent(Interval(0.1234, 0.1, math.inf)) == "12.3 % [10, inf]"
    assert percent(Interval(1e-9, 1e-9, 1e-9)) == "0 %"

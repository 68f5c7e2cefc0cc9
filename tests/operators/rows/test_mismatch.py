"""Rejected tokens and rows leave the mask."""

from __future__ import annotations

import math

import pytest
import torch

from flowrl.data.metrics import Metrics
from flowrl.operators import MaskMismatch
from tests.support.errors import raises

OLD = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, 0.0]])
ROLLOUT = torch.tensor([[-1.0, -1.0, -3.0], [-1.3, -0.9, 0.0]])  # d: 0, -1, 0; 0.3, -0.1
MASK = torch.tensor([[True, True, True], [True, True, False]])


@pytest.mark.parametrize(
    ("level", "low", "high", "kept"),
    [
        ("token", 0.5, 2.0, [[True, False, True], [True, True, False]]),  # exp(-1) = 0.37 is below 0.5
        ("token", 0.3, 1.2, [[True, True, True], [False, True, False]]),  # exp(0.3) = 1.35 is above 1.2
        ("sequence", None, 1.1, [[True, True, True], [False, False, False]]),  # exp(0.2) = 1.22
        ("geometric", math.exp(-0.3), 2.0, [[False, False, False], [True, True, False]]),  # the mean of d is -1/3
        ("k2", None, 0.1, [[False, False, False], [True, True, False]]),  # the mean of d**2 / 2 is 1/6
    ],
)
def test_what_is_out_of_bounds_leaves_the_mask(
    level: str, low: float | None, high: float, kept: list[list[bool]]
) -> None:
    metrics = Metrics()
    found = MaskMismatch(level, low, high)(OLD, ROLLOUT, MASK, metrics)
    assert found.tolist() == kept
    assert metrics.compute() == {"mask_mismatch/masked": pytest.approx(1 - sum(map(sum, kept)) / 5)}


def test_bounds_that_are_no_range_are_refused() -> None:
    with raises("correction.invalid-settings", low=3.0, high=2.0):
        MaskMismatch(low=3.0, high=2.0)

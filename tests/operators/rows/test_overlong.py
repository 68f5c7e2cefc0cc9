"""Overlong responses: the penalty of the DAPO paper, and the mask that excludes them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.data.metrics import Metrics
from flowrl.operators import MaskOverlong, OverlongPenalty
from tests.operators.advantages.ragged import masks, numbers
from tests.support.errors import raises


def penalty(length: int, most: int, buffer: int) -> float:
    """Equation 13."""
    if length <= most - buffer:
        return 0.0
    return ((most - buffer) - length) / buffer if length <= most else -1.0


@given(masks(), st.integers(0, 2**31), st.integers(1, 7), st.integers(1, 7), st.floats(0.1, 2.0))
def test_the_penalty_on_the_last_token_matches_the_paper(
    mask: Tensor, seed: int, most: int, buffer: int, weight: float
) -> None:
    buffer = min(buffer, most)
    scores, metrics = numbers(mask, seed), Metrics()
    found = OverlongPenalty(most, buffer, weight)(scores, mask, metrics)
    changes = []
    for row, on in enumerate(mask):
        expected = [float(x) for x in scores[row][on]]
        if expected:
            changes.append(weight * penalty(len(expected), most, buffer))
            expected[-1] += changes[-1]
        assert found[row][on].tolist() == pytest.approx(expected, abs=1e-6)
    assert (found[~mask] == 0).all() and found.dtype == torch.float32
    if changes:
        assert metrics.compute() == {"overlong/penalty": pytest.approx(-sum(changes) / len(changes), abs=1e-6)}


def test_invalid_settings_and_rewards_off_the_mask_are_refused() -> None:
    with raises("rows.invalid-settings", buffer=9, most=8):
        OverlongPenalty(8, 9)
    with raises("reward.off-mask", column="token_level_scores", row=0, token=1):
        OverlongPenalty(8, 2)(torch.ones(1, 2), torch.tensor([[True, False]]))


@given(masks(), st.integers(0, 7))
def test_only_overlong_rows_are_masked(mask: Tensor, most: int) -> None:
    metrics = Metrics()
    found = MaskOverlong(most)(mask, metrics)
    longer = [int(row.sum()) > most for row in mask]
    assert found.tolist() == [
        [False] * mask.shape[1] if far else row.tolist() for far, row in zip(longer, mask, strict=True)
    ]
    assert metrics.compute() == {"overlong/masked": sum(longer) / len(longer)}

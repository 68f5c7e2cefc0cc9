"""`NormalizeReward` and `ClipReward`, against NumPy over all rows so far."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl import After
from flowrl.data.metrics import Metrics
from flowrl.graphs import ppo
from flowrl.operators import ClipReward, NormalizeReward
from tests.support.errors import raises
from tests.support.kernel import exact

MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0]], dtype=torch.bool)
SCORES = torch.tensor([[0.5, 2.0, 0.0], [0.0, 0.0, -3.0], [0.0, 0.0, 0.0], [7.0, 0.0, 0.0]])
LIVE = [0, 1, 3]


def rows_of(scores: torch.Tensor) -> np.ndarray:
    return scores.double().sum(-1).numpy()


@pytest.mark.parametrize("shift", [True, False])
def test_the_run_counts_all_rows_so_far(shift: bool) -> None:
    operator, seen = NormalizeReward(shift_mean=shift), np.empty(0)
    for step in range(3):
        scores, metrics = SCORES * (step + 1) - 0.25 * MASK, Metrics()
        out = operator(scores, MASK, metrics=metrics)
        seen = np.concatenate([seen, rows_of(scores)[LIVE]])
        mean, std = seen.mean(), seen.std(ddof=1)
        expected = (rows_of(scores) - shift * mean) / std
        np.testing.assert_allclose(rows_of(out)[LIVE], expected[LIVE], rtol=1e-5)
        assert metrics.compute() == pytest.approx({"normalize_reward/mean": mean, "normalize_reward/std": std})
        assert not out[~MASK].any() and out.dtype == torch.float32
        torch.testing.assert_close(out[0, 0], scores[0, 0] / std, check_dtype=False)  # only the last token is shifted


def test_a_batch_is_normalized_alone() -> None:
    operator = NormalizeReward(over="batch")
    operator(SCORES * 100, MASK)
    out = rows_of(operator(SCORES, MASK))[LIVE]
    assert out.mean() == pytest.approx(0, abs=1e-6) and out.std(ddof=1) == pytest.approx(1)


def test_equal_scores_become_zero_and_nothing_grows() -> None:
    equal = torch.tensor([[0.1], [0.1]])
    mask = torch.ones(2, 1, dtype=torch.bool)
    assert NormalizeReward()(equal, mask).abs().max() < 1e-7
    torch.testing.assert_close(NormalizeReward(shift_mean=False)(equal, mask), equal)
    assert NormalizeReward()(equal[:0], mask[:0]).shape == (0, 1)


@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=5))
def test_rows_are_clipped(scores: list[float]) -> None:
    given_scores, metrics = torch.tensor(scores)[:, None], Metrics()
    out = ClipReward(-1.0, 2.0)(given_scores, torch.ones(len(scores), 1, dtype=torch.bool), metrics=metrics)
    assert out.squeeze(1).tolist() == np.clip(np.array(scores, np.float32), -1, 2).tolist()
    assert metrics.compute()["clip_reward/clipped"] == pytest.approx(np.mean([not -1 <= s <= 2 for s in scores]))


def test_the_last_token_takes_the_difference() -> None:
    out = ClipReward(-1.0, 2.0)(SCORES, MASK)
    assert out.tolist() == [[0.5, 1.5, 0.0], [0.0, 0.0, -1.0], [0.0, 0.0, 0.0], [2.0, 0.0, 0.0]]


def test_invalid_settings_are_refused() -> None:
    with raises("reward.invalid-settings"):
        ClipReward(1.0, 1.0)
    with raises("reward.off-mask"):
        ClipReward(-1.0, 1.0)(torch.ones(4, 3), MASK)


def test_both_are_edits_of_a_graph() -> None:
    normalized = ppo(exact).edit(insert={"normalize_reward": After("reward", NormalizeReward())})
    clipped = normalized.edit(insert={"clip_reward": After("normalize_reward", ClipReward(-5.0, 5.0))})
    assert next(iter(clipped["kl_shape"].inputs.values())).node == "clip_reward"
    assert clipped.check() == []

"""The optimal token baseline against loops in float64, by hand, and against the least variance itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.operators import CorrectLogitNorms, OptimalTokenBaseline, RolloutCorrection
from tests.nightly import examples
from tests.operators.advantages.ragged import NAN, masks, numbers
from tests.support.errors import raises

OTB = OptimalTokenBaseline()


def by_loops(rewards: Tensor, norms: Tensor, mask: Tensor, uid: np.ndarray, zero_tail: bool = False) -> Tensor:
    """Row by row and token by token: ``B_t = sum_i G_t W_t / sum_i W_t`` over those that have a t-th token."""
    r = [rewards[i][mask[i]].double().tolist() for i in range(len(uid))]
    w = [norms[i][mask[i]].double().tolist() for i in range(len(uid))]
    found = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(len(uid)):
        own = []
        for t in range(len(r[row])):
            peers = [i for i in range(len(uid)) if uid[i] == uid[row] and len(r[i]) > t]
            to_come, pulled = [sum(r[i][t:]) for i in peers], [sum(w[i][: t + 1]) for i in peers]
            if not sum(pulled):
                pulled = [1.0] * len(peers)
            baseline = sum(g * x for g, x in zip(to_come, pulled, strict=True)) / sum(pulled)
            if zero_tail and len(peers) == 1:
                baseline = 0.0
            own.append(sum(r[row][t:]) - baseline)
        found[row, mask[row]] = torch.tensor(own, dtype=torch.float64)
    return found


class TestFormula:
    @examples(80)
    @given(masks(), st.integers(0, 2**31), st.booleans(), st.booleans(), st.randoms(use_true_random=False))
    def test_the_baseline_equals_loops_over_rows_and_tokens(
        self, half: Tensor, seed: int, still: bool, zero_tail: bool, random: object
    ) -> None:
        """Ragged rows with holes, groups in any order, and tokens that do not pull at all."""
        mask = torch.cat([half, half.flip(0), half.roll(1, 1)])
        uid = np.array([f"p{i % len(half)}" for i in range(len(mask))], dtype=object)
        random.shuffle(uid)  # type: ignore[attr-defined]
        rewards, norms = numbers(mask, seed), numbers(mask, seed + 1).square()
        if still:
            norms = torch.where(norms < 0.5, 0.0, norms)
        found = OptimalTokenBaseline(zero_tail=zero_tail)(rewards, norms, mask, uid)
        expected = by_loops(rewards, norms, mask, uid, zero_tail)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
        assert found.dtype == torch.float32

    def test_the_baseline_equals_a_worked_example(self) -> None:
        """Scores 1 and 0; the first row has pulled three times as hard by its first token, and is alone after it."""
        rewards, mask = torch.tensor([[0.0, 1.0], [0.0, NAN]]), torch.tensor([[True, True], [True, False]])
        norms, uid = torch.tensor([[1.5, 0.2], [0.5, NAN]]), np.array(["p", "p"], dtype=object)
        assert OTB(rewards, norms, mask, uid).tolist() == [[0.25, 0.0], [-0.75, 0.0]]

    @pytest.mark.parametrize("score", [0.1, 1 / 3, -0.7])
    def test_equal_scores_give_exactly_zero(self, score: float) -> None:
        mask = torch.arange(6) < torch.tensor([[6], [1], [3], [2], [6]])
        rewards = torch.zeros(5, 6)
        rewards[torch.arange(5), mask.sum(1) - 1] = score
        norms = numbers(mask, 0).square()
        assert (OTB(rewards, norms, mask, np.array(["p"] * 5, dtype=object)) == 0).all()

    def test_groups_in_blocks_equal_each_group_alone(self) -> None:
        """Groups are processed in blocks, in any row order."""
        mask = torch.rand(300, 9, generator=torch.Generator().manual_seed(0)) < 0.7
        uid = np.array([f"p{i % 50}" for i in range(300)], dtype=object)
        rewards, norms = numbers(mask, 1), numbers(mask, 2).square()
        found = OTB(rewards, norms, mask, uid)
        for group in range(50):
            own = torch.arange(group, 300, 50)
            alone = OTB(rewards[own], norms[own], mask[own], uid[own.numpy()])
            torch.testing.assert_close(found[own], alone, atol=1e-6, rtol=1e-6)

    def test_a_nan_norm_is_not_treated_as_zero(self) -> None:
        norms, mask = torch.tensor([[1.0, torch.nan], [1.0, 1.0]]), torch.ones(2, 2, dtype=torch.bool)
        found = OTB(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), norms, mask, np.array(["p", "p"], dtype=object))
        assert found.isfinite().tolist() == [[True, False], [True, False]]

    def test_single_row_groups_and_rewards_off_the_mask_are_refused(self) -> None:
        ones = torch.ones(3, 2, dtype=torch.bool)
        with raises("rows.small-group", uid="lonely", found=1):
            OTB(torch.zeros(3, 2), torch.zeros(3, 2), ones, np.array(["a", "lonely", "a"], dtype=object))
        with raises("reward.off-mask", column="token_level_rewards", row=0, token=1):
            mask = torch.tensor([[True, False]] * 2)
            OTB(torch.ones(2, 2), torch.zeros(2, 2), mask, np.array(["a", "a"], dtype=object))
        assert "group baseline" in OTB.effects


def test_the_baseline_minimizes_the_weighted_squared_error() -> None:
    """At each token ``sum_i W_t (G_t - b)**2`` has its minimum at the baseline, so its slope there is 0."""
    mask = torch.ones(8, 5, dtype=torch.bool)
    rewards, norms = numbers(mask, 3), numbers(mask, 4).square()
    advantages = OTB(rewards, norms, mask, np.array(["p"] * 8, dtype=object)).double()
    slope = (norms.double().cumsum(1) * advantages).sum(0)
    torch.testing.assert_close(slope, torch.zeros(5, dtype=torch.float64), atol=1e-5, rtol=0)


def test_logit_norms_get_the_squared_weights_of_a_correction() -> None:
    """Ratios of 2, 1/2 and 4, which is truncated to 3; a NaN is off the mask."""
    mask, rollout = torch.tensor([[True, True, True, False]]), torch.tensor([[-2.0, -1.0, -3.0, NAN]])
    old = rollout + torch.tensor([[2.0, 0.5, 4.0, 1.0]]).log()
    correct = CorrectLogitNorms(RolloutCorrection("token", "truncate", high=3.0))
    found = correct(torch.tensor([[0.5, 0.5, 0.5, NAN]]), old, rollout, mask)
    torch.testing.assert_close(found, torch.tensor([[2.0, 0.125, 4.5, 0.0]]))

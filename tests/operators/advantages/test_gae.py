"""Advantages against formulas written out in float64 Python, cases by hand, and ragged masks with holes."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.core.operators.operator import Operator
from flowrl.errors import ParameterError
from flowrl.operators.advantages.gae import (
    GAE,
    DecoupledGAE,
    ReturnToGo,
    RowScore,
    SubtractBaseline,
    Whiten,
    gae,
    whiten,
)
from tests.nightly import examples
from tests.operators.advantages.ragged import NAN, masks, numbers
from tests.support.errors import raises

unit = st.floats(0, 1)


def gae_by_sums(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Eq. 16 as the explicit sum ``sum_l (gamma lam)**l delta_{t+l}`` over the tokens that are there."""
    advantages = torch.zeros(mask.shape, dtype=torch.float64)
    returns = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(mask.shape[0]):
        at = [t for t in range(mask.shape[1]) if mask[row, t]]
        r, v = [float(rewards[row, t]) for t in at], [float(values[row, t]) for t in at]
        delta = [r[i] + (gamma * v[i + 1] if i + 1 < len(at) else 0.0) - v[i] for i in range(len(at))]
        for i, t in enumerate(at):
            advantages[row, t] = sum((gamma * lam) ** k * d for k, d in enumerate(delta[i:]))
            returns[row, t] = advantages[row, t] + v[i]
    return advantages, returns


class TestGAE:
    @examples(100)
    @given(masks(), st.integers(0, 2**31), unit, unit)
    def test_gae_equals_the_sum_over_the_tokens_on_the_mask(
        self, mask: Tensor, seed: int, gamma: float, lam: float
    ) -> None:
        rewards, values = numbers(mask, seed), numbers(mask, seed + 1)
        advantages, returns = gae(rewards, values, mask, gamma, lam)
        expected_advantages, expected_returns = gae_by_sums(rewards, values, mask, gamma, lam)
        torch.testing.assert_close(advantages.double(), expected_advantages, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(returns.double(), expected_returns, atol=2e-5, rtol=2e-5)
        assert advantages.dtype == returns.dtype == torch.float32
        assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()

    def test_gae_equals_a_worked_example(self) -> None:
        # delta = [0 + .5*2 - 1, 1 - 2] = [0, -1]; A = [0 + .5*.5*-1, -1] = [-.25, -1]; R = A + V = [.75, 1]
        mask = torch.tensor([[True, True]])
        advantages, returns = gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 2.0]]), mask, 0.5, 0.5)
        assert advantages.tolist() == [[-0.25, -1.0]]
        assert returns.tolist() == [[0.75, 1.0]]

    @examples(30)
    @given(masks(), st.integers(0, 2**31), unit)
    def test_lambda_1_gives_discounted_returns(self, mask: Tensor, seed: int, gamma: float) -> None:
        rewards = numbers(mask, seed)
        _, returns = gae(rewards, numbers(mask, seed + 1), mask, gamma, 1.0)
        for row in range(mask.shape[0]):
            later = [float(x) for x in rewards[row][mask[row]]]
            for i, found in enumerate(returns[row][mask[row]].tolist()):
                assert found == pytest.approx(sum(gamma**k * r for k, r in enumerate(later[i:])), abs=2e-5)

    @examples(30)
    @given(masks(), st.integers(0, 2**31))
    def test_holes_and_padding_do_not_change_results(self, mask: Tensor, seed: int) -> None:
        rewards, values = numbers(mask, seed), numbers(mask, seed + 1)
        advantages, returns = gae(rewards, values, mask, 0.9, 0.8)
        for row in range(mask.shape[0]):
            at = mask[row]
            dense, dense_returns = gae(rewards[row : row + 1, at], values[row : row + 1, at], at[at][None], 0.9, 0.8)
            assert advantages[row, at].tolist() == dense[0].tolist()
            assert returns[row, at].tolist() == dense_returns[0].tolist()

    def test_a_reward_off_the_mask_is_refused(self) -> None:
        mask = torch.tensor([[True, True, False], [True, False, False]])
        rewards = torch.zeros(2, 3)
        rewards[1, 2] = 1.0
        with raises("reward.off-mask", column="token_level_rewards", row=1, token=2):
            gae(rewards, torch.zeros(2, 3), mask, 1.0, 1.0)

    def test_gae_refuses_values_of_another_shape(self) -> None:
        with raises("rows.shape-mismatch", expected=(2, 3), found=(2, 1)):
            gae(torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3, dtype=torch.bool), 1.0, 1.0)

    def test_bfloat16_inputs_are_computed_in_float32(self) -> None:
        mask = torch.ones(1, 300, dtype=torch.bool)
        rewards = torch.full((1, 300), 0.5, dtype=torch.bfloat16)
        advantages, _ = gae(rewards, torch.zeros(1, 300, dtype=torch.bfloat16), mask, 1.0, 1.0)
        assert advantages.dtype == torch.float32
        assert advantages[0, 0] == 150.0  # bf16 would stop growing at 128

    def test_advantages_have_no_gradient(self) -> None:
        mask, values = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, requires_grad=True)
        advantages, returns = gae(torch.zeros(1, 2), values, mask, 1.0, 1.0)
        assert not advantages.requires_grad and not returns.requires_grad


def gae_by_recurrence(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: Tensor) -> Tensor:
    """Eq. 16 token by token in float64, last token first; `lam` is ``[batch]``."""
    advantages = torch.zeros(mask.shape, dtype=torch.float64)
    for row, (r, v) in enumerate(zip(rewards.tolist(), values.tolist(), strict=True)):
        value = advantage = 0.0
        found = [0.0] * mask.shape[1]
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            delta = r[t] + gamma * value - v[t]
            value, advantage = v[t], delta + gamma * float(lam[row]) * advantage
            found[t] = advantage
        advantages[row] = torch.tensor(found, dtype=torch.float64)
    return advantages


@st.composite
def long_masks(draw: st.DrawFn) -> Tensor:
    """Rows of one block of the scan up to more blocks than fit into one: prefixes, runs with holes, anything."""
    width = draw(st.sampled_from([1, 2, 31, 32, 33, 64, 65, 1000, 1024, 1025, 1056, 1057, 2500]))
    ends = torch.tensor(draw(st.lists(st.integers(0, width), min_size=1, max_size=3)))
    mask = torch.arange(width) < ends[:, None]
    uniforms = torch.rand(mask.shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    return mask & (uniforms > draw(st.sampled_from([-1.0, 0.02, 0.5, 0.99])))


class TestLongResponses:
    @examples(60)
    @given(
        long_masks(),
        st.integers(0, 2**31),
        st.sampled_from([0.0, 1e-30, 0.5, 0.99, 1.0]),
        st.sampled_from([0.0, 1e-6, 0.95, 0.999, 1.0]),
        st.sampled_from([0.0, 100.0]),
    )
    def test_long_responses_have_errors_of_a_few_roundings(
        self, mask: Tensor, seed: int, gamma: float, lam: float, level: float
    ) -> None:
        """Relative to advantages and values: of few tokens, all advantages may be small."""
        rewards, values = numbers(mask, seed), numbers(mask, seed + 1) + level
        advantages, returns = gae(rewards, values, mask, gamma, lam)
        truth = gae_by_recurrence(rewards, values, mask, gamma, torch.full((len(mask),), lam, dtype=torch.float64))
        most = 3e-7 * float(truth.abs().max() + level + 3)
        assert float((advantages.double() - truth).abs().max()) <= most
        paid = torch.where(mask, truth + values.double(), 0.0)
        assert float((returns.double() - paid).abs().max()) <= most
        assert not advantages[~mask].any() and not returns[~mask].any()

    @examples(30)
    @given(long_masks(), st.integers(0, 2**31))
    def test_a_row_is_bit_equal_in_any_batch_layout(self, mask: Tensor, seed: int) -> None:
        """Alone, without its holes, or in a wider batch: so a batch may be cut and padded anyhow."""
        rewards, values = numbers(mask, seed), numbers(mask, seed + 1)
        advantages, returns = gae(rewards, values, mask, 0.99, 0.95)
        wide = gae(*(torch.nn.functional.pad(x, (0, 40)) for x in (rewards, values, mask)), 0.99, 0.95)  # type: ignore[misc]
        assert torch.equal(wide[0][:, : mask.shape[1]], advantages) and not wide[0][:, mask.shape[1] :].any()
        for row in range(len(mask)):
            at = mask[row]
            dense = gae(rewards[row : row + 1, at], values[row : row + 1, at], at[at][None], 0.99, 0.95)
            assert torch.equal(dense[0][0], advantages[row, at]) and torch.equal(dense[1][0], returns[row, at])

    @pytest.mark.parametrize("share", [1.1, 0.85])
    @pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (1.0, 0.99)])
    def test_batch_errors_are_at_most_3e_7_of_the_largest_advantage(
        self, share: float, gamma: float, lam: float
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        mask = torch.arange(4096) < torch.randint(1000, 4097, (32, 1), generator=generator)
        mask &= torch.rand(32, 128, generator=generator).repeat_interleave(32, 1) < share
        rewards, values = numbers(mask, 1), numbers(mask, 2)
        advantages, _ = gae(rewards, values, mask, gamma, lam)
        truth = gae_by_recurrence(rewards, values, mask, gamma, torch.full((32,), lam, dtype=torch.float64))
        assert float((advantages.double() - truth).abs().max()) <= 3e-7 * float(truth.abs().max())

    def test_each_row_has_its_own_lambda(self) -> None:
        mask = torch.arange(1500) < torch.tensor([[1500], [700], [40], [0]])
        mask[0, 100:200] = False
        rewards, values, lam = numbers(mask, 0), numbers(mask, 1), torch.tensor([1.0, 0.9, 0.5, 0.1])
        advantages, _ = gae(rewards, values, mask, 0.999, lam)
        truth = gae_by_recurrence(rewards, values, mask, 0.999, lam)
        torch.testing.assert_close(advantages.double(), truth, rtol=0, atol=3e-7 * float(truth.abs().max()))

    @pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
    def test_nan_and_inf_affect_no_later_token_and_no_other_row(self, bad: float) -> None:
        mask = torch.ones(3, 80, dtype=torch.bool)
        mask[:, 5:9] = False
        rewards, values = numbers(mask, 0, 0.0), numbers(mask, 1)
        clean, _ = gae(rewards, values, mask, 0.99, 0.95)
        rewards[1, 40] = bad
        advantages, _ = gae(rewards, values, mask, 0.99, 0.95)
        spoilt = torch.zeros_like(mask)
        spoilt[1, :41] = mask[1, :41]
        assert torch.equal(advantages.isfinite(), ~spoilt)
        assert torch.equal(advantages[~spoilt], clean[~spoilt])


class TestReturnToGo:
    @examples(50)
    @given(masks(), st.integers(0, 2**31), unit)
    def test_return_to_go_equals_the_discounted_sum_of_later_rewards(
        self, mask: Tensor, seed: int, gamma: float
    ) -> None:
        rewards = numbers(mask, seed)
        found = ReturnToGo(gamma)(rewards, mask)
        for row in range(len(mask)):
            later = [float(x) for x in rewards[row][mask[row]]]
            for i, value in enumerate(found[row][mask[row]].tolist()):
                assert value == pytest.approx(sum(gamma**k * r for k, r in enumerate(later[i:])), abs=2e-5)
        assert (found[~mask] == 0).all() and found.dtype == torch.float32


class TestBaselineOfAnotherAnswer:  # ReMax
    @settings(deadline=None)
    @given(masks(), st.integers(0, 2**16), st.floats(0, 1))
    def test_the_advantage_is_the_return_to_go_minus_the_baseline_score(
        self, mask: Tensor, seed: int, gamma: float
    ) -> None:
        rewards = numbers(mask, seed)
        theirs = masks_like(mask, seed)
        scores = numbers(theirs, seed + 1)
        baseline = RowScore()(scores, theirs)
        found = SubtractBaseline()(ReturnToGo(gamma)(rewards, mask), baseline, mask)
        for row in range(len(mask)):
            sampled = [t for t in range(mask.shape[1]) if mask[row, t]]
            other = sum(float(scores[row, t].double()) for t in range(theirs.shape[1]) if theirs[row, t])
            for i, t in enumerate(sampled):
                to_come = sum(gamma**k * float(rewards[row, s].double()) for k, s in enumerate(sampled[i:]))
                assert float(found[row, t]) == pytest.approx(to_come - other, abs=1e-4)
        assert (found[~mask] == 0).all() and not found.isnan().any()

    def test_a_score_off_the_mask_is_refused(self) -> None:
        with raises("reward.off-mask", column="token_level_scores", row=0, token=1):
            RowScore()(torch.tensor([[1.0, 2.0]]), torch.tensor([[True, False]]))


def masks_like(mask: Tensor, seed: int) -> Tensor:
    """Another mask of as many rows, and of another width."""
    return torch.rand(len(mask), 5, generator=torch.Generator().manual_seed(seed)) > 0.5


class TestDecoupledGAE:
    @examples(50)
    @given(masks(), st.integers(0, 2**31), unit, unit)
    def test_actor_and_critic_have_their_own_lambda(
        self, mask: Tensor, seed: int, lam: float, critic_lam: float
    ) -> None:
        rewards, values = numbers(mask, seed), numbers(mask, seed + 1)
        advantages, returns = DecoupledGAE(0.9, lam, critic_lam=critic_lam)(rewards, values, mask)
        torch.testing.assert_close(
            advantages.double(), gae_by_sums(rewards, values, mask, 0.9, lam)[0], atol=2e-5, rtol=2e-5
        )
        torch.testing.assert_close(
            returns.double(), gae_by_sums(rewards, values, mask, 0.9, critic_lam)[1], atol=2e-5, rtol=2e-5
        )

    def test_long_responses_have_a_larger_lambda(self) -> None:
        # alpha 0.5: lambda is 1 - 1/2 for 4 tokens, and 0 for 2, where the advantage is one-step
        mask = torch.tensor([[True] * 4, [True, False, True, False]])
        rewards, values = numbers(mask, 0, 0.0), numbers(mask, 1, 0.0)
        advantages, _ = DecoupledGAE(alpha=0.5)(rewards, values, mask)
        for row, lam in enumerate((0.5, 0.0)):
            expected, _ = gae_by_sums(rewards[row, None], values[row, None], mask[row, None], 1.0, lam)
            torch.testing.assert_close(advantages[row, None].double(), expected, atol=1e-5, rtol=1e-5)


class TestWhiten:
    @examples(100)
    @given(masks(), st.integers(0, 2**31), st.booleans(), st.booleans())
    def test_whitening_equals_its_formula(self, mask: Tensor, seed: int, shift_mean: bool, unbiased: bool) -> None:
        x = 3 * numbers(mask, seed) + 2
        flat = [float(v) for v in x[mask]]
        if len(flat) == 1:
            with raises("advantage.single-token"):
                whiten(x, mask, shift_mean)
            return
        found = whiten(x, mask, shift_mean, unbiased)
        expected = []
        if flat:
            mean = statistics.fmean(flat)
            variance = statistics.variance(flat) if unbiased else statistics.pvariance(flat)
            expected = [(v - mean) / math.sqrt(variance + 1e-8) + (0 if shift_mean else mean) for v in flat]
        assert found[mask].tolist() == pytest.approx(expected, abs=1e-5)
        assert found.dtype == torch.float32 and (found[~mask] == 0).all()

    def test_whitening_makes_equal_values_zero(self) -> None:
        mask = torch.ones(7, 3, dtype=torch.bool)
        assert (whiten(torch.full((7, 3), 0.1), mask) == 0).all()

    @pytest.mark.parametrize("level", [0.0, -1e3, 1e6])
    @pytest.mark.parametrize("scale", [1e-3, 1.0, 1e25])
    def test_whitening_has_errors_of_float32_rounding_only(self, level: float, scale: float) -> None:
        """Also where the mean is far from 0, or squares do not fit into float32."""
        mask = torch.rand(60, 50, generator=torch.Generator().manual_seed(1)) < 0.7
        x = (numbers(mask, 0) + level) * scale
        flat = x[mask].double()
        expected = (flat - flat.mean()) * torch.rsqrt(flat.var() + 1e-8)
        torch.testing.assert_close(whiten(x, mask)[mask].double(), expected, rtol=1e-6, atol=1e-6)
        back = expected + flat.mean()
        torch.testing.assert_close(whiten(x, mask, shift_mean=False)[mask].double(), back, rtol=3e-7, atol=1e-6)

    @pytest.mark.parametrize("shift_mean", [True, False])
    @pytest.mark.parametrize("bad", [NAN, math.inf])
    def test_whitening_keeps_non_finite_values_on_the_mask(self, shift_mean: bool, bad: float) -> None:
        mask = torch.tensor([[True, True, False], [True, False, False]])
        found = whiten(torch.tensor([[bad, 1.0, NAN], [2.0, 5.0, NAN]]), mask, shift_mean)
        assert (found[~mask] == 0).all() and not found[mask].isfinite().any()


class TestOperators:
    def test_operators_equal_their_functions(self) -> None:
        mask = torch.tensor([[True, True, False], [True, True, True]])
        rewards, values = numbers(mask, 0, 0.0), numbers(mask, 1, 0.0)
        out = GAE(gamma=0.9, lam=0.7)(rewards, values, mask)
        advantages, returns = gae_by_sums(rewards, values, mask, 0.9, 0.7)
        torch.testing.assert_close(out.advantages.double(), advantages, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(out.returns.double(), returns, atol=1e-6, rtol=1e-5)
        white = Whiten()(out.advantages, mask)
        assert float(white[mask].mean()) == pytest.approx(0, abs=1e-6)
        assert float(white[mask].std()) == pytest.approx(1, abs=1e-6)

    def test_granularity_of_the_operators(self) -> None:
        assert (GAE.granularity, ReturnToGo.granularity, Whiten.granularity) == ("row", "row", "batch")

    @pytest.mark.parametrize("value", [-0.1, 1.1])
    @pytest.mark.parametrize(
        ("operator", "name"),
        [(GAE, "gamma"), (GAE, "lam"), (DecoupledGAE, "gamma"), (DecoupledGAE, "lam"), (DecoupledGAE, "critic_lam")],
    )
    def test_parameters_out_of_range_are_refused(self, operator: type[Operator], name: str, value: float) -> None:
        with pytest.raises(ParameterError, match=f"{name}="):
            operator(**{name: value})

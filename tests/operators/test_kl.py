"""KL in the reward by hand, and the adaptive coefficient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.data.metrics import Metrics
from flowrl.errors import ParameterError
from flowrl.operators.advantages.per_token import Estimator, kl_penalty
from flowrl.operators.kl import AdaptiveKL, KLShape, adapt_kl_coef, kl_shape
from tests.nightly import examples
from tests.support.errors import raises

NAN = float("nan")
ESTIMATORS: list[Estimator] = ["k1", "k2", "k3", "abs"]

# The worked example of the documents.
OLD = torch.tensor([[-0.12, -0.08, -0.15, -0.10, -0.05, -0.02]])
REF = torch.tensor([[-0.15, -0.10, -0.18, -0.12, -0.08, -0.03]])
SCORES = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
REWARDS = [-0.0003, -0.0002, -0.0003, -0.0002, -0.0003, 0.9999]
ALL = torch.ones(1, 6, dtype=torch.bool)


class TestShape:
    def test_shaped_rewards_worked_example(self) -> None:
        assert kl_shape(SCORES, OLD, REF, ALL, 0.01)[0].tolist() == pytest.approx(REWARDS, abs=1e-7)

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    @examples(40)
    @given(data=st.data())
    def test_shaped_rewards_equal_loops_over_ragged_masks(self, estimator: Estimator, data: st.DataObject) -> None:
        rows, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
        row = st.lists(st.booleans(), min_size=width, max_size=width)
        mask = torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)))
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
        scores, old, ref = (
            torch.randn(mask.shape, generator=generator).masked_fill(~mask, off) for off in (NAN, float("inf"), NAN)
        )
        found = kl_shape(scores, old, ref, mask, 0.3, estimator)
        assert found.dtype == torch.float32
        for i in range(rows):
            for t in range(width):
                kl = float(kl_penalty(old[i, t], ref[i, t], estimator)) if mask[i, t] else 0.0
                expected = float(scores[i, t]) - 0.3 * kl if mask[i, t] else 0.0
                assert float(found[i, t]) == pytest.approx(expected, rel=1e-4, abs=1e-5)

    def test_shaped_rewards_have_no_gradient(self) -> None:
        scores, old, ref = (column.clone().requires_grad_() for column in (SCORES, OLD, REF))
        assert not kl_shape(scores, old, ref, ALL, 0.01, "k3").requires_grad
        assert not KLShape(0.01)(scores, old, ref, ALL, metrics=Metrics()).requires_grad

    @pytest.mark.parametrize("coef", [-0.1, True, float("inf"), NAN])
    def test_non_numeric_coefficients_are_refused(self, coef: float) -> None:
        with pytest.raises(ParameterError, match="coef"):
            KLShape(coef)

    def test_a_score_off_the_mask_is_refused(self) -> None:
        mask = ALL.clone()
        mask[0, 5] = False
        with raises("reward.off-mask", column="token_level_scores", row=0, token=5):
            kl_shape(SCORES, OLD, REF, mask, 0.01)


class TestAdaptive:
    def test_adaptive_coefficient_worked_example(self) -> None:
        controller = AdaptiveKL(target=6.0, horizon=10_000, coef=0.2)
        assert adapt_kl_coef(0.2, 6.0, 256, controller) == 0.2
        assert adapt_kl_coef(0.2, 6.6, 256, controller) == pytest.approx(0.2 * (1 + 0.1 * 0.0256))
        assert adapt_kl_coef(0.2, 60.0, 256, controller) == pytest.approx(0.2 * (1 + 0.2 * 0.0256))
        assert adapt_kl_coef(0.2, 0.0, 256, controller) == pytest.approx(0.2 * (1 - 0.2 * 0.0256))

    def test_the_adaptive_coefficient_converges_to_the_target_kl(self) -> None:
        """Where KL falls as 0.1 / coef, the coefficient that gives the target 0.5 is 0.2."""
        controller = AdaptiveKL(target=0.5, horizon=1000, coef=0.01)
        coef = controller.coef
        for _ in range(400):
            coef = adapt_kl_coef(coef, 0.1 / coef, 100, controller)
        assert coef == pytest.approx(0.2, rel=1e-2)

    def test_invalid_settings_of_the_controller_are_refused(self) -> None:
        with pytest.raises(ParameterError, match="target"):
            AdaptiveKL(target=0.0)
        with raises("reward.invalid-settings", given=10.0, expected=64):
            adapt_kl_coef(0.1, 1.0, 64, AdaptiveKL(target=1.0, horizon=10))


class TestOperator:
    def test_a_fixed_coefficient_stays_constant(self) -> None:
        shape, metrics = KLShape(coef=0.01), Metrics()
        for _ in range(2):
            rewards = shape(SCORES, OLD, REF, ALL, metrics=metrics)
            assert rewards[0].tolist() == pytest.approx(REWARDS, abs=1e-7)
        assert metrics.compute() == pytest.approx({"kl/ref": 0.14 / 6, "kl/coef": 0.01}, rel=1e-5)

    def test_adaptive_coefficient_moves_between_calls(self) -> None:
        # KL is 0.02333 a token, 16.7 % above the target, over 1 of 100 rows.
        shape = KLShape(coef=AdaptiveKL(target=0.02, horizon=100, coef=0.01))
        first, second = Metrics(), Metrics()
        assert shape(SCORES, OLD, REF, ALL, metrics=first)[0].tolist() == pytest.approx(REWARDS, abs=1e-7)
        shape(SCORES, OLD, REF, ALL, metrics=second)
        assert first.compute()["kl/coef"] == pytest.approx(0.01)
        assert second.compute()["kl/coef"] == pytest.approx(0.01 * (1 + (0.14 / 6 / 0.02 - 1) / 100), rel=1e-6)

    def test_adaptive_coefficient_stays_when_nothing_was_sampled(self) -> None:
        shape = KLShape(coef=AdaptiveKL(target=0.02, horizon=100, coef=0.01))
        shape(torch.zeros(1, 6), OLD, REF, ~ALL)
        metrics = Metrics()
        shape(SCORES, OLD, REF, ALL, metrics=metrics)
        assert metrics.compute()["kl/coef"] == 0.01

    def test_kl_shape_declares_the_kl_effect(self) -> None:
        assert KLShape(0.1).effects == KLShape(AdaptiveKL(target=1.0)).effects == {"kl"}
        assert KLShape(0.0).effects == frozenset()

    def test_a_negative_coefficient_is_refused(self) -> None:
        with pytest.raises(ParameterError, match="coef"):
            KLShape(coef=-0.1)

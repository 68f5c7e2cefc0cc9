"""KL estimators against exact KL by enumeration, KL in the reward by hand, and the adaptive coefficient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.data.metrics import Metrics
from flowrl.errors import DataError, ParameterError
from flowrl.operators.kl import AdaptiveKL, Estimator, KLShape, adapt_kl_coef, kl_penalty, kl_shape

NAN = float("nan")
ESTIMATORS: list[Estimator] = ["k1", "k2", "k3", "abs"]

# The worked example of the documents.
OLD = torch.tensor([[-0.12, -0.08, -0.15, -0.10, -0.05, -0.02]])
REF = torch.tensor([[-0.15, -0.10, -0.18, -0.12, -0.08, -0.03]])
SCORES = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
REWARDS = [-0.0003, -0.0002, -0.0003, -0.0002, -0.0003, 0.9999]
ALL = torch.ones(1, 6, dtype=torch.bool)


def by_formula(log_prob: float, ref: float, estimator: str) -> float:
    d = log_prob - ref
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "abs": abs(d)}[estimator]


def categoricals(seed: int, size: int = 5, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits of a policy (with gradient) and of a reference."""
    generator = torch.Generator().manual_seed(seed)
    policy, ref = (scale * torch.randn(size, generator=generator) for _ in range(2))
    return policy.requires_grad_(), ref


class TestEstimators:
    @pytest.mark.parametrize("estimator", ESTIMATORS)
    @settings(deadline=None, max_examples=60)
    @given(st.floats(-15, 0), st.floats(-15, 0))
    def test_value_and_gradient(self, estimator: Estimator, log_prob: float, ref: float) -> None:
        x = torch.tensor([log_prob], requires_grad=True)
        y = torch.tensor([ref])
        value = kl_penalty(x, y, estimator)
        value.sum().backward()
        at, against = x.item(), y.item()  # what float32 made of them
        assert value.item() == pytest.approx(by_formula(at, against, estimator), rel=1e-4, abs=1e-9)
        d = at - against
        slope = {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d), "abs": (d > 0) - (d < 0)}[estimator]
        assert x.grad is not None and float(x.grad) == pytest.approx(slope, rel=1e-4, abs=1e-6)

    @pytest.mark.parametrize("seed", range(3))
    def test_k1_and_k3_are_unbiased(self, seed: int) -> None:
        policy, ref = (x.detach().double().log_softmax(0) for x in categoricals(seed))
        exact = sum(math.exp(p) * (p - q) for p, q in zip(policy.tolist(), ref.tolist(), strict=True))
        for estimator in ("k1", "k3"):
            mean = (policy.exp() * kl_penalty(policy, ref, estimator)).sum()
            assert float(mean) == pytest.approx(exact, rel=1e-5)

    @pytest.mark.parametrize("seed", range(3))
    def test_gradients_follow_what_the_docs_say(self, seed: int) -> None:
        """As a loss on own samples, in expectation: k1 nothing, k2 KL(policy || ref), k3 KL(ref || policy)."""
        policy, ref = categoricals(seed)
        p, q = policy.detach().softmax(0), ref.softmax(0)

        def gradient(objective: Tensor) -> Tensor:
            return torch.autograd.grad(objective, policy)[0]

        def of_estimator(estimator: Estimator) -> Tensor:
            return gradient((p * kl_penalty(policy.log_softmax(0), ref.log_softmax(0), estimator)).sum())

        log_p, log_q = policy.log_softmax(0), ref.log_softmax(0)
        reverse = gradient((log_p.exp() * (log_p - log_q)).sum())
        forward = gradient((q * (log_q - policy.log_softmax(0))).sum())
        torch.testing.assert_close(of_estimator("k1"), torch.zeros(5), atol=1e-6, rtol=0)
        torch.testing.assert_close(of_estimator("k2"), reverse, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(of_estimator("k3"), forward, atol=1e-6, rtol=1e-5)

    def test_k3_keeps_its_digits_near_zero(self) -> None:
        # At d = 2**-13 the value is 7.45e-9: exp(-d) - 1 + d in float32 would give 0 or 6e-8.
        d = 2.0**-13
        assert float(kl_penalty(torch.tensor([d]), torch.zeros(1), "k3")) == pytest.approx(d * d / 2, rel=1e-3)

    @pytest.mark.parametrize("log_prob", [-1e4, -200.0, -21.0])
    def test_k3_never_overflows(self, log_prob: float) -> None:
        x = torch.tensor([log_prob], requires_grad=True)
        value = kl_penalty(x, torch.zeros(1), "k3")
        value.sum().backward()
        assert value.item() == pytest.approx(math.exp(20) - 21, rel=1e-5)
        assert x.grad is not None and float(x.grad) == 0

    def test_k3_still_pulls_where_verl_clamps(self) -> None:
        x = torch.tensor([-5.0, -0.01], requires_grad=True)
        kl_penalty(x, torch.tensor([-0.01, -40.0]), "k3").sum().backward()  # k3 is 141 and 39
        assert x.grad is not None
        assert x.grad.tolist() == pytest.approx([1 - math.exp(4.99), 1.0], rel=1e-5)

    def test_bf16_gives_float32_and_shapes_must_agree(self) -> None:
        assert kl_penalty(torch.zeros(2).bfloat16(), torch.zeros(2).bfloat16(), "k2").dtype == torch.float32
        with pytest.raises(DataError, match=r"\(2, 3\).*\(2, 1\)"):
            kl_penalty(torch.zeros(2, 3), torch.zeros(2, 1), "k1")


class TestShape:
    def test_worked_example(self) -> None:
        assert kl_shape(SCORES, OLD, REF, ALL, 0.01)[0].tolist() == pytest.approx(REWARDS, abs=1e-7)

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    @settings(deadline=None, max_examples=40)
    @given(data=st.data())
    def test_equals_loops_over_ragged_masks(self, estimator: Estimator, data: st.DataObject) -> None:
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
                kl = by_formula(float(old[i, t]), float(ref[i, t]), estimator) if mask[i, t] else 0.0
                expected = float(scores[i, t]) - 0.3 * kl if mask[i, t] else 0.0
                assert float(found[i, t]) == pytest.approx(expected, rel=1e-4, abs=1e-5)

    def test_refuses_a_score_off_the_mask(self) -> None:
        mask = ALL.clone()
        mask[0, 5] = False
        with pytest.raises(DataError, match=r"token_level_scores\[0, 5\] is 1 where the mask is False"):
            kl_shape(SCORES, OLD, REF, mask, 0.01)


class TestAdaptive:
    def test_by_hand(self) -> None:
        controller = AdaptiveKL(target=6.0, horizon=10_000, coef=0.2)
        assert adapt_kl_coef(0.2, 6.0, 256, controller) == 0.2
        assert adapt_kl_coef(0.2, 6.6, 256, controller) == pytest.approx(0.2 * (1 + 0.1 * 0.0256))
        assert adapt_kl_coef(0.2, 60.0, 256, controller) == pytest.approx(0.2 * (1 + 0.2 * 0.0256))
        assert adapt_kl_coef(0.2, 0.0, 256, controller) == pytest.approx(0.2 * (1 - 0.2 * 0.0256))

    def test_steers_a_system_to_its_target(self) -> None:
        """Where KL falls as 0.1 / coef, the coefficient that gives the target 0.5 is 0.2."""
        controller = AdaptiveKL(target=0.5, horizon=1000, coef=0.01)
        coef = controller.coef
        for _ in range(400):
            coef = adapt_kl_coef(coef, 0.1 / coef, 100, controller)
        assert coef == pytest.approx(0.2, rel=1e-2)

    def test_refuses_nonsense(self) -> None:
        with pytest.raises(ParameterError, match="target"):
            AdaptiveKL(target=0.0)
        with pytest.raises(ParameterError, match="horizon of 10 rows"):
            adapt_kl_coef(0.1, 1.0, 64, AdaptiveKL(target=1.0, horizon=10))


class TestOperator:
    def test_fixed_coefficient(self) -> None:
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

    def test_says_that_it_puts_kl_in(self) -> None:
        assert KLShape(0.1).effects == KLShape(AdaptiveKL(target=1.0)).effects == {"kl"}
        assert KLShape(0.0).effects == frozenset()

    def test_refuses_a_negative_coefficient(self) -> None:
        with pytest.raises(ParameterError, match="coef"):
            KLShape(coef=-0.1)

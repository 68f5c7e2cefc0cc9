"""Selection by masks, and KL estimators against exact KL by enumeration."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.operators.advantages.per_token import (
    Estimator,
    equal_numbers,
    has_holes,
    kl_penalty,
    select,
    select_rewards,
)
from tests.nightly import examples
from tests.operators.advantages.ragged import masks
from tests.support.errors import raises

NAN = float("nan")
ESTIMATORS: list[Estimator] = ["k1", "k2", "k3", "abs", "k1+", "k3+"]


def by_formula(log_prob: float, ref: float, estimator: str) -> float:
    d = log_prob - ref
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "abs": abs(d)}[estimator.removesuffix("+")]


def categoricals(seed: int, size: int = 5, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits of a policy (with gradient) and of a reference."""
    generator = torch.Generator().manual_seed(seed)
    policy, ref = (scale * torch.randn(size, generator=generator) for _ in range(2))
    return policy.requires_grad_(), ref


class TestMasked:
    def test_select_zeroes_values_off_the_mask(self) -> None:
        x = torch.tensor([[1.0, NAN, 3.0], [NAN, NAN, float("inf")]])
        mask = torch.tensor([[True, False, True], [False, False, False]])
        assert select(x, mask).tolist() == [[1, 0, 3], [0, 0, 0]]

    @examples(60)
    @given(masks(), st.data())
    def test_select_preserves_the_bits_of_selected_values(self, mask: Tensor, data: st.DataObject) -> None:
        """For all kinds of float32, including denormals and -0.0, and any strides."""
        floats = st.lists(st.floats(width=32), min_size=mask.numel(), max_size=mask.numel())
        x = torch.tensor(data.draw(floats)).view(mask.shape)
        given_bits, on = x.view(torch.int32).flatten().tolist(), mask.flatten().tolist()
        expected = [bits if here else 0 for bits, here in zip(given_bits, on, strict=True)]
        assert select(x, mask).view(torch.int32).flatten().tolist() == expected
        across = select(x.T.contiguous().T, mask.T.contiguous().T).contiguous()
        assert across.view(torch.int32).flatten().tolist() == expected
        with_gradient = select(x.clone().requires_grad_(), mask)
        assert with_gradient.detach().view(torch.int32).flatten().tolist() == expected

    def test_select_broadcasts_row_values_and_keeps_half_precision(self) -> None:
        mask = torch.tensor([[True, False, True], [False, True, True]])
        assert select(torch.tensor([1.5, NAN])[:, None].expand(2, 3), mask)[0].tolist() == [1.5, 0, 1.5]
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            half = torch.tensor([[0.25, NAN, -2.0]], dtype=dtype)
            found = select_rewards(half, mask[:1], "rewards")
            assert found.tolist() == [[0.25, 0.0, -2.0]] and found.dtype == torch.float32

    @examples(60)
    @given(masks())
    def test_a_hole_is_an_unmasked_token_before_a_masked_one(self, mask: Tensor) -> None:
        rows = ["".join("x" if on else "." for on in row) for row in mask.tolist()]
        assert has_holes(mask) == any(".x" in row for row in rows)
        assert has_holes(mask.T.contiguous().T) == has_holes(mask)

    def test_empty_masks_have_no_holes(self) -> None:
        for shape in ((0, 4), (3, 0), (3, 1)):
            assert not has_holes(torch.zeros(shape, dtype=torch.bool))

    def test_equality_ignores_dtype_and_excludes_nan(self) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x = torch.tensor([0.5, -0.0], dtype=dtype, requires_grad=True)
            assert equal_numbers(x, torch.tensor([0.5, 0.0]))
            assert not equal_numbers(x, torch.tensor([0.5, 1.0])) and not equal_numbers(x * NAN, x * NAN)

    def test_a_reward_off_the_mask_is_refused_and_padding_is_not(self) -> None:
        mask = torch.tensor([[True, False, False], [False, True, False]])
        padded = torch.tensor([[2.0, 0.0, NAN], [NAN, 3.0, -0.0]])
        assert select_rewards(padded, mask, "rewards").tolist() == [[2, 0, 0], [0, 3, 0]]
        for lost in (1e-30, float("inf")):
            padded[1, 2] = lost
            with raises("reward.off-mask", column="rewards", row=1, token=2):
                select_rewards(padded, mask, "rewards")

    def test_no_gradient_reaches_values_off_the_mask(self) -> None:
        x = torch.tensor([[2.0, NAN]], requires_grad=True)
        select(x, torch.tensor([[True, False]])).square().sum().backward()
        assert x.grad is not None and x.grad.tolist() == [[4.0, 0.0]]

    def test_a_mask_that_is_not_bool_is_refused(self) -> None:
        with raises("rows.shape-mismatch", expected="torch.bool", found="torch.float32"):
            select(torch.zeros(1, 2), torch.ones(1, 2))


class TestEstimators:
    @pytest.mark.parametrize("estimator", ESTIMATORS)
    @examples(60)
    @given(st.floats(-15, 0), st.floats(-15, 0))
    def test_kl_estimators_have_the_value_and_gradient_of_their_formulas(
        self, estimator: Estimator, log_prob: float, ref: float
    ) -> None:
        x = torch.tensor([log_prob], requires_grad=True)
        y = torch.tensor([ref])
        value = kl_penalty(x, y, estimator)
        value.sum().backward()
        at, against = x.item(), y.item()  # what float32 made of them
        assert value.item() == pytest.approx(by_formula(at, against, estimator), rel=1e-4, abs=1e-9)
        d = at - against
        slopes = {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d), "abs": (d > 0) - (d < 0), "k1+": d, "k3+": d}
        slope = slopes[estimator]
        assert x.grad is not None and float(x.grad) == pytest.approx(slope, rel=1e-4, abs=1e-6)

    @pytest.mark.parametrize("seed", range(3))
    def test_k1_and_k3_are_unbiased(self, seed: int) -> None:
        policy, ref = (x.detach().double().log_softmax(0) for x in categoricals(seed))
        exact = sum(math.exp(p) * (p - q) for p, q in zip(policy.tolist(), ref.tolist(), strict=True))
        for estimator in ("k1", "k3"):
            mean = (policy.exp() * kl_penalty(policy, ref, estimator)).sum()
            assert float(mean) == pytest.approx(exact, rel=1e-5)

    @pytest.mark.parametrize("seed", range(3))
    def test_expected_gradients_match_the_docs(self, seed: int) -> None:
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

    def test_k3_is_accurate_near_zero(self) -> None:
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

    def test_k3_has_a_gradient_where_verl_clamps(self) -> None:
        x = torch.tensor([-5.0, -0.01], requires_grad=True)
        kl_penalty(x, torch.tensor([-0.01, -40.0]), "k3").sum().backward()  # k3 is 141 and 39
        assert x.grad is not None
        assert x.grad.tolist() == pytest.approx([1 - math.exp(4.99), 1.0], rel=1e-5)

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_a_bound_cuts_the_estimate_and_its_gradient_but_not_that_of_k2(self, estimator: Estimator) -> None:
        ref = torch.tensor([-0.01, -40.0, -5.5])
        x, free = (torch.tensor([-5.0, -0.01, -5.0], requires_grad=True) for _ in range(2))
        found, plain = kl_penalty(x, ref, estimator, bound=10.0), kl_penalty(free, ref, estimator)
        assert found.tolist() == plain.clamp(-10, 10).tolist()
        found.sum().backward()
        plain.sum().backward()
        assert x.grad is not None and free.grad is not None
        inside = torch.ones(3) if estimator.endswith("+") else (plain.detach().abs() <= 10).float()
        torch.testing.assert_close(x.grad, free.grad * inside)

    def test_bfloat16_gives_float32_and_shapes_must_match(self) -> None:
        assert kl_penalty(torch.zeros(2).bfloat16(), torch.zeros(2).bfloat16(), "k2").dtype == torch.float32
        with raises("rows.shape-mismatch", expected=(2, 3), found=(2, 1)):
            kl_penalty(torch.zeros(2, 3), torch.zeros(2, 1), "k1")

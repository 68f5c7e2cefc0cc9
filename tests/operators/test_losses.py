"""Losses against formulas written out in float64 Python, and the sums that micro-batches and ranks rely on."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.data.metrics import Metrics
from flowrl.errors import DataError, ParameterError
from flowrl.operators.losses import Aggregation, KLLoss, PPOClip, ValueClip, token_weights
from tests.loss_rows import (
    NAN,
    PolicyBatch,
    Rows,
    ValueBatch,
    aggregate,
    by_loops,
    every_aggregation,
    losses,
    make,
    masks,
    on_mask,
    run,
)


class TestWeights:
    @every_aggregation
    @settings(deadline=None, max_examples=60)
    @given(masks(), st.integers(0, 2**31))
    def test_weighted_sum_is_the_mode(
        self, aggregation: Aggregation, norm: float | None, mask: Tensor, seed: int
    ) -> None:
        weights = token_weights(mask, aggregation, norm)
        x = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))
        assert weights.dtype == torch.float32 and weights.shape == mask.shape
        assert (weights[~mask] == 0).all() and (weights[mask] > 0).all()
        expected = aggregate(on_mask(x, mask), aggregation, norm)
        assert float((weights * x).sum()) == pytest.approx(expected, rel=1e-5, abs=1e-5)

    def test_by_hand(self) -> None:
        mask = torch.tensor([[True, False, True, True], [False] * 4, [True, False, False, False]])
        on = mask.float()
        assert torch.equal(token_weights(mask, "token-mean"), on / 4)
        assert torch.equal(token_weights(mask, "seq-mean-token-sum"), on / 2)
        assert torch.equal(token_weights(mask, "seq-mean-token-mean"), on / torch.tensor([[6.0], [1.0], [2.0]]))
        assert torch.equal(token_weights(mask, "seq-mean-token-sum-norm", 8), on / 16)

    @every_aggregation
    def test_nothing_on_the_mask(self, aggregation: Aggregation, norm: float | None) -> None:
        assert torch.equal(token_weights(torch.zeros(2, 3, dtype=torch.bool), aggregation, norm), torch.zeros(2, 3))

    @every_aggregation
    @settings(deadline=None, max_examples=20)
    @given(masks())
    def test_padding_changes_nothing(self, aggregation: Aggregation, norm: float | None, mask: Tensor) -> None:
        padded = torch.nn.functional.pad(mask, (0, 5, 0, 2))
        weights = token_weights(padded, aggregation, norm)
        assert torch.equal(weights[: mask.shape[0], : mask.shape[1]], token_weights(mask, aggregation, norm))
        assert weights.count_nonzero() == mask.sum()

    def test_norm_is_asked_for_exactly_where_it_is_used(self) -> None:
        mask = torch.ones(1, 1, dtype=torch.bool)
        for aggregation, norm in [
            ("seq-mean-token-sum-norm", None),
            ("token-mean", 4.0),
            ("seq-mean-token-sum-norm", 0),
        ]:
            with pytest.raises(ParameterError, match=r"norm=<the longest response"):
                token_weights(mask, aggregation, norm)  # type: ignore[arg-type]
            for kind in (PPOClip, ValueClip):
                with pytest.raises(ParameterError, match=r"norm=<the longest response"):
                    kind(aggregation=aggregation, norm=norm)  # type: ignore[arg-type]


@every_aggregation
@pytest.mark.parametrize("which", range(4))
class TestEveryLoss:
    @settings(deadline=None, max_examples=40)
    @given(mask=masks(), seed=st.integers(0, 2**31))
    def test_equals_loops_over_tokens(
        self, aggregation: Aggregation, norm: float | None, which: int, mask: Tensor, seed: int
    ) -> None:
        loss = losses(aggregation, norm)[which]
        rows = make(type(loss), mask, seed)
        value, gradient, _ = run(loss, rows, loss.weights(mask))
        assert value == pytest.approx(by_loops(loss, rows), rel=1e-4, abs=1e-5)
        assert (gradient[~mask] == 0).all() and gradient.isfinite().all()

    def test_gradient_equals_finite_differences(self, aggregation: Aggregation, norm: float | None, which: int) -> None:
        loss = losses(aggregation, norm)[which]
        mask = torch.rand(6, 8, generator=torch.Generator().manual_seed(7)) < 0.7
        mask[2] = False
        rows = make(type(loss), mask, seed=3)
        _, gradient, _ = run(loss, rows, loss.weights(mask))
        step = 1e-6
        for i, t in mask.nonzero().tolist():
            up, down = rows.output.double(), rows.output.double()
            up[i, t] += step
            down[i, t] -= step
            slope = (by_loops(loss, rows, up) - by_loops(loss, rows, down)) / (2 * step)
            assert float(gradient[i, t]) == pytest.approx(slope, rel=1e-4, abs=1e-6)

    @settings(deadline=None, max_examples=40)
    @given(mask=masks(), seed=st.integers(0, 2**31), data=st.data())
    def test_parts_add_up_to_the_whole(
        self, aggregation: Aggregation, norm: float | None, which: int, mask: Tensor, seed: int, data: st.DataObject
    ) -> None:
        """Loss, gradient and merged metrics do not depend on how rows are dealt to micro-batches and ranks."""
        loss = losses(aggregation, norm)[which]
        rows, weights = make(type(loss), mask, seed), loss.weights(mask)
        value, gradient, metrics = run(loss, rows, weights)
        part_of = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(mask), max_size=len(mask))))
        total, gradients, merged = 0.0, torch.zeros_like(gradient), Metrics()
        for part in range(3):
            index = (part_of == part).nonzero().flatten()
            part_value, part_gradient, part_metrics = run(loss, rows.take(index), weights[index])
            total += part_value
            gradients[index] = part_gradient
            merged.merge(part_metrics)
        assert total == pytest.approx(value, rel=1e-5, abs=1e-6)
        assert torch.equal(gradients, gradient)
        assert merged.compute() == pytest.approx(metrics.compute(), rel=1e-5, abs=1e-6, nan_ok=True)

    def test_padding_columns_and_rows_change_nothing(
        self, aggregation: Aggregation, norm: float | None, which: int
    ) -> None:
        loss = losses(aggregation, norm)[which]
        mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(1)) < 0.6
        rows = make(type(loss), mask, seed=5)

        def pad(x: Tensor | None, fill: float) -> Tensor | None:
            return None if x is None else torch.nn.functional.pad(x, (0, 3, 0, 2), value=fill)

        batch = type(rows.batch)(*(pad(x, 0 if x is mask else NAN) for x in rows.batch))
        padded = Rows(pad(rows.output, NAN), pad(rows.entropy, NAN), batch)  # type: ignore[arg-type]
        value, gradient, metrics = run(loss, rows, loss.weights(mask))
        padded_value, padded_gradient, padded_metrics = run(loss, padded, loss.weights(batch.response_mask))
        assert padded_value == pytest.approx(value, rel=1e-6)
        assert torch.equal(padded_gradient[:4, :5], gradient) and padded_gradient.count_nonzero() <= mask.sum()
        assert padded_metrics.compute() == pytest.approx(metrics.compute(), rel=1e-6)

    @pytest.mark.parametrize("off", [NAN, float("inf"), -float("inf")])
    def test_what_is_off_the_mask_does_not_matter(
        self, aggregation: Aggregation, norm: float | None, which: int, off: float
    ) -> None:
        loss = losses(aggregation, norm)[which]
        mask = torch.tensor([[True, False, True], [False, False, False], [True, True, False]])
        value, gradient, metrics = run(loss, make(type(loss), mask, 2, off), loss.weights(mask))
        clean, clean_gradient, clean_metrics = run(loss, make(type(loss), mask, 2, 0.0), loss.weights(mask))
        assert value == clean and torch.equal(gradient, clean_gradient)
        assert metrics.compute() == clean_metrics.compute()

    def test_a_mini_batch_without_tokens_is_zero_and_reports_nothing(
        self, aggregation: Aggregation, norm: float | None, which: int
    ) -> None:
        loss = losses(aggregation, norm)[which]
        mask = torch.zeros(2, 3, dtype=torch.bool)
        value, gradient, metrics = run(loss, make(type(loss), mask, 0), loss.weights(mask))
        assert value == 0 and (gradient == 0).all()
        assert all(metric.weight == 0 for metric in metrics.values())


@every_aggregation
def test_logged_losses_are_the_mean_over_mini_batches(aggregation: Aggregation, norm: float | None) -> None:
    """Mini-batches of unequal token and row counts, each cut into micro-batches, weigh the same in the log."""
    policy = PPOClip(0.2, aggregation=aggregation, norm=norm, kl=KLLoss("k3", 0.5))
    critic = ValueClip(0.2, aggregation, norm)
    generator = torch.Generator().manual_seed(0)
    metrics, expected = Metrics(), dict[str, float]()
    for seed, size in enumerate((4, 7, 5)):
        mask = torch.rand(size, 6, generator=generator) < (0.2 + 0.3 * seed)
        for loss, key in ((policy, "actor/pg_loss"), (critic, "critic/vf_loss")):
            rows, weights = make(type(loss), mask, seed), loss.weights(mask)
            for index in torch.arange(size).split(2):
                loss(rows.output[index], None, rows.take(index).batch, weights[index], metrics)
            alone = PPOClip(0.2, aggregation=aggregation, norm=norm) if loss is policy else critic
            expected[key] = expected.get(key, 0.0) + by_loops(alone, rows) / 3
            if loss is policy:
                with_kl = by_loops(PPOClip(0.2, aggregation=aggregation, norm=norm, kl=KLLoss("k3", 1.0)), rows)
                term = with_kl - by_loops(alone, rows)
                expected["actor/kl_loss"] = expected.get("actor/kl_loss", 0.0) + term / 3
    found = metrics.compute()
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-4)


def one(new: float, old: float, advantage: float, loss: PPOClip) -> tuple[float, float, dict[str, float]]:
    """Loss, gradient and metrics of a single token."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    batch = PolicyBatch(torch.tensor([[old]]), torch.tensor([[advantage]]), None, mask)
    value, gradient, metrics = run(loss, Rows(torch.tensor([[new]]), torch.ones(1, 1), batch), loss.weights(mask))
    return value, gradient.item(), metrics.compute()


class TestPPOClip:
    def test_a_ratio_to_the_rollout_has_the_gradient_of_what_the_trainer_expects(self) -> None:
        """Over every answer of one token, weighed by how often the engine gives it; one to "old" is biased there."""
        draw = torch.Generator().manual_seed(5)
        logits, noise, advantage = torch.randn(3, 8, generator=draw, dtype=torch.float64)
        engine = (logits + 0.3 * noise).log_softmax(-1)
        policy = logits.clone().requires_grad_()
        (policy.softmax(-1) * advantage).sum().backward()
        assert policy.grad is not None

        def gradient(loss: PPOClip, old: Tensor) -> Tensor:
            x = logits.clone().requires_grad_()
            batch = PolicyBatch(old[:, None], advantage[:, None], None, torch.ones(8, 1, dtype=torch.bool))
            value = loss(x.log_softmax(-1)[:, None], None, batch, engine.exp()[:, None].float(), Metrics())
            return torch.autograd.grad(-value, x)[0]

        unclipped = PPOClip(0.99, 100.0, ratio_to="rollout")
        torch.testing.assert_close(gradient(unclipped, engine), policy.grad, rtol=1e-5, atol=1e-6)
        biased = gradient(PPOClip(0.99, 100.0), logits.log_softmax(-1))
        assert (biased - policy.grad).norm() > 0.05 * policy.grad.norm()

    @every_aggregation
    def test_at_ratio_1_the_gradient_is_the_policy_gradient(self, aggregation: Aggregation, norm: float | None) -> None:
        loss = PPOClip(0.2, dual_clip=3.0, aggregation=aggregation, norm=norm)
        mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(4)) < 0.6
        rows = make(PPOClip, mask, 1, 0.0)
        rows = rows._replace(batch=rows.batch._replace(old_log_probs=rows.output.clone()))
        weights = loss.weights(mask)
        _, gradient, metrics = run(loss, rows, weights)
        assert torch.equal(gradient, -rows.batch.advantages * weights)
        assert metrics.compute()["actor/pg_clipfrac"] == metrics.compute()["actor/approx_kl"] == 0

    def test_by_hand(self) -> None:
        """Ratio 2 or 1/2, clip 0.2 and 0.3, advantage ±1: where the clip bites, the gradient ends."""
        loss, ln2 = PPOClip(0.2, 0.3), math.log(2)
        for new, advantage, value, slope, clipped in [
            (ln2, 1.0, -1.3, 0.0, 1.0),
            (ln2, -1.0, 2.0, 2.0, 0.0),
            (-ln2, 1.0, -0.5, -0.5, 0.0),
            (-ln2, -1.0, 0.8, 0.0, 1.0),
        ]:
            found, gradient, metrics = one(new, 0.0, advantage, loss)
            assert (found, gradient) == pytest.approx((value, slope))
            assert metrics["actor/pg_clipfrac"] == clipped
            assert metrics["actor/approx_kl"] == pytest.approx(-new)
            assert "actor/pg_clipfrac_lower" not in metrics

    def test_dual_clip_by_hand(self) -> None:
        """Ratio 8, bound 3: only a negative advantage is bounded, and its gradient ends."""
        loss, ln8 = PPOClip(0.2, dual_clip=3.0), math.log(8)
        value, gradient, metrics = one(ln8, 0.0, -1.0, loss)
        assert (value, gradient, metrics["actor/pg_clipfrac_lower"]) == (3.0, 0.0, 1.0)
        value, gradient, metrics = one(math.log(2), 0.0, -1.0, loss)
        assert (value, gradient, metrics["actor/pg_clipfrac_lower"]) == pytest.approx((2.0, 2.0, 0.0))
        value, _, metrics = one(ln8, 0.0, 1.0, loss)
        assert (value, metrics["actor/pg_clipfrac_lower"]) == pytest.approx((-1.2, 0.0))

    @pytest.mark.parametrize("new", [0.0, -400.0])
    @pytest.mark.parametrize("advantage", [1.0, -1.0])
    def test_a_log_ratio_beyond_20_stays_finite(self, new: float, advantage: float) -> None:
        value, gradient, _ = one(new, -200.0, advantage, PPOClip(0.2))
        assert math.isfinite(value) and gradient == 0

    def test_metrics_are_means_over_tokens(self) -> None:
        mask = torch.tensor([[True, True, True], [True, False, False]])
        old = torch.zeros(2, 3)
        new = torch.tensor([[0.5, -0.5, 0.1], [0.5, NAN, NAN]])
        advantages = torch.tensor([[1.0, 1.0, 1.0], [-1.0, NAN, NAN]])
        entropy = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, NAN]])
        ref = torch.zeros(2, 3)
        loss = PPOClip(0.2, kl=KLLoss("k1", 0.5), aggregation="seq-mean-token-sum")
        rows = Rows(new, entropy, PolicyBatch(old, advantages, ref, mask))
        found = run(loss, rows, loss.weights(mask))[2].compute()
        assert found["actor/pg_clipfrac"] == 0.25
        assert found["actor/entropy"] == 2.5
        assert found["actor/approx_kl"] == pytest.approx(-0.15)
        assert found["actor/kl_loss"] == pytest.approx((0.1 + 0.5) / 2)

    def test_entropy_bonus_has_its_gradient(self) -> None:
        mask = torch.tensor([[True, True, False]])
        loss = PPOClip(0.2, entropy=0.1)
        rows, entropy = make(PPOClip, mask, 0), torch.tensor([[1.0, 2.0, NAN]], requires_grad=True)
        loss(rows.output, entropy, rows.batch, loss.weights(mask), Metrics()).backward()
        assert entropy.grad is not None and entropy.grad.tolist() == [[pytest.approx(-0.05)] * 2 + [0.0]]

    def test_says_what_it_wants_and_refuses_to_go_without(self) -> None:
        assert not PPOClip().wants_entropy
        with_both = PPOClip(0.2, kl=KLLoss("k3", 0.001), entropy=0.01)
        assert with_both.wants_entropy
        mask = torch.ones(1, 2, dtype=torch.bool)
        rows, weights = make(PPOClip, mask, 0), with_both.weights(mask)
        with pytest.raises(DataError, match="needs entropy"):
            with_both(rows.output, None, rows.batch, weights, Metrics())
        with pytest.raises(DataError, match="needs ref_log_prob"):
            with_both(rows.output, rows.entropy, rows.batch._replace(ref_log_prob=None), weights, Metrics())

    def test_is_a_record(self) -> None:
        assert PPOClip(0.2) == PPOClip() and hash(PPOClip(0.2)) == hash(PPOClip())
        assert PPOClip(0.2, kl=KLLoss("k3", 0.001)) == PPOClip(kl=KLLoss())
        for wrong in ({"clip_low": 0.0}, {"clip_low": 1.0}, {"dual_clip": 1.0}, {"aggregation": "mean"}, {"clip": 0.2}):
            with pytest.raises(ParameterError, match=next(iter(wrong))):
                PPOClip(**wrong)

    def test_refuses_to_broadcast(self) -> None:
        mask = torch.ones(2, 3, dtype=torch.bool)
        rows = make(PPOClip, mask, 0)
        batch = rows.batch._replace(advantages=torch.ones(2, 1))
        with pytest.raises(DataError, match="shape"):
            PPOClip()(rows.output, None, batch, PPOClip().weights(mask), Metrics())


class TestValueClip:
    def test_by_hand(self) -> None:
        """Old value 0, clip 0.2, value 1: clipped to 0.2, which counts where it is the farther from the return."""
        mask, loss = torch.ones(1, 1, dtype=torch.bool), ValueClip(0.2)
        for target, value, slope, clipped in [(2.0, 1.8**2 / 2, 0.0, 1.0), (-1.0, 2.0, 2.0, 0.0)]:
            batch = ValueBatch(torch.zeros(1, 1), torch.tensor([[target]]), mask)
            found, gradient, metrics = run(loss, Rows(torch.ones(1, 1), torch.ones(1, 1), batch), loss.weights(mask))
            assert (found, gradient.item()) == pytest.approx((value, slope))
            assert metrics.compute() == pytest.approx(
                {"critic/vf_clipfrac": clipped, "critic/vf_loss": value, "critic/vpred_mean": 1.0}
            )

    def test_without_clip_it_is_half_the_squared_error(self) -> None:
        mask, loss = torch.ones(1, 2, dtype=torch.bool), ValueClip(None)
        batch = ValueBatch(torch.zeros(1, 2), torch.tensor([[2.0, -1.0]]), mask)
        value, gradient, metrics = run(loss, Rows(torch.ones(1, 2), torch.ones(1, 2), batch), loss.weights(mask))
        assert value == (0.5 + 2) / 2 and gradient.tolist() == [[-0.5, 1.0]]
        assert "critic/vf_clipfrac" not in metrics
        assert not loss.wants_entropy

    @pytest.mark.parametrize("clip", [1e6, 100.0, 10.0])
    def test_rounding_is_not_counted_as_clipping(self, clip: float) -> None:
        draw = torch.Generator().manual_seed(0)
        old, new, returns = (torch.randn(64, 64, generator=draw) for _ in range(3))
        mask, loss, metrics = torch.ones(64, 64, dtype=torch.bool), ValueClip(clip), Metrics()
        batch: Any = SimpleNamespace(values=old, returns=returns)
        new.requires_grad_()
        found = loss(new, None, batch, loss.weights(mask), metrics)
        assert metrics.compute()["critic/vf_clipfrac"] == 0.0
        (gradient,) = torch.autograd.grad(found, new)
        torch.testing.assert_close(gradient, (new.detach() - returns) / mask.numel())

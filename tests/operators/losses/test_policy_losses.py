"""Losses of policies: cases by hand, and formulas written out in float64."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.errors import ParameterError
from flowrl.operators import ClipCov, KLLoss, PPOClip, UpdateActor
from flowrl.operators.losses.objective import Aggregation, TokenObjective
from tests.nightly import examples
from tests.operators.losses.loss_formulas import FORMULAS, Row
from tests.support.errors import raises
from tests.support.rows.loss_rows import (
    NAN,
    PolicyBatch,
    Rows,
    every_aggregation,
    make,
    masks,
    run,
)


def one(new: float, old: float, advantage: float, policy: PPOClip) -> tuple[float, float, dict[str, float]]:
    """Loss, gradient and metrics of a single token."""
    loss = TokenObjective(policy)
    mask = torch.ones(1, 1, dtype=torch.bool)
    batch = PolicyBatch(torch.tensor([[old]]), torch.tensor([[advantage]]), None, mask)
    value, gradient, metrics = run(loss, Rows(torch.tensor([[new]]), torch.ones(1, 1), batch), loss.weights(mask))
    return value, gradient.item(), metrics.compute()


class TestPPOClip:
    def test_a_ratio_to_the_rollout_has_an_unbiased_gradient(self) -> None:
        """Over every response of one token, weighted by the engine; a ratio to "old" is biased there."""
        draw = torch.Generator().manual_seed(5)
        logits, noise, advantage = torch.randn(3, 8, generator=draw, dtype=torch.float64)
        engine = (logits + 0.3 * noise).log_softmax(-1)
        policy = logits.clone().requires_grad_()
        (policy.softmax(-1) * advantage).sum().backward()
        assert policy.grad is not None

        def gradient(loss: PPOClip, old: Tensor) -> Tensor:
            x = logits.clone().requires_grad_()
            batch = PolicyBatch(old[:, None], advantage[:, None], None, torch.ones(8, 1, dtype=torch.bool))
            weights = engine.exp()[:, None].float()
            value = TokenObjective(loss)(x.log_softmax(-1)[:, None], None, batch, weights, Metrics())
            return torch.autograd.grad(-value, x)[0]

        unclipped = PPOClip(0.99, 100.0, ratio_to="rollout")
        torch.testing.assert_close(gradient(unclipped, engine), policy.grad, rtol=1e-5, atol=1e-6)
        biased = gradient(PPOClip(0.99, 100.0), logits.log_softmax(-1))
        assert (biased - policy.grad).norm() > 0.05 * policy.grad.norm()

    @every_aggregation
    def test_at_ratio_1_the_gradient_of_ppo_clip_is_the_policy_gradient(
        self, aggregation: Aggregation, norm: float | None
    ) -> None:
        loss = TokenObjective(PPOClip(0.2, dual_clip=3.0), aggregation, norm)
        mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(4)) < 0.6
        rows = make(PPOClip, mask, 1, 0.0)
        rows = rows._replace(batch=rows.batch._replace(old_log_probs=rows.output.clone()))
        weights = loss.weights(mask)
        _, gradient, metrics = run(loss, rows, weights)
        assert torch.equal(gradient, -rows.batch.advantages * weights)
        assert metrics.compute()["actor/pg_clipfrac"] == metrics.compute()["actor/approx_kl"] == 0

    def test_the_clipped_surrogate_equals_a_worked_example(self) -> None:
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

    def test_dual_clip_worked_example(self) -> None:
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

    def test_loss_metrics_are_means_over_tokens(self) -> None:
        mask = torch.tensor([[True, True, True], [True, False, False]])
        old = torch.zeros(2, 3)
        new = torch.tensor([[0.5, -0.5, 0.1], [0.5, NAN, NAN]])
        advantages = torch.tensor([[1.0, 1.0, 1.0], [-1.0, NAN, NAN]])
        entropy = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, NAN]])
        ref = torch.zeros(2, 3)
        loss = TokenObjective(PPOClip(0.2), "seq-mean-token-sum", kl=KLLoss("k1", 0.5))
        rows = Rows(new, entropy, PolicyBatch(old, advantages, ref, mask))
        found = run(loss, rows, loss.weights(mask))[2].compute()
        assert found["actor/pg_clipfrac"] == 0.25
        assert found["actor/entropy"] == 2.5
        assert found["actor/approx_kl"] == pytest.approx(-0.15)
        assert found["actor/kl_loss"] == pytest.approx((0.1 + 0.5) / 2)

    def test_the_entropy_bonus_has_the_expected_gradient(self) -> None:
        mask = torch.tensor([[True, True, False]])
        loss = TokenObjective(PPOClip(0.2), entropy=0.1)
        rows, entropy = make(PPOClip, mask, 0), torch.tensor([[1.0, 2.0, NAN]], requires_grad=True)
        loss(rows.output, entropy, rows.batch, loss.weights(mask), Metrics()).backward()
        assert entropy.grad is not None and entropy.grad.tolist() == [[pytest.approx(-0.05)] * 2 + [0.0]]

    def test_ppo_clip_declares_its_inputs_and_refuses_missing_ones(self) -> None:
        assert not TokenObjective(PPOClip()).wants_entropy
        with_both = TokenObjective(PPOClip(0.2), kl=KLLoss("k3", 0.001), entropy=0.01)
        assert with_both.wants_entropy
        mask = torch.ones(1, 2, dtype=torch.bool)
        rows, weights = make(PPOClip, mask, 0), with_both.weights(mask)
        with raises("objective.missing-column", column="entropy"):
            with_both(rows.output, None, rows.batch, weights, Metrics())
        with raises("objective.missing-column", column="ref_log_prob"):
            with_both(rows.output, rows.entropy, rows.batch._replace(ref_log_prob=None), weights, Metrics())

    def test_losses_compare_by_value_and_check_settings(self) -> None:
        assert PPOClip(0.2) == PPOClip() and hash(PPOClip(0.2)) == hash(PPOClip())
        assert UpdateActor(PPOClip(0.2), kl=KLLoss("k3", 0.001)) == UpdateActor(kl=KLLoss())
        for kind, wrong in (
            (PPOClip, {"clip_low": 0.0}),
            (PPOClip, {"clip_low": 1.0}),
            (PPOClip, {"dual_clip": 1.0}),
            (PPOClip, {"clip": 0.2}),
            (UpdateActor, {"aggregation": "mean"}),
        ):
            with pytest.raises(ParameterError, match=next(iter(wrong))):
                kind(**wrong)

    def test_columns_of_another_shape_are_refused(self) -> None:
        mask = torch.ones(2, 3, dtype=torch.bool)
        rows = make(PPOClip, mask, 0)
        batch = rows.batch._replace(advantages=torch.ones(2, 1))
        with raises("rows.shape-mismatch", expected=(2, 3), found=(2, 1)):
            TokenObjective(PPOClip())(rows.output, None, batch, mask.float(), Metrics())


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@examples(15)
@given(mask=masks(), seed=st.integers(0, 2**31))
def test_every_loss_matches_its_formula(name: str, aggregation: Aggregation, mask: Tensor, seed: int) -> None:
    """Value and gradient, over ragged rows with holes and rows of nothing; the advantage is that of the row."""
    loss, formula = FORMULAS[name]
    draw = torch.Generator().manual_seed(seed)
    new, old, ref = ((-2 + torch.randn(mask.shape, generator=draw)).clamp(max=-0.05) for _ in range(3))
    old = (new + 0.4 * torch.randn(mask.shape, generator=draw)).clamp(max=-0.05)
    advantages = torch.randn(len(mask), 1, generator=draw).expand(mask.shape)
    off = [x.masked_fill(~mask, NAN) for x in (new, old, advantages, ref)]
    batch = SimpleNamespace(old_log_probs=off[1], advantages=off[2], ref_log_prob=off[3])
    objective = TokenObjective(loss, aggregation, key=Key.of(0))
    value, gradient, _ = run(objective, Rows(off[0], torch.zeros(mask.shape), batch), objective.weights(mask))
    exact = new.double().requires_grad_()
    rows = [
        Row(exact[i][mask[i]], old[i][mask[i]].double(), advantages[i][mask[i]].double(), ref[i][mask[i]].double())
        for i in range(len(mask))
        if mask[i].any()
    ]
    weights = objective.weights(mask).double()
    live = [weights[i][mask[i]] for i in range(len(mask)) if mask[i].any()]
    expected = sum(((w * x).sum() for w, x in zip(live, formula(rows), strict=True)), (0.0 * exact).sum())
    expected.backward()
    assert value == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
    torch.testing.assert_close(gradient, exact.grad.float(), rtol=1e-3, atol=1e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", FORMULAS)
def test_at_ratio_1_the_gradient_of_every_loss_is_the_policy_gradient(name: str) -> None:
    """But for what is regularized (DRO by the reference, and KL-Cov by |log r|, whose slope at 0 is taken to be 0), and
    Clip-Cov, which takes the gradient from some."""
    if name in ("dro", "clip_cov"):
        return
    loss, _ = FORMULAS[name]
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(4)) < 0.6
    rows = make(PPOClip, mask, 1, 0.0)
    advantages = rows.batch.advantages[:, :1].expand(mask.shape) if loss.unit == "row" else rows.batch.advantages
    new = -rows.output.abs() - 0.1
    batch = rows.batch._replace(old_log_probs=new.clone(), advantages=advantages.clone())
    objective = TokenObjective(loss, "seq-mean-token-mean")
    weights = objective.weights(mask)
    _, gradient, _ = run(objective, rows._replace(output=new, batch=batch), weights)
    torch.testing.assert_close(gradient, -advantages * weights, rtol=1e-5, atol=1e-7)


class TestClipCov:
    """Ten rows of 100 tokens, half of which are within the bounds."""

    mask = torch.ones(10, 100, dtype=torch.bool)
    log_probs = -1.0 + torch.tensor([-0.5, 0.5]).repeat(10, 50)
    advantages = torch.tensor([-4.0, 4.0, 4.0, -4.0]).repeat(10, 25)  # covariances of 2 and -2

    def drawn(self, loss: ClipCov, key: Key) -> Tensor:
        found = loss(self.log_probs, self.log_probs, self.advantages, self.mask, Metrics(), key)
        return found == 0

    @pytest.mark.parametrize(("share", "count"), [(1e-9, 1), (0.0129, 12), (0.5, 500), (1.0, 500)])
    def test_clip_cov_samples_its_share_of_tokens_within_the_bounds(self, share: float, count: int) -> None:
        sampled = self.drawn(ClipCov(share), Key.of(1))
        assert sampled.sum() == count
        assert (self.log_probs * self.advantages)[sampled].sign().unique().tolist() in ([-1.0, 1.0], [-1.0], [1.0])
        inside = (self.log_probs + 1.0) * self.advantages
        assert (inside[sampled] == 2.0).all()

    def test_clip_cov_samples_uniformly_and_differently_per_step(self) -> None:
        one, again, other = (self.drawn(ClipCov(0.1), Key.of(seed)) for seed in (1, 1, 2))
        assert torch.equal(one, again) and not torch.equal(one, other)
        often = (
            sum(self.drawn(ClipCov(0.25), Key.of(seed)).double() for seed in range(200)) / 200
        )  # half of those within
        within = often[(self.log_probs + 1.0) * self.advantages == 2.0]  # type: ignore[index]
        assert abs(float(within.mean()) - 0.5) < 1e-6
        assert float((within - 0.5).abs().max()) < 5 * (0.25 / 200) ** 0.5

    def test_clip_cov_without_eligible_tokens_clips_none_and_refuses_reversed_bounds(self) -> None:
        assert not self.drawn(ClipCov(1.0, low=3.0), Key.of(0)).any()
        with raises("objective.invalid-settings", low=6.0, high=5.0):
            ClipCov(low=6.0)

"""Losses against formulas written out in float64 Python, and the sums that micro-batches and ranks rely on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.data.metrics import Metrics
from flowrl.operators import KLLoss, PPOClip, UpdateActor, UpdateCritic, ValueClip
from flowrl.operators.losses.objective import Aggregation, TokenObjective, token_weights
from flowrl.schedules import Linear
from tests.nightly import examples
from tests.support.errors import raises
from tests.support.rows.loss_rows import (
    NAN,
    Rows,
    aggregate,
    by_loops,
    every_aggregation,
    make,
    masks,
    objectives,
    on_mask,
    run,
)


class TestWeights:
    @every_aggregation
    @examples(60)
    @given(masks(), st.integers(0, 2**31))
    def test_weighted_sum_equals_the_aggregation_mode(
        self, aggregation: Aggregation, norm: float | None, mask: Tensor, seed: int
    ) -> None:
        weights = token_weights(mask, aggregation, norm)
        x = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))
        assert weights.dtype == torch.float32 and weights.shape == mask.shape
        assert (weights[~mask] == 0).all() and (weights[mask] > 0).all()
        expected = aggregate(on_mask(x, mask), aggregation, norm)
        assert float((weights * x).sum()) == pytest.approx(expected, rel=1e-5, abs=1e-5)

    def test_token_weights_equal_a_worked_example(self) -> None:
        mask = torch.tensor([[True, False, True, True], [False] * 4, [True, False, False, False]])
        on = mask.float()
        assert torch.equal(token_weights(mask, "token-mean"), on / 4)
        assert torch.equal(token_weights(mask, "token-sum"), on)
        assert torch.equal(token_weights(mask, "seq-mean-token-sum"), on / 2)
        assert torch.equal(token_weights(mask, "seq-mean-token-mean"), on / torch.tensor([[6.0], [1.0], [2.0]]))
        assert torch.equal(token_weights(mask, "seq-mean-token-sum-norm", 8), on / 16)

    @every_aggregation
    def test_an_empty_mask_has_zero_weights(self, aggregation: Aggregation, norm: float | None) -> None:
        assert torch.equal(token_weights(torch.zeros(2, 3, dtype=torch.bool), aggregation, norm), torch.zeros(2, 3))

    @every_aggregation
    @examples(20)
    @given(masks())
    def test_padding_does_not_change_weights(self, aggregation: Aggregation, norm: float | None, mask: Tensor) -> None:
        padded = torch.nn.functional.pad(mask, (0, 5, 0, 2))
        weights = token_weights(padded, aggregation, norm)
        assert torch.equal(weights[: mask.shape[0], : mask.shape[1]], token_weights(mask, aggregation, norm))
        assert weights.count_nonzero() == mask.sum()

    def test_norm_is_required_only_by_its_aggregation(self) -> None:
        mask = torch.ones(1, 1, dtype=torch.bool)
        for aggregation, norm in [
            ("seq-mean-token-sum-norm", None),
            ("token-mean", 4.0),
            ("seq-mean-token-sum-norm", 0),
        ]:
            with raises("objective.invalid-settings", aggregation=aggregation, given=norm):
                token_weights(mask, aggregation, norm)  # type: ignore[arg-type]
            for kind in (UpdateActor, UpdateCritic):
                with raises("objective.invalid-settings", aggregation=aggregation, given=norm):
                    kind(aggregation=aggregation, norm=norm)  # type: ignore[arg-type]


@every_aggregation
@pytest.mark.parametrize("which", range(5))
class TestEveryLoss:
    @examples(40)
    @given(mask=masks(), seed=st.integers(0, 2**31))
    def test_the_objective_equals_loops_over_tokens(
        self, aggregation: Aggregation, norm: float | None, which: int, mask: Tensor, seed: int
    ) -> None:
        loss = objectives(aggregation, norm)[which]
        rows = make(type(loss.loss), mask, seed)
        value, gradient, _ = run(loss, rows, loss.weights(mask))
        assert value == pytest.approx(by_loops(loss, rows), rel=1e-4, abs=1e-5)
        assert (gradient[~mask] == 0).all() and gradient.isfinite().all()

    def test_the_gradient_equals_finite_differences(
        self, aggregation: Aggregation, norm: float | None, which: int
    ) -> None:
        loss = objectives(aggregation, norm)[which]
        mask = torch.rand(6, 8, generator=torch.Generator().manual_seed(7)) < 0.7
        mask[2] = False
        rows = make(type(loss.loss), mask, seed=3)
        _, gradient, _ = run(loss, rows, loss.weights(mask))
        step = 1e-6
        for i, t in mask.nonzero().tolist():
            up, down = rows.output.double(), rows.output.double()
            up[i, t] += step
            down[i, t] -= step
            slope = (by_loops(loss, rows, up) - by_loops(loss, rows, down)) / (2 * step)
            assert float(gradient[i, t]) == pytest.approx(slope, rel=1e-4, abs=1e-6)

    @examples(40)
    @given(mask=masks(), seed=st.integers(0, 2**31), data=st.data())
    def test_loss_gradient_and_metrics_do_not_depend_on_micro_batches_and_ranks(
        self, aggregation: Aggregation, norm: float | None, which: int, mask: Tensor, seed: int, data: st.DataObject
    ) -> None:
        """Loss, gradient and merged metrics do not depend on how rows are dealt to micro-batches and ranks."""
        loss = objectives(aggregation, norm)[which]
        rows, weights = make(type(loss.loss), mask, seed), loss.weights(mask)
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

    def test_padding_columns_and_rows_do_not_change_results(
        self, aggregation: Aggregation, norm: float | None, which: int
    ) -> None:
        loss = objectives(aggregation, norm)[which]
        mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(1)) < 0.6
        rows = make(type(loss.loss), mask, seed=5)

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
    def test_values_off_the_mask_do_not_change_results(
        self, aggregation: Aggregation, norm: float | None, which: int, off: float
    ) -> None:
        loss = objectives(aggregation, norm)[which]
        mask = torch.tensor([[True, False, True], [False, False, False], [True, True, False]])
        value, gradient, metrics = run(loss, make(type(loss.loss), mask, 2, off), loss.weights(mask))
        clean, clean_gradient, clean_metrics = run(loss, make(type(loss.loss), mask, 2, 0.0), loss.weights(mask))
        assert value == clean and torch.equal(gradient, clean_gradient)
        assert metrics.compute() == clean_metrics.compute()

    def test_a_mini_batch_without_tokens_has_zero_loss_and_no_metrics(
        self, aggregation: Aggregation, norm: float | None, which: int
    ) -> None:
        loss = objectives(aggregation, norm)[which]
        mask = torch.zeros(2, 3, dtype=torch.bool)
        value, gradient, metrics = run(loss, make(type(loss.loss), mask, 0), loss.weights(mask))
        assert value == 0 and (gradient == 0).all()
        assert all(metric.weight == 0 for metric in metrics.values())


@every_aggregation
def test_logged_losses_are_means_over_mini_batches(aggregation: Aggregation, norm: float | None) -> None:
    """Mini-batches of unequal token and row counts, each cut into micro-batches, weigh the same in the log; sums over
    tokens are logged as their mean."""
    policy = TokenObjective(PPOClip(0.2), aggregation, norm, KLLoss("k3", 0.5))
    critic = TokenObjective(ValueClip(0.2), aggregation, norm)
    generator = torch.Generator().manual_seed(0)
    metrics, expected, tokens = Metrics(), dict[str, float](), 0
    for seed, size in enumerate((4, 7, 5)):
        mask = torch.rand(size, 6, generator=generator) < (0.2 + 0.3 * seed)
        tokens += int(mask.sum())
        for loss, key in ((policy, "actor/pg_loss"), (critic, "critic/vf_loss")):
            rows, weights = make(type(loss.loss), mask, seed), loss.weights(mask)
            for index in torch.arange(size).split(2):
                loss(rows.output[index], None, rows.take(index).batch, weights[index], metrics)
            alone = TokenObjective(PPOClip(0.2), aggregation, norm) if loss is policy else critic
            expected[key] = expected.get(key, 0.0) + by_loops(alone, rows) / 3
            if loss is policy:
                with_kl = by_loops(TokenObjective(PPOClip(0.2), aggregation, norm, KLLoss("k3", 1.0)), rows)
                term = with_kl - by_loops(alone, rows)
                expected["actor/kl_loss"] = expected.get("actor/kl_loss", 0.0) + term / 3
    if aggregation == "token-sum":
        expected = {key: 3 * value / tokens for key, value in expected.items()}
    found = metrics.compute()
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-4)


def test_a_kl_coefficient_may_reach_zero_where_the_term_has_no_gradient() -> None:
    """The loss and its gradient are then those without the term, also for a log-prob whose estimate overflows."""
    mask = torch.tensor([[True, True, False], [True, False, False]])
    falling = UpdateActor(kl=KLLoss("k3", Linear(0.1, 0.0, steps=2)))
    kls = [falling.in_step(step).kl for step in range(4)]
    assert [None if kl is None else kl.coef for kl in kls] == [0.1, 0.05, 0.0, 0.0]
    assert "kl" in falling.effects and "kl" not in UpdateActor(kl=KLLoss("k3", 0.0)).effects
    for kl, differs in ((kls[1], True), (kls[2], False)):
        rows = make(PPOClip, mask, 0)
        rows.batch.ref_log_prob[0, 0] = -rows.output[0, 0].detach() if differs else 1e30
        gradients = []
        for term in (None, kl):
            output = rows.output.detach().clone().requires_grad_()
            objective = TokenObjective(PPOClip(0.2), kl=term)
            objective(output, None, rows.batch, objective.weights(mask), Metrics()).backward()
            gradients.append(output.grad)
        assert torch.equal(*gradients) != differs

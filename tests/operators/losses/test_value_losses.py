"""Losses of critics: cases by hand, and formulas written out in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.data.metrics import Metrics
from flowrl.errors import ParameterError
from flowrl.operators import ValueClip, ValueHuber
from flowrl.operators.losses.objective import Aggregation, TokenObjective
from tests.nightly import examples
from tests.support.rows.loss_rows import (
    Rows,
    ValueBatch,
    aggregate,
    make,
    masks,
    on_mask,
    run,
)


class TestValueClip:
    def test_the_clipped_value_loss_equals_a_worked_example(self) -> None:
        """Old value 0, clip 0.2, value 1: clipped to 0.2, which counts where it is the farther from the return."""
        mask, loss = torch.ones(1, 1, dtype=torch.bool), TokenObjective(ValueClip(0.2))
        for target, value, slope, clipped in [(2.0, 1.8**2 / 2, 0.0, 1.0), (-1.0, 2.0, 2.0, 0.0)]:
            batch = ValueBatch(torch.zeros(1, 1), torch.tensor([[target]]), mask)
            found, gradient, metrics = run(loss, Rows(torch.ones(1, 1), torch.ones(1, 1), batch), loss.weights(mask))
            assert (found, gradient.item()) == pytest.approx((value, slope))
            assert metrics.compute() == pytest.approx(
                {"critic/vf_clipfrac": clipped, "critic/vf_loss": value, "critic/vpred_mean": 1.0}
            )

    def test_without_clip_the_loss_is_half_the_squared_error(self) -> None:
        mask, loss = torch.ones(1, 2, dtype=torch.bool), TokenObjective(ValueClip(None))
        batch = ValueBatch(torch.zeros(1, 2), torch.tensor([[2.0, -1.0]]), mask)
        value, gradient, metrics = run(loss, Rows(torch.ones(1, 2), torch.ones(1, 2), batch), loss.weights(mask))
        assert value == (0.5 + 2) / 2 and gradient.tolist() == [[-0.5, 1.0]]
        assert "critic/vf_clipfrac" not in metrics
        assert not loss.wants_entropy

    @pytest.mark.parametrize("clip", [1e6, 100.0, 10.0])
    def test_rounding_is_not_counted_as_clipping(self, clip: float) -> None:
        draw = torch.Generator().manual_seed(0)
        old, new, returns = (torch.randn(64, 64, generator=draw) for _ in range(3))
        mask, loss, metrics = torch.ones(64, 64, dtype=torch.bool), TokenObjective(ValueClip(clip)), Metrics()
        batch: Any = SimpleNamespace(values=old, returns=returns)
        new.requires_grad_()
        found = loss(new, None, batch, loss.weights(mask), metrics)
        assert metrics.compute()["critic/vf_clipfrac"] == 0.0
        (gradient,) = torch.autograd.grad(found, new)
        torch.testing.assert_close(gradient, (new.detach() - returns) / mask.numel())


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("loss", [ValueHuber(0.3), ValueHuber(), ValueClip(None)], ids=repr)
@examples(25)
@given(mask=masks(), seed=st.integers(0, 2**31))
def test_squared_and_huber_losses_match_their_formulas(
    loss: ValueHuber | ValueClip, aggregation: Aggregation, mask: Tensor, seed: int
) -> None:
    """Value and gradient in float64, over ragged rows with holes and rows of nothing."""
    delta = loss.delta if isinstance(loss, ValueHuber) else float("inf")
    rows, objective = make(ValueClip, mask, seed), TokenObjective(loss, aggregation)
    weights = objective.weights(mask)
    value, gradient, metrics = run(objective, rows, weights)
    errors = [
        [v - r for v, r in zip(*row, strict=True)]
        for row in zip(on_mask(rows.output, mask), on_mask(rows.batch.returns, mask), strict=True)
    ]
    per_token = [[e * e / 2 if abs(e) <= delta else delta * (abs(e) - delta / 2) for e in row] for row in errors]
    assert value == pytest.approx(aggregate(per_token, aggregation, None), rel=1e-5, abs=1e-7)
    slopes = torch.tensor([min(max(e, -delta), delta) for row in errors for e in row], dtype=torch.float64)
    torch.testing.assert_close(gradient[mask].double(), slopes * weights[mask].double(), rtol=1e-5, atol=1e-7)
    assert (gradient[~mask] == 0).all()
    if mask.any():
        assert metrics.compute()["critic/vpred_mean"] == pytest.approx(
            float(rows.output[mask].double().mean()), abs=1e-6
        )


def test_huber_refuses_delta_zero() -> None:
    with pytest.raises(ParameterError, match="delta"):
        ValueHuber(0.0)

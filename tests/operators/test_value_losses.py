"""Losses of critics: cases by hand, and formulas written out in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.data.metrics import Metrics
from flowrl.operators import ValueClip
from flowrl.operators.objective import TokenObjective
from tests.loss_rows import (
    Rows,
    ValueBatch,
    run,
)


class TestValueClip:
    def test_by_hand(self) -> None:
        """Old value 0, clip 0.2, value 1: clipped to 0.2, which counts where it is the farther from the return."""
        mask, loss = torch.ones(1, 1, dtype=torch.bool), TokenObjective(ValueClip(0.2))
        for target, value, slope, clipped in [(2.0, 1.8**2 / 2, 0.0, 1.0), (-1.0, 2.0, 2.0, 0.0)]:
            batch = ValueBatch(torch.zeros(1, 1), torch.tensor([[target]]), mask)
            found, gradient, metrics = run(loss, Rows(torch.ones(1, 1), torch.ones(1, 1), batch), loss.weights(mask))
            assert (found, gradient.item()) == pytest.approx((value, slope))
            assert metrics.compute() == pytest.approx(
                {"critic/vf_clipfrac": clipped, "critic/vf_loss": value, "critic/vpred_mean": 1.0}
            )

    def test_without_clip_it_is_half_the_squared_error(self) -> None:
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

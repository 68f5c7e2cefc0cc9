"""Losses of critics."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from flowrl import columns as c
from flowrl.core.operators.loss import Loss
from flowrl.core.operators.ports import INJECTED
from flowrl.data.metrics import Metrics


class ValueClip(Loss):
    """The clipped value loss of PPO: half the squared error to the returns, the larger of plain and clipped.

    Per token: ``max((V - R)**2, (clip(V, V_old ± clip) - R)**2) / 2``, as in OpenAI's baselines (``ppo2``) and verl.

    Reports ``critic/vf_clipfrac`` (tokens where clipping made the loss larger) and ``critic/vpred_mean``.

    Args:
        clip: how far a value may move from the old one before its gradient ends; None is no clipping.
    """

    clip: float | None = Field(default=0.2, gt=0)

    def __call__(
        self,
        new_values: c.NewValues,
        values: c.Values,
        returns: c.Returns,
        response_mask: c.ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> Tensor:
        squared, tokens = (new_values - returns).square(), response_mask.sum()
        if self.clip is not None:
            # within, it is `new_values` exactly
            clipped = (new_values.clamp(values - self.clip, values + self.clip) - returns).square()
            metrics.mean("critic/vf_clipfrac", (clipped > squared).sum(), tokens)
            squared = torch.maximum(squared, clipped)
        metrics.mean("critic/vpred_mean", new_values.detach().sum(), tokens)
        return 0.5 * squared


class ValueHuber(Loss):
    """Half the squared error to the returns, linear beyond `delta`, so that outliers pull no harder than that.

    ``e**2 / 2`` where ``|e| <= delta``, else ``delta * (|e| - delta / 2)``, with ``e = V - R`` (Huber 1964).

    Reports ``critic/vpred_mean``.

    Args:
        delta: where it turns linear.
    """

    delta: float = Field(default=1.0, gt=0)

    def __call__(
        self,
        new_values: c.NewValues,
        returns: c.Returns,
        response_mask: c.ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> Tensor:
        metrics.mean("critic/vpred_mean", new_values.detach().sum(), response_mask.sum())
        return torch.nn.functional.huber_loss(new_values, returns, reduction="none", delta=self.delta)

"""Value losses of critics."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from flowrl import columns as c
from flowrl.core.operators.loss import Loss
from flowrl.core.operators.ports import INJECTED
from flowrl.data.metrics import Metrics


class ValueClip(Loss):
    """The clipped value loss of PPO: half the squared error to the returns, the larger of unclipped and clipped.

    ``max((V - R)**2, (clip(V, V_old ± clip) - R)**2) / 2`` per token, as in OpenAI's baselines (``ppo2``) and verl.

    Reports ``critic/vf_clipfrac`` (share of tokens where clipping increases the loss) and ``critic/vpred_mean``.

    Args:
        clip: bound on the change of a value from the old one; None is no clipping.
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
            # within the bounds it is exactly `new_values`
            clipped = (new_values.clamp(values - self.clip, values + self.clip) - returns).square()
            metrics.mean("critic/vf_clipfrac", (clipped > squared).sum(), tokens)
            squared = torch.maximum(squared, clipped)
        metrics.mean("critic/vpred_mean", new_values.detach().sum(), tokens)
        return 0.5 * squared


class ValueHuber(Loss):
    """The Huber loss to the returns: half the squared error, linear beyond `delta`.

    ``e**2 / 2`` where ``|e| <= delta``, else ``delta * (|e| - delta / 2)``, with ``e = V - R`` (Huber 1964).

    Reports ``critic/vpred_mean``.

    Args:
        delta: error from which on the loss is linear.
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

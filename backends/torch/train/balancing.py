"""The load-balancing loss of mixtures of experts, exact over the micro-batches and ranks of a mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowrl.backends.torch.score.rows import Rows, SequenceInputs, take
from flowrl.data.metrics import Metrics

if TYPE_CHECKING:
    from flowrl.backends.torch.score.model import TorchModel


class LoadBalancing:
    """``coef * E * sum_e f_e P_e`` over all attended tokens of the rows of a mini-batch (Fedus et al. 2021,
    arXiv:2101.03961, equations 4 to 6), as transformers' ``load_balancing_loss_func`` computes it.

    ``f_e`` is how many of a token's choices are expert ``e``, and ``P_e`` the router's probability of it, both means
    over tokens and layers. Only ``P_e`` has a gradient, so with ``f_e`` of the whole mini-batch the loss is a sum over
    tokens, and the parts of micro-batches and ranks add up. If a mini-batch takes several, the model first runs over
    them without gradients to count ``f_e``.

    Args:
        coef: its factor in the loss.
        model: a model with `TorchModel.routers`.
    """

    def __init__(self, coef: float, model: TorchModel) -> None:
        self._coef, self._model = coef, model
        self._counts: Tensor | None = None  # choices of each expert in the mini-batch; None are those of the last pass
        self._value = 0.0

    def begin(self, part: Rows, turns: Sequence[Tensor | None], in_one: bool) -> None:
        """Prepare for the micro-batches `turns` of this rank's rows `part`; None is an idle one. A collective."""
        self._counts, self._value = None, 0.0
        if in_one:
            return
        mesh = self._model.mesh
        counts = torch.zeros(self._model.experts, device=mesh.device)
        for run in turns:
            micro: Any = SequenceInputs.idle(mesh.device) if run is None else take(part, run, mesh.device)
            found = self._model.count_routes(micro)
            counts += 0 if run is None else found
        self._counts = mesh.total(counts)

    def loss(self) -> Tensor:
        """The part of the last forward pass of the model in the loss."""
        assert self._model.routes is not None
        probabilities, chosen = self._model.routes
        counts = chosen.detach() if self._counts is None else self._counts
        tokens = counts.sum() / self._model.experts_per_token
        value: Tensor = len(counts) * (counts / tokens * probabilities / tokens).sum()
        self._value += float(value.detach())
        return self._coef * value

    def report(self, metrics: Metrics, name: str) -> None:
        """Report the loss of the mini-batch, without its factor."""
        metrics.mean(name, self._value, float(self._model.mesh.position.reports_shared))

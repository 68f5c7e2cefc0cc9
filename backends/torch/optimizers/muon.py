"""Muon over whole matrices, also if processes share their rows or columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.backends.torch.train.mesh import ProcessMesh
from flowrl.sync.buckets import BUCKET_BYTES

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPS = 1e-7


def orthogonalized(x: Tensor) -> Tensor:
    """Each matrix with singular values near 1 (about 0.7 to 1.2), bfloat16: Jordan's quintic Newton-Schulz iteration.

    ``X <- a X + (b A + c A A) X`` with ``A = X X^T`` (Liu et al. 2025, arXiv:2502.16982, equation 2), from the matrix
    divided by its Frobenius norm, in bfloat16 as in `torch.optim.Muon`.

    Args:
        x: float ``[... rows columns]``.
    """
    a, b, c = _COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    found = x.bfloat16().reshape(-1, *x.shape[-2:])
    found = found.mT if tall else found
    found = found / found.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return (found.mT if tall else found).reshape(x.shape)


class MuonAdamW(torch.optim.AdamW):
    """Muon for the groups of parameters with a ``momentum``, and AdamW for those where it is None.

    Every process orthogonalizes every matrix, whole, and steps its part; `step` is a collective.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        mesh: ProcessMesh,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        foreach: bool | None,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=foreach)
        self._mesh = mesh

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state; AdamW's own method expects its states in every group."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of each parameter with a gradient."""
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if group["momentum"] is None]
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group["momentum"] is not None:
                self._step(group)

    def _step(self, group: dict[str, Any]) -> None:
        """Liu et al. 2025, equations 1 and 4."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        whole = self._mesh.full(self._directions(parameters, group["momentum"]), BUCKET_BYTES)
        lr = group["lr"]
        for parameter, (_, direction) in zip(parameters, whole, strict=True):
            own = self._mesh.part_of(orthogonalized(direction), parameter).to(local(parameter).device)
            parameter.mul_(1 - lr * group["weight_decay"])
            local(parameter).add_(own, alpha=-lr * 0.2 * max(parameter.shape[-2:]) ** 0.5)

    def _directions(self, parameters: list[nn.Parameter], momentum: float) -> Iterator[tuple[str, Tensor]]:
        """Nesterov's momentum of each, as a mean of gradients."""
        for parameter in parameters:
            state, gradient = self.state[parameter], parameter.grad
            assert gradient is not None
            if not state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
            yield "", gradient.lerp(buffer, momentum)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, which shares its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

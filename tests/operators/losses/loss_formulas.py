"""The losses of policies as their papers write them, row by row, in float64; gradients are autograd's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import assume
from torch import Tensor

from flowrl.core.operators.loss import Loss
from flowrl.operators import CISPO, DPPO, DRO, GMPO, GSPO, SAPO, ClipCov, KLCov, PPOClip, Reinforce


class Row(NamedTuple):
    """The tokens of one row that are on the mask: float64 ``[tokens]`` each, `new` with a gradient."""

    new: Tensor
    old: Tensor
    advantage: Tensor
    ref: Tensor


Formula = Callable[[list[Row]], list[Tensor]]
"""The loss of each token, row by row."""


def by_row(formula: Callable[[Row], Tensor]) -> Formula:
    return lambda rows: [formula(row) for row in rows]


def ppo(row: Row) -> Tensor:
    ratio = torch.exp(row.new - row.old)
    return -torch.stack([min(r * a, r.clamp(0.8, 1.3) * a) for r, a in zip(ratio, row.advantage, strict=True)])


def gspo(row: Row) -> Tensor:
    """Equation 5, of a row: its advantage is the same at all tokens."""
    ratio = torch.exp((row.new - row.old).sum() / len(row.new))
    a = row.advantage[0]
    return -torch.minimum(ratio * a, ratio.clamp(0.95, 1.1) * a).expand(len(row.new))


def cispo(row: Row) -> Tensor:
    weight = torch.exp(row.new - row.old).detach().clamp(0.6, 1.28)
    return -weight * row.advantage * row.new


def gmpo(row: Row) -> Tensor:
    """``(prod_t |min(r_t A, clip(r_t) A)|)^(1/n) sgn(A)``."""
    a = row.advantage[0]
    if a == 0:
        return 0.0 * row.new
    ratio = torch.exp(row.new - row.old)
    bounded = torch.minimum(ratio * a, ratio.clamp(math.exp(-0.3), math.exp(0.3)) * a).abs() / a.abs()
    return (-bounded.prod().pow(1.0 / len(row.new)) * a).expand(len(row.new))


def sapo(row: Row) -> Tensor:
    ratio = torch.exp(row.new - row.old)
    tau = torch.where(row.advantage > 0, torch.tensor(1.5).double(), torch.tensor(2.0).double())
    return -(4.0 / tau) / (1.0 + torch.exp(-tau * (ratio - 1.0))) * row.advantage


def dppo(divergence: str, high: float = 0.05) -> Callable[[Row], Tensor]:
    def formula(row: Row) -> Tensor:
        p, q = row.new.detach().exp(), row.old.exp()
        kl = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        far = ((p - q).abs() if divergence == "tv" else kl) > torch.where(row.advantage > 0, high, 0.05)
        leaves = torch.where(row.advantage > 0, p > q, p < q)
        weight = (p / q).clamp(max=1.5)
        return torch.where(far & leaves, 0.0, -weight * row.advantage * row.new)

    return formula


def dro(row: Row) -> Tensor:
    return (0.5 * (row.advantage.mean() - 0.7 * (row.new - row.ref).sum()) ** 2).expand(len(row.new))


def kl_cov(rows: list[Row]) -> list[Tensor]:
    """Over all tokens of the mini-batch: the fifth of them of largest covariance, at least one."""
    if not rows:
        return []
    new = torch.cat([row.new for row in rows]).detach()
    advantage = torch.cat([row.advantage for row in rows])
    covariance = (new - new.mean()) * (advantage - advantage.mean())
    ordered, k = covariance.sort(descending=True).values, max(1, int(0.2 * len(new)))
    assume(len(new) == k or ordered[k - 1] - ordered[k] > 1e-6)  # of equal ones, any may be taken
    least = ordered[k - 1]
    losses = []
    for row, own in zip(rows, covariance.split([len(row.new) for row in rows]), strict=True):
        plain = -row.advantage * torch.exp(row.new - row.old)
        losses.append(torch.where(own >= least, plain + 2.0 * (row.new - row.old).abs(), plain))
    return losses


def clip_cov(rows: list[Row]) -> list[Tensor]:
    """Over all tokens of the mini-batch, where as many are drawn as there are within the bounds."""
    if not rows:
        return []
    new = torch.cat([row.new for row in rows]).detach()
    advantage = torch.cat([row.advantage for row in rows])
    covariance = (new - new.mean()) * (advantage - advantage.mean())
    assume(bool(((covariance - 0.1).abs() > 1e-6).all() and ((covariance - 0.9).abs() > 1e-6).all()))
    drawn = ((covariance > 0.1) & (covariance < 0.9)).split([len(row.new) for row in rows])
    return [
        torch.where(own, 0.0, -row.advantage * torch.exp(row.new - row.old))
        for row, own in zip(rows, drawn, strict=True)
    ]


FORMULAS: dict[str, tuple[Loss, Formula]] = {
    "ppo": (PPOClip(0.2, 0.3), by_row(ppo)),
    "reinforce": (Reinforce(), by_row(lambda row: -row.advantage * row.new)),
    "gspo": (GSPO(0.05, 0.1), by_row(gspo)),
    "cispo": (CISPO(0.4, 0.28), by_row(cispo)),
    "gmpo": (GMPO(0.3), by_row(gmpo)),
    "sapo": (SAPO(1.5, 2.0), by_row(sapo)),
    "dppo_tv": (DPPO("tv", 0.05, 1.5), by_row(dppo("tv"))),
    "dppo_kl": (DPPO("kl", 0.05, 1.5), by_row(dppo("kl"))),
    "dppo_tv_two_bounds": (DPPO("tv", 0.05, 1.5, within_high=0.12), by_row(dppo("tv", 0.12))),
    "dppo_kl_two_bounds": (DPPO("kl", 0.05, 1.5, within_high=0.01), by_row(dppo("kl", 0.01))),
    "dro": (DRO(0.7), by_row(dro)),
    "kl_cov": (KLCov(0.2, 2.0), kl_cov),
    "clip_cov": (ClipCov(1.0, 0.1, 0.9), clip_cov),
}

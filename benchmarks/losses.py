"""Losses, compared with the same formulas in plain torch: forward and backward, the mean over tokens.

*Bare* computes only the formula, and assumes zeros off the mask. *By hand* also selects by the mask, so that a NaN off
the mask stays out, and reports the loss and the mean of ``old - new``, as trainers do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from harness import medians, table
from torch import Tensor

from flowrl.core.operators.loss import Loss
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.operators import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GSPO,
    NLL,
    SAPO,
    ClipCov,
    KLCov,
    PPOClip,
    PPOClipNLL,
    Reinforce,
    ValueClip,
    ValueHuber,
)
from flowrl.operators.losses.objective import TokenObjective

ROWS, WIDTH = 256, 1024

generator = torch.Generator().manual_seed(0)
lengths = torch.randint(WIDTH // 8, WIDTH + 1, (ROWS,), generator=generator)
MASK = torch.arange(WIDTH) < lengths[:, None]
NEW, OLD, REF, VALUES, RETURNS = ((-1.0 + 0.3 * torch.randn(ROWS, WIDTH, generator=generator)) * MASK for _ in range(5))
NEW, OLD, REF = (x.clamp(max=-0.01) * MASK for x in (NEW, OLD, REF))
A = torch.randn(ROWS, 1, generator=generator) * MASK
SCORES = torch.zeros(ROWS, WIDTH)
SCORES[:, 0] = torch.randint(0, 2, (ROWS,), generator=generator).float()
TOKENS = int(MASK.sum())


Columns = SimpleNamespace
Formula = Callable[[Tensor, Columns], Tensor]


def row_mean(x: Tensor) -> Tensor:
    return (x.sum(1) / lengths)[:, None]


def ppo(new: Tensor, c: Columns) -> Tensor:
    ratio = (new - c.old_log_probs).exp()
    return torch.max(-c.advantages * ratio, -c.advantages * ratio.clamp(0.8, 1.2))


def gspo(new: Tensor, c: Columns) -> Tensor:
    ratio = row_mean(new - c.old_log_probs).detach().exp() * (new - new.detach()).exp()
    return torch.max(-c.advantages * ratio, -c.advantages * ratio.clamp(1 - 3e-4, 1 + 4e-4))


def gmpo(new: Tensor, c: Columns) -> Tensor:
    moved = new - c.old_log_probs
    clipped = moved.clamp(-0.4, 0.4)
    counts = torch.where(c.advantages > 0, torch.min(moved, clipped), torch.max(moved, clipped))
    return (-row_mean(c.advantages) * row_mean(counts).exp()).expand(ROWS, WIDTH)


def sapo(new: Tensor, c: Columns) -> Tensor:
    tau = torch.where(c.advantages > 0, 1.0, 1.05)
    return -c.advantages * 4.0 / tau * torch.sigmoid(tau * ((new - c.old_log_probs).exp() - 1.0))


def dppo(new: Tensor, c: Columns) -> Tensor:
    p, old = new.detach().exp(), c.old_log_probs.exp()
    away = torch.where(c.advantages > 0, p > old, p < old) & ((p - old).abs() > 0.2)
    return -(new - c.old_log_probs).detach().exp().clamp(max=20.0) * c.advantages * new * ~away


def dro(new: Tensor, c: Columns) -> Tensor:
    return (0.5 * (row_mean(c.advantages) - (new - c.ref_log_prob).sum(1, keepdim=True)) ** 2).expand(ROWS, WIDTH)


def covariance(new: Tensor, c: Columns) -> Tensor:
    values, advantage = new.detach()[MASK], c.advantages[MASK]
    out = torch.full((ROWS, WIDTH), -torch.inf)
    out[MASK] = (values - values.mean()) * (advantage - advantage.mean())
    return out.flatten()


def chosen(index: Tensor) -> Tensor:
    out = torch.zeros(ROWS * WIDTH, dtype=torch.bool)
    out[index] = True
    return out.view(ROWS, WIDTH)


def kl_cov(new: Tensor, c: Columns) -> Tensor:
    most = chosen(covariance(new, c).topk(max(1, int(2e-4 * TOKENS))).indices)
    return -c.advantages * (new - c.old_log_probs).exp() + (new - c.old_log_probs).abs() * most


def clip_cov(new: Tensor, c: Columns) -> Tensor:
    found = covariance(new, c)
    band = ((found >= 0.1) & (found <= 5.0)).nonzero().flatten()
    sampled = chosen(band[torch.randperm(len(band))[: max(1, int(2e-4 * TOKENS))]])
    return -c.advantages * (new - c.old_log_probs).exp() * ~sampled


def nll_beside(new: Tensor, c: Columns) -> Tensor:
    right = MASK & (c.token_level_scores.sum(1, keepdim=True) > 0)
    return ppo(new, c) - 0.1 * TOKENS / right.sum() * right * new


def value_clip(new: Tensor, c: Columns) -> Tensor:
    clipped = new.clamp(c.values - 0.2, c.values + 0.2)
    return 0.5 * torch.max((new - c.returns).square(), (clipped - c.returns).square())


LOSSES: list[tuple[Loss, Formula]] = [
    (PPOClip(), ppo),
    (Reinforce(), lambda new, c: -c.advantages * new),
    (CISPO(), lambda new, c: -(new - c.old_log_probs).detach().exp().clamp(0.0, 1.28) * c.advantages * new),
    (GSPO(), gspo),
    (GMPO(), gmpo),
    (SAPO(), sapo),
    (DPPO(), dppo),
    (DRO(), dro),
    (KLCov(), kl_cov),
    (ClipCov(low=0.1), clip_cov),
    (NLL(), lambda new, c: -new),
    (PPOClipNLL(), nll_beside),
    (ValueClip(), value_clip),
    (ValueHuber(), lambda new, c: torch.nn.functional.huber_loss(new, c.returns, reduction="none")),
]
BATCH = SimpleNamespace(
    old_log_probs=OLD, advantages=A, ref_log_prob=REF, token_level_scores=SCORES, values=VALUES, returns=RETURNS
)


def bare(formula: Formula) -> None:
    new = NEW.clone().requires_grad_()
    ((formula(new, BATCH) * MASK).sum() / TOKENS).backward()


def by_hand(formula: Formula, reads: list[str], weights: Tensor) -> list[Tensor]:
    output = NEW.clone().requires_grad_()
    on = weights != 0
    new = torch.where(on, output, 0.0)
    columns = SimpleNamespace(**{name: torch.where(on, getattr(BATCH, name), 0.0) for name in reads})
    loss = (weights * torch.where(on, formula(new, columns), 0.0)).sum()
    loss.backward()
    reported = [loss.detach()]
    if "old_log_probs" in reads:
        reported += [(columns.old_log_probs - new.detach()).sum(), on.sum()]
    return reported


def composed(objective: TokenObjective, weights: Tensor) -> Metrics:
    new, metrics = NEW.clone().requires_grad_(), Metrics()
    objective(new, None, BATCH, weights, metrics).backward()
    return metrics


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = []
    for loss, formula in LOSSES:
        objective = TokenObjective(loss, key=Key.of(0))
        weights = objective.weights(MASK)  # once per mini-batch, whatever its micro-batches
        reads = [name for name in loss.signature.ports if name != "response_mask"]
        cases = {
            "bare": partial(bare, formula),
            "by hand": partial(by_hand, formula, reads, weights),
            "loss": partial(composed, objective, weights),
        }
        taken = medians(cases, seconds=3.0)
        times = [f"{taken['loss'] / taken[name]:.2f}" for name in ("bare", "by hand")]
        rows.append([type(loss).__name__, *(f"{1e3 * seconds:.2f}" for seconds in taken.values()), *times])
    heads = ["", "bare ms", "by hand ms", "loss ms", "vs bare", "vs by hand"]
    table(f"{ROWS} rows of up to {WIDTH} tokens, forward and backward", heads, rows)

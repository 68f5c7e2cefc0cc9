"""Losses of policies that learn from advantages: the clipped surrogate, and what takes its place by one edit.

With ``r = exp(log_prob - old_log_prob)``, of a token, and advantage ``A``, each docstring gives the loss of a token (or
row) before it is aggregated; ``sg`` is a number without a gradient. The log-ratio is clamped to ±20 before `exp`, as in
verl; beyond, r is constant and has no gradient. Fractions and means are reported over token counts, so those of
micro-batches and ranks merge.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowrl import columns as c
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.loss import Loss, Unit
from flowrl.core.operators.ports import INJECTED, Signature
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.errors import ParameterError
from flowrl.operators.advantages.per_token import MAX_EXPONENT


def log_ratio_of(log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor, metrics: Metrics) -> Tensor:
    """``log_prob - old_log_prob`` of each token; reports ``actor/approx_kl``, the mean of its negative."""
    log_ratio = log_probs - old_log_probs
    metrics.mean("actor/approx_kl", -log_ratio.detach().sum(), response_mask.sum())
    return log_ratio


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


def _row_mean(x: Tensor, response_mask: Tensor) -> Tensor:
    """The mean over the tokens of each row on the mask, ``[rows]``; 0 for a row of none."""
    return x.sum(-1) / response_mask.sum(-1).clamp(min=1)


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, response_mask: Tensor, metrics: Metrics
) -> Tensor:
    """``max(-A * r, -A * clip(r, 1 - low, 1 + high))`` of each token; reports ``actor/pg_clipfrac``."""
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    metrics.mean("actor/pg_clipfrac", (clipped > plain).sum(), response_mask.sum())
    return torch.maximum(plain, clipped)


class PPOClip(Loss):
    """The clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7), with dual clip.

    ``max(-A * r, -A * clip(r, 1 - clip_low, 1 + clip_high))``; with `dual_clip` c, where ``A < 0``, at most ``-A * c``
    (Ye et al. 2020, arXiv:1912.09729).

    The ratio to the rollout's own log-probs (verl's bypass mode) needs no `OldLogProb`, so it saves a forward pass a
    step, and corrects for the engine as well: unclipped, its gradient is unbiased whatever the engine computes. But r
    starts from trainer / engine and not from 1, so the clip cuts off what engine and trainer differ by before the
    policy has moved, and where top-p or top-k renormalised the engine's log-probs, r starts below 1.

    Reports ``actor/pg_clipfrac`` (share of tokens where clipping made the loss larger), ``actor/pg_clipfrac_lower``
    (share of tokens at the dual clip) and ``actor/approx_kl`` (mean of ``old - new``).

    Args:
        clip_low: how far below 1 the ratio counts.
        clip_high: how far above 1; None is `clip_low`. Apart, they are DAPO's clip-higher (arXiv:2503.14476, §3.1).
        dual_clip: the bound c > 1 on the ratio where the advantage is negative (3 in the paper); None is no bound.
        ratio_to: whose log-probs the ratio is taken to: ``"old"``, the trainer's at the start of the step; or
            ``"rollout"``, the engine's that sampled. `UpdateActor` wants just these, and refuses the others.
    """

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float | None = Field(default=None, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    ratio_to: Literal["old", "rollout"] = "old"

    @property
    def signature(self) -> Signature:
        """The columns that are wired; `old_log_probs` is of the kind that the ratio is taken to."""
        return self._signature if self.ratio_to == "old" else _to_rollout

    @property
    def effects(self) -> frozenset[str]:
        """``{"importance correction"}`` with a ratio to what the engine sampled from."""
        return frozenset({Effect.IMPORTANCE_CORRECTION} if self.ratio_to == "rollout" else ())

    def __call__(
        self,
        log_probs: c.LogProbs,
        old_log_probs: c.OldLogProbs,
        advantages: c.Advantages,
        response_mask: c.ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> Tensor:
        ratio = _exp(log_ratio_of(log_probs, old_log_probs, response_mask, metrics))
        clip_high = self.clip_low if self.clip_high is None else self.clip_high
        per_token = _clipped_surrogate(ratio, advantages, self.clip_low, clip_high, response_mask, metrics)
        if self.dual_clip is not None:
            bound = -advantages * self.dual_clip
            at_bound = (advantages < 0) & (per_token > bound)
            per_token = torch.where(at_bound, bound, per_token)
            metrics.mean("actor/pg_clipfrac_lower", at_bound.sum(), response_mask.sum())
        return per_token


_to_rollout = PPOClip._signature.retyped("old_log_probs", c.RolloutLogProbs)  # made once: calls are laid out by it


class Reinforce(Loss):
    """``-A * log_prob`` (Williams 1992): no ratio, so for one mini-batch a step."""

    def __call__(self, log_probs: c.LogProbs, advantages: c.Advantages) -> Tensor:
        return -advantages * log_probs


class GSPO(Loss):
    """The clipped surrogate with one ratio a response (GSPO: Zheng et al. 2025, arXiv:2507.18071, eqs. 5, 7).

    ``s = exp(mean_t log r_t)`` is the ratio of a row, the geometric mean of those of its tokens, and its loss
    ``max(-A * s, -A * clip(s, 1 - clip_low, 1 + clip_high))``. Each token takes its ratio to be
    ``sg(s) * exp(log_prob - sg(log_prob))`` (GSPO-token, eq. 14), which has the same gradient where A is that of the
    row. The paper aggregates by ``seq-mean-token-mean``.

    Args:
        clip_low, clip_high: how far below and above 1 the ratio counts.
    """

    unit: ClassVar[Unit] = "row"

    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    clip_high: float = Field(default=4e-4, gt=0)

    def __call__(
        self,
        log_probs: c.LogProbs,
        old_log_probs: c.OldLogProbs,
        advantages: c.Advantages,
        response_mask: c.ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> Tensor:
        log_ratio = log_ratio_of(log_probs, old_log_probs, response_mask, metrics)
        of_row = _exp(_row_mean(log_ratio.detach(), response_mask))[:, None]
        ratio = of_row * (log_probs - log_probs.detach()).exp()
        return _clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high, response_mask, metrics)


class CISPO(Loss):
    """Clipped weights in place of clipped gradients (CISPO: MiniMax 2025, arXiv:2506.13585, eqs. 4, 5).

    ``-sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * log_prob``: every token has a gradient, also where r is clipped.

    Args:
        clip_low: how far below 1 a weight may be; 1 (as in the paper) is no lower bound.
        clip_high: how far above 1.
    """

    clip_low: float = Field(default=1.0, gt=0, le=1)
    clip_high: float = Field(default=0.28, gt=0)

    def __call__(
        self,
        log_probs: c.LogProbs,
        old_log_probs: c.OldLogProbs,
        advantages: c.Advantages,
        response_mask: c.ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> Tensor:
        ratio = _exp(log_ratio_of(log_probs, old_log_probs, response_mask, metrics).detach())
        weight = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        metrics.mean("actor/pg_clipfrac", (weight != ratio).sum(), response_mask.sum())
        return -weight * advantages * log_probs


class GMPO(Loss):
    """The geometric mean of the tokens' clipped ratios (GMPO: Zhao et al. 2025, arXiv:2507.20673).

    A row's loss is ``-A * exp(mean_t l_t)``, where ``l_t`` is ``log r_t``, clipped to ±`clip` where that makes the loss
    larger; A is the row's advantage (the mean of its tokens'). Outliers count less than in an arithmetic mean, so the
    clip is wide. Aggregate by ``seq-mean-token-mean``: the mean over rows.

    Args:
        clip: how far from 0 a log-ratio counts (0.4 in the paper).
    """

    unit: ClassVar[Unit] = "row"

    clip: float = Field(default=0.4, gt=0)

    @property
    def effects(self) -> frozenset[str]:
        """``{"one advantage a row"}``: it takes the mean of those of its tokens."""
        return frozenset({Effect.ONE_ADVANTAGE_A_ROW})

    def __call__(
        self,
        log_probs: c.LogProbs,
        old_log_probs: c.OldLogProbs,
        advantages: c.Advantages,
        response_mask: c.ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> Tensor:
        log_ratio = log_ratio_of(log_probs, old_log_probs, response_mask, metrics)
        clipped = log_ratio.clamp(-self.clip, self.clip)
        counts = torch.where(advantages > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
        metrics.mean("actor/pg_clipfrac", (counts != log_ratio).sum(), response_mask.sum())
        return -_row_mean(advantages, response_mask) * _exp(_row_mean(counts, response_mask))


class SAPO(Loss):
    """A soft gate in place of the clip (SAPO: Gao et al. 2025, arXiv:2511.20347).

    ``-A * 4 / tau * sigmoid(tau * (r - 1))``: at r = 1 its gradient is PPO's, and it falls smoothly on both sides. The
    paper aggregates by ``seq-mean-token-mean``.

    Args:
        tau_pos, tau_neg: the steepness where the advantage is positive, and where it is not.
    """

    tau_pos: float = Field(default=1.0, gt=0)
    tau_neg: float = Field(default=1.05, gt=0)

    def __call__(
        self,
        log_probs: c.LogProbs,
        old_log_probs: c.OldLogProbs,
        advantages: c.Advantages,
        response_mask: c.ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> Tensor:
        ratio = _exp(log_ratio_of(log_probs, old_log_probs, response_mask, metrics))
        tau = torch.where(advantages > 0, self.tau_pos, self.tau_neg)
        return -advantages * 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0))


class KLCov(Loss):
    """KL on the tokens that cost most entropy (KL-Cov: Cui et al. 2025, arXiv:2505.22617).

    ``-A * r``, and for the share `top` of the mini-batch's tokens whose ``(log_prob - mean) * (A - mean)`` is largest
    (means over the mini-batch) also ``coef * |log r|``.

    Args:
        top: the share of tokens; at least one.
        coef: the weight of KL there.
    """

    unit: ClassVar[Unit] = "batch"

    top: float = Field(default=2e-4, gt=0, le=1)
    coef: float = Field(default=1.0, gt=0)

    def __call__(
        self,
        log_probs: c.LogProbs,
        old_log_probs: c.OldLogProbs,
        advantages: c.Advantages,
        response_mask: c.ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> Tensor:
        log_ratio = log_ratio_of(log_probs, old_log_probs, response_mask, metrics)
        covariance, tokens = _covariance(log_probs, advantages, response_mask), int(response_mask.sum())
        most = covariance.flatten().topk(min(tokens, max(1, int(self.top * tokens)))).indices
        return -advantages * _exp(log_ratio) + self.coef * log_ratio.abs() * _at(most, response_mask)


class ClipCov(Loss):
    """No gradient from some of the tokens that cost entropy (Clip-Cov: Cui et al. 2025, arXiv:2505.22617).

    ``-A * r``, and 0 for tokens that are drawn, as many as the share `share` of the mini-batch's, from those whose
    ``(log_prob - mean) * (A - mean)`` is from `low` to `high` (means over the mini-batch).

    Reports ``actor/pg_clipfrac``, the share of tokens that were drawn.

    Args:
        share: how many are drawn, of all tokens; at least one, and at most those within the bounds.
        low, high: the bounds of the covariance.

    Raises:
        ParameterError: `low` is above `high`.
    """

    unit: ClassVar[Unit] = "batch"

    share: float = Field(default=2e-4, gt=0, le=1)
    low: float = 1.0
    high: float = 5.0

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ParameterError(
                f"no covariance is from low={self.low:g} to high={self.high:g}; expected low <= high, as in "
                f"ClipCov(low=1.0, high=5.0)"
            )

    def __call__(
        self,
        log_probs: c.LogProbs,
        old_log_probs: c.OldLogProbs,
        advantages: c.Advantages,
        response_mask: c.ResponseMask,
        metrics: Metrics = INJECTED,
        key: Key = INJECTED,
    ) -> Tensor:
        ratio = _exp(log_ratio_of(log_probs, old_log_probs, response_mask, metrics))
        covariance, tokens = _covariance(log_probs, advantages, response_mask), int(response_mask.sum())
        band = ((covariance >= self.low) & (covariance <= self.high)).flatten().nonzero().flatten()
        order = torch.randperm(len(band), generator=key.generator())[: max(1, int(self.share * tokens))]
        drawn = _at(band[order.to(band.device)], response_mask)
        metrics.mean("actor/pg_clipfrac", drawn.sum(), tokens)
        return -advantages * ratio * ~drawn


def _covariance(log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """``(log_prob - mean) * (A - mean)`` of each token, means over all on the mask; -inf off it."""
    said, advantage = log_probs.detach()[response_mask], advantages[response_mask]
    covariance = torch.full_like(advantages, -torch.inf)
    covariance[response_mask] = (said - said.mean()) * (advantage - advantage.mean())
    return covariance


def _at(places: Tensor, response_mask: Tensor) -> Tensor:
    """True at these tokens, counted row by row: bool of the shape of the mask."""
    found = torch.zeros_like(response_mask).flatten()
    found[places] = True
    return found.view_as(response_mask)


class DPPO(Loss):
    """A trust region by divergence and not by ratio (DPPO: Qi et al. 2026, arXiv:2602.04879).

    ``-sg(min(r, max_ratio)) * A * log_prob`` for tokens that are within the region, or that move towards the old
    policy; 0 for others. How far a token is from the old policy is told by the two-way distribution of it and all
    others: total variation ``|p - p_old|``, or KL ``p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))``.

    Args:
        divergence: ``"tv"`` or ``"kl"``.
        within: how far is within the region.
        max_ratio: where weights are truncated.
    """

    divergence: Literal["tv", "kl"] = "tv"
    within: float = Field(default=0.2, gt=0)
    max_ratio: float = Field(default=20.0, gt=1)

    def __call__(
        self,
        log_probs: c.LogProbs,
        old_log_probs: c.OldLogProbs,
        advantages: c.Advantages,
        response_mask: c.ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> Tensor:
        log_ratio = log_ratio_of(log_probs, old_log_probs, response_mask, metrics).detach()
        p, old = log_probs.detach().double().exp(), old_log_probs.double().exp()
        distance = (p - old).abs() if self.divergence == "tv" else _kl_term(old, p) + _kl_term(1.0 - old, 1.0 - p)
        away = torch.where(advantages > 0, p > old, p < old)
        counts = ~(away & (distance > self.within))
        metrics.mean("actor/pg_clipfrac", (~counts & response_mask).sum(), response_mask.sum())
        return -_exp(log_ratio).clamp(max=self.max_ratio) * advantages * log_probs * counts


def _kl_term(p: Tensor, q: Tensor) -> Tensor:
    """``p log(p / q)``, 0 where p is 0."""
    return torch.xlogy(p, p) - torch.xlogy(p, q)


class DRO(Loss):
    """Direct reward optimisation (DRO: Richemond et al. 2024, arXiv:2405.19107), off-policy by construction.

    A row's loss is ``(A - tau * log(pi / pi_ref))**2 / 2``, where A is the row's reward less a value or baseline (the
    mean of its tokens' advantages) and log(pi / pi_ref) the sum over its tokens. It reads `ref_log_prob`. Aggregate by
    ``seq-mean-token-mean``: the mean over rows.

    Args:
        tau: the weight of KL to the reference.
    """

    unit: ClassVar[Unit] = "row"

    tau: float = Field(default=1.0, gt=0)

    @property
    def effects(self) -> frozenset[str]:
        """``{"held to the reference"}``, by its square."""
        return frozenset({Effect.HELD_TO_REFERENCE})

    def __call__(
        self,
        log_probs: c.LogProbs,
        ref_log_prob: c.RefLogProbs,
        advantages: c.Advantages,
        response_mask: c.ResponseMask,
    ) -> Tensor:
        pull = self.tau * (log_probs - ref_log_prob).sum(-1)
        return 0.5 * (_row_mean(advantages, response_mask) - pull).square()

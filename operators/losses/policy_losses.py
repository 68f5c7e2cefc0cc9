"""Policy losses that read advantages: PPO's clipped surrogate and its alternatives.

Each docstring gives the loss of a token (or row) before aggregation, with the ratio ``r = exp(log_prob -
old_log_prob)`` of the token and its advantage ``A``; ``sg`` stops the gradient. The log-ratio is clamped to ±20 before
`exp`, as in verl; beyond, r is constant and has no gradient. Fractions and means are reported with token counts, so
that those of micro-batches and ranks merge.
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
    """``log_prob - old_log_prob`` of each token; reports its negative mean as ``actor/approx_kl``."""
    log_ratio = log_probs - old_log_probs
    metrics.mean("actor/approx_kl", -log_ratio.detach().sum(), response_mask.sum())
    return log_ratio


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


def _row_mean(x: Tensor, response_mask: Tensor) -> Tensor:
    """The mean over each row's tokens on the mask, ``[rows]``; 0 for an empty row."""
    return x.sum(-1) / response_mask.sum(-1).clamp(min=1)


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, response_mask: Tensor, metrics: Metrics
) -> Tensor:
    """``max(-A * r, -A * clip(r, 1 - low, 1 + high))`` of each token; reports ``actor/pg_clipfrac``."""
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    metrics.tokens("actor/pg_clipfrac", clipped > plain, response_mask)
    return torch.maximum(plain, clipped)


class PPOClip(Loss):
    """The clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7), with dual clip.

    ``max(-A * r, -A * clip(r, 1 - clip_low, 1 + clip_high))``; with `dual_clip` c, where ``A < 0``, at most ``-A * c``
    (Ye et al. 2020, arXiv:1912.09729).

    With ``ratio_to="rollout"`` (verl's bypass mode), `OldLogProb` is not needed, which saves a forward pass per step,
    and the ratio also corrects for the engine. It corrects the probability of each token, but not that of the tokens
    before it: without the clip, the gradient is unbiased for any engine if responses have one token, and biased if they
    are longer (by 20.2 % in ``AuditTask(steps=2, mismatch=0.5)``). r starts at trainer / engine instead of 1: the clip
    also clips their mismatch, and r starts below 1 if top-p or top-k renormalized the engine's log-probs.

    Reports ``actor/pg_clipfrac`` (share of tokens where clipping increases the loss), ``actor/pg_clipfrac_lower``
    (share of tokens at the dual clip) and ``actor/approx_kl`` (mean of ``old - new``, in nats).

    Args:
        clip_low: the lower bound of the ratio is ``1 - clip_low``.
        clip_high: the upper bound is ``1 + clip_high``; None is `clip_low`. Different bounds are DAPO's clip-higher
            (arXiv:2503.14476, §3.1).
        dual_clip: bound c > 1 on the ratio for negative advantages (3 in the paper); None is no bound.
        ratio_to: the denominator of the ratio: ``"old"``, the trainer's log-probs at the start of the step, or
            ``"rollout"``, the engine's. `UpdateActor` accepts only these as its `old_log_probs`.
    """

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float | None = Field(default=None, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    ratio_to: Literal["old", "rollout"] = "old"

    @property
    def signature(self) -> Signature:
        """The columns that are wired; `ratio_to` decides the kind of `old_log_probs`."""
        return self._signature if self.ratio_to == "old" else _to_rollout

    @property
    def effects(self) -> frozenset[str]:
        """``{"importance correction"}`` with ``ratio_to="rollout"``."""
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
            metrics.tokens("actor/pg_clipfrac_lower", at_bound, response_mask)
        return per_token


_to_rollout = PPOClip._signature.retyped("old_log_probs", c.RolloutLogProbs)  # one object: call layouts depend on it


class Reinforce(Loss):
    """``-A * log_prob`` (Williams 1992). It has no ratio, so use one mini-batch per step."""

    def __call__(self, log_probs: c.LogProbs, advantages: c.Advantages) -> Tensor:
        return -advantages * log_probs


class GSPO(Loss):
    """The clipped surrogate with one ratio per response (GSPO: Zheng et al. 2025, arXiv:2507.18071, eqs. 5, 7).

    The ratio of a row is ``s = exp(mean_t log r_t)``, the geometric mean over its tokens, and its loss
    ``max(-A * s, -A * clip(s, 1 - clip_low, 1 + clip_high))``. It is computed with the token ratio
    ``sg(s) * exp(log_prob - sg(log_prob))`` (GSPO-token, eq. 14), which has the same gradient if all tokens of a row
    have the same A. The paper aggregates by ``seq-mean-token-mean``. The unit of an episode is the episode: the mean is
    over the sampled tokens of all its segments.

    Args:
        clip_low, clip_high: the bounds of the ratio are ``1 - clip_low`` and ``1 + clip_high``.
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
    """Clipped importance weights in place of a clipped surrogate (CISPO: MiniMax 2025, arXiv:2506.13585, eqs. 4, 5).

    ``-sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * log_prob``: tokens with a clipped r keep a gradient.

    Args:
        clip_low: the lower bound of the weight is ``1 - clip_low``; 1 (as in the paper) is no lower bound.
        clip_high: the upper bound is ``1 + clip_high``.
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
        metrics.tokens("actor/pg_clipfrac", weight != ratio, response_mask)
        return -weight * advantages * log_probs


class GMPO(Loss):
    """The geometric mean of the tokens' clipped ratios (GMPO: Zhao et al. 2025, arXiv:2507.20673).

    A row's loss is ``-A * exp(mean_t l_t)``, where ``l_t`` is ``log r_t``, clipped to ±`clip` if that increases the
    loss, and A the mean of its tokens' advantages. A geometric mean is less sensitive to outliers than an arithmetic
    one, so the clip is wide. Aggregate by ``seq-mean-token-mean``: the mean over rows.

    Args:
        clip: bound on the absolute log-ratio (0.4 in the paper).
    """

    unit: ClassVar[Unit] = "row"

    clip: float = Field(default=0.4, gt=0)

    @property
    def effects(self) -> frozenset[str]:
        """``{"advantage per row"}``, the mean over its tokens."""
        return frozenset({Effect.ADVANTAGE_PER_ROW})

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
        metrics.tokens("actor/pg_clipfrac", counts != log_ratio, response_mask)
        return -_row_mean(advantages, response_mask) * _exp(_row_mean(counts, response_mask))


class SAPO(Loss):
    """A soft gate in place of the clip (SAPO: Gao et al. 2025, arXiv:2511.20347).

    ``-A * 4 / tau * sigmoid(tau * (r - 1))``: at r = 1 its gradient is that of PPO, and it decays smoothly on both
    sides. The paper aggregates by ``seq-mean-token-mean``.

    Args:
        tau_pos, tau_neg: steepness for positive advantages, and for all others.
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
    """A KL penalty on the tokens that reduce entropy most (KL-Cov: Cui et al. 2025, arXiv:2505.22617).

    ``-A * r``, plus ``coef * |log r|`` for the share `top` of the mini-batch's tokens with the largest covariance
    ``(log_prob - mean) * (A - mean)`` (means over the mini-batch).

    Args:
        top: share of tokens with the penalty; at least one token.
        coef: coefficient of the penalty.
    """

    unit: ClassVar[Unit] = "batch"

    top: float = Field(default=2e-4, gt=0, le=1)
    coef: float = Field(default=1.0, ge=0)

    @property
    def effects(self) -> frozenset[str]:
        """``{"nonlinear in advantages"}``, by the penalty and the choice of its tokens."""
        return frozenset({Effect.NONLINEAR})

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
    """Drop the gradient of some tokens that reduce entropy (Clip-Cov: Cui et al. 2025, arXiv:2505.22617).

    ``-A * r``, and 0 for a random sample of the tokens whose covariance ``(log_prob - mean) * (A - mean)`` is in
    [`low`, `high`] (means over the mini-batch). The sample has `share` of all tokens of the mini-batch.

    This is the paper's loss, and not that of its authors' code, which verl has as ``clip_cov``: there, the other tokens
    have the clipped surrogate of `PPOClip`, and clipped ones are not sampled.

    Reports ``actor/pg_clipfrac``, the share of tokens in the sample.

    Args:
        share: size of the sample as a share of all tokens; at least one token, and at most those in range.
        low, high: range of the covariance.

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
                f"ClipCov needs low <= high, given low={self.low:g}, high={self.high:g}. Pass a range, such as "
                f"ClipCov(low=1.0, high=5.0).",
                code="objective.invalid-settings",
                low=self.low,
                high=self.high,
            )

    @property
    def effects(self) -> frozenset[str]:
        """``{"nonlinear in advantages"}``, by the choice of the tokens."""
        return frozenset({Effect.NONLINEAR})

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
        sample = _at(band[order.to(band.device)], response_mask)
        metrics.tokens("actor/pg_clipfrac", sample, response_mask)
        return -advantages * ratio * ~sample


def _covariance(log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """``(log_prob - mean) * (A - mean)`` of each token, means over the mask; -inf off it."""
    log_prob, advantage = log_probs.detach()[response_mask], advantages[response_mask]
    covariance = torch.full_like(advantages, -torch.inf)
    covariance[response_mask] = (log_prob - log_prob.mean()) * (advantage - advantage.mean())
    return covariance


def _at(indices: Tensor, response_mask: Tensor) -> Tensor:
    """True at these indices of the flattened mask: bool, shape of the mask."""
    mask = torch.zeros_like(response_mask).flatten()
    mask[indices] = True
    return mask.view_as(response_mask)


class DPPO(Loss):
    """A trust region by divergence instead of ratio (DPPO: Qi et al. 2026, arXiv:2602.04879).

    ``-sg(min(r, max_ratio)) * A * log_prob`` for tokens within the region, or whose update moves towards the old
    policy; 0 for others. The divergence is that of the binary distribution (this token, any other): total variation
    ``|p - p_old|``, or KL ``p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))``.

    Args:
        divergence: ``"tv"`` or ``"kl"``.
        within: radius of the region.
        max_ratio: upper bound of the weights.
        within_high: radius where ``A > 0``, if it differs; verl's ``clip_ratio_high``, and `within` its
            ``clip_ratio_low``.
    """

    divergence: Literal["tv", "kl"] = "tv"
    within: float = Field(default=0.2, gt=0)
    max_ratio: float = Field(default=20.0, gt=1)
    within_high: float | None = Field(default=None, gt=0)

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
        high = self.within if self.within_high is None else self.within_high
        counts = ~(away & torch.where(advantages > 0, distance > high, distance > self.within))
        metrics.tokens("actor/pg_clipfrac", ~counts & response_mask, response_mask)
        return -_exp(log_ratio).clamp(max=self.max_ratio) * advantages * log_probs * counts


def _kl_term(p: Tensor, q: Tensor) -> Tensor:
    """``p log(p / q)``, 0 where p is 0."""
    return torch.xlogy(p, p) - torch.xlogy(p, q)


class DRO(Loss):
    """Direct reward optimization (DRO: Richemond et al. 2024, arXiv:2405.19107), off-policy by design.

    A row's loss is ``(A - tau * log(pi / pi_ref))**2 / 2``, where A is the row's reward minus a value or baseline (the
    mean of its tokens' advantages) and log(pi / pi_ref) the sum over its tokens. It reads `ref_log_prob`. Aggregate by
    ``seq-mean-token-mean``: the mean over rows.

    verl's loss ``dro`` is another method: ``-A * log_prob + beta / 2 * (log r)**2`` of each token, with the old policy
    in place of the reference.

    Args:
        tau: coefficient of KL to the reference.
    """

    unit: ClassVar[Unit] = "row"

    tau: float = Field(default=1.0, gt=0)

    @property
    def effects(self) -> frozenset[str]:
        """``{"reference regularization", "nonlinear in advantages"}``, by the squared term."""
        return frozenset({Effect.REFERENCE_REGULARIZATION, Effect.NONLINEAR})

    def __call__(
        self,
        log_probs: c.LogProbs,
        ref_log_prob: c.RefLogProbs,
        advantages: c.Advantages,
        response_mask: c.ResponseMask,
    ) -> Tensor:
        pull = self.tau * (log_probs - ref_log_prob).sum(-1)
        return 0.5 * (_row_mean(advantages, response_mask) - pull).square()

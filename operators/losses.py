"""Losses as records: the clipped policy loss of PPO and GRPO, the clipped value loss, and how tokens are aggregated.

A loss is per token; aggregation is a matrix of weights over the tokens of a *mini-batch*, whose loss is
``(weights * per_token_loss).sum()``. The weights alone know the counts, so micro-batches and ranks each sum their own
rows, and neither their number nor padding changes a gradient.

Metrics merge in the same way. A loss is reported over the share of the mini-batch that the rows at hand are (all shares
of a mini-batch sum to 1), so what is logged is the loss of the mini-batch, or its mean over mini-batches. Fractions and
means per token are reported over token counts.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from flowrl.data.metrics import Metrics
from flowrl.errors import DataError, ParameterError
from flowrl.operators.per_token import MAX_EXPONENT, Estimator, kl_penalty, select
from flowrl.spec import Spec

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def token_weights(response_mask: Tensor, aggregation: Aggregation, norm: float | None = None) -> Tensor:
    """The weight of every token of a mini-batch in its loss.

    With N tokens on the mask, S rows that have any, and n of them in this row, a token weighs

    - ``token-mean``: 1 / N (DAPO: Yu et al. 2025, arXiv:2503.14476, eq. 8);
    - ``seq-mean-token-sum``: 1 / S;
    - ``seq-mean-token-mean``: 1 / (S * n) (GRPO: Shao et al. 2024, arXiv:2402.03300, eq. 3);
    - ``seq-mean-token-sum-norm``: 1 / (S * norm) (Dr. GRPO: Liu et al. 2025, arXiv:2503.20783, §3.2), where `norm` is a
      constant such as the longest response allowed, never a padded width.

    Args:
        response_mask: bool ``[rows response]``, all rows of the mini-batch.
        aggregation: see above.
        norm: the constant of ``seq-mean-token-sum-norm``.

    Returns:
        float32 ``[rows response]``, 0 off the mask; all 0 where nothing is on the mask.

    Raises:
        ParameterError: `norm` is missing, or given for another aggregation.
    """
    _check_norm(aggregation, norm)
    lengths = response_mask.sum(-1, keepdim=True, dtype=torch.float32)
    sequences = (lengths > 0).sum().float()
    if aggregation == "token-mean":
        count = lengths.sum()
    elif aggregation == "seq-mean-token-mean":
        count = sequences * lengths
    else:
        count = sequences * (1.0 if norm is None else norm)
    return select((1.0 / count).expand(response_mask.shape), response_mask)


def _check_norm(aggregation: Aggregation, norm: float | None) -> None:
    if (aggregation == "seq-mean-token-sum-norm") != (norm is not None) or (norm is not None and norm <= 0):
        raise ParameterError(
            f"aggregation={aggregation!r} was given norm={norm!r}; norm is the positive constant that "
            f"seq-mean-token-sum-norm divides by, and belongs to it alone: write "
            f"aggregation='seq-mean-token-sum-norm', norm=<the longest response allowed, in tokens>."
        )


class _Aggregated:
    """What the losses below share: weights from `aggregation` and `norm`, and how a loss is reported."""

    aggregation: Aggregation
    norm: float | None

    def __post_init__(self) -> None:
        _check_norm(self.aggregation, self.norm)

    def weights(self, response_mask: Tensor) -> Tensor:
        """`token_weights` of a mini-batch under this loss's aggregation: float32 ``[rows response]``."""
        return token_weights(response_mask, self.aggregation, self.norm)

    def _share(self, weights: Tensor) -> Tensor:
        """Which share of the mini-batch these rows are, of its tokens or of its sequences."""
        if self.aggregation in ("token-mean", "seq-mean-token-mean"):
            return weights.sum()  # sums to 1 over the mini-batch
        per_row = weights.sum(-1) / (weights != 0).sum(-1).clamp(min=1)  # 1 / (S * norm) in every row that counts
        return per_row.sum() * (1.0 if self.norm is None else self.norm)


class PolicyColumns(Protocol):
    """What `PPOClip` reads of a batch: float ``[rows response]`` each; its ratio is taken to `old_log_probs`."""

    @property
    def old_log_probs(self) -> Tensor: ...
    @property
    def advantages(self) -> Tensor: ...
    @property
    def ref_log_prob(self) -> Tensor | None: ...


class ValueColumns(Protocol):
    """What `ValueClip` reads of a batch: float ``[rows response]`` each; `values` are those before the update."""

    @property
    def values(self) -> Tensor: ...
    @property
    def returns(self) -> Tensor: ...


class KLLoss(Spec):
    """KL to the reference as a term of the loss: ``coef * KL`` per token, aggregated as the loss is.

    The estimator sees the policy's own samples, so its gradient differs from the gradient of what it estimates (Tang &
    Munos 2025, arXiv:2506.09477). On-policy, in expectation: k2 follows KL(policy || reference); k3, GRPO's choice,
    follows KL(reference || policy); k1 follows nothing, its gradient is pure noise.

    Args:
        estimator: see `flowrl.operators.per_token`.
        coef: the weight of KL, beta.
    """

    estimator: Estimator = "k3"
    coef: float = Field(default=0.001, gt=0)


class PPOClip(_Aggregated, Spec):
    """The clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7), with dual clip, entropy bonus and KL.

    Per token, with ``r = exp(log_prob - old_log_prob)``: ``max(-A * r, -A * clip(r, 1 - clip_low, 1 + clip_high))``;
    with `dual_clip` c, where ``A < 0``, at most ``-A * c`` (Ye et al. 2020, arXiv:1912.09729); less
    ``entropy * H``; plus ``kl.coef * KL``. The log-ratio is clamped to ±20 before `exp`, as in verl; beyond, r is
    constant and has no gradient.

    The ratio to the rollout's own log-probs (verl's bypass mode) needs no `OldLogProb`, so it saves a forward pass a
    step, and corrects for the engine as well: unclipped, its gradient is unbiased whatever the engine computes. But r
    starts from trainer / engine and not from 1, so the clip cuts off what engine and trainer differ by before the
    policy has moved, and where top-p or top-k renormalised the engine's log-probs, r starts below 1.

    Args:
        clip_low: how far below 1 the ratio counts.
        clip_high: how far above 1; None is `clip_low`. Apart, they are DAPO's clip-higher (arXiv:2503.14476, §3.1).
        dual_clip: the bound c > 1 on the ratio where the advantage is negative (3 in the paper); None is no bound.
        aggregation: see `token_weights`.
        norm: see `token_weights`.
        kl: a KL term, or None.
        entropy: the weight of the entropy bonus.
        ratio_to: whose log-probs the ratio is taken to: ``"old"``, the trainer's at the start of the step; or
            ``"rollout"``, the engine's that sampled. `UpdateActor` wants just these, and refuses the others.
    """

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float | None = Field(default=None, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    aggregation: Aggregation = "token-mean"
    norm: float | None = None
    kl: KLLoss | None = None
    entropy: float = Field(default=0.0, ge=0)
    ratio_to: Literal["old", "rollout"] = "old"

    @property
    def wants_entropy(self) -> bool:
        """Whether the loss needs entropy with its gradient; entropy that is passed without need is still reported."""
        return self.entropy > 0

    def __call__(
        self, output: Tensor, entropy: Tensor | None, batch: PolicyColumns, weights: Tensor, metrics: Metrics
    ) -> Tensor:
        """The loss of some rows of a mini-batch: a float32 scalar.

        Reports ``actor/pg_loss``, ``actor/pg_clipfrac`` (share of tokens where clipping made the loss larger),
        ``actor/pg_clipfrac_lower`` (share of tokens at the dual clip), ``actor/approx_kl`` (mean of ``old - new``), and
        where they are there ``actor/entropy`` (mean per token) and ``actor/kl_loss`` (before its coefficient).

        Args:
            output: float ``[rows response]``, log-probs under the weights as they are.
            entropy: float ``[rows response]``, or None.
            batch: the columns of these rows.
            weights: float32 ``[rows response]``, from `weights`; a token of weight 0 is not looked at.
            metrics: the collector.

        Raises:
            DataError: entropy or `ref_log_prob` is wanted but not there, or shapes differ.
        """
        on = weights != 0
        new, old, advantage = select(output, on), select(batch.old_log_probs, on), select(batch.advantages, on)
        log_ratio = new - old
        ratio = log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
        clip_high = self.clip_low if self.clip_high is None else self.clip_high
        plain, clipped = -advantage * ratio, -advantage * ratio.clamp(1.0 - self.clip_low, 1.0 + clip_high)
        per_token = torch.maximum(plain, clipped)
        at_clip, tokens = clipped > plain, on.sum()
        if self.dual_clip is not None:
            bound = -advantage * self.dual_clip
            at_bound = (advantage < 0) & (per_token > bound)
            per_token = torch.where(at_bound, bound, per_token)
            metrics.mean("actor/pg_clipfrac_lower", at_bound.sum(), tokens)
        loss, share = (weights * per_token).sum(), self._share(weights)
        metrics.mean("actor/pg_loss", loss.detach(), share)
        metrics.mean("actor/pg_clipfrac", at_clip.sum(), tokens)
        metrics.mean("actor/approx_kl", -log_ratio.detach().sum(), tokens)
        if entropy is not None:
            metrics.mean("actor/entropy", select(entropy.detach(), on).sum(), tokens)
        if self.entropy > 0:
            loss = loss - self.entropy * (weights * select(_wanted(entropy, "entropy", "entropy > 0"), on)).sum()
        if self.kl is not None:
            ref = select(_wanted(batch.ref_log_prob, "ref_log_prob", "a KL term"), on)
            kl = (weights * kl_penalty(new, ref, self.kl.estimator)).sum()
            metrics.mean("actor/kl_loss", kl.detach(), share)
            loss = loss + self.kl.coef * kl
        return loss


def _wanted(x: Tensor | None, name: str, reason: str) -> Tensor:
    if x is None:
        raise DataError(f"PPOClip has {reason} and so needs {name}, but got None; pass {name}, or remove the term.")
    return x


class ValueClip(_Aggregated, Spec):
    """The clipped value loss of PPO: half the squared error to the returns, the larger of plain and clipped.

    Per token: ``max((V - R)**2, (clip(V, V_old ± clip) - R)**2) / 2``, as in OpenAI's baselines (``ppo2``) and verl.

    Args:
        clip: how far a value may move from the old one before its gradient ends; None is no clipping.
        aggregation: see `token_weights`.
        norm: see `token_weights`.
    """

    clip: float | None = Field(default=0.2, gt=0)
    aggregation: Aggregation = "token-mean"
    norm: float | None = None

    @property
    def wants_entropy(self) -> bool:
        """False: a critic has no entropy."""
        return False

    def __call__(
        self, output: Tensor, entropy: Tensor | None, batch: ValueColumns, weights: Tensor, metrics: Metrics
    ) -> Tensor:
        """The loss of some rows of a mini-batch: a float32 scalar.

        Reports ``critic/vf_loss``, ``critic/vf_clipfrac`` (tokens where clipping made the loss larger) and
        ``critic/vpred_mean``.

        Args:
            output: float ``[rows response]``, values under the weights as they are.
            entropy: not used.
            batch: the columns of these rows.
            weights: float32 ``[rows response]``, from `weights`; a token of weight 0 is not looked at.
            metrics: the collector.

        Raises:
            DataError: shapes differ.
        """
        on = weights != 0
        new, returns = select(output, on), select(batch.returns, on)
        squared, tokens = (new - returns).square(), on.sum()
        if self.clip is not None:
            old = select(batch.values, on)
            clipped = (new.clamp(old - self.clip, old + self.clip) - returns).square()  # within, it is `new` exactly
            metrics.mean("critic/vf_clipfrac", (clipped > squared).sum(), tokens)
            squared = torch.maximum(squared, clipped)
        loss = 0.5 * (weights * squared).sum()
        metrics.mean("critic/vf_loss", loss.detach(), self._share(weights))
        metrics.mean("critic/vpred_mean", new.detach().sum(), tokens)
        return loss

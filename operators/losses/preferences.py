"""Losses that learn from examples: demonstrations, right responses, preference pairs and labeled responses."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from flowrl import columns as c
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.loss import Loss, Unit
from flowrl.core.operators.ports import INJECTED, Signature
from flowrl.data.metrics import Metrics
from flowrl.data.proto.column_math import rows_of_groups
from flowrl.errors import DataError
from flowrl.operators.losses.policy_losses import PPOClip


class NLL(Loss):
    """The negative log-likelihood of the tokens: for supervised fine-tuning and best-of-n."""

    def __call__(self, log_probs: c.LogProbs) -> Tensor:
        return -log_probs


class PPOClipNLL(Loss):
    """The clipped surrogate plus the negative log-likelihood of right responses (VAPO: Yue et al. 2025,
    arXiv:2504.05118, §4.3).

    ``l_t - coef * [right] * (N / N_right) * log_prob``, where ``l_t`` is the loss of `PPOClip`, and N_right of the
    mini-batch's N tokens belong to right responses. With ``token-mean`` the second term is ``coef`` times the mean over
    these tokens; it is 0 if there are none.

    Reports the metrics of `clip`, and ``actor/nll_loss``: that mean, before its coefficient.

    Args:
        clip: the clipped surrogate.
        coef: coefficient of the second term.
        above: a response is right if the sum of its scores is above this value.
    """

    unit: ClassVar[Unit] = "batch"

    clip: PPOClip = PPOClip()
    coef: float = Field(default=0.1, gt=0)
    above: float = 0.0

    @property
    def signature(self) -> Signature:
        """The columns that are wired; `clip.ratio_to` decides the kind of `old_log_probs`."""
        return self._signature if self.clip.ratio_to == "old" else _nll_to_rollout

    @property
    def effects(self) -> frozenset[str]:
        """The effects of `clip`, and ``"nonlinear in advantages"``, since the second term does not depend on them."""
        return self.clip.effects | {Effect.NONLINEAR}

    def __call__(
        self,
        log_probs: c.LogProbs,
        old_log_probs: c.OldLogProbs,
        advantages: c.Advantages,
        response_mask: c.ResponseMask,
        token_level_scores: c.TokenLevelScores,
        metrics: Metrics = INJECTED,
    ) -> Tensor:
        surrogate = self.clip(log_probs, old_log_probs, advantages, response_mask, metrics)
        right = response_mask & (token_level_scores.sum(-1, keepdim=True) > self.above)
        metrics.mean("actor/nll_loss", -(log_probs.detach() * right).sum(), right.sum())
        share = right.sum().clamp(min=1) / response_mask.sum().clamp(min=1)
        return surrogate - self.coef / share * right * log_probs


_nll_to_rollout = PPOClipNLL._signature.retyped("old_log_probs", c.RolloutLogProbs)


class DPO(Loss):
    """Direct preference optimization of the best over the worst response of each group (DPO: Rafailov et al. 2023,
    arXiv:2305.18290, eq. 7), online or offline.

    ``-log sigmoid(beta * (d_best - d_worst))`` with ``d = log pi - log pi_ref``, summed over the tokens of a row. Best
    and worst are by the sum of a row's scores; the first of equal rows counts. Each row of a group has the group's
    loss, so ``seq-mean-token-mean`` is the mean over rows. A group of equal scores has no pair and loss 0.

    Reports ``actor/dpo_accuracy`` (share of pairs where d is larger for the best) and ``actor/dpo_margin``.

    Args:
        beta: coefficient of KL to the reference.
        label_smoothing: probability that a preference is wrong (conservative DPO).
    """

    unit: ClassVar[Unit] = "group"

    beta: float = Field(default=0.1, gt=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)

    @property
    def effects(self) -> frozenset[str]:
        """``{"reference regularization"}``, by `beta`."""
        return frozenset({Effect.REFERENCE_REGULARIZATION})

    def __call__(
        self,
        log_probs: c.LogProbs,
        ref_log_prob: c.RefLogProbs,
        token_level_scores: c.TokenLevelScores,
        uid: c.Uid,
        metrics: Metrics = INJECTED,
    ) -> Tensor:
        best, worst, group = pairs_of(token_level_scores.sum(-1), uid)
        moved = (log_probs - ref_log_prob).sum(-1)
        margin = self.beta * (moved[best] - moved[worst])
        sure, wrong = logsigmoid(margin), logsigmoid(-margin)
        loss = -(1.0 - self.label_smoothing) * sure - self.label_smoothing * wrong
        pairs = best != worst
        report_margins("actor/dpo_", margin, pairs, metrics)
        return (loss * pairs)[group]


class IPO(Loss):
    """Identity preference optimization of the best over the worst response of each group (IPO: Azar et al. 2023,
    arXiv:2310.12036, eq. 17), online or offline.

    ``(d_best - d_worst - 1 / (2 * tau))**2`` with ``d = log pi - log pi_ref``, summed over the tokens of a row. Groups
    as in `DPO`. Reports ``actor/ipo_accuracy`` and ``actor/ipo_margin``, of ``d_best - d_worst``.

    Args:
        tau: coefficient of KL to the reference; the margin that the loss asks for is ``1 / (2 * tau)``.
        per_token: average d over the tokens of its row, as TRL's ``loss_type="ipo"`` does, instead of summing it.
    """

    unit: ClassVar[Unit] = "group"

    tau: float = Field(default=0.1, gt=0)
    per_token: bool = False

    @property
    def effects(self) -> frozenset[str]:
        """``{"reference regularization"}``, by `tau`."""
        return frozenset({Effect.REFERENCE_REGULARIZATION})

    def __call__(
        self,
        log_probs: c.LogProbs,
        ref_log_prob: c.RefLogProbs,
        token_level_scores: c.TokenLevelScores,
        uid: c.Uid,
        response_mask: c.ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> Tensor:
        best, worst, group = pairs_of(token_level_scores.sum(-1), uid)
        moved = (log_probs - ref_log_prob).sum(-1)
        if self.per_token:
            moved = moved / _lengths(response_mask)
        margin, pairs = moved[best] - moved[worst], best != worst
        report_margins("actor/ipo_", margin, pairs, metrics)
        return ((margin - 1.0 / (2.0 * self.tau)).square() * pairs)[group]


class SimPO(Loss):
    """Simple preference optimization, without a reference (SimPO: Meng et al. 2024, arXiv:2405.14734, eq. 6).

    ``-log sigmoid(r_best - r_worst - gamma)`` with ``r = beta * log pi / length``, the mean over the tokens of a row.
    Groups as in `DPO`. Reports ``actor/simpo_accuracy`` and ``actor/simpo_margin``, of ``r_best - r_worst``.

    Args:
        beta: scale of the mean log-prob.
        gamma: the margin by which the best response should lead. The defaults of both are the paper's for Llama 3 Base;
            TRL's are ``beta=0.1`` and ``simpo_gamma=0.5``.
    """

    unit: ClassVar[Unit] = "group"

    beta: float = Field(default=2.0, gt=0)
    gamma: float = Field(default=1.0, ge=0)

    def __call__(
        self,
        log_probs: c.LogProbs,
        token_level_scores: c.TokenLevelScores,
        uid: c.Uid,
        response_mask: c.ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> Tensor:
        best, worst, group = pairs_of(token_level_scores.sum(-1), uid)
        reward = self.beta * log_probs.sum(-1) / _lengths(response_mask)
        margin, pairs = reward[best] - reward[worst], best != worst
        report_margins("actor/simpo_", margin, pairs, metrics)
        return (-logsigmoid(margin - self.gamma) * pairs)[group]


class ORPO(Loss):
    """Odds-ratio preference optimization, without a reference (ORPO: Hong et al. 2024, arXiv:2403.07691, eqs. 6, 7).

    ``-log p_best - coef * log sigmoid(log(odds(p_best) / odds(p_worst)))`` with ``odds(p) = p / (1 - p)``, where
    ``log p`` is the mean log-prob of the tokens of a row (eq. 1). Groups as in `DPO`. Reports ``actor/orpo_accuracy``
    and ``actor/orpo_margin``, of the log odds ratio, and ``actor/nll_loss``, the mean of ``-log p_best``.

    Args:
        coef: coefficient of the odds ratio, the paper's lambda.
    """

    unit: ClassVar[Unit] = "group"

    coef: float = Field(default=0.1, gt=0)

    def __call__(
        self,
        log_probs: c.LogProbs,
        token_level_scores: c.TokenLevelScores,
        uid: c.Uid,
        response_mask: c.ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> Tensor:
        best, worst, group = pairs_of(token_level_scores.sum(-1), uid)
        log_p = log_probs.sum(-1) / _lengths(response_mask)
        log_odds = log_p - _log1mexp(log_p)
        margin, pairs = log_odds[best] - log_odds[worst], best != worst
        report_margins("actor/orpo_", margin, pairs, metrics)
        metrics.mean("actor/nll_loss", (-log_p[best].detach() * pairs).sum(), pairs.sum())
        return ((-log_p[best] - self.coef * logsigmoid(margin)) * pairs)[group]


class BradleyTerry(Loss):
    """The negative log-likelihood of preferences under a reward model (InstructGPT: Ouyang et al. 2022,
    arXiv:2203.02155, eq. 1).

    ``-log sigmoid(r_chosen - r_rejected - margin)``, with the margin of the pair if the data has one (Llama 2: Touvron
    et al. 2023, arXiv:2307.09288, eq. 2), else 0. Groups as in `DPO`. Reports ``reward_model/accuracy`` (share of pairs
    whose chosen response scores higher) and ``reward_model/margin``, of ``r_chosen - r_rejected``.
    """

    unit: ClassVar[Unit] = "group"

    def __call__(
        self,
        new_scores: c.NewScores,
        token_level_scores: c.TokenLevelScores,
        margin: c.Margin,
        uid: c.Uid,
        metrics: Metrics = INJECTED,
    ) -> Tensor:
        best, worst, group = pairs_of(token_level_scores.sum(-1), uid)
        rewards = new_scores.sum(-1)
        lead, pairs = rewards[best] - rewards[worst], best != worst
        report_margins("reward_model/", lead, pairs, metrics)
        return (-logsigmoid(lead - margin[best]) * pairs)[group]


class KTO(Loss):
    """Kahneman-Tversky optimization on responses with a label each (KTO: Ethayarajh et al. 2024, arXiv:2402.01306,
    eqs. 7, 8).

    ``w * (1 - sigmoid(beta * (d - z)))`` for a desirable response, whose scores sum to more than 0, and
    ``w * (1 - sigmoid(beta * (z - d)))`` for another, with ``d = log pi - log pi_ref``, summed over the tokens of a
    row. The baseline z is an estimate of KL to the reference; see `KTOBaseline`.

    Reports ``actor/kto_desirable`` and ``actor/kto_undesirable``, the means of ``beta * d`` over the rows of each
    label that there is.

    Args:
        beta: how fast the value saturates.
        desirable, undesirable: the weights w of the two labels. The paper advises that, with n rows of each,
            ``desirable * n_desirable / (undesirable * n_undesirable)`` be between 1 and 3/2.
    """

    unit: ClassVar[Unit] = "row"

    beta: float = Field(default=0.1, gt=0)
    desirable: float = Field(default=1.0, ge=0)
    undesirable: float = Field(default=1.0, ge=0)

    @property
    def effects(self) -> frozenset[str]:
        """``{"reference regularization"}``, by `beta`."""
        return frozenset({Effect.REFERENCE_REGULARIZATION})

    def __call__(
        self,
        log_probs: c.LogProbs,
        ref_log_prob: c.RefLogProbs,
        token_level_scores: c.TokenLevelScores,
        kl_baseline: c.KLBaseline,
        metrics: Metrics = INJECTED,
    ) -> Tensor:
        good = token_level_scores.sum(-1) > 0
        moved = (log_probs - ref_log_prob).sum(-1)
        gain = torch.where(good, moved - kl_baseline, kl_baseline - moved)
        for name, rows in (("desirable", good), ("undesirable", ~good)):
            if rows.any():
                metrics.mean(f"actor/kto_{name}", (self.beta * moved.detach() * rows).sum(), rows.sum())
        weight = torch.where(good, self.desirable, self.undesirable)
        return weight * torch.sigmoid(-self.beta * gain)


def report_margins(prefix: str, margin: Tensor, pairs: Tensor, metrics: Metrics) -> None:
    """Report the share of pairs with a positive margin, and the mean margin.

    Args:
        margin: float ``[groups]``.
        pairs: bool ``[groups]``, whether a group has a pair.
    """
    metrics.mean(f"{prefix}accuracy", (pairs & (margin.detach() > 0)).sum(), pairs.sum())
    metrics.mean(f"{prefix}margin", (margin.detach() * pairs).sum(), pairs.sum())


def _lengths(response_mask: Tensor) -> Tensor:
    """The number of tokens of each row, at least 1."""
    return response_mask.sum(-1).clamp(min=1)


def _log1mexp(x: Tensor) -> Tensor:
    """``log(1 - exp(x))`` for x < 0, by the branch that does not cancel (Maechler 2012); finite at 0."""
    x = x.clamp(max=-1e-6)
    near = x > -math.log(2.0)
    of_near, of_far = x.where(near, -1.0), x.where(~near, -1.0)  # so that neither gradient is infinite
    return torch.where(near, (-of_near.expm1()).log(), (-of_far.exp()).log1p())


def pairs_of(scores: Tensor, uid: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """The best and worst row of each group, the same row if all scores are equal; and the group of each row."""
    best, worst, by_row = [], [], scores.tolist()
    group = torch.empty(len(uid), dtype=torch.int64, device=scores.device)
    for number, (name, members) in enumerate(rows_of_groups(uid).items()):
        if len(members) == 1:
            raise DataError(
                f"The group with uid {str(name)!r} has a single row, and a preference needs two. Sample several "
                f"responses per prompt, for example with Repeat(2).",
                code="rows.small-group",
                uid=str(name),
                expected=2,
                found=1,
            )
        best.append(max(members, key=by_row.__getitem__))
        worst.append(min(members, key=by_row.__getitem__))
        group[members] = number
        if by_row[best[-1]] == by_row[worst[-1]]:
            worst[-1] = best[-1]
    index = torch.tensor([best, worst], device=scores.device)
    return index[0], index[1], group

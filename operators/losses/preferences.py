"""Losses that learn from examples: demonstrations, right responses and preference pairs."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

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
        best, worst, group = _pairs(token_level_scores.sum(-1), uid)
        moved = (log_probs - ref_log_prob).sum(-1)
        margin = self.beta * (moved[best] - moved[worst])
        sure, wrong = torch.nn.functional.logsigmoid(margin), torch.nn.functional.logsigmoid(-margin)
        loss = -(1.0 - self.label_smoothing) * sure - self.label_smoothing * wrong
        pairs = best != worst
        metrics.mean("actor/dpo_accuracy", (pairs & (margin.detach() > 0)).sum(), pairs.sum())
        metrics.mean("actor/dpo_margin", (margin.detach() * pairs).sum(), pairs.sum())
        return (loss * pairs)[group]


def _pairs(scores: Tensor, uid: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
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

"""A teacher's opinion of what the policy sampled: of the tokens themselves, or of all that could have stood there.

The rows are the policy's own, so the student learns where it goes, and not where its teacher would have gone.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from flowrl import columns as c
from flowrl.core.operators.loss import Loss
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.core.operators.roles import Reads, Role
from flowrl.data.metrics import Metrics
from flowrl.errors import DataError
from flowrl.operators.advantages.per_token import select
from flowrl.protocols.heads import Head, HiddenStateScorer
from flowrl.protocols.scorers import LogitScorer
from flowrl.records import Sequences


class TeacherTop(NamedTuple):
    """The most likely tokens of a teacher in the place of each token, and all others together."""

    teacher_ids: c.TeacherIds
    teacher_log_probs: c.TeacherLogProbs
    teacher_rest: c.TeacherRest


class TeacherTopK(Operator):
    """What a teacher would have said in the place of each sampled token: its `k` most likely tokens, and the rest.

    Log-probs are at each row's temperature, float32 ``[batch response k]``, over the whole vocabulary: those of the k
    and of the rest add up to 1. The rest is one number a token, float32 ``[batch response]``. All are 0 off the mask.

    Args:
        k: tokens; less than the vocabulary.
        teacher: a frozen model with the policy's vocabulary.

    Raises:
        ParameterError: the vocabulary has no more than `k` tokens.
    """

    granularity: ClassVar[Granularity] = "row"
    k: int = Field(default=64, ge=1)
    teacher: Reads[LogitScorer] = Role("teacher")

    def __call__(self, rollout: Sequences) -> TeacherTop:
        return TeacherTop(*self.teacher.top_log_probs(rollout, self.k))


class TeacherSaid(NamedTuple):
    """All that a teacher could have said in the place of each token, once its head makes distributions of it."""

    teacher_states: c.TeacherHiddenStates
    teacher_head: Head


class TeacherHiddenStates(Operator):
    """All that a teacher would have said in the place of each sampled token, as it can travel: its last states.

    They are float32 ``[batch response hidden]``, 0 off the mask; its head goes beside, by name, and whoever trains
    reads it once from the teacher's folder. So ``[batch response vocabulary]`` is neither sent nor held.

    Args:
        teacher: a frozen model with the policy's vocabulary; its size is its own.

    Raises:
        BindError: the teacher's logits are not made by a linear head, and perhaps a scale (Granite, Cohere) or a cap
            (Gemma 2).
    """

    granularity: ClassVar[Granularity] = "row"
    teacher: Reads[HiddenStateScorer] = Role("teacher")

    def __call__(self, rollout: Sequences) -> TeacherSaid:
        return TeacherSaid(*self.teacher.last_states(rollout))


class ReverseKL(Operator):
    """How much more likely the teacher finds each sampled token than the policy did, as its advantage.

    ``A_t = log p_teacher(y_t) - log p_old(y_t)``, the estimate k1 of the negated KL(policy || teacher) of that token.
    Nothing is summed over later tokens (a discount of 0), as in Thinking Machines, "On-policy distillation" (2025,
    https://thinkingmachines.ai/blog/on-policy-distillation); MiniLLM (Gu et al. 2023, arXiv:2306.08543) sums them.

    Reports ``distill/reverse_kl``, the mean per token.
    """

    granularity: ClassVar[Granularity] = "row"

    def __call__(
        self,
        ref_log_prob: c.RefLogProbs,
        old_log_probs: c.OldLogProbs,
        response_mask: c.ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> c.Advantages:
        advantages = select(ref_log_prob - old_log_probs, response_mask)
        metrics.mean("distill/reverse_kl", -advantages.sum(dtype=torch.float64), response_mask.sum())
        return advantages


def divergence(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """The generalised Jensen-Shannon divergence (GKD: Agarwal et al. 2023, arXiv:2306.13649, eq. 1).

    ``beta KL(P || M) + (1 - beta) KL(Q || M)`` with P of the teacher, Q of the student and ``M = beta P + (1 - beta)
    Q``. It is 0 at both ends, where its limits in shape are taken in its place, as in TRL: at 0 KL(P || Q), the forward
    KL, which covers the teacher; at 1 KL(Q || P), the reverse, which seeks its modes.

    Args:
        teacher, student: log-probs ``[tokens outcomes]``, each row a whole distribution.
        beta: from 0 to 1.

    Returns:
        ``[tokens]``.
    """
    if beta == 0.0:
        return _kl(teacher, student)
    if beta == 1.0:
        return _kl(student, teacher)
    share = teacher.new_tensor(beta)
    mixed = torch.logaddexp(teacher + share.log(), student + torch.log1p(-share))
    return beta * _kl(teacher, mixed) + (1.0 - beta) * _kl(student, mixed)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


class GKD(Loss):
    """The divergence from a teacher over its most likely tokens (GKD: Agarwal et al. 2023, arXiv:2306.13649, eq. 1).

    The outcomes of each token are the k that `TeacherTopK` gives, and that it is another: so both sides are whole
    distributions, and what is measured is never more than the divergence over the vocabulary. See `divergence`.

    Args:
        beta: 0 is KL(teacher || student), 1 is KL(student || teacher), between them Jensen-Shannon.
    """

    beta: float = Field(default=1.0, ge=0, le=1)

    def __call__(
        self,
        distributions: c.Distributions,
        teacher_ids: c.TeacherIds,
        teacher_log_probs: c.TeacherLogProbs,
        teacher_rest: c.TeacherRest,
    ) -> Tensor:
        teacher = torch.cat([teacher_log_probs, teacher_rest[:, None]], dim=1)
        likely = distributions.gather(1, teacher_ids)
        rest = distributions.scatter(1, teacher_ids, -torch.inf).logsumexp(1, keepdim=True)
        return divergence(teacher, torch.cat([likely, rest], dim=1), self.beta)


class FullGKD(Loss):
    """The divergence from a teacher over the whole vocabulary (GKD: Agarwal et al. 2023, arXiv:2306.13649, eq. 1).

    Of some tokens at a time, the teacher's head makes its distributions from the states that `TeacherHiddenStates`
    gives, in the arithmetic of the teacher and at each row's temperature. See `divergence`.

    Args:
        beta: 0 is KL(teacher || student), 1 is KL(student || teacher), between them Jensen-Shannon.

    Raises:
        DataError: teacher and student have vocabularies of two sizes.
    """

    beta: float = Field(default=1.0, ge=0, le=1)

    def __call__(
        self,
        distributions: c.Distributions,
        teacher_states: c.TeacherHiddenStates,
        teacher_head: Head,
        temperature: c.Temperature,
    ) -> Tensor:
        teacher = teacher_head.log_probs(teacher_states, temperature)
        if teacher.shape != distributions.shape:
            raise DataError(
                f"the teacher has logits for {teacher.shape[1]} tokens and the student for {distributions.shape[1]}; "
                f"expected one vocabulary, padding included: give both as many by resize_token_embeddings(...), or "
                f"distil from likely tokens by TeacherTopK and GKD."
            )
        return divergence(teacher, distributions, self.beta)

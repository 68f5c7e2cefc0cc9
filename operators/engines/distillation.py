"""On-policy distillation: a teacher scores the policy's own samples, by sampled token or over the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

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
from flowrl.operators.explains import exact, tokens_on
from flowrl.protocols.heads import Head, HiddenStateScorer
from flowrl.protocols.scorers import LogitScorer
from flowrl.records import Sequences


class TeacherTop(NamedTuple):
    """The teacher's most likely tokens at each position, and the log-probability of all others."""

    teacher_ids: c.TeacherIds
    teacher_log_probs: c.TeacherLogProbs
    teacher_rest: c.TeacherRest


class TeacherTopK(Operator):
    """The teacher's `k` most likely tokens at each position, and the log-probability of the rest.

    Writes token ids, int64 ``[batch response k]``; their log-probs at each row's temperature, float32 ``[batch response
    k]``; and the log-probability of all other tokens, float32 ``[batch response]``. The k + 1 probabilities add up to
    1; all entries are 0 off the mask.

    Args:
        k: number of tokens, less than the vocabulary size.
        teacher: a frozen model with the policy's vocabulary.

    Raises:
        ParameterError: the vocabulary has at most `k` tokens.
    """

    granularity: ClassVar[Granularity] = "row"
    k: int = Field(default=64, ge=1)
    teacher: Reads[LogitScorer] = Role("teacher")

    def __call__(self, rollout: Sequences) -> TeacherTop:
        return TeacherTop(*self.teacher.top_log_probs(rollout, self.k))


class TeacherDistribution(NamedTuple):
    """The teacher's hidden states, and the head that computes its distributions from them."""

    teacher_states: c.TeacherHiddenStates
    teacher_head: Head


class TeacherHiddenStates(Operator):
    """The teacher's last hidden states at each sampled token, from which its full distributions are computed.

    The states are float32 ``[batch response hidden]``, 0 off the mask. The trainer loads the head once from the
    teacher's folder, so ``[batch response vocabulary]`` is never sent or stored.

    Args:
        teacher: a frozen model with the policy's vocabulary, of any size.

    Raises:
        BindError: the teacher computes its logits by something other than a linear head with an optional scale
            (Granite, Cohere) or cap (Gemma 2).
    """

    granularity: ClassVar[Granularity] = "row"
    teacher: Reads[HiddenStateScorer] = Role("teacher")

    def __call__(self, rollout: Sequences) -> TeacherDistribution:
        return TeacherDistribution(*self.teacher.last_states(rollout))


class ReverseKL(Operator):
    """The log-ratio of teacher to policy at each sampled token, as its advantage.

    ``A_t = log p_teacher(y_t) - log p_old(y_t)``, the negated k1 estimate of KL(policy || teacher) at that token. Later
    tokens are not summed (a discount of 0), as in Thinking Machines, "On-policy distillation" (2025,
    https://thinkingmachines.ai/blog/on-policy-distillation); MiniLLM (Gu et al. 2023, arXiv:2306.08543) sums them.

    Reports ``distill/reverse_kl``, the mean per token in nats.
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

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """See `flowrl.operators.explains.Explains`."""
        if not (on := tokens_on(inputs["response_mask"], row)):
            return ""
        token = max(on, key=lambda one: abs(float(outputs["advantages"][row, one])))
        teacher, old = (exact(inputs[name][row, token]) for name in ("ref_log_prob", "old_log_probs"))
        after = exact(outputs["advantages"][row, token])
        return f"token {token}, where it is largest: teacher - old = {teacher} - {old} = {after}"


def divergence(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """The generalized Jensen-Shannon divergence (GKD: Agarwal et al. 2023, arXiv:2306.13649, eq. 1).

    ``beta KL(P || M) + (1 - beta) KL(Q || M)`` with P the teacher, Q the student and ``M = beta P + (1 - beta) Q``. It
    vanishes for beta 0 and 1, so there it is replaced as in TRL: for 0 by KL(P || Q), the forward KL (mode-covering),
    and for 1 by KL(Q || P), the reverse KL (mode-seeking).

    Args:
        teacher, student: log-probs ``[tokens outcomes]``, each row a complete distribution.
        beta: in [0, 1].

    Returns:
        ``[tokens]``, in nats.
    """
    if beta == 0.0:
        return _kl(teacher, student)
    if beta == 1.0:
        return _kl(student, teacher)
    weight = teacher.new_tensor(beta)
    mixed = torch.logaddexp(teacher + weight.log(), student + torch.log1p(-weight))
    return beta * _kl(teacher, mixed) + (1.0 - beta) * _kl(student, mixed)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


class GKD(Loss):
    """The divergence from a teacher over its most likely tokens (GKD: Agarwal et al. 2023, arXiv:2306.13649, eq. 1).

    Each distribution has k + 1 outcomes: the k tokens of `TeacherTopK`, and any other token. Its divergence is a lower
    bound of the divergence over the vocabulary. See `divergence`.

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
    """The divergence from a teacher over the full vocabulary (GKD: Agarwal et al. 2023, arXiv:2306.13649, eq. 1).

    The teacher's head computes its distributions from the states of `TeacherHiddenStates`, for some tokens at a time,
    in the teacher's precision and at each row's temperature. See `divergence`.

    Args:
        beta: 0 is KL(teacher || student), 1 is KL(student || teacher), between them Jensen-Shannon.

    Raises:
        DataError: the vocabularies of teacher and student have different sizes.
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
                f"The teacher has logits for {teacher.shape[1]} tokens and the student for {distributions.shape[1]}, "
                f"expected equal numbers, padding included. Resize one of them by resize_token_embeddings(...), or "
                f"distill the likely tokens only: TeacherTopK and GKD.",
                code="objective.teacher-vocabulary",
                expected=distributions.shape[1],
                found=teacher.shape[1],
            )
        return divergence(teacher, distributions, self.beta)

"""KTO's baseline: an estimate of KL to the reference from responses to other prompts."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flowrl import columns as c
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.data.metrics import Metrics
from flowrl.data.segments import refuse_segments
from flowrl.data.text.tokenizer import positions
from flowrl.errors import DataError
from flowrl.operators.advantages.per_token import select
from flowrl.records import Sequences


class MismatchedSequences(NamedTuple):
    """Prompts with the responses of other rows."""

    input_ids: c.InputIds
    attention_mask: c.AttentionMask
    position_ids: c.PositionIds
    response_mask: c.ResponseMask
    temperature: c.Temperature


class MismatchResponses(Operator):
    """Give each prompt the response of the row before it, and the first prompt that of the last row.

    These are the pairs of KTO's estimate of KL (Ethayarajh et al. 2024, arXiv:2402.01306, §4.1), as TRL forms them.

    Raises:
        DataError: there is a single row, whose response is its own; or a row has several segments.
    """

    granularity: ClassVar[Granularity] = "batch"

    def __call__(self, rollout: Sequences) -> MismatchedSequences:
        rows, response = rollout.response_mask.shape
        if rows == 1:
            raise DataError(
                f"{self.name} got a single row, whose prompt has no other response. Take at least two rows per step: "
                f"Training(..., prompts=2).",
                code="rows.one-row",
                node=self.name,
                expected=2,
            )
        refuse_segments(rollout.attention_mask, rollout.position_ids, self.name)
        prompt = rollout.input_ids.shape[1] - response

        def mixed(column: Tensor) -> Tensor:
            return torch.cat([column[:, :prompt], column[:, prompt:].roll(1, 0)], 1)

        attention_mask = mixed(rollout.attention_mask)
        return MismatchedSequences(
            mixed(rollout.input_ids),
            attention_mask,
            positions(attention_mask),
            rollout.response_mask.roll(1, 0),
            rollout.temperature,
        )


class KTOBaseline(Operator):
    """The baseline of KTO (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8): an estimate of KL to the reference.

    ``z = max(0, mean(log pi - log pi_ref))`` over the rows of the step, each summed over its tokens; the rows have
    responses to other prompts (`MismatchResponses`). The weights are those at the start of the step, and z has no
    gradient. Reports ``kto/baseline``.
    """

    granularity: ClassVar[Granularity] = "batch"

    def __call__(
        self,
        old_log_probs: c.OldLogProbs,
        ref_log_prob: c.RefLogProbs,
        response_mask: c.ResponseMask,
        metrics: Metrics = INJECTED,
    ) -> c.KLBaseline:
        moved = select(old_log_probs - ref_log_prob, response_mask).sum(-1, dtype=torch.float64)
        baseline = moved.mean().clamp(min=0.0)
        metrics.mean("kto/baseline", baseline, 1)
        return baseline.float().expand(len(moved)).clone()

"""Episodes as rows: the columns that `Interact` and `Sampled` write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.data.proto.column_math import objects
from flowrl.data.segments import restart
from flowrl.data.text.tokenizer import ChatTokenizer, assemble
from flowrl.episodes.sequences import OtherSide, RowRecord
from flowrl.errors import SyncError
from flowrl.operators.engines.engines import oldest_version
from flowrl.protocols.protocols import Synced
from flowrl.records import EpisodeBatch


def episode_batch(
    records: Sequence[RowRecord],
    summaries: Sequence[Mapping[str, Any]],
    asked: Sequence[Mapping[str, OtherSide]],
    tokenizer: ChatTokenizer,
    temperature: Tensor,
    version: Tensor,
) -> EpisodeBatch:
    """The columns of some rows.

    Args:
        temperature: float32 ``[batch]``.
        version: int64 ``[batch]``, for rows without a response.
    """
    prompts, prompt_mask = tokenizer.pad_left([record.prompt for record in records])
    width = max((len(record.ids) for record in records), default=0)
    responses = torch.full((len(records), width), tokenizer.pad_id)
    present = torch.zeros(len(records), width, dtype=torch.bool)
    sampled, log_probs, scores = present.clone(), torch.zeros(len(records), width), torch.zeros(len(records), width)
    versions = torch.full_like(responses, -1)
    ends, starts = present.clone(), present.clone()  # the last token of each turn, the first of a further segment
    for i, record in enumerate(records):
        length = len(record.ids)
        responses[i, :length], present[i, :length] = torch.tensor(record.ids, dtype=torch.int64), True
        sampled[i, :length], log_probs[i, :length] = torch.tensor(record.sampled), torch.tensor(record.log_probs)
        versions[i, :length][sampled[i, :length]] = torch.tensor(record.versions, dtype=torch.int64)
        starts[i, list(record.starts)] = True
        for position, reward in record.rewards.items():
            scores[i, position], ends[i, position] = reward, True
    input_ids, attention_mask, position_ids = assemble(prompts, prompt_mask, responses, present)
    position_ids = restart(position_ids, torch.cat([torch.zeros_like(prompt_mask), starts], 1))
    return EpisodeBatch(
        prompts=prompts,
        responses=responses,
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        response_mask=sampled,
        rollout_log_probs=log_probs,
        response_text=objects(record.text for record in records),
        temperature=temperature,
        policy_version=oldest_version(versions, sampled, version),
        token_version=versions,
        token_level_scores=scores,
        turns=torch.tensor([len(record.rewards) for record in records], dtype=torch.int64),
        turn_ids=torch.where(sampled, ends.cumsum(1) - ends.long(), -1),
        conversation=objects(record.conversation for record in records),
        episode=objects(summaries),
        asked=objects(asked),
    )


def version_of(engine: Synced, name: str) -> int:
    """The version of an engine's weights; refuses one without a receipt."""
    if (receipt := engine.receipt) is None:
        raise SyncError(
            f"The engine {name!r} of the episodes has no receipt for its weights, so the version of its responses is "
            f"unknown. Sync it first, or bind it with frozen=True.",
            code="engine.no-receipt",
            engine=name,
        )
    return receipt.version

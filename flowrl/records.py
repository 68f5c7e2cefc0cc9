"""Records: named groups of columns (and a few batchless values) that travel between operators.

What an operator *returns* is a `NamedTuple`. What an operator *reads* may be any of those, or a `Protocol` that lists
just the columns it reads as properties; every record that has these columns fits, for a type checker and for the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from flowrl import columns as c
from flowrl.errors import DataError
from flowrl.padding import assemble, pad_left, pad_right


class PromptBatch(NamedTuple):
    """Prompts as they come from the data, before anything is sampled; tokens are padded on the left."""

    prompts: c.Prompts
    prompt_mask: c.PromptMask
    uid: c.Uid
    row_id: c.RowId
    data_source: c.DataSource
    ground_truth: c.GroundTruth
    extra_info: c.ExtraInfo
    raw_prompt: c.RawPrompt


class RolloutBatch(NamedTuple):
    """What a rollout engine sampled, with the versions of the policy that sampled it; that of a row is the oldest of
    its tokens'."""

    prompts: c.Prompts
    responses: c.Responses
    input_ids: c.InputIds
    attention_mask: c.AttentionMask
    position_ids: c.PositionIds
    response_mask: c.ResponseMask
    rollout_log_probs: c.RolloutLogProbs
    response_text: c.ResponseText
    temperature: c.Temperature
    policy_version: c.PolicyVersion
    token_version: c.TokenVersion

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        *,
        log_probs: Sequence[Sequence[float]] | None = None,
        sampled: Sequence[Sequence[bool]] | None = None,
        texts: Sequence[str] | None = None,
        temperature: float = 1.0,
        policy_version: int = -1,
        pad: int = 0,
    ) -> RolloutBatch:
        """Rows of unequal lengths, padded: ``RolloutBatch.of([[5, 6], [5]], [[7], [8, 9]])``.

        Args:
            prompts: token ids of each row, at least one.
            responses: token ids of each row, those that others wrote in between included.
            log_probs: of each response token, under the policy that sampled it; None is unknown, which is NaN.
            sampled: whether each response token was sampled; None is all.
            texts: of the responses; None is unknown, which is None in each row.
            policy_version: of the policy that sampled the rows; -1 is none.
            pad: the token id of padding, which no model reads.

        Raises:
            DataError: other numbers of rows, or of tokens in a row; a prompt without tokens.
        """
        _refuse_unequal(prompts, responses, log_probs=log_probs, sampled=sampled, texts=texts)
        ids, prompt_mask = pad_left(prompts, pad)
        tokens, present = pad_right(responses, pad)
        on = present.clone()
        if sampled is not None:
            on[present] = torch.tensor([one for row in sampled for one in row], dtype=torch.bool)
        found = torch.zeros(present.shape)
        known = [[torch.nan] * len(row) for row in responses] if log_probs is None else log_probs
        found[present] = torch.tensor([one for row in known for one in row], dtype=torch.float32)
        return cls(
            ids,
            tokens,
            *assemble(ids, prompt_mask, tokens, present),
            response_mask=on,
            rollout_log_probs=found.where(on, 0.0),
            response_text=_objects(texts or [None] * len(responses)),
            temperature=torch.full((len(responses),), float(temperature)),
            policy_version=torch.full((len(responses),), policy_version),
            token_version=torch.where(on, policy_version, -1),
        )


class DemoBatch(NamedTuple):
    """Demonstrations: prompts with responses to imitate, which no policy has sampled: their
    `policy_version` is -1, and their temperature 1."""

    prompts: c.Prompts
    responses: c.Responses
    input_ids: c.InputIds
    attention_mask: c.AttentionMask
    position_ids: c.PositionIds
    response_mask: c.ResponseMask
    response_text: c.ResponseText
    raw_prompt: c.RawPrompt
    temperature: c.Temperature
    policy_version: c.PolicyVersion
    uid: c.Uid
    row_id: c.RowId


class PreferenceBatch(NamedTuple):
    """Pairs of responses: of each, the chosen one in a row that scores 1, followed by the rejected one, which scores
    0. The two rows of a pair share their `uid` and their `margin`; no policy has sampled them: their `policy_version`
    is -1."""

    prompts: c.Prompts
    responses: c.Responses
    input_ids: c.InputIds
    attention_mask: c.AttentionMask
    position_ids: c.PositionIds
    response_mask: c.ResponseMask
    response_text: c.ResponseText
    raw_prompt: c.RawPrompt
    temperature: c.Temperature
    policy_version: c.PolicyVersion
    uid: c.Uid
    row_id: c.RowId
    token_level_scores: c.TokenLevelScores
    margin: c.Margin

    @staticmethod
    def rows_per_item() -> int:
        """How many rows a draw has."""
        return 2


class UnpairedBatch(NamedTuple):
    """Responses that score 1 if they are desirable, else 0; no policy has sampled them, so their `policy_version` is
    -1."""

    prompts: c.Prompts
    responses: c.Responses
    input_ids: c.InputIds
    attention_mask: c.AttentionMask
    position_ids: c.PositionIds
    response_mask: c.ResponseMask
    response_text: c.ResponseText
    raw_prompt: c.RawPrompt
    temperature: c.Temperature
    policy_version: c.PolicyVersion
    uid: c.Uid
    row_id: c.RowId
    token_level_scores: c.TokenLevelScores


class EpisodeBatch(NamedTuple):
    """The transcripts of episodes: the columns of `RolloutBatch`, whose responses go from the first turn to the last,
    including the replies of the environment (off `response_mask`); the rewards; and what other engines were asked."""

    prompts: c.Prompts
    responses: c.Responses
    input_ids: c.InputIds
    attention_mask: c.AttentionMask
    position_ids: c.PositionIds
    response_mask: c.ResponseMask
    rollout_log_probs: c.RolloutLogProbs
    response_text: c.ResponseText
    temperature: c.Temperature
    policy_version: c.PolicyVersion
    token_version: c.TokenVersion
    token_level_scores: c.TokenLevelScores
    turns: c.Turns
    turn_ids: c.TurnIds
    conversation: c.Conversation
    episode: c.Episode
    asked: c.Asked


class Tokens(Protocol):
    """What a model needs to run over whole sequences; the last ``response`` columns of `input_ids` are the response."""

    @property
    def input_ids(self) -> c.InputIds: ...
    @property
    def attention_mask(self) -> c.AttentionMask: ...
    @property
    def position_ids(self) -> c.PositionIds: ...
    @property
    def response_mask(self) -> c.ResponseMask: ...


class Sequences(Tokens, Protocol):
    """Tokens plus the temperature that log-probs are taken at."""

    @property
    def temperature(self) -> c.Temperature: ...


class VersionedSequences(Sequences, Protocol):
    """Sequences with the version of the policy that sampled them."""

    @property
    def policy_version(self) -> c.PolicyVersion: ...


class Updated(NamedTuple):
    """The policy was updated; `version` is that of its new weights."""

    version: int


class CriticUpdated(NamedTuple):
    """The critic was updated; `version` is that of its new weights."""

    version: int


class RewardModelUpdated(NamedTuple):
    """The reward model was updated; `version` is that of its new weights."""

    version: int


FROZEN = -2
"""The version of a frozen engine's weights, which nothing trains; -1 is that of demonstrations."""


class Receipt(NamedTuple):
    """Weights arrived at an engine; `version` is `FROZEN` if they are those of its folder for good.

    `digest` is xxh3-128 over the digests of the tensors as received (Hugging Face names, sorted; tied weights once),
    see `flowrl.sync.digest`; `bytes` were moved (0 for an alias), in `seconds`, by `transport`.
    """

    version: int
    digest: str
    bytes: int
    seconds: float
    transport: str

    @property
    def frozen(self) -> bool:
        """Whether the engine is frozen."""
        return self.version == FROZEN


def _objects(values: Sequence[object]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _refuse_unequal(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], **others: Any) -> None:
    """Refuse columns of other numbers of rows than the responses, or of tokens in a row."""
    for name, given in {"prompts": prompts, **others}.items():
        if given is not None and len(given) != len(responses):
            raise DataError(
                f"RolloutBatch.of(...) got {len(responses)} responses and {len(given)} {name}. Pass one for each row.",
                code="rows.unequal",
                column=name,
                expected=len(responses),
                found=len(given),
            )
    for name in (name for name in ("log_probs", "sampled") if others[name] is not None):
        for row, (ids, given) in enumerate(zip(responses, others[name], strict=True)):
            if len(given) != len(ids):
                raise DataError(
                    f"Row {row} of RolloutBatch.of(...) has {len(ids)} response tokens and {len(given)} {name}. Pass "
                    f"one for each token.",
                    code="rows.unequal",
                    column=name,
                    row=row,
                    expected=len(ids),
                    found=len(given),
                )
    if empty := [row for row, ids in enumerate(prompts) if not len(ids)]:
        raise DataError(
            f"Prompt {empty[0]} of {len(prompts)} has no tokens. Pass prompts of at least one token.",
            code="tokenizer.empty-prompt",
            row=empty[0],
        )


def rows_per_item(record: type) -> int:
    """How many rows a draw from a source of this record has: its own `rows_per_item`, or 1."""
    rows: int = getattr(record, "rows_per_item", lambda: 1)()
    return rows

"""Records: named groups of columns (and a few batchless values) that travel between operators.

What an operator *returns* is a `NamedTuple`. What an operator *reads* may be any of those, or a `Protocol` that lists
just the columns it reads as properties; every record that has these columns fits, for a type checker and for the graph.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from flowrl import columns as c


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
    including the replies of the environment (off `response_mask`); and the rewards."""

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

    `digest` is xxh3-128 over the tensors as received (Hugging Face names, sorted; tied weights once); `bytes` were
    moved (0 for an alias), in `seconds`, by `transport`.
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


def rows_per_item(record: type) -> int:
    """How many rows a draw from a source of this record has: its own `rows_per_item`, or 1."""
    rows: int = getattr(record, "rows_per_item", lambda: 1)()
    return rows

"""What live engines must do that score more than the tokens that are there; see `flowrl.protocols.protocols`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from flowrl.protocols.protocols import Scorer
from flowrl.records import Sequences, Tokens


class Top(NamedTuple):
    """The most likely tokens after each token, and all others together.

    Args:
        ids: int64 ``[batch response k]``, the most likely first; 0 off the mask.
        log_probs: float32 ``[batch response k]``, theirs; 0 off the mask.
        rest: float32 ``[batch response]``, the log-prob that it is none of them; 0 off the mask.
    """

    ids: Tensor
    log_probs: Tensor
    rest: Tensor


@runtime_checkable
class LogitScorer(Scorer, Protocol):
    """A scorer that says what else could have stood in a token's place."""

    def top_log_probs(self, batch: Sequences, k: int) -> Top:
        """The `k` most likely tokens in the place of each response token, at each row's temperature."""
        ...


@runtime_checkable
class NormScorer(Scorer, Protocol):
    """A scorer that also says how hard each token pulls at the logits."""

    def logit_norms(self, batch: Sequences) -> Tensor:
        """Squared norms of the gradient of each response token's log-prob in its logits: float32 ``[batch response]``,
        0 off the mask."""
        ...


@runtime_checkable
class RewardScorer(Protocol):
    """Weights that say how good a whole sequence is, given its tokens."""

    def rewards(self, batch: Tokens) -> Tensor:
        """The score of each row: float32 ``[batch]``."""
        ...


@runtime_checkable
class TextRewardScorer(Protocol):
    """Weights that say how good the last answer of a conversation is; tokeniser and template are their own."""

    def rewards_of(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> Tensor:
        """The score of each conversation, ``{"role": ..., "content": ...}`` a message: float32 ``[conversations]``."""
        ...

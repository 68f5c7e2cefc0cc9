"""Protocols of engines that score more than the given tokens; see `flowrl.protocols.protocols`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from flowrl.data.metrics import Metrics
from flowrl.protocols.protocols import Batch, MiniBatch, Objective, Scorer, Trainer
from flowrl.records import Receipt, Sequences, Tokens


class Top(NamedTuple):
    """The ``k`` most likely tokens at each position, and the remaining probability.

    Args:
        ids: int64 ``[batch response k]``, most likely first; 0 off the mask.
        log_probs: float32 ``[batch response k]``; 0 off the mask.
        rest: float32 ``[batch response]``, the log of the probability of all other tokens; 0 off the mask.
    """

    ids: Tensor
    log_probs: Tensor
    rest: Tensor


@runtime_checkable
class LogitScorer(Scorer, Protocol):
    """A scorer that also gives the most likely tokens at each position."""

    def top_log_probs(self, batch: Sequences, k: int) -> Top:
        """The `k` most likely tokens at the position of each response token, at each row's temperature."""
        ...


@runtime_checkable
class Follower(Scorer, Protocol):
    """A scorer whose weights may follow those of a trainer, such as a reference that is reset; and `Checkpointed`."""

    def follow(self, source: Trainer, alpha: float) -> Receipt:
        """Set the weights to ``alpha * source + (1 - alpha) * own``; the receipt has version and digest of `source`.

        Raises:
            SyncError: the weights received are of another architecture, or differ from those sent.
        """
        ...

    def save_checkpoint(self, folder: str) -> None:
        """Write the weights into a new folder."""
        ...

    def load_checkpoint(self, folder: str) -> None:
        """Restore the weights that `save_checkpoint` wrote."""
        ...


@runtime_checkable
class NormScorer(Scorer, Protocol):
    """A scorer that also gives each token's gradient norm in the logits."""

    def logit_norms(self, batch: Sequences) -> Tensor:
        """Squared norm of the gradient of each response token's log-prob in its logits: float32 ``[batch response]``,
        0 off the mask."""
        ...


@runtime_checkable
class RewardScorer(Protocol):
    """A reward model that scores sequences of tokens."""

    def rewards(self, batch: Tokens) -> Tensor:
        """The score of each row: float32 ``[batch]``."""
        ...


@runtime_checkable
class RewardTrainer(RewardScorer, Protocol):
    """A reward model that is trained."""

    @property
    def version(self) -> int:
        """The number of updates so far."""
        ...

    def update(self, batch: Batch, mini_batches: Sequence[MiniBatch], objective: Objective[Batch]) -> Metrics:
        """One optimizer step per mini-batch on the objective of the scores, each on the last token on
        `response_mask`, then increment `version`; otherwise as `Trainer.update`."""
        ...

    def save_pretrained(self, folder: str) -> None:
        """Write a Hugging Face folder of a sequence classifier with one label, with its tokenizer."""
        ...


@runtime_checkable
class TextRewardScorer(Protocol):
    """A reward model that scores the last response of a conversation, with its own tokenizer and chat template."""

    def rewards_of(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> Tensor:
        """The score of each conversation, ``{"role": ..., "content": ...}`` a message: float32 ``[conversations]``."""
        ...

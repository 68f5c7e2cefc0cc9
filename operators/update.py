"""What writes weights: `UpdateActor` and `UpdateCritic`, PPO's epochs over mini-batches, and `Sync`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from flowrl import columns as c
from flowrl.core.operator import Granularity, Operator
from flowrl.core.ports import INJECTED, Signature
from flowrl.core.protocols import Critic, MiniBatch, Rollout, Shipped, Trainer
from flowrl.core.roles import Reads, Role, Writes
from flowrl.data.balance import Share, split_rows
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.errors import DataError, StalePolicyError, SyncError
from flowrl.operators.losses import PPOClip, ValueClip
from flowrl.records import CriticUpdated, Receipt, Tokens, Updated, VersionedSequences


class PolicyBatch(NamedTuple):
    """What a policy loss may read, one row per response; its ratio is taken to `old_log_probs`."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_mask: Tensor
    temperature: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    ref_log_prob: Tensor | None


class ValueBatch(NamedTuple):
    """What a value loss may read, one row per response."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_mask: Tensor
    values: Tensor
    returns: Tensor


def draw_mini_batches(
    loss: PPOClip | ValueClip, response_mask: Tensor, mini_batch: int | None, epochs: int, key: Key
) -> list[MiniBatch]:
    """The optimiser steps of one update: per epoch, a seeded permutation of all rows cut into mini-batches.

    Args:
        loss: gives the weights of the tokens, which are taken over each whole mini-batch.
        response_mask: bool ``[batch response]``.
        mini_batch: rows of a mini-batch; None takes all rows at once, in their order.
        epochs: passes over the rows.
        key: what the permutations are drawn from.

    Raises:
        DataError: there are no rows, or `mini_batch` does not divide them.
    """
    rows = len(response_mask)
    size = rows if mini_batch is None else mini_batch
    if rows == 0 or rows % size:
        raise DataError(
            f"{rows} rows cannot be cut into equal mini-batches (mini_batch={mini_batch}); expected at least one row, "
            f"and a divisor of prompts x n: change mini_batch, the prompts a step, or Repeat(n)."
        )
    return [MiniBatch(index, loss.weights(response_mask[index])) for index in _draw_rows(rows, size, epochs, key)]


def _draw_rows(rows: int, size: int, epochs: int, key: Key) -> list[Tensor]:
    """The rows of each mini-batch."""
    drawn: list[Tensor] = []
    for epoch in range(epochs):
        generator = key.derive("epoch", epoch).generator()
        # One mini-batch of all rows keeps their order, and so the micro-batches of OldLogProb: ratios are exactly 1.
        order = torch.randperm(rows, generator=generator) if size < rows else torch.arange(rows)
        drawn += order.split(size)
    return drawn


def rank_rows(rows: Sequence[Tensor], tokens: Tensor, ranks: int) -> list[Tensor]:
    """The rows that each rank computes on, given those of all mini-batches: int64, ascending, for each rank."""
    parts = [[index[own] for own in split_rows(tokens[index], ranks)] for index in rows]
    return [torch.cat([part[rank] for part in parts]).unique() for rank in range(ranks)]


def rank_parts(steps: Sequence[MiniBatch], share: Share | None, attention_mask: Tensor) -> Sequence[MiniBatch]:
    """The part that a rank has in each mini-batch; the weights of its tokens stay those of the whole.

    Args:
        steps: whole mini-batches, by the rows of the step.
        share: what the rank is given; None is everything.
        attention_mask: bool ``[rows of the rank, sequence]``.

    Returns:
        mini-batches by the rows of the rank.
    """
    if share is None:
        return steps
    tokens = attention_mask.sum(1) if share.tokens is None else share.tokens
    rows = torch.arange(len(tokens)) if share.rows is None else share.rows
    parts = []
    for index, weights in steps:
        own = split_rows(tokens[index].cpu(), share.ranks)[share.rank]
        parts.append(MiniBatch(torch.searchsorted(rows, index[own]), weights[own]))
    return parts


def _own(column: Tensor, share: Share | None) -> Tensor:
    """The rows of a rank, of a column that it is given whole."""
    return column if share is None or share.rows is None else column[share.rows]


def _divisors(mini_batch: int | None) -> Mapping[str, int]:
    return {} if mini_batch is None else {"mini_batch": mini_batch}


class UpdateActor(Operator):
    """Train the policy on rows that it sampled itself: one optimiser step per mini-batch.

    Old log-probs, advantages and reference stay as they were taken at the start of the step, so mini-batches and epochs
    after the first are on-policy in the sense of PPO (Schulman et al. 2017, arXiv:1707.06347, alg. 1).

    Args:
        loss: the policy loss; with a KL term it wants `ref_log_prob`, and with ``ratio_to="rollout"`` the rollout's own
            log-probs as `old_log_probs`.
        ppo_epochs: passes over the rows.
        mini_batch: rows (not prompts) of an optimiser step; None for all at once. It must divide prompts x n.
        actor: the trainer.

    Raises:
        StalePolicyError: rows were sampled by another version of the policy than the one that is trained here.
        DataError: `mini_batch` does not divide the rows.
    """

    granularity: ClassVar[Granularity] = "batch"
    whole: ClassVar[frozenset[str]] = frozenset({"response_mask", "policy_version"})  # all weigh, and all refuse
    loss: PPOClip = PPOClip()
    ppo_epochs: int = Field(default=1, ge=1)
    mini_batch: int | None = Field(default=None, ge=1)
    actor: Writes[Trainer] = Role("actor")

    @property
    def row_divisors(self) -> Mapping[str, int]:
        """What must divide the rows: the mini-batch, if there is one."""
        return _divisors(self.mini_batch)

    @property
    def effects(self) -> frozenset[str]:
        """``"kl"`` with a KL term, ``"importance correction"`` with a ratio to what the engine sampled from."""
        kl = {"kl"} if self.loss.kl is not None else set()
        return frozenset(kl | ({"importance correction"} if self.loss.ratio_to == "rollout" else set()))

    @property
    def signature(self) -> Signature:
        """The ports; `old_log_probs` is of the kind that the loss takes its ratio to."""
        own = super().signature
        return own if self.loss.ratio_to == "old" else own.retyped("old_log_probs", c.RolloutLogProbs)

    def wants(self) -> Mapping[str, bool]:
        return {"ref_log_prob": self.loss.kl is not None}

    def shares(self, tokens: Tensor, ranks: int, key: Key) -> Sequence[Tensor]:
        """The rows of each rank's parts in the mini-batches."""
        return rank_rows(_draw_rows(len(tokens), self.mini_batch or len(tokens), self.ppo_epochs, key), tokens, ranks)

    def __call__(
        self,
        rollout: VersionedSequences,
        old_log_probs: c.OldLogProbs,
        advantages: c.Advantages,
        ref_log_prob: c.RefLogProbs | None = None,
        key: Key = INJECTED,
        metrics: Metrics = INJECTED,
        share: Share | None = INJECTED,
    ) -> Updated:
        stale = (rollout.policy_version != self.actor.version).nonzero().flatten()
        if len(stale):
            row = int(stale[0])
            raise StalePolicyError(
                f"{len(stale)} of {len(rollout.policy_version)} rows were not sampled by the policy that is trained: "
                f"row {row} carries policy_version {int(rollout.policy_version[row])}, the actor is at "
                f"{self.actor.version}; expected all rows of this step from its own weights: run Sync after every "
                f"update, then Generate."
            )
        mask = _own(rollout.response_mask, share)
        if ref_log_prob is not None:
            metrics.mean("kl/ref", (old_log_probs - ref_log_prob)[mask].sum(), mask.sum())
        batch = PolicyBatch(
            rollout.input_ids,
            rollout.attention_mask,
            rollout.position_ids,
            mask,
            rollout.temperature,
            old_log_probs,
            advantages,
            ref_log_prob,
        )
        steps = draw_mini_batches(self.loss, rollout.response_mask, self.mini_batch, self.ppo_epochs, key)
        parts = rank_parts(steps, share, rollout.attention_mask)
        metrics.merge(self.actor.update(batch, parts, self.loss))
        return Updated(self.actor.version)


class UpdateCritic(Operator):
    """Train the critic towards the returns: one optimiser step per mini-batch.

    Args:
        loss: the value loss.
        ppo_epochs: passes over the rows.
        mini_batch: rows of an optimiser step; None for all at once. It must divide prompts x n.
        critic: the critic.

    Raises:
        DataError: `mini_batch` does not divide the rows.
    """

    granularity: ClassVar[Granularity] = "batch"
    whole: ClassVar[frozenset[str]] = frozenset({"response_mask"})
    loss: ValueClip = ValueClip()
    ppo_epochs: int = Field(default=1, ge=1)
    mini_batch: int | None = Field(default=None, ge=1)
    critic: Writes[Critic] = Role("critic")

    @property
    def row_divisors(self) -> Mapping[str, int]:
        """What must divide the rows: the mini-batch, if there is one."""
        return _divisors(self.mini_batch)

    def shares(self, tokens: Tensor, ranks: int, key: Key) -> Sequence[Tensor]:
        """The rows of each rank's parts in the mini-batches."""
        return rank_rows(_draw_rows(len(tokens), self.mini_batch or len(tokens), self.ppo_epochs, key), tokens, ranks)

    def __call__(
        self,
        rollout: Tokens,
        values: c.Values,
        returns: c.Returns,
        key: Key = INJECTED,
        metrics: Metrics = INJECTED,
        share: Share | None = INJECTED,
    ) -> CriticUpdated:
        mask = _own(rollout.response_mask, share)
        batch = ValueBatch(rollout.input_ids, rollout.attention_mask, rollout.position_ids, mask, values, returns)
        steps = draw_mini_batches(self.loss, rollout.response_mask, self.mini_batch, self.ppo_epochs, key)
        parts = rank_parts(steps, share, rollout.attention_mask)
        metrics.merge(self.critic.update(batch, parts, self.loss))
        return CriticUpdated(self.critic.version)


class Sync(Operator):
    """Carry the updated weights to the rollout engine; the receipt that it returns proves that they arrived.

    Every row that the engine generates from now on carries the receipt's version. A run also syncs once before its
    first step.

    Raises:
        SyncError: the engine's receipt is for other weights than the trainer's.
    """

    granularity: ClassVar[Granularity] = "batch"
    actor: Reads[Trainer] = Role("actor")
    rollout: Writes[Rollout] = Role("rollout")

    def __call__(self, updated: Updated, metrics: Metrics = INJECTED) -> Receipt:
        receipt = self.rollout.sync(self.actor)
        if not receipt.version == self.rollout_version() == self.actor.version == updated.version:
            raise SyncError(
                f"the update says version {updated.version}, the actor is at {self.actor.version}, the receipt is for "
                f"{receipt.version} and the engine holds {self.rollout_version()}; expected one version: sync once "
                f"after each update, and let the engine refuse what it did not receive."
            )
        # Between processes the way from one to the other counts, and not the engine's own from there.
        transport = self.actor.transport if isinstance(self.actor, Shipped) else receipt.transport
        metrics.max(f"sync/by/{transport.replace(' ', '_')}", 1)
        metrics.sum("sync/bytes", receipt.bytes)
        metrics.max("sync/version", receipt.version)
        return receipt

    def rollout_version(self) -> int | None:
        """The version that the engine itself reports, or None if it holds no receipt."""
        held = self.rollout.receipt
        return held.version if held is not None else None

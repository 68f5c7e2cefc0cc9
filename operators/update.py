"""What writes weights: `UpdateActor` and `UpdateCritic`, PPO's epochs over mini-batches, and `Sync`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from flowrl import columns as c
from flowrl.core.operator import Granularity, Operator
from flowrl.core.ports import INJECTED, Signature
from flowrl.core.protocols import Critic, MiniBatch, Rollout, Trainer
from flowrl.core.roles import Reads, Role, Writes
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
    batches = []
    for epoch in range(epochs):
        generator = key.derive("epoch", epoch).generator()
        # One mini-batch of all rows keeps their order, and so the micro-batches of OldLogProb: ratios are exactly 1.
        order = torch.randperm(rows, generator=generator) if size < rows else torch.arange(rows)
        for index in order.split(size):
            batches.append(MiniBatch(index, loss.weights(response_mask[index])))
    return batches


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

    def __call__(
        self,
        rollout: VersionedSequences,
        old_log_probs: c.OldLogProbs,
        advantages: c.Advantages,
        ref_log_prob: c.RefLogProbs | None = None,
        key: Key = INJECTED,
        metrics: Metrics = INJECTED,
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
        if ref_log_prob is not None:
            mask = rollout.response_mask
            metrics.mean("kl/ref", (old_log_probs - ref_log_prob)[mask].sum(), mask.sum())
        batch = PolicyBatch(
            rollout.input_ids,
            rollout.attention_mask,
            rollout.position_ids,
            rollout.response_mask,
            rollout.temperature,
            old_log_probs,
            advantages,
            ref_log_prob,
        )
        steps = draw_mini_batches(self.loss, rollout.response_mask, self.mini_batch, self.ppo_epochs, key)
        metrics.merge(self.actor.update(batch, steps, self.loss))
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
    loss: ValueClip = ValueClip()
    ppo_epochs: int = Field(default=1, ge=1)
    mini_batch: int | None = Field(default=None, ge=1)
    critic: Writes[Critic] = Role("critic")

    @property
    def row_divisors(self) -> Mapping[str, int]:
        """What must divide the rows: the mini-batch, if there is one."""
        return _divisors(self.mini_batch)

    def __call__(
        self, rollout: Tokens, values: c.Values, returns: c.Returns, key: Key = INJECTED, metrics: Metrics = INJECTED
    ) -> CriticUpdated:
        batch = ValueBatch(
            rollout.input_ids, rollout.attention_mask, rollout.position_ids, rollout.response_mask, values, returns
        )
        steps = draw_mini_batches(self.loss, rollout.response_mask, self.mini_batch, self.ppo_epochs, key)
        metrics.merge(self.critic.update(batch, steps, self.loss))
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
        metrics.sum("sync/bytes", receipt.bytes)
        metrics.max("sync/version", receipt.version)
        return receipt

    def rollout_version(self) -> int | None:
        """The version that the engine itself reports, or None if it holds no receipt."""
        held = self.rollout.receipt
        return held.version if held is not None else None

"""What writes weights: `UpdateActor` and `UpdateCritic`, PPO's epochs over mini-batches, and `Sync`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from pydantic import Field
from torch import Tensor

from flowrl import columns as c
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.loss import Loss, ModelQuantity
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED, FromParameters, PortField, Signature
from flowrl.core.operators.roles import Reads, Role, Writes
from flowrl.data.balance import Share
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.data.now import Now
from flowrl.errors import ParameterError, StalePolicyError, SyncError
from flowrl.operators.engines.engines import OldLogProb
from flowrl.operators.engines.model_inputs import AsksModel
from flowrl.operators.losses.objective import ROW, Aggregation, FirstPass, KLLoss, TokenObjective, check_norm
from flowrl.operators.losses.policy_losses import PPOClip
from flowrl.operators.losses.value_losses import ValueClip
from flowrl.operators.updates.mini_batches import draw_rows, own_rows, rank_parts, rank_rows, record
from flowrl.protocols.protocols import Caches, Critic, LiveWeightUpdate, RemoteWeights, Synced, Trainer
from flowrl.record_types import record_columns
from flowrl.records import CriticUpdated, Receipt, Tokens, Updated, VersionedSequences
from flowrl.spec import parameters


class _Update:
    """What the updates below share: optimiser steps over mini-batches, on an objective that has a loss."""

    loss: Loss
    ppo_epochs: int
    mini_batch: int | None
    aggregation: Aggregation
    norm: float | None
    trains: ClassVar[frozenset[ModelQuantity]]
    replicated: ClassVar[frozenset[str]]

    def __post_init__(self) -> None:
        check_norm(self.aggregation, self.norm)
        if not self.trains & self.loss.said.keys():
            raise ParameterError(
                f"{self.loss!r} is of the {' and '.join(self.loss.said)} of what is trained, and this update trains "
                f"{' or '.join(sorted(self.trains, reverse=True))}; expected a loss that reads these: PPOClip() for "
                f"UpdateActor, ValueClip() for UpdateCritic."
            )

    @property
    def row_divisors(self) -> Mapping[str, int]:
        """What must divide the rows: the mini-batch, if there is one."""
        return {} if self.mini_batch is None else {"mini_batch": self.mini_batch}

    @property
    def replicated_columns(self) -> frozenset[str]:
        """`replicated`, and all columns of a loss over more than a row."""
        seen = {"ref_log_prob", *self.loss.signature.ports} if self._beyond_rows else set()
        return self.replicated | seen

    def shares(self, tokens: Tensor, ranks: int, key: Key) -> Sequence[Tensor] | None:
        """The rows of each rank's parts in the mini-batches; all of them where these depend on groups."""
        if self._groups is not None:
            return None
        return rank_rows(draw_rows(len(tokens), self.mini_batch, self.ppo_epochs, key), tokens, ranks)

    @property
    def _beyond_rows(self) -> bool:
        return self.loss.unit in ("group", "batch")

    @property
    def _groups(self) -> str | None:
        """The column that says which group a row is of, where the loss is over groups."""
        fields: Mapping[PortField, Any] = self.loss.signature.fields if self.loss.unit == "group" else {}
        return next((field.name for field, wanted in fields.items() if getattr(wanted, "kind", "") == "group"), None)

    def _of_rank(self, name: str, column: Any, share: Share | None) -> Any:
        """The rows of this rank, of a column that it may be given whole."""
        return own_rows(column, share) if name in self.replicated_columns else column

    def _train(
        self,
        engine: Any,
        rollout: Any,
        columns: Mapping[str, Any],
        objective: TokenObjective,
        key: Key,
        share: Share | None,
    ) -> Metrics:
        """Update `engine` on the mini-batches of this rank's rows, and return what it reports.

        Args:
            engine: a trainer or critic.
            rollout: the record of sequences.
            columns: what else the objective reads.
            objective: what is minimised.
            key: what mini-batches are drawn from.
            share: what this rank is given.
        """
        sequences = rollout._asdict()
        read = {**{name: sequences[name] for name in self.loss.signature.ports if name in sequences}, **columns}
        groups = None if self._groups is None else read[self._groups]
        drawn = draw_rows(len(rollout.response_mask), self.mini_batch, self.ppo_epochs, key, groups)
        inputs = {name: self._of_rank(name, column, share) for name, column in sequences.items()}
        seen, whole = ({}, read) if self._beyond_rows else (read, None)
        attended = inputs.get("attention_mask", inputs["response_mask"])
        parts = rank_parts(drawn, objective.weights, rollout.response_mask, attended, share, whole)
        metrics: Metrics = engine.update(record({**seen, **inputs}), parts, objective)
        return metrics


class UpdateActor(_Update, AsksModel, Operator):
    """Train the policy on rows that it sampled itself, or on demonstrations: one optimiser step per mini-batch.

    What the loss reads are ports of the update. Columns stay as they were taken at the start of the step, so
    mini-batches and epochs after the first are on-policy in the sense of PPO (Schulman et al. 2017, arXiv:1707.06347,
    alg. 1).

    Args:
        loss: the policy loss; ``PPOClip(ratio_to="rollout")`` wants the rollout's own log-probs as `old_log_probs`.
        ppo_epochs: passes over the rows.
        mini_batch: rows (not prompts) of an optimiser step; None for all at once. It must divide prompts x n, and hold
            whole groups where the loss is over groups.
        aggregation, norm: of tokens; see `token_weights`.
        kl: a KL term, which wants `ref_log_prob`; or None.
        entropy: the weight of the entropy bonus.
        prior_updates: by how many updates the weights may be ahead of the rows: 1 for a second update of one role in a
            step, which runs after the first.
        reads: what the policy is given of the rows; see `AsksModel`.
        actor: the trainer.

    Raises:
        ParameterError: a loss of values, a KL term beside a loss of distributions, or a `norm` that does not belong to
            `aggregation`.
        StalePolicyError: rows, or by a `Lag` with spans tokens, were sampled by another version of the policy than the
            one that is trained here; rows that no policy has sampled, as those of `DemoData`, have none.
        DataError: `mini_batch` does not divide the rows, or cuts groups that must stay together.
    """

    granularity: ClassVar[Granularity] = "batch"
    replicated: ClassVar[frozenset[str]] = frozenset({"response_mask", "policy_version"})  # all weigh, and all refuse
    trains: ClassVar[frozenset[ModelQuantity]] = frozenset({"log-probs", "distributions"})
    scores: ClassVar[bool] = False
    """Whether it also writes `old_log_probs`, of its first pass; see `ScoringUpdate`."""
    loss: Loss = PPOClip()
    ppo_epochs: int = Field(default=1, ge=1)
    mini_batch: int | None = Field(default=None, ge=1)
    aggregation: Aggregation = "token-mean"
    norm: float | None = None
    kl: KLLoss | None = None
    entropy: float = Field(default=0.0, ge=0)
    prior_updates: int = Field(default=0, ge=0)
    actor: Writes[Trainer] = Role("actor")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl is not None and "distributions" in self.loss.said:
            raise ParameterError(
                f"kl={self.kl!r} is of log-probs, and {self.loss!r} is of whole distributions, of which the model says "
                f"the loss alone; expected kl=None, and a term within the loss, if any."
            )

    @property
    def replicated_columns(self) -> frozenset[str]:
        """Also the versions of tokens, by which all refuse."""
        return super().replicated_columns | {"token_version"}

    @property
    def effects(self) -> frozenset[str]:
        """Those of the loss, and ``"kl"`` with a KL term: by k1, ``"kl without a gradient"``, too."""
        if self.kl is None:
            return self.loss.effects
        without_gradient = {Effect.KL_WITHOUT_GRADIENT} if self.kl.estimator == "k1" else set()
        return self.loss.effects | {Effect.KL} | without_gradient

    def wants(self) -> Mapping[str, bool]:
        by_loss = "ref_log_prob" in self.loss.signature.ports  # then it is no matter of the KL term
        return {} if by_loss else {"ref_log_prob": self.kl is not None}

    def __call__(
        self,
        rollout: VersionedSequences,
        *,
        ref_log_prob: c.RefLogProbs | None = None,
        token_version: c.TokenVersion | None = None,
        key: Key = INJECTED,
        metrics: Metrics = INJECTED,
        now: Now = INJECTED,
        **columns: FromParameters,
    ) -> Updated:
        self._refuse_stale(rollout, token_version, now.ahead, metrics)
        mask = own_rows(rollout.response_mask, now.share)
        settings = self.loss, self.aggregation, self.norm, self.kl, self.entropy, key
        objective, read = TokenObjective(*settings), {**columns, "ref_log_prob": ref_log_prob}
        if self.scores:
            old = torch.zeros(mask.shape, device=mask.device)  # and 0 in rows without a token, which are not run
            objective, read[ROW] = FirstPass(*settings, old_log_probs=old), torch.arange(len(old))
        else:
            old = self._of_rank("old_log_probs", columns.get("old_log_probs"), now.share)
        metrics.merge(self._train(self.actor, rollout, read, objective, key, now.share))
        if ref_log_prob is not None and old is not None:
            ref = self._of_rank("ref_log_prob", ref_log_prob, now.share)
            metrics.mean("kl/ref", (old - ref)[mask].sum(), mask.sum())
        updated = Updated(self.actor.version)
        return cast(Updated, Scored(updated, old)) if self.scores else updated

    def fusing(self, scorer: Operator) -> Operator | str | None:
        """This update as it also writes what `OldLogProb` does; see `flowrl.core.graphs.fusing.Fuses`."""
        if type(scorer) is not OldLogProb or scorer.actor != self.actor:
            return None
        if type(self) is not UpdateActor:
            return f"is of a class of its own, {type(self).__name__}"
        if self.ppo_epochs != 1:
            return f"goes over the rows several times (ppo_epochs={self.ppo_epochs!r})"
        if self.mini_batch is not None:
            return f"changes weights between its rows (mini_batch={self.mini_batch!r})"
        if self.prior_updates != 0:
            return f"comes after another update (prior_updates={self.prior_updates!r})"
        if "log-probs" not in self.loss.said:
            return f"has no log-probs in its pass, but {' and '.join(self.loss.said)} ({type(self.loss).__name__})"
        if self._beyond_rows:
            return f"sees its rows at once (the loss {type(self.loss).__name__} is of a {self.loss.unit})"
        return (
            ScoringUpdate(**parameters(self), scorer=scorer.name)
            if scorer.reads == self.reads
            else "reads another record"
        )

    def _refuse_stale(
        self, rollout: VersionedSequences, token_version: Tensor | None, ahead: int, metrics: Metrics
    ) -> None:
        """Refuse versions that may not be trained on; where they may be older, report how old they are.

        Args:
            rollout: the rows; -1 is the version of those that no policy sampled.
            token_version: int64 ``[batch response]``, where tokens have versions of their own.
            ahead: by how many versions generation may be ahead.
            metrics: where to.
        """
        of_tokens = None if token_version is None else token_version.where(rollout.response_mask, -1)
        sampled_by = rollout.policy_version if of_tokens is None else of_tokens
        age = self.actor.version - sampled_by
        sampled = sampled_by >= 0  # and not from a file
        window = self.prior_updates + ahead
        stale = (sampled & ((age < 0) | (age > window))).nonzero()
        if len(stale):
            place, version = stale[0].tolist(), self.actor.version
            rows, found = len(stale[:, 0].unique()), int(sampled_by[tuple(place)])
            carries = f"policy_version {found}" if len(place) == 1 else f"token_version {found} at token {place[1]}"
            own = "from its own weights: run Sync after every update, then Generate"
            raise StalePolicyError(
                f"{rows} of {len(sampled_by)} rows were not sampled by the policy that is trained: row {place[0]} "
                f"carries {carries}, the actor is at {version}; expected all rows of this step "
                f"{f'of the versions {version - window} to {version}, by the lag' if ahead else own}."
            )
        if ahead:
            metrics.mean("queue/age_mean", age[sampled].sum(), int(sampled.sum()))
            metrics.max("queue/age_max", age[sampled].max() if sampled.any() else 0)


class Scored(NamedTuple):
    """The policy was updated; and what it said of the rows before: what `OldLogProb` writes."""

    updated: Updated
    old_log_probs: c.OldLogProbs


class ScoringUpdate(UpdateActor):
    """`UpdateActor` that also writes what `OldLogProb` does, of its one pass over all rows; it stands in plans alone
    (`flowrl.core.graphs.fusing`), where it is the same, bit for bit.

    Args:
        loss, ppo_epochs, mini_batch, aggregation, norm, kl, entropy, prior_updates, reads, actor: of the
            `UpdateActor` in whose place it is.
        scorer: the name of the `OldLogProb`.
    """

    _signature = replace(UpdateActor._signature, outputs=record_columns(Scored), output_record=Scored)
    scores = True
    scorer: str = "old_log_prob"

    @property
    def more_ports(self) -> Signature:
        """Those of the loss but `old_log_probs`."""
        return _without_old(self.loss.signature)


@functools.lru_cache(maxsize=256)
def _without_old(loss: Signature) -> Signature:
    """The same object each time, since calls are laid out by it."""
    return replace(loss, ports={name: port for name, port in loss.ports.items() if name != "old_log_probs"})


class UpdateCritic(_Update, AsksModel, Operator):
    """Train the critic towards the returns: one optimiser step per mini-batch.

    Args:
        loss: the value loss; what it reads are ports of the update.
        ppo_epochs: passes over the rows.
        mini_batch: rows of an optimiser step; None for all at once. It must divide prompts x n.
        aggregation, norm: of tokens; see `token_weights`.
        reads: what the critic is given of the rows; see `AsksModel`.
        critic: the critic.

    Raises:
        ParameterError: a loss of log-probs, or a `norm` that does not belong to `aggregation`.
        DataError: `mini_batch` does not divide the rows, or cuts groups that must stay together.
    """

    granularity: ClassVar[Granularity] = "batch"
    replicated: ClassVar[frozenset[str]] = frozenset({"response_mask"})
    trains: ClassVar[frozenset[ModelQuantity]] = frozenset({"values"})
    loss: Loss = ValueClip()
    ppo_epochs: int = Field(default=1, ge=1)
    mini_batch: int | None = Field(default=None, ge=1)
    aggregation: Aggregation = "token-mean"
    norm: float | None = None
    critic: Writes[Critic] = Role("critic")

    @property
    def effects(self) -> frozenset[str]:
        """Those of the loss."""
        return self.loss.effects

    def __call__(
        self,
        rollout: Tokens,
        *,
        key: Key = INJECTED,
        metrics: Metrics = INJECTED,
        now: Now = INJECTED,
        **columns: FromParameters,
    ) -> CriticUpdated:
        objective = TokenObjective(self.loss, self.aggregation, self.norm, key=key)
        metrics.merge(self._train(self.critic, rollout, columns, objective, key, now.share))
        return CriticUpdated(self.critic.version)


class Sync(Operator):
    """Carry the updated weights to the rollout engine; the receipt that it returns proves that they arrived.

    Every row that the engine generates from now on carries the receipt's version. A run also syncs once before its
    first step.

    Raises:
        SyncError: the engine's receipt is for other weights than the trainer's.
    """

    granularity: ClassVar[Granularity] = "batch"
    _caches: ClassVar[Caches | None] = None
    actor: Reads[Trainer] = Role("actor")
    rollout: Writes[Synced] = Role("rollout")

    @property
    def effects(self) -> frozenset[str]:
        """``"spans"`` where weights change under answers that are under way."""
        return frozenset() if self._caches is None else frozenset({Effect.SPANS})

    def swapping(self, caches: Caches) -> Self:
        """The sync that runs where a `Lag` has spans; see `flowrl.core.graphs.spans`."""
        made = copy.copy(self)
        made.__dict__["_caches"] = caches
        return made

    def in_place_of(self, other: Operator) -> Self:
        made = super().in_place_of(other)
        return made if (caches := getattr(other, "_caches", None)) is None else made.swapping(caches)

    def __call__(self, updated: Updated, metrics: Metrics = INJECTED) -> Receipt:
        if self._caches is None:
            receipt = self.rollout.sync(self.actor)
        else:
            receipt = cast(LiveWeightUpdate, self.rollout).swap(self.actor, self._caches)
        if not receipt.version == self.rollout_version() == self.actor.version == updated.version:
            raise SyncError(
                f"the update says version {updated.version}, the actor is at {self.actor.version}, the receipt is for "
                f"{receipt.version} and the engine holds {self.rollout_version()}; expected one version: sync once "
                f"after each update, and let the engine refuse what it did not receive."
            )
        # Between processes the way from one to the other counts, and not the engine's own from there.
        transport = self.actor.transport if isinstance(self.actor, RemoteWeights) else receipt.transport
        metrics.max(f"sync/by/{transport.replace(' ', '_')}", 1)
        metrics.sum("sync/bytes", receipt.bytes)
        metrics.max("sync/version", receipt.version)
        return receipt

    def rollout_version(self) -> int | None:
        """The version that the engine itself reports, or None if it holds no receipt."""
        held = self.rollout.receipt
        return held.version if held is not None else None

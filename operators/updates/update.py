"""Operators that train: `UpdateActor` and `UpdateCritic`, and PPO's epochs over mini-batches."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from flowrl import columns as c
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.loss import Loss, ModelQuantity
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED, FromParameters, PortField, Signature
from flowrl.core.operators.roles import Role, Writes
from flowrl.data.balance import Shard
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.data.now import Now
from flowrl.errors import ParameterError, StalePolicyError
from flowrl.operators.engines.engines import OldLogProb
from flowrl.operators.engines.model_inputs import ModelInputs
from flowrl.operators.losses.objective import (
    Aggregation,
    FirstPass,
    KLLoss,
    TokenObjective,
    check_norm,
    token_weights,
)
from flowrl.operators.losses.policy_losses import PPOClip
from flowrl.operators.losses.row_means import ROW, RowMeans
from flowrl.operators.losses.value_losses import ValueClip
from flowrl.operators.updates.mini_batches import mini_batch_rows, own_rows, rank_parts, rank_rows, record
from flowrl.protocols.protocols import Critic, Trainer
from flowrl.record_types import record_columns
from flowrl.records import FROZEN, CriticUpdated, Tokens, Updated, VersionedSequences
from flowrl.spec import parameters


class Update(ModelInputs):
    """Base of updates: optimizer steps over mini-batches on an objective with a loss."""

    granularity: ClassVar[Granularity] = "batch"
    replicated: ClassVar[frozenset[str]] = frozenset({"response_mask"})
    trains: ClassVar[frozenset[ModelQuantity]]
    loss: Loss
    ppo_epochs: int = Field(default=1, ge=1)
    mini_batch: int | None = Field(default=None, ge=1)
    aggregation: Aggregation = "token-mean"
    norm: float | None = None

    def __post_init__(self) -> None:
        check_norm(self.aggregation, self.norm)
        if not self.trains & self.loss.model_ports.keys():
            raise ParameterError(
                f"{type(self).__name__} needs a loss of {' or '.join(sorted(self.trains, reverse=True))}, and "
                f"{self.loss!r} reads {' and '.join(self.loss.model_ports)}. Pass another loss, such as PPOClip() to "
                f"UpdateActor, ValueClip() to UpdateCritic or BradleyTerry() to UpdateRewardModel.",
                code="update.wrong-loss",
                loss=type(self.loss).__name__,
                expected=sorted(self.trains, reverse=True),
                found=tuple(self.loss.model_ports),
            )

    @property
    def effects(self) -> frozenset[str]:
        """The effects of the loss."""
        return self.loss.effects

    @property
    def row_divisors(self) -> Mapping[str, int]:
        """Parameters that must divide the rows of a step: `mini_batch`, if given."""
        return {} if self.mini_batch is None else {"mini_batch": self.mini_batch}

    def optimizer_steps(self, rows: int | None) -> int:
        """One per mini-batch and epoch; see `flowrl.run.training.length.CountsUpdates`."""
        return self.ppo_epochs * (1 if self.mini_batch is None or rows is None else max(1, rows // self.mini_batch))

    @property
    def replicated_columns(self) -> frozenset[str]:
        """`replicated`, and the columns of a loss over groups or mini-batches."""
        read = {"ref_log_prob", *self.loss.signature.ports} if self._beyond_rows else set()
        return self.replicated | read

    def shards(self, tokens: Tensor, ranks: int, key: Key) -> Sequence[Tensor] | None:
        """The rows of each rank; None for all rows, if mini-batches depend on groups."""
        if self._groups is not None:
            return None
        return rank_rows(mini_batch_rows(len(tokens), self.mini_batch, self.ppo_epochs, key), tokens, ranks)

    def row_weights(self, response_mask: Tensor, key: Key, uid: np.ndarray | None) -> tuple[Tensor, Tensor]:
        """See `flowrl.run.recording.summaries.UpdatesByRows`."""
        steps, weights = torch.full((len(response_mask),), -1), torch.zeros(len(response_mask))
        groups = None if self._groups is None else uid
        mini_batches = mini_batch_rows(len(response_mask), self.mini_batch, self.ppo_epochs, key, groups)
        for number, rows in enumerate(mini_batches):
            weights[rows] += token_weights(response_mask[rows], self.aggregation, self.norm).sum(-1)
            steps[rows] = torch.where(steps[rows] < 0, number, steps[rows])
        return steps, weights

    @property
    def _beyond_rows(self) -> bool:
        return self.loss.unit in ("group", "batch")

    @property
    def _groups(self) -> str | None:
        """The column with the group of each row, for a loss over groups."""
        fields: Mapping[PortField, Any] = self.loss.signature.fields if self.loss.unit == "group" else {}
        return next((field.name for field, typed in fields.items() if getattr(typed, "kind", "") == "group"), None)

    def _of_rank(self, name: str, column: Any, shard: Shard | None) -> Any:
        """The rows of this rank, of a column that may be replicated."""
        return own_rows(column, shard) if name in self.replicated_columns else column

    def _train(
        self,
        engine: Any,
        rollout: Any,
        columns: Mapping[str, Any],
        objective: TokenObjective,
        key: Key,
        shard: Shard | None,
    ) -> Metrics:
        """Update `engine`, a trainer or critic, on this rank's rows of the mini-batches; returns its metrics."""
        sequences = rollout._asdict()
        read = {**{name: sequences[name] for name in self.loss.signature.ports if name in sequences}, **columns}
        groups = None if self._groups is None else read[self._groups]
        mini_batches = mini_batch_rows(len(rollout.response_mask), self.mini_batch, self.ppo_epochs, key, groups)
        inputs = {name: self._of_rank(name, column, shard) for name, column in sequences.items()}
        by_row, all_rows = ({}, read) if self._beyond_rows else (read, None)
        attended = inputs.get("attention_mask", inputs["response_mask"])
        parts = rank_parts(mini_batches, objective.weights, rollout.response_mask, attended, shard, all_rows)
        metrics: Metrics = engine.update(record({**by_row, **inputs}), parts, objective)
        return metrics


class UpdateActor(Update, Operator):
    """Train the policy on its own samples or on demonstrations: one optimizer step per mini-batch.

    The update has a port for each column that the loss reads. Columns are computed once per step, so `old_log_probs`
    and advantages stay constant over mini-batches and epochs, as in PPO (Schulman et al. 2017, arXiv:1707.06347,
    alg. 1).

    Args:
        loss: the policy loss; ``PPOClip(ratio_to="rollout")`` needs the rollout's log-probs as `old_log_probs`.
        ppo_epochs: passes over the rows.
        mini_batch: rows (not prompts) per optimizer step; None for all rows. It must divide prompts x n, and contain
            complete groups if the loss is over groups.
        aggregation, norm: how to aggregate tokens; see `token_weights`.
        kl: a KL term, which needs `ref_log_prob`; or None.
        entropy: coefficient of the entropy bonus.
        prior_updates: earlier updates of the same role in a step, which make the weights newer than the rows: 1 for a
            second update, which runs after the first.
        replayed: further versions by which rows may be older: ``max_age`` of the `Replay` that adds them.
        reads: record of the policy's inputs; None for tokens. See `ModelInputs`.
        actor: the trainer.

    Raises:
        ParameterError: the loss is of values, a KL term is combined with a loss of distributions, or `norm` does not
            match `aggregation`.
        StalePolicyError: rows (or tokens, with ``Lag(spans=True)``) were sampled by another version of the policy than
            the trainer has. Rows without a version, such as those of `DemoData`, are always accepted.
        DataError: `mini_batch` does not divide the rows, or splits groups.
    """

    replicated: ClassVar[frozenset[str]] = frozenset({"response_mask", "policy_version"})  # for weights, and to refuse
    trains: ClassVar[frozenset[ModelQuantity]] = frozenset({"log-probs", "distributions"})
    row_columns: ClassVar[Mapping[str, str]] = {"entropy": "actor/entropy", "clipped": "actor/pg_clipfrac"}
    """By column of row summaries, the metric of tokens whose mean over each row it is."""
    scores: ClassVar[bool] = False
    """Whether the update also writes the `old_log_probs` of its first pass; see `ScoringUpdate`."""
    loss: Loss = PPOClip()
    kl: KLLoss | None = None
    entropy: float = Field(default=0.0, ge=0)
    prior_updates: int = Field(default=0, ge=0)
    replayed: int = Field(default=0, ge=0)
    actor: Writes[Trainer] = Role("actor")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl is not None and "distributions" in self.loss.model_ports:
            raise ParameterError(
                f"kl={self.kl!r} needs log-probs, and with {self.loss!r}, a loss of distributions, the model computes "
                f"none. Pass kl=None, and add a KL term to the loss if needed.",
                code="update.wrong-loss",
                loss=type(self.loss).__name__,
                kl=self.kl,
            )

    @property
    def replicated_columns(self) -> frozenset[str]:
        """Those of all updates, and `token_version`, since all ranks check it."""
        return super().replicated_columns | {"token_version"}

    @property
    def effects(self) -> frozenset[str]:
        """The effects of the loss, ``"kl"`` with a KL term whose coefficient is not 0, and ``"kl without a gradient"``
        if it is k1 without a ratio."""
        if self.kl is None or self.kl.coef == 0:
            return self.loss.effects
        without_gradient = {Effect.KL_WITHOUT_GRADIENT} if self.kl.estimator == "k1" and not self.kl.ratio else set()
        return self.loss.effects | {Effect.KL} | without_gradient

    def optional_ports(self) -> Mapping[str, bool]:
        by_loss = "ref_log_prob" in self.loss.signature.ports  # then the loss needs it, whatever the KL term
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
        self._refuse_stale(rollout, token_version, now.lag, metrics)
        mask = own_rows(rollout.response_mask, now.shard)
        means = RowMeans()
        settings = self.loss, self.aggregation, self.norm, self.kl, self.entropy, key, means
        objective, read = TokenObjective(*settings), {**columns, "ref_log_prob": ref_log_prob}
        read[ROW] = torch.arange(len(rollout.response_mask if self._beyond_rows else mask))
        if self.scores:
            old = torch.zeros(mask.shape, device=mask.device)  # stays 0 in empty rows, which are not computed
            objective = FirstPass(*settings, old_log_probs=old)
        else:
            old = self._of_rank("old_log_probs", columns.get("old_log_probs"), now.shard)
        metrics.merge(self._train(self.actor, rollout, read, objective, key, now.shard))
        self._report_rows(means, now.shard, metrics)
        if ref_log_prob is not None and old is not None:
            ref = self._of_rank("ref_log_prob", ref_log_prob, now.shard)
            metrics.mean("kl/ref", (old - ref)[mask].sum(), mask.sum())
        updated = Updated(self.actor.version)
        return cast(Updated, Scored(updated, old)) if self.scores else updated

    def fusing(self, scorer: Operator) -> Operator | str | None:
        """This update fused with `OldLogProb`, or why it cannot be; see `flowrl.core.graphs.fusing.FusableUpdate`."""
        if type(scorer) is not OldLogProb or scorer.actor != self.actor:
            return None
        if type(self) is not UpdateActor:
            return f"is of a subclass, {type(self).__name__}"
        if self.ppo_epochs != 1:
            return f"makes several passes over the rows (ppo_epochs={self.ppo_epochs!r})"
        if self.mini_batch is not None:
            return f"changes weights between mini-batches (mini_batch={self.mini_batch!r})"
        if self.prior_updates != 0:
            return f"follows another update (prior_updates={self.prior_updates!r})"
        if "log-probs" not in self.loss.model_ports:
            return f"computes no log-probs, but {' and '.join(self.loss.model_ports)} ({type(self.loss).__name__})"
        if self._beyond_rows:
            return f"needs all rows at once (the loss {type(self.loss).__name__} is of a {self.loss.unit})"
        return (
            ScoringUpdate(**parameters(self), scorer=scorer.name)
            if scorer.reads == self.reads
            else "reads another record"
        )

    def _report_rows(self, means: RowMeans, shard: Shard | None, metrics: Metrics) -> None:
        """Report what `row_columns` names, and the entropies of tokens, by the number of the row in the step."""
        rows = None if shard is None or shard.rows is None or self._beyond_rows else shard.rows.cpu()
        if (entropies := means.entropies()) is not None:
            numbers, of_tokens = entropies
            metrics.column(f"{self.name}/entropies", numbers if rows is None else rows[numbers], of_tokens)
        own = None if rows is None else rows.tolist()
        for what, key in self.row_columns.items():
            for row, value in means.of(key).items():
                metrics.row(f"{self.name}/{what}", str(row if own is None else own[row]), value)

    def _refuse_stale(
        self, rollout: VersionedSequences, token_version: Tensor | None, ahead: int, metrics: Metrics
    ) -> None:
        """Refuse rows (or tokens, if `token_version`, int64 ``[batch response]``, is given) that are newer than the
        actor, or older than `ahead` and `prior_updates` allow; and rows of a frozen engine if the loss has a ratio to
        the actor's log-probs. With a lag, report their age."""
        self._refuse_frozen(rollout.policy_version)
        of_tokens = None if token_version is None else token_version.where(rollout.response_mask, -1)
        sampled_by = rollout.policy_version if of_tokens is None else of_tokens
        age = self.actor.version - sampled_by
        sampled = sampled_by >= 0  # neither from a file nor from a frozen engine
        window = self.prior_updates + ahead + self.replayed
        stale = (sampled & ((age < 0) | (age > window))).nonzero()
        if len(stale):
            index, version = stale[0].tolist(), self.actor.version
            rows, found = len(stale[:, 0].unique()), int(sampled_by[tuple(index)])
            column = f"policy_version {found}" if len(index) == 1 else f"token_version {found} at token {index[1]}"
            expected = f"versions {version - window} to {version}" if window else "the actor's version"
            raise StalePolicyError(
                f"{rows} of {len(sampled_by)} rows come from another version of the policy: row {index[0]} has "
                f"{column}, the actor is at {version}, expected {expected}. Run Sync after every update, then "
                f"Generate; for rows of earlier steps, set edit(lag=...).",
                code="update.stale-rows",
                node=self.name,
                row=index[0],
                expected=version,
                found=found,
            )
        if ahead:
            metrics.mean("queue/age_mean", age[sampled].sum(), int(sampled.sum()))
            metrics.max("queue/age_max", age[sampled].max() if sampled.any() else 0)

    def _refuse_frozen(self, policy_version: Tensor) -> None:
        """Refuse rows of a frozen engine if the loss compares the policy with itself at the start of the step."""
        frozen = (policy_version == FROZEN).nonzero()
        read = {str(getattr(typed, "kind", "")) for typed in self.loss.signature.fields.values()}
        if len(frozen) and "log-prob of the old policy" in read:
            raise StalePolicyError(
                f"{len(frozen)} of {len(policy_version)} rows, the first of them row {int(frozen[0])}, come from a "
                f"frozen engine, and {type(self.loss).__name__} has a ratio to old_log_probs, as if the actor had "
                f"sampled them. Use a loss without one, such as NLL() or Reinforce(), or PPOClip(ratio_to='rollout') "
                f"with the engine's rollout_log_probs.",
                code="update.frozen-rows",
                node=self.name,
                row=int(frozen[0]),
                loss=type(self.loss).__name__,
            )


class Scored(NamedTuple):
    """An update, and the `old_log_probs` before it."""

    updated: Updated
    old_log_probs: c.OldLogProbs


class ScoringUpdate(UpdateActor):
    """`UpdateActor` fused with the `OldLogProb` named `scorer`, from its single pass over all rows; the result is the
    same, bit for bit. It occurs in plans only (`flowrl.core.graphs.fusing`)."""

    _signature = replace(UpdateActor._signature, outputs=record_columns(Scored), output_record=Scored)
    scores = True
    scorer: str = "old_log_prob"

    def __repr__(self) -> str:
        return f"{self.unfused!r}, fused with {self.scorer}"

    @property
    def unfused(self) -> UpdateActor:
        """The update of the graph."""
        own = {name: value for name, value in parameters(self).items() if name != "scorer"}
        return UpdateActor(**own).in_place_of(self)

    @property
    def more_ports(self) -> Signature:
        """The ports of the loss except `old_log_probs`."""
        return _without_old(self.loss.signature)


@functools.lru_cache(maxsize=256)
def _without_old(loss: Signature) -> Signature:
    """Cached, since the layout of calls depends on the identity of the signature."""
    return replace(loss, ports={name: port for name, port in loss.ports.items() if name != "old_log_probs"})


class UpdateCritic(Update, Operator):
    """Train the critic on the returns: one optimizer step per mini-batch.

    Args:
        loss: the value loss; the update has a port for each column that it reads.
        ppo_epochs: passes over the rows.
        mini_batch: rows per optimizer step; None for all rows. It must divide prompts x n.
        aggregation, norm: how to aggregate tokens; see `token_weights`.
        reads: record of the critic's inputs; None for tokens. See `ModelInputs`.
        critic: the critic.

    Raises:
        ParameterError: the loss is of log-probs, or `norm` does not match `aggregation`.
        DataError: `mini_batch` does not divide the rows, or splits groups.
    """

    trains: ClassVar[frozenset[ModelQuantity]] = frozenset({"values"})
    loss: Loss = ValueClip()
    critic: Writes[Critic] = Role("critic")

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
        metrics.merge(self._train(self.critic, rollout, columns, objective, key, now.shard))
        return CriticUpdated(self.critic.version)

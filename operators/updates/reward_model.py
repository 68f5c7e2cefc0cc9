"""`UpdateRewardModel`: optimizer steps of a reward model on pairs of responses."""

from __future__ import annotations

from typing import ClassVar

from flowrl.core.operators.loss import Loss, ModelQuantity
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import INJECTED, FromParameters
from flowrl.core.operators.roles import Role, Writes
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.data.now import Now
from flowrl.operators.losses.objective import Aggregation, TokenObjective
from flowrl.operators.losses.preferences import BradleyTerry
from flowrl.operators.updates.update import Update
from flowrl.protocols.scorers import RewardTrainer
from flowrl.records import RewardModelUpdated, Tokens


class UpdateRewardModel(Update, Operator):
    """Train the reward model on pairs of responses: one optimizer step per mini-batch.

    Args:
        loss: a loss of scores; the update has a port for each column that it reads.
        ppo_epochs: passes over the rows.
        mini_batch: rows per optimizer step, two per pair; None for all rows.
        aggregation, norm: how to aggregate tokens, which all have the loss of their row; see
            `flowrl.operators.losses.objective.token_weights`.
        reads: record of the model's inputs; None for tokens. See `ModelInputs`.
        reward_model: the model.

    Raises:
        ParameterError: the loss is not of scores, or `norm` does not match `aggregation`.
        DataError: `mini_batch` does not divide the rows, or splits pairs.
    """

    trains: ClassVar[frozenset[ModelQuantity]] = frozenset({"scores"})
    loss: Loss = BradleyTerry()
    aggregation: Aggregation = "seq-mean-token-mean"
    reward_model: Writes[RewardTrainer] = Role("reward_model")

    def __call__(
        self,
        rollout: Tokens,
        *,
        key: Key = INJECTED,
        metrics: Metrics = INJECTED,
        now: Now = INJECTED,
        **columns: FromParameters,
    ) -> RewardModelUpdated:
        objective = TokenObjective(self.loss, self.aggregation, self.norm, key=key)
        metrics.merge(self._train(self.reward_model, rollout, columns, objective, key, now.shard))
        return RewardModelUpdated(self.reward_model.version)

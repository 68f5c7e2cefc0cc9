"""Training of a reward model on pairs of responses."""

from __future__ import annotations

from flowrl.graph import algorithm
from flowrl.operators import UpdateRewardModel
from flowrl.records import PreferenceBatch, RewardModelUpdated


@algorithm
def reward_model(pairs: PreferenceBatch, *, epochs: int = 1, mini_batch: int | None = None) -> RewardModelUpdated:
    """Reward modeling (InstructGPT: Ouyang et al. 2022, arXiv:2203.02155, eq. 1), on ``data=PreferenceData(...)``.

    ``-log sigmoid(r_chosen - r_rejected)``, the likelihood of the preferences under Bradley and Terry's model (1952).

    Args:
        pairs: two rows per pair, chosen and rejected.
        epochs: passes over the rows of a step.
        mini_batch: rows per optimizer step, two per pair; None for all.
    """
    return UpdateRewardModel(ppo_epochs=epochs, mini_batch=mini_batch)(
        pairs, token_level_scores=pairs.token_level_scores, margin=pairs.margin, uid=pairs.uid
    )

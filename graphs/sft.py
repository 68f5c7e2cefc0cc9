"""Supervised fine-tuning: the policy learns to say what demonstrations say."""

from __future__ import annotations

from flowrl.graph import algorithm
from flowrl.operators import NLL, UpdateActor
from flowrl.operators.losses.objective import Aggregation
from flowrl.records import DemoBatch, Updated


@algorithm
def sft(
    demos: DemoBatch, *, epochs: int = 1, mini_batch: int | None = None, aggregation: Aggregation = "token-mean"
) -> Updated:
    """Supervised fine-tuning (Ouyang et al. 2022, arXiv:2203.02155, sec. 3.5), on ``data=DemoData(...)``.

    The loss is ``-log pi(y | x)``, over the tokens of responses alone. Nothing is sampled, so there is no engine.

    Args:
        demos: demonstrations.
        epochs: passes over the rows of a step.
        mini_batch: rows per optimiser step; None for all.
        aggregation: of tokens; see `token_weights`.
    """
    return UpdateActor(NLL(), epochs, mini_batch, aggregation)(demos)

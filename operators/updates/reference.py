"""`SyncReference`: the reference follows the policy, at once or as a moving average."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.core.operators.roles import Reads, Role, Writes
from flowrl.data.metrics import Metrics
from flowrl.protocols.protocols import Trainer
from flowrl.protocols.scorers import Follower
from flowrl.records import Receipt, Updated


class SyncReference(Operator):
    """Move the reference towards the updated policy: ``ref = alpha * actor + (1 - alpha) * ref``.

    It runs after the log-probs of the step are computed. ``SyncReference().when(every=100, start=99)`` resets the
    reference after every 100 steps; a small `alpha` in every step is a moving average (TR-DPO: Gorbatovski et al. 2024,
    arXiv:2404.09656, eqs. 4, 5; TRL's ``sync_ref_model``). Checkpoints contain the reference.

    Reports ``ref/version``, the version of the policy that the reference moved towards.

    Args:
        alpha: the share of the policy; 1 copies it.

    Raises:
        SyncError: the reference has another architecture than the policy.
    """

    granularity: ClassVar[Granularity] = "batch"
    alpha: float = Field(default=1.0, gt=0, le=1)
    actor: Reads[Trainer] = Role("actor")
    ref: Writes[Follower] = Role("ref")

    def __call__(self, updated: Updated, metrics: Metrics = INJECTED) -> Receipt:
        receipt = self.ref.follow(self.actor, self.alpha)
        metrics.max("ref/version", receipt.version)
        return receipt

"""`Sync`: the trainer's weights go back to the rollout engine."""

from __future__ import annotations

from typing import ClassVar

from flowrl.core.operator import Granularity, Operator
from flowrl.core.ports import INJECTED
from flowrl.core.protocols import Rollout, Trainer
from flowrl.core.roles import Reads, Role, Writes
from flowrl.data.metrics import Metrics
from flowrl.errors import SyncError
from flowrl.records import Receipt, Updated


class Sync(Operator):
    """Carry the updated weights to the rollout engine; what it returns proves that they arrived.

    The receipt's version is what every row that the engine generates from now on bears. A run syncs once before its
    first step too.

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
        """The version that the engine itself says it holds."""
        held = self.rollout.receipt
        return held.version if held is not None else None

"""`Sync`: the updated weights reach the rollout engine."""

from __future__ import annotations

import copy
from typing import ClassVar, Self, cast

from flowrl.core.operators.effects import Effect
from flowrl.core.operators.operator import Granularity, Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.core.operators.roles import Reads, Role, Writes
from flowrl.data.metrics import Metrics
from flowrl.errors import SyncError, type_of
from flowrl.protocols.protocols import Caches, LiveWeightUpdate, Synced, Trainer
from flowrl.protocols.remote import RemoteWeights
from flowrl.records import Receipt, Updated


class Sync(Operator):
    """Transfer the updated weights to the rollout engine, whose receipt proves that they arrived.

    All rows that the engine generates afterwards have the receipt's version. A run also syncs once before its first
    step. Reports ``sync/bytes``, ``sync/version`` and ``sync/by/<transport>``; and ``sync/changed``, if only changes
    were sent.

    Args:
        changed: send only the values that changed since the engine's last sync, if trainer and engine are in other
            processes and that takes fewer bytes. Both keep a copy of the weights in CPU memory; see
            `flowrl.sync.shadow`.

    Raises:
        SyncError: the engine's receipt is for other weights than the trainer's.
    """

    granularity: ClassVar[Granularity] = "batch"
    _caches: ClassVar[Caches | None] = None
    changed: bool = False
    actor: Reads[Trainer] = Role("actor")
    rollout: Writes[Synced] = Role("rollout")

    @property
    def effects(self) -> frozenset[str]:
        """``"spans"`` if weights change while responses are in flight."""
        return frozenset() if self._caches is None else frozenset({Effect.SPANS})

    def swapping(self, caches: Caches) -> Self:
        """The sync of a graph with ``Lag(spans=True)``; see `flowrl.core.graphs.spans`."""
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
        if not isinstance(receipt, Receipt):
            raise SyncError(
                f"{self.name}: {type(self.rollout).__name__} returned {type_of(receipt)} from its weight update, "
                f"expected a Receipt. Return Receipt(version, digest, bytes, seconds, transport) of what it loaded, "
                f"and store it as `self.receipt`.",
                code="call.return",
                node=self.name,
                expected="Receipt",
                found=type_of(receipt),
            )
        if not receipt.version == self.rollout_version() == self.actor.version == updated.version:
            raise SyncError(
                f"The update has version {updated.version}, the actor {self.actor.version}, the receipt "
                f"{receipt.version} and the engine {self.rollout_version()}, expected one version. Sync once after "
                f"each update; an engine must return a receipt for the weights that it loaded.",
                code="engine.version-mismatch",
                node=self.name,
                expected=updated.version,
                found=self.rollout_version(),
            )
        # Between processes, report the transport and bytes between them rather than the engine's own.
        if isinstance(self.actor, RemoteWeights):
            receipt = receipt._replace(transport=self.actor.transport)
            if (sent := self.actor.changes) is not None:
                receipt = receipt._replace(bytes=sent.nbytes)
                if sent.share is not None:
                    metrics.max("sync/changed", sent.share)
        transport = receipt.transport
        metrics.max(f"sync/by/{transport.replace(' ', '_')}", 1)
        metrics.sum("sync/bytes", receipt.bytes)
        metrics.max("sync/version", receipt.version)
        return receipt

    def rollout_version(self) -> int | None:
        """The version that the engine itself reports; None without a receipt."""
        receipt = self.rollout.receipt
        return receipt.version if receipt is not None else None

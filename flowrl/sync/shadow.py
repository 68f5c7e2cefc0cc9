"""`Shadow`: a copy in CPU memory of the weights that an engine received last, so that a sync sends only what changed.

The trainer's process and the engine's have one each; if several ranks of the trainer send, each has its share. The
trainer compares new weights with its shadow and sends the `Changes`; the engine's side applies them to its own shadow,
and the engine loads all weights from there, whatever layout it gives them. The digests are those of whole tensors, as
in a full sync. So the receipt proves the same: it does not rest on all earlier syncs having been right, as a chain of
digests of changes would, and an engine whose copy is damaged is refused by the name of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flowrl.errors import SyncError
from flowrl.protocols.remote import SentChanges
from flowrl.sync.changes import Changes
from flowrl.sync.digest import algorithm_for, combine, has_digest, tensor_digest
from flowrl.sync.received import Origin, ReceivedWeights, Shipment, Weight, received

_PREFIX = "changes of "


def common(syncs: Iterable[str | None]) -> str | None:
    """The sync whose weights all sides have, given the last one of each; None if they differ, or one has none."""
    last, *others = set(syncs)
    return None if others else last


class Shadow:
    """The weights of the last sync to one engine, or a sender's share of them.

    `sync` identifies it; None before the first one and after one that failed, so that the next one sends all weights.
    """

    def __init__(self) -> None:
        self.sync: str | None = None
        self.tensors: dict[str, Tensor] = {}
        """In CPU memory, by name."""

    def put(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor into the shadow; returns the copy."""
        place = self.tensors.get(name)
        if place is None or (place.dtype, place.shape) != (tensor.dtype, tensor.shape):
            place = self.tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return place.copy_(tensor.detach())

    def outgoing(
        self, rounds: Iterable[Iterable[tuple[str, Tensor]]], sync: str, base: str | None
    ) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """What a sync sends for the receiver to have weights that are sent in `rounds`: of each tensor the changes, or
        all of it if these are not smaller.

        `base` is the `common` sync of all sides; None sends all weights.
        """
        self.sync = None
        sent: list[str] = []
        for weights in rounds:
            yield self._changed(weights, base, sent)
        self._complete(sent, sync)

    def _changed(
        self, weights: Iterable[tuple[str, Tensor]], base: str | None, sent: list[str]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            old = None if base is None else self.tensors.get(name)
            sent.append(name)
            if old is not None and (old.dtype, old.shape) == (tensor.dtype, tensor.shape):
                changes = Changes.between(old, tensor)
                changes.apply(old)
                if changes.nbytes < tensor.nbytes:
                    digest = tensor_digest(name, tensor, algorithm_for(tensor))  # not of `old`, which only should equal
                    name, tensor = _PREFIX + name, changes.pack(digest)
            else:
                self.put(name, tensor)
            yield name, tensor

    def incoming(self, origin: Origin, shipment: Shipment) -> ReceivedWeights:
        """The weights that arrive, which the shadow follows if `origin` says so."""
        return received(origin, shipment if origin.sync is None else ShadowedShipment(origin, shipment, self))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """In the block an engine loads the weights that arrive; if that fails, the shadow is not used again."""
        try:
            yield
        except BaseException:
            self.sync = None
            raise

    def _complete(self, names: Iterable[str], sync: str | None) -> None:
        """The shadow has all weights of a sync; those of other names are dropped."""
        self.tensors = {name: self.tensors[name] for name in names}
        self.sync = sync


class ShadowedShipment:
    """A shipment of weights or their changes, as a `Shipment` of all weights; the receiver's `Shadow` follows it."""

    def __init__(self, origin: Origin, shipment: Shipment, shadow: Shadow) -> None:
        self.transport = shipment.transport
        self._origin, self._shipment, self._shadow = origin, shipment, shadow
        self._nbytes = self._changed = self._values = 0
        self._digest: str | None = None

    @property
    def digest(self) -> str:
        """The digest of all weights; the shipment's own is that of what was sent."""
        if self._digest is None:
            raise self._origin.incomplete()
        return self._digest

    @property
    def changes(self) -> SentChanges:
        """What arrived so far."""
        full = self._origin.base is None
        return SentChanges(self._nbytes, None if full else self._changed / max(1, self._values))

    def weights(self) -> Iterator[Weight]:
        """All weights in memory that the receiver owns; see `flowrl.sync.received.Shipment`."""
        shadow, base = self._shadow, self._origin.base
        if base is not None and base != shadow.sync:
            raise SyncError(
                f"{self._origin} came as the changes since sync {base}, but the engine's process has the weights of "
                f"{'none' if shadow.sync is None else shadow.sync}. Sync again, which sends all weights.",
                code="sync.other-base",
                role=self._origin.role,
                version=self._origin.version,
                expected=base,
                found=shadow.sync,
            )
        shadow.sync = None
        digests: dict[str, str] = {}
        for name, tensor, digest in self._shipment.weights():
            self._nbytes += tensor.nbytes
            if name.startswith(_PREFIX):
                name, digest = self._apply(name, tensor, digest)
                tensor = shadow.tensors[name].clone()
            else:
                self._put(name, tensor)
            self._values += tensor.numel()
            digests[name] = digest
            yield Weight(name, tensor, digest)
        self._digest = combine(digests)
        shadow._complete(digests, self._origin.sync)

    def _apply(self, name: str, packed: Tensor, digest: str) -> tuple[str, str]:
        """Apply changes; returns the name and the digest of the tensor that has them."""
        if not has_digest(name, packed, digest):
            raise self._origin.damaged(f"{name} is not what was sent")
        name = name.removeprefix(_PREFIX)
        place = self._shadow.tensors[name]
        changes, digest = Changes.unpack(packed, place)
        changes.apply(place)
        self._changed += len(changes.places)
        return name, digest

    def _put(self, name: str, tensor: Tensor) -> None:
        """A tensor that came as a whole."""
        old = self._shadow.tensors.get(name)
        if self._origin.base is not None and old is not None and old.shape == tensor.shape:
            self._changed += len(Changes.between(old, tensor.to(old.dtype)).places)
        self._shadow.put(name, tensor)

"""`Source`: what stands in for a trainer where its weights are received, whichever way they come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flowrl.errors import SyncError
from flowrl.records import Receipt, Sequences
from flowrl.sync.digest import combine, tensor_digest
from flowrl.sync.probe import probe

BUCKET_BYTES = 256 << 20
"""Weights leave a trainer in buckets of at most this size (a larger tensor is a bucket of its own)."""


@dataclass(frozen=True)
class Origin:
    """What is known of weights before any of them comes.

    Args:
        role: of the trainer.
        version: of its weights.
        adapter_of: see `flowrl.core.protocols.Adapted`; None where whole weights come.
        scores: the trainer's log-probs of `flowrl.sync.probe.TOKENS`, after the first; None where nobody probes.
    """

    role: str
    version: int
    adapter_of: str | None = None
    scores: tuple[float, ...] | None = None

    def __str__(self) -> str:
        return f"the weights of {self.role} at version {self.version}"


class Cargo(Protocol):
    """Weights that can be taken as they come in."""

    @property
    def transport(self) -> str:
        """The way by which they come, as the receipt names it."""
        ...

    @property
    def digest(self) -> str:
        """Of all of them as they were sent; what the receipt must bear."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, each of which is the receiver's to keep.

        Raises:
            SyncError: a tensor is not what was sent, was not sent at all, or has not arrived.
        """
        ...


class Source:
    """Weights of one version: `flowrl.core.protocols.Rollout.sync` takes one for a trainer.

    Args:
        origin: whose they are.
        cargo: the weights themselves.
    """

    def __init__(self, origin: Origin, cargo: Cargo) -> None:
        self._origin, self._cargo = origin, cargo

    @property
    def version(self) -> int:
        """Of the weights."""
        return self._origin.version

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights as they were sent; see `Cargo.tensors`."""
        return self._cargo.tensors()

    def log_probs(self, batch: Sequences) -> Tensor:
        """The trainer's log-probs of `flowrl.sync.probe.probe`, which it took before it sent its weights.

        Raises:
            SyncError: it took none, or `batch` is another one.
        """
        if self._origin.scores is None or not torch.equal(batch.input_ids, probe().input_ids):
            raise SyncError(
                f"{self._origin} come from another process, without {self._origin.role} to score tokens; expected to "
                f"be asked for flowrl.sync.probe.probe() alone, by an engine whose backend says that it probes."
            )
        return torch.tensor([self._origin.scores])

    def check(self, receipt: Receipt) -> Receipt:
        """The receipt of an engine that took these weights over, with the transport that they came by.

        Raises:
            SyncError: it is for other weights.
        """
        if (receipt.version, receipt.digest) != (self.version, self._cargo.digest):
            raise SyncError(
                f"{self._origin} have the digest {self._cargo.digest}, and the receipt is for version "
                f"{receipt.version} with {receipt.digest}; expected the same on both sides: the engine must digest "
                f"what it received, and sync again."
            )
        return receipt._replace(transport=self._cargo.transport)


class AdapterSource(Source):
    """The weights of an adapter alone; it is `flowrl.core.protocols.Adapted`."""

    @property
    def adapter_of(self) -> str:
        """What the adapter is added to, and how."""
        assert self._origin.adapter_of is not None
        return self._origin.adapter_of

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter as it was sent; see `Cargo.tensors`."""
        return self._cargo.tensors()


def source_of(origin: Origin, cargo: Cargo) -> Source:
    """The `Source` of whole weights, or of an adapter."""
    return Source(origin, cargo) if origin.adapter_of is None else AdapterSource(origin, cargo)


class Tally:
    """The digests of the weights that came, held against those that were sent.

    Args:
        origin: whose weights they are.
    """

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._taken: dict[str, str] = {}

    def take(self, name: str, tensor: Tensor, sent: str | None) -> None:
        """Enter a tensor, which was sent with this `tensor_digest`; None says that none of this name was.

        Raises:
            SyncError: it is not that, or comes twice.
        """
        if sent is None or name in self._taken:
            raise self._damaged(f"{name} was not sent, or twice")
        self._taken[name] = tensor_digest(name, tensor)
        if self._taken[name] != sent:
            raise self._damaged(f"{name} is not what was sent")

    def finish(self, sent: Mapping[str, str]) -> str:
        """The digest of all weights, once all have come.

        Args:
            sent: the digest of every tensor that left the trainer.

        Raises:
            SyncError: some did not come, or others than were sent.
        """
        if missing := sorted(sent.keys() - self._taken.keys()):
            raise SyncError(f"{self._origin} are not whole: {', '.join(missing[:5])} did not arrive; sync again.")
        if wrong := sorted(name for name, digest in self._taken.items() if sent.get(name) != digest):
            raise self._damaged(f"{', '.join(wrong[:5])} came otherwise than the trainer says at the end")
        return combine(self._taken)

    def _damaged(self, what: str) -> SyncError:
        return SyncError(f"{self._origin} are damaged: {what}; sync again.")

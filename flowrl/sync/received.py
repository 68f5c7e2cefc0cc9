"""`ReceivedWeights`: the stand-in for a trainer in the process where its weights arrive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flowrl.errors import SyncError
from flowrl.protocols.remote import SentChanges
from flowrl.records import Receipt, Sequences
from flowrl.sync.digest import combine, has_digest
from flowrl.sync.probe import Probe


@dataclass(frozen=True)
class Origin:
    """Metadata of weights, known before any of them arrives.

    Args:
        adapter_of: see `flowrl.protocols.protocols.Adapted`; None for full weights.
        probe: what the trainer scored before it sent them; None without a probe.
        scores: its log-probs of the probe; see `flowrl.sync.probe.Probe.score`.
        compute_dtype: its compute dtype, such as ``"float32"``.
        sync: identifies a sync after which the receiver keeps a copy of the weights, so that the next one may send
            the changes; None if it keeps none. See `flowrl.sync.shadow.Shadow`.
        base: the sync whose weights the changes belong to; None if all weights are sent.
    """

    role: str
    version: int
    adapter_of: str | None = None
    probe: Probe | None = None
    scores: tuple[float, ...] = ()
    compute_dtype: str = "float32"
    sync: str | None = None
    base: str | None = None

    @staticmethod
    def of(message: Mapping[str, Any]) -> Origin:
        """An origin that was sent to this process as JSON."""
        probe = message["probe"]
        return Origin(**{**message, "probe": probe and Probe(**probe), "scores": tuple(message["scores"])})

    def __str__(self) -> str:
        return f"the weights of {self.role} at version {self.version}"

    def damaged(self, what: str) -> SyncError:
        """The error of weights that differ from those that were sent."""
        return SyncError(
            f"{self} are damaged: {what}. Sync again.",
            code="sync.damaged",
            role=self.role,
            version=self.version,
            reason=what,
        )

    def incomplete(self) -> SyncError:
        """The error of weights that were not read to the end."""
        return SyncError(
            f"{self} were not read to the end. The engine must iterate over all of them.",
            code="sync.damaged",
            role=self.role,
            version=self.version,
        )


class Weight(NamedTuple):
    """One tensor of a set of weights, with its Hugging Face name and its `tensor_digest` when it left the trainer."""

    name: str
    tensor: Tensor
    digest: str


class Shipment(Protocol):
    """Weights that can be iterated once, as they arrive."""

    @property
    def transport(self) -> str:
        """Their transport, as the receipt names it."""
        ...

    @property
    def digest(self) -> str:
        """The digest of all of them as they were sent, which the receipt must carry."""
        ...

    @property
    def changes(self) -> SentChanges | None:
        """What was sent, once all arrived; None if the sync sends all weights every time."""
        ...

    def weights(self) -> Iterator[Weight]:
        """The weights, in memory that the receiver owns; nothing is hashed here."""
        ...


class ReceivedWeights:
    """Weights of one version: `flowrl.protocols.protocols.Rollout.sync` accepts them in place of a trainer."""

    def __init__(self, origin: Origin, shipment: Shipment) -> None:
        self._origin, self._shipment = origin, shipment

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self._origin.version

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, each checked as it arrives; see `checked`."""
        return ((name, tensor) for name, tensor, _ in self.checked())

    def checked(self) -> Iterator[Weight]:
        """The weights, each hashed as it arrives."""
        for weight in self.unchecked():
            if not has_digest(*weight):
                raise self._origin.damaged(f"{weight.name} is not what was sent")
            yield weight

    def unchecked(self) -> Iterator[Weight]:
        """The weights without hashes, for an engine that hashes them itself; see `Shipment.weights`."""
        return self._shipment.weights()

    @property
    def transport(self) -> str:
        """Their transport."""
        return self._shipment.transport

    @property
    def changes(self) -> SentChanges | None:
        """What was sent, once all arrived; None if the sync sends all weights every time."""
        return self._shipment.changes

    @property
    def compute_dtype(self) -> torch.dtype:
        """The trainer's compute dtype."""
        dtype: torch.dtype = getattr(torch, self._origin.compute_dtype)
        return dtype

    @property
    def probe(self) -> Probe | None:
        """What the trainer scored before it sent its weights."""
        return self._origin.probe

    def log_probs(self, batch: Sequences) -> Tensor:
        """The trainer's log-probs of `probe`, computed before it sent its weights."""
        probe = self._origin.probe
        if probe is None or not torch.equal(batch.input_ids, probe.batch().input_ids):
            raise SyncError(
                f"{self._origin} come from another process, which cannot score tokens for this engine. Score only the "
                f"probe that came with them (source.probe); the engine's backend must declare that it probes.",
                code="sync.no-probe",
                role=self._origin.role,
                version=self._origin.version,
            )
        return torch.tensor(self._origin.scores).view(-1, probe.width)

    def check(self, receipt: Receipt) -> Receipt:
        """The receipt of an engine that loaded these weights, with their transport."""
        if (receipt.version, receipt.digest) != (self.version, self._shipment.digest):
            raise SyncError(
                f"{self._origin} have the digest {self._shipment.digest}, but the engine's receipt is for version "
                f"{receipt.version} with {receipt.digest}. The engine must digest the tensors that it received; sync "
                f"again.",
                code="sync.wrong-receipt",
                role=self._origin.role,
                version=self._origin.version,
                expected=self._shipment.digest,
                found=receipt.digest,
            )
        return receipt._replace(transport=self._shipment.transport)


class ReceivedAdapter(ReceivedWeights):
    """The weights of an adapter only; it is `flowrl.protocols.protocols.Adapted`."""

    @property
    def adapter_of(self) -> str:
        """What the adapter is added to, and how."""
        assert self._origin.adapter_of is not None
        return self._origin.adapter_of

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter's names and tensors; see `weights`."""
        return self.weights()


def received(origin: Origin, shipment: Shipment) -> ReceivedWeights:
    """Full weights, or an adapter, depending on `origin`."""
    return ReceivedWeights(origin, shipment) if origin.adapter_of is None else ReceivedAdapter(origin, shipment)


class Manifest:
    """The tensors of a shipment that have arrived, to be checked against those that were sent."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._arrived: dict[str, str] = {}

    def enter(self, name: str, tensor: Tensor, sent: str | None) -> Weight:
        """Register a tensor that was sent with this digest; None if no tensor of this name was sent."""
        if sent is None or name in self._arrived:
            raise self._origin.damaged(f"{name} was not sent, or arrived twice")
        self._arrived[name] = sent
        return Weight(name, tensor, sent)

    def finish(self, sent: Mapping[str, str]) -> str:
        """The digest of all weights, once all have arrived; `sent` are the digests at the trainer."""
        if missing := sorted(sent.keys() - self._arrived.keys()):
            raise SyncError(
                f"{self._origin} are incomplete: {', '.join(missing[:5])} did not arrive. Sync again.",
                code="sync.damaged",
                role=self._origin.role,
                version=self._origin.version,
                missing=missing[:5],
            )
        if wrong := sorted(name for name, digest in self._arrived.items() if sent.get(name) != digest):
            raise self._origin.damaged(f"{', '.join(wrong[:5])} differ from the digests that the trainer sent last")
        return combine(self._arrived)

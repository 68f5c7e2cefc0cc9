"""`Export`: weights for engines in other processes of the machine, in Ray's object store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
import torch
from torch import Tensor

from flowrl.sync.buckets import in_buckets
from flowrl.sync.digest import combine, tensor_digest
from flowrl.sync.received import Manifest, Origin, ReceivedWeights, Weight
from flowrl.sync.shadow import Shadow


@dataclass(frozen=True)
class Export:
    """Weights in the object store; a `flowrl.sync.received.Shipment`.

    The only transport if the trainer takes turns with the engine on a slot, because it sleeps when the engine receives.
    Between two CPU processes of one machine it takes half to three quarters of the time of a gloo stream, for 0.5 to
    261 MiB (`benchmarks/ray_sync.py`).

    It needs additional memory for one bucket in the trainer's process (CPU memory for weights on a GPU; plus that of
    gathering sharded weights, see the backend), for all weights in the object store until received, and for one tensor
    in the receiving process.

    Args:
        digests: the `tensor_digest` of each sent tensor.
        buckets: references to lists of tensors: name, dtype, shape and bytes of each.
    """

    origin: Origin
    digests: Mapping[str, str]
    nbytes: int
    buckets: tuple[Any, ...]

    transport: ClassVar[str] = "object store"
    changes: ClassVar[None] = None

    @property
    def digest(self) -> str:
        """The digest of all weights, which the receipt must have."""
        return combine(self.digests)

    @staticmethod
    def joined(shares: Sequence[Export]) -> Export:
        """Those of all senders, together all weights."""
        digests = {name: digest for share in shares for name, digest in share.digests.items()}
        buckets = tuple(bucket for share in shares for bucket in share.buckets)
        return Export(shares[0].origin, digests, sum(share.nbytes for share in shares), buckets)

    @staticmethod
    def of(origin: Origin, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Export:
        """Put weights into the object store, bucket by bucket of at most `bucket_bytes`."""
        references: list[Any] = []
        digests: dict[str, str] = {}
        nbytes = 0
        for bucket in in_buckets(weights, bucket_bytes):
            entries = []
            for name, tensor in bucket:
                raw = tensor.detach().cpu().contiguous()
                digests[name] = tensor_digest(name, raw)
                array = raw.reshape(-1).view(torch.uint8).numpy()  # no copy; `ray.put` copies
                entries.append((name, str(raw.dtype).removeprefix("torch."), tuple(raw.shape), array))
                nbytes += raw.nbytes
            references.append(ray.put(entries))
        return Export(origin, digests, nbytes, tuple(references))

    def open(self, rank: int, shadow: Shadow | None = None) -> AbstractContextManager[ReceivedWeights]:
        """The weights for a rank of the engine, within the block; `shadow` is its copy of the last ones."""
        return nullcontext((shadow or Shadow()).incoming(self.origin, self))

    def weights(self) -> Iterator[Weight]:
        """The received weights; see `flowrl.sync.received.Shipment`."""
        manifest = Manifest(self.origin)
        for reference in self.buckets:
            for name, dtype, shape, raw in ray.get(reference):
                own = torch.from_numpy(raw.copy())  # the store is read-only
                tensor = own.view(getattr(torch, dtype)).reshape(shape)
                yield manifest.enter(name, tensor, self.digests.get(name))
        manifest.finish(self.digests)

"""Weights on their way to engines in other processes of the machine, through Ray's object store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
import torch
from torch import Tensor

from flowrl.sync.digest import combine, tensor_digest
from flowrl.sync.source import Origin, Source, Tally, source_of

Bucket = list[tuple[str, str, tuple[int, ...], Any]]  # name, dtype, shape, bytes


@dataclass(frozen=True)
class Export:
    """Weights in the object store.

    Beside the weights themselves there is at most one bucket in the memory of the trainer's process (for weights on
    a GPU: of the CPU's memory; where they are sharded, what gathering them takes comes on top, see the backend), one
    copy of all weights in the object store until they are received, and one tensor in the memory of the receiving
    process, besides what its engine keeps.

    Args:
        origin: whose weights they are.
        digests: the `tensor_digest` of each tensor as it was sent.
        nbytes: of all tensors.
        buckets: references to lists of tensors.
    """

    origin: Origin
    digests: Mapping[str, str]
    nbytes: int
    buckets: tuple[Any, ...]

    transport: ClassVar[str] = "object store"

    @property
    def digest(self) -> str:
        """Of all weights; what the receipt must bear."""
        return combine(self.digests)

    @staticmethod
    def of(origin: Origin, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Export:
        """Put weights into the object store, bucket by bucket."""
        buckets: list[Any] = []
        bucket: Bucket = []
        digests: dict[str, str] = {}
        size = total = 0
        for name, tensor in weights:
            if bucket and size + tensor.nbytes > bucket_bytes:
                buckets.append(ray.put(bucket))
                bucket, size = [], 0
            raw = tensor.detach().cpu().contiguous()
            digests[name] = tensor_digest(name, raw)
            array = raw.reshape(-1).view(torch.uint8).numpy()  # no copy: it is made when the bucket is put
            bucket.append((name, str(raw.dtype).removeprefix("torch."), tuple(raw.shape), array))
            size, total = size + raw.nbytes, total + raw.nbytes
        if bucket:
            buckets.append(ray.put(bucket))
        return Export(origin, digests, total, tuple(buckets))

    def open(self, rank: int) -> AbstractContextManager[Source]:
        """The weights for a rank of the engine, which may take them within the block."""
        return nullcontext(source_of(self.origin, self))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights as they were sent; see `flowrl.sync.source.Cargo`."""
        tally = Tally(self.origin)
        for reference in self.buckets:
            for name, dtype, shape, raw in ray.get(reference):
                tensor = (
                    torch.from_numpy(raw.copy()).view(getattr(torch, dtype)).reshape(shape)
                )  # the store is read-only
                tally.take(name, tensor, self.digests.get(name))
                yield name, tensor
        tally.finish(self.digests)

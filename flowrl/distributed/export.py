"""Weights on their way from a trainer to engines in other processes of the node, through the object store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import Tensor

from flowrl.digest import combine, tensor_digest
from flowrl.errors import SyncError
from flowrl.records import Receipt

BUCKET_BYTES = 256 << 20
"""Weights leave a trainer in buckets of at most this size (a larger tensor is a bucket of its own)."""

Bucket = list[tuple[str, str, tuple[int, ...], Any]]  # name, dtype, shape, bytes


@dataclass(frozen=True)
class Export:
    """Weights of one version: what stands in for a trainer where they are received.

    Beside the weights themselves there is at most one bucket in the memory of the trainer's process (for weights on
    a GPU: of the CPU's memory; where they are sharded, what gathering them takes comes on top, see the backend), one
    copy of all weights in the object store until they are received, and one tensor in the memory of the receiving
    process, besides what its engine keeps.

    Args:
        role: of the trainer.
        version: of its weights.
        digests: the `tensor_digest` of each tensor as it was sent.
        nbytes: of all tensors.
        buckets: references to lists of tensors.
    """

    role: str
    version: int
    digests: Mapping[str, str]
    nbytes: int
    buckets: tuple[Any, ...]

    transport = "object store"

    @property
    def digest(self) -> str:
        """Of all weights; what the receipt must bear."""
        return combine(self.digests)

    @staticmethod
    def of(
        role: str,
        version: int,
        weights: Iterable[tuple[str, Tensor]],
        bucket_bytes: int,
        adapter_of: str | None = None,
    ) -> Export:
        """Put weights into the object store, bucket by bucket; with `adapter_of` they are an adapter's alone."""
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
        if adapter_of is not None:
            return AdapterExport(role, version, digests, total, tuple(buckets), adapter_of)
        return Export(role, version, digests, total, tuple(buckets))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights as they were sent.

        Raises:
            SyncError: a tensor is not what was sent, was not sent at all, or has not arrived.
        """
        due = dict(self.digests)
        for reference in self.buckets:
            for name, dtype, shape, raw in ray.get(reference):
                tensor = (
                    torch.from_numpy(raw.copy()).view(getattr(torch, dtype)).reshape(shape)
                )  # the store is read-only
                sent = due.pop(name, None)
                if sent != tensor_digest(name, tensor):
                    what = "was not sent, or twice" if sent is None else "is not what was sent"
                    raise SyncError(f"{self._named()} are damaged: {name} {what}; sync again.")
                yield name, tensor
        if due:
            raise SyncError(f"{self._named()} are not whole: {', '.join(sorted(due)[:5])} did not arrive; sync again.")

    def check(self, receipt: Receipt) -> Receipt:
        """The receipt of an engine that took these weights over, with the transport that they came by.

        Raises:
            SyncError: it is for other weights.
        """
        if (receipt.version, receipt.digest) != (self.version, self.digest):
            raise SyncError(
                f"{self._named()} have the digest {self.digest}, and the receipt is for version {receipt.version} with "
                f"{receipt.digest}; expected the same on both sides: the engine must digest what it received, and "
                f"sync again."
            )
        return receipt._replace(transport=self.transport)

    def _named(self) -> str:
        return f"the weights of {self.role} at version {self.version}"


@dataclass(frozen=True)
class AdapterExport(Export):
    """The weights of an adapter alone; see `flowrl.engines.Adapted`.

    Args:
        adapter_of: what the adapter is added to, and how.
    """

    adapter_of: str

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter as it was sent; raises as `weights` does."""
        return self.weights()

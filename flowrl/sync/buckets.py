"""Weights in buckets: some tensors at a time, so that no process needs a second copy of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from flowrl.data.balance import deal
from flowrl.sync.digest import algorithm_for, tensor_digest

BUCKET_BYTES = 256 << 20
"""The default maximum bytes of a bucket (a larger tensor gets its own bucket)."""

_ALIGNED = 16  # bytes: packed tensors start at multiples of it, so that their memory can be viewed as any dtype


def aligned(nbytes: int) -> int:
    """The bytes of a tensor in memory that it shares with others, so that each can be viewed as any dtype."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


Entry = tuple[str, str, list[int], str]
"""The header of a packed tensor: name, dtype, shape, digest."""


def _nbytes(tensor: Tensor) -> int:
    return tensor.nbytes


def in_buckets(
    weights: Iterable[tuple[str, Tensor]], bucket_bytes: int, size: Callable[[Tensor], int] = _nbytes
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Weights in order, in buckets of at most `bucket_bytes`; a larger tensor gets its own bucket.

    `size` returns the bytes of a tensor in a bucket. Read each bucket completely before the next; one tensor is
    prefetched.
    """
    coming = iter(weights)
    ahead = next(coming, None)

    def bucket() -> Iterator[tuple[str, Tensor]]:
        nonlocal ahead
        room = bucket_bytes
        first = True
        while ahead is not None and (first or size(ahead[1]) <= room):
            room -= size(ahead[1])
            first = False
            yield ahead
            ahead = next(coming, None)

    while ahead is not None:
        yield bucket()


def in_rounds(sizes: Sequence[int], shares: int, bucket_bytes: int) -> Iterator[Sequence[list[int]]]:
    """Deal weights to several senders: in each round, the weights of each one, at most `bucket_bytes` of them, or a
    larger one. The shares have about equal bytes; see `flowrl.data.balance.deal`."""
    parts: list[list[list[int]]] = [[] for _ in range(shares)]
    rooms = [0] * shares
    for item, share in enumerate(deal(sizes, shares)):
        if not parts[share] or sizes[item] > rooms[share]:
            parts[share].append([])
            rooms[share] = bucket_bytes
        parts[share][-1].append(item)
        rooms[share] -= sizes[item]
    yield from zip_longest(*parts, fillvalue=[])


def packed(
    rounds: Iterable[Iterable[tuple[str, Tensor]]], bucket_bytes: int, device: torch.device
) -> Iterator[tuple[list[Entry], int, Tensor] | None]:
    """Pack weights into buckets that share one buffer, so each bucket is valid for one iteration of the loop.

    Yields the contents of each bucket, the bytes of its tensors, and uint8 ``[size]`` on the device; and None at the
    end of each round.
    """
    memory = torch.empty(0, dtype=torch.uint8)
    for weights in rounds:
        for bucket in in_buckets(weights, bucket_bytes, _room):
            entries: list[Entry] = []
            used = nbytes = 0
            for name, tensor in bucket:
                if used + _room(tensor) > len(memory):  # at the first tensor of a bucket, or never
                    memory = torch.empty(0, dtype=torch.uint8)  # before there are two
                    memory = torch.empty(max(bucket_bytes, _room(tensor)), dtype=torch.uint8, device=device)
                place = _view(memory, used, tensor.dtype, tensor.shape)
                place.copy_(tensor.detach())
                dtype = str(tensor.dtype).removeprefix("torch.")
                entries.append((name, dtype, list(tensor.shape), tensor_digest(name, place, algorithm_for(place))))
                used, nbytes = used + _room(tensor), nbytes + tensor.nbytes
                del place, tensor
            yield entries, nbytes, memory[:used]
        yield None


def unpacked(entries: Iterable[Entry], memory: Tensor) -> Iterator[tuple[str, Tensor, str]]:
    """The tensors of a packed bucket: names, copies, and the digests that they were packed with."""
    used = 0
    for name, dtype, shape, digest in entries:
        place = _view(memory, used, getattr(torch, dtype), torch.Size(shape))
        yield name, place.clone(), digest
        used += _room(place)


def _room(tensor: Tensor) -> int:
    return (tensor.nbytes // _ALIGNED + 1) * _ALIGNED


def _view(memory: Tensor, start: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    size = shape.numel() * dtype.itemsize
    return memory[start : start + size].view(dtype).view(shape)

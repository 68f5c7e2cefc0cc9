"""Which part of a tensor a process holds: on each axis some runs of indices, so that it is one box or several.

`DTensor` says how a tensor is placed on a device mesh; `held` turns that into indices, for any placement on any number
of axes. `overlap` finds what two parts have in common, so that a tensor that was written in one way can be read in any
other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

Runs = tuple[tuple[int, int], ...]
"""First index and length of runs of indices along an axis, in the order in which a local tensor has them."""

Part = tuple[Runs, ...]
"""The runs on each axis of a tensor; their product are its boxes."""


def whole(shape: Sequence[int]) -> Part:
    """The part that is a whole tensor."""
    return tuple(((0, size),) for size in shape)


def held(tensor: Tensor) -> Part:
    """The part of a tensor that this process holds."""
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    mesh: Any = tensor.device_mesh
    return part(tensor.shape, tensor.placements, mesh.shape, mesh.get_coordinate())


def first_holder(tensor: Tensor) -> bool:
    """Whether this process is the first of those that hold the same part of a sharded tensor."""
    assert isinstance(tensor, DTensor)
    coordinate: Any = tensor.device_mesh.get_coordinate()
    return all(at == 0 for at, place in zip(coordinate, tensor.placements, strict=True) if isinstance(place, Replicate))


def part(shape: Sequence[int], placements: Sequence[Any], sizes: Sequence[int], coordinate: Sequence[int]) -> Part:
    """The part at a `coordinate` of a mesh with these `sizes`.

    ``Shard(d)`` cuts axis ``d`` into equal pieces of which the last may be shorter or empty. ``_StridedShard(d, k)``
    cuts each of ``k`` equal pieces so: either because an inner axis of the mesh, of size ``k``, cuts ``d`` first (FSDP
    over tensor parallelism), or because ``k`` tensors are stored as one (the gate and up projections of experts).
    """
    runs = list(whole(shape))
    cuts = [axis for axis, place in enumerate(placements) if hasattr(place, "dim")]
    later = [axis for axis in cuts if _follows(axis, placements, sizes)]
    for axis in [*(axis for axis in cuts if axis not in later), *later]:
        place, size, at = placements[axis], sizes[axis], coordinate[axis]
        pieces = 1 if axis in later else getattr(place, "split_factor", 1)
        runs[place.dim] = sum((_cut(_cut(runs[place.dim], pieces, i), size, at) for i in range(pieces)), ())
    return tuple(runs)


def _follows(axis: int, placements: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether the placement on an axis of the mesh is a strided one that cuts what an inner axis has cut."""
    factor, dim = getattr(placements[axis], "split_factor", None), placements[axis].dim
    inner = [sizes[i] for i in range(axis + 1, len(sizes)) if getattr(placements[i], "dim", None) == dim]
    return factor is not None and factor in inner


def _cut(runs: Runs, pieces: int, at: int) -> Runs:
    """One of several equal pieces of the indices in `runs`."""
    each = -(-sum(size for _, size in runs) // pieces)
    skip, room, found = at * each, each, []
    for first, size in runs:
        start = min(skip, size)
        taken = min(size - start, room)
        skip, room = skip - start, room - taken
        if taken:
            found.append((first + start, taken))
    return tuple(found)


def lengths(part: Part) -> tuple[int, ...]:
    """The shape of the local tensor of a part."""
    return tuple(sum(size for _, size in runs) for runs in part)


def overlap(one: Part, other: Part) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """The boxes that two parts of a tensor have in common, each as slices of the local tensors of both."""
    yield from (
        (tuple(here for here, _ in box), tuple(there for _, there in box))
        for box in product(*(list(_common(*runs)) for runs in zip(one, other, strict=True)))
    )


def _common(one: Runs, other: Runs) -> Iterator[tuple[slice, slice]]:
    """The runs that two lists have in common, as slices of their concatenations."""
    here = 0
    for first, size in one:
        there = 0
        for start, length in other:
            low, high = max(first, start), min(first + size, start + length)
            if low < high:
                yield (
                    slice(here + low - first, here + high - first),
                    slice(there + low - start, there + high - start),
                )
            there += length
        here += size


def count(part: Part) -> int:
    """The number of elements of a part."""
    return torch.Size(lengths(part)).numel()

"""Which parts of a tensor a process of a mesh holds: the axis ``tensor`` or ``expert`` cuts it first, FSDP the rows of
what is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.tensor import DTensor, Replicate, Shard


class Cut(NamedTuple):
    """How an axis of a mesh cuts a tensor: along `dim`, each of `blocks` equal blocks of it (of weights that are stored
    fused, such as gate and up projections)."""

    dim: int
    blocks: int = 1
    axis: str = "tensor"


class Box(NamedTuple):
    """A part of a tensor: its place in what the process holds, and in the whole tensor."""

    local: tuple[slice, ...]
    whole: tuple[slice, ...]

    def common(self, other: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Where what both have is: in what the process of each holds; None if they have nothing in common."""
        here, there = [], []
        for mine, own, theirs, their in zip(self.whole, self.local, other.whole, other.local, strict=True):
            low, high = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
            if low >= high:
                return None
            here.append(slice(own.start + low - mine.start, own.start + high - mine.start))
            there.append(slice(their.start + low - theirs.start, their.start + high - theirs.start))
        return tuple(here), tuple(there)


class Place(NamedTuple):
    """A process among those that hold a tensor: its number, and how many there are, on the axis that cuts it, and by
    FSDP."""

    part: int
    parts: int
    shard: int
    shards: int


def cut_of(tensor: DTensor) -> Cut | None:
    """How the axis ``tensor`` or ``expert`` cuts a sharded tensor; None if all of its processes hold the same."""
    names = tensor.device_mesh.mesh_dim_names or ()
    for name, placement in zip(names, tensor.placements, strict=False):
        if name in ("tensor", "expert") and not isinstance(placement, Replicate):
            dim: int = placement.dim  # type: ignore[attr-defined]
            # Packed weights are `_StridedShard`, which is no `Shard`.
            blocks = 1 if isinstance(placement, Shard) else int(placement.split_factor)  # type: ignore[attr-defined]
            return Cut(dim % tensor.ndim, blocks, name)
    return None


def part(total: int, number: int, count: int) -> tuple[int, int]:
    """First element of a part, and one past the last, of `count` as equal as torch's; the last ones may be empty."""
    each = -(-total // count)
    return min(number * each, total), min((number + 1) * each, total)


def boxes(shape: Sequence[int], cut: Cut | None, place: Place) -> list[Box]:
    """The parts of a tensor of this `shape` that a process holds: one for each block; none if it has no rows."""
    dim, spans = 0, [(0, shape[0])]
    if cut is not None:
        dim, block = cut.dim, shape[cut.dim] // cut.blocks
        begin, end = part(block, place.part, place.parts)
        spans = [(start + begin, start + end) for start in range(0, cut.blocks * block, block)]
    rows = sum(end - start for start, end in spans) if dim == 0 else shape[0]
    first, last = part(rows, place.shard, place.shards)
    found, before = [], 0
    for start, end in spans:
        local, whole = ([slice(0, size) for size in shape] for _ in range(2))
        if dim:
            local[0], whole[0] = slice(0, last - first), slice(first, last)
            local[dim], whole[dim] = slice(before, before + end - start), slice(start, end)
        else:
            low, high = max(first, before), min(last, before + end - start)
            local[0], whole[0] = slice(low - first, high - first), slice(start + low - before, start + high - before)
        before += end - start
        if whole[0].start < whole[0].stop and whole[dim].start < whole[dim].stop:
            found.append(Box(tuple(local), tuple(whole)))
    return found


def local_shape(shape: Sequence[int], cut: Cut | None, place: Place) -> tuple[int, ...]:
    """The shape of what a process holds."""
    sides = list(shape)
    if cut is not None:
        begin, end = part(shape[cut.dim] // cut.blocks, place.part, place.parts)
        sides[cut.dim] = cut.blocks * (end - begin)
    first, last = part(sides[0], place.shard, place.shards)
    return (last - first, *sides[1:])

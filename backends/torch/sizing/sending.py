"""The memory of a sync in a process of a trainer, which gathers shards of weights and packs them into buckets."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

from flowrl.backends.torch.sizing.weights import FLOAT, Model, Weight, weights_of
from flowrl.protocols.mesh import Mesh
from flowrl.sync.buckets import in_buckets, in_rounds

_AXES = ("fsdp", "weights")
"""The axis on which processes differ that have the shards of a weight, by whether another axis cuts it."""


class Shard(NamedTuple):
    """A weight of which only sizes count, in bytes as it is sent.

    Args:
        nbytes: of all of it.
        own: of the first process's shard.
        cut: whether the axis ``tensor`` or ``expert`` cuts it, so that it is joined from parts.
        rounded: of the shard, if it is rounded before it is gathered.
    """

    nbytes: int
    own: int
    cut: bool
    rounded: int


class Piece(NamedTuple):
    """A weight, or several that are `converted` together; see `flowrl.sync.pieces.Piece`."""

    shards: tuple[Shard, ...]
    converted: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(shard.nbytes for shard in self.shards)


@functools.cache
def sending_bytes(
    model: Model, mesh: Mesh | None, limit: int, dtype: str, transport: str = "nccl", device: str = "cuda"
) -> int:
    """The most bytes on the device of a process, besides its shards, while a model on `mesh` is sent to an engine in
    `dtype`, in buckets of at most `limit` bytes.

    It follows `flowrl.backends.torch.train.shards`, allocation by allocation: each process gathers and sends a share in
    rounds, or, by CUDA IPC, all weights.

    Args:
        mesh: None has one process without shards.
        transport: see `flowrl.sync.route.choose`.
    """
    pieces = pieces_of(model, mesh or Mesh(), dtype)
    if mesh is None or transport == "cuda ipc":
        live = _Live(mesh or Mesh(), limit, transport, device)
        if mesh is None:
            live.whole(pieces)
        else:
            live.all(pieces)
        return live.most
    rounds = [
        [[pieces[number] for number in share] for share in shares]
        for shares in in_rounds([piece.nbytes for piece in pieces], mesh.shares, limit)
    ]
    sizes = [[_sizes([shard for piece in share for shard in piece.shards]) for share in one] for one in rounds]
    groups = [{rank: members for members in mesh.together(axis) for rank in members} for axis in _AXES]
    most = 0
    for share in range(mesh.shares):
        live = _Live(mesh, limit, transport, device)
        for shares, each in zip(rounds, sizes, strict=True):
            packed = [sum(each[rank][cut] for rank in groups[cut][share]) for cut in (False, True)]
            live.share(shares[share], packed)
        most = max(most, live.most)
    return most


def pieces_of(model: Model, mesh: Mesh, dtype: str) -> list[Piece]:
    """What a sync sends, in order."""
    own = weights_of(model._replace(tensor=mesh.tensor, expert=mesh.expert)).sent
    found = []
    for one, mine in zip(weights_of(model._replace(tensor=1, expert=1)).sent, own, strict=True):
        width, shards = one.width(dtype), []
        for whole, part in zip(one.shapes, mine.shapes, strict=True):
            cut = whole != part
            experts = cut and mesh.expert > 1 and len(whole) == 3 and whole[1:] == part[1:]
            numbers = width * Weight(part, False, 0, experts).numbers(mesh)
            shards.append(Shard(width * math.prod(whole), numbers, cut, numbers * (width < FLOAT)))
        found.append(Piece((*shards,), one.converted))
    return found


def _sizes(shards: Sequence[Shard]) -> list[int]:
    """Bytes of the first process's shards, of weights that no axis cuts, and of the others."""
    return [sum(shard.own for shard in shards if shard.cut == cut) for cut in (False, True)]


class _Live:
    """Bytes that are alive in a process, `now` and at `most`."""

    def __init__(self, mesh: Mesh, limit: int, transport: str, device: str) -> None:
        self.now = self.most = 0
        self._members, self._limit = [len(mesh.together(axis)[0]) for axis in _AXES], limit
        self._buffered = transport != "object store"
        self._keeps = transport == "object store" and device == "cpu"  # tensors of a bucket until it is stored
        self._buffer = self._kept = self._room = 0

    def whole(self, pieces: Sequence[Piece]) -> None:
        """Round and send all pieces, one after the other."""
        for piece in pieces:
            self._add(rounded := sum(shard.rounded for shard in piece.shards))
            self._send(piece, rounded)

    def share(self, pieces: Sequence[Piece], packed: Sequence[int]) -> None:
        """Gather pieces in a round in which this process sends `packed` bytes to others, and send them."""
        with self._gathering([shard for piece in pieces for shard in piece.shards], packed) as take:
            for piece in pieces:
                sizes = [take(shard) for shard in piece.shards]
                self._send(piece, sum(sizes))
        self._drop()

    def all(self, pieces: Sequence[Piece]) -> None:
        """Gather and send all pieces in buckets: those that are converted by themselves, the others together."""
        for converted, run in groupby(pieces, lambda piece: piece.converted):
            for together in ([piece] for piece in run) if converted else [list(run)]:
                shards, held = [shard for piece in together for shard in piece.shards], 0
                ahead = iter([*(shard.rounded for shard in shards[1:]), 0])
                buckets = in_buckets([("", shard) for shard in shards], self._limit)  # type: ignore[misc]
                each: list[list[Shard]] = [[shard for _, shard in bucket] for bucket in buckets]  # type: ignore[misc]
                for number, bucket in enumerate(each, 1):
                    rounded = sum(shard.rounded for shard in bucket) + [next(ahead) for _ in bucket][-1]
                    self._add(rounded)
                    with self._gathering(bucket, _sizes(bucket)) as take:
                        for shard in bucket:
                            if converted:
                                held += take(shard)
                            else:
                                self._send(Piece((shard,), False), take(shard))
                        if converted and number == len(each):
                            self._send(together[0], held)
                    rows = [shard for shard in bucket if not shard.cut]
                    view = self._members[0] * rows[0].own if rows == bucket[-1:] else 0  # and so all that was gathered
                    view *= not converted or number < len(each)
                    self.now += view - rounded
                    held += view * converted
                    self._kept += view * (not converted)

    @contextmanager
    def _gathering(self, shards: Sequence[Shard], packed: Sequence[int]) -> Iterator[Callable[[Shard], int]]:
        """In the block `shards` are gathered. What it yields copies one out of what was gathered, and returns the bytes
        of the copy; the only one of an axis is no copy."""
        gathered = [members * size for members, size in zip(self._members, _sizes(shards), strict=True)]
        for size, sent in zip(gathered, packed, strict=True):
            self._add(size + sent)
            self.now -= sent
        alone = [sum(shard.cut == cut for shard in shards) == 1 or self._members[cut] == 1 for cut in (False, True)]

        def take(shard: Shard) -> int:
            copy = 0 if alone[shard.cut] else shard.own * self._members[shard.cut]
            self._add(copy + shard.nbytes * shard.cut)
            self.now -= copy * shard.cut
            return shard.nbytes if shard.cut else copy

        yield take
        self.now -= sum(gathered)

    def _send(self, piece: Piece, taken: int) -> None:
        """Send a piece, whose tensors took so many bytes; those of the piece before go."""
        if piece.converted:  # the largest is copied, and all stay until the last is sent
            self._add(largest := max(shard.nbytes for shard in piece.shards))
            self.now -= largest
        if self._buffered:
            needed = max(self._limit, max(shard.nbytes for shard in piece.shards) * (not piece.converted))
            self._add(max(0, needed - self._buffer))
            self._buffer = max(needed, self._buffer)
        if not self._keeps or piece.nbytes > self._room:
            self._drop()
            self._room = self._limit
        self._kept, self._room = self._kept + taken, self._room - piece.nbytes
        if piece.converted:
            self._drop()

    def _drop(self) -> None:
        self.now -= self._kept
        self._kept = 0

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)

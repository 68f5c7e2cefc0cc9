"""The memory of optimizers: their states, and what a step takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flowrl.backends.torch.optimizers.specs import AdamW, Muon, Optimizer, is_matrix
from flowrl.backends.torch.optimizers.streamed import Offload, buckets
from flowrl.backends.torch.sizing.weights import FLOAT, Weight, Weights
from flowrl.protocols.mesh import Mesh
from flowrl.sync.buckets import BUCKET_BYTES, in_buckets

_BLOCK = 256
"""As `flowrl.backends.torch.optimizers.eight_bit.BLOCK`, which imports torchao."""

_FEWEST = 4096
"""The fewest numbers of a state that torchao stores in 8 bits."""


class Steps(NamedTuple):
    """The steps of an optimizer.

    Args:
        mesh: the processes, of which the first is meant.
        device: ``"cuda"`` or ``"cpu"``.
        sharded: parameters are shards, also on one rank.
    """

    optimizer: Optimizer
    weights: Weights
    mesh: Mesh
    device: str
    sharded: bool

    @property
    def states(self) -> int:
        """Bytes of the states of all parameters; torch keeps ``"step"`` on the CPU."""
        counted = FLOAT * (self.device == "cpu")
        return sum(self._state(one) + counted * ("step" in self._keys(one)) for one in self._trained)

    def peak(self, offload: Offload) -> int:
        """The most bytes that a step takes on the device, besides what stays there between steps."""
        if offload is True and self.device != "cpu":
            return 0
        if offload not in ("optimizer", "parameters"):
            return self._temporary(self._trained)
        moved = []
        for bucket in buckets([_Whole(one) for one in self._trained]):
            each = [whole.weight for whole in bucket]
            states = sum(map(self._state, each))
            parameters = 2 * FLOAT * sum(one.numbers(self.mesh) for one in each)
            moved.append((states if offload == "optimizer" else parameters) + self._temporary(each))
        return max(moved)

    @property
    def _eight_bit(self) -> bool:
        return isinstance(self.optimizer, AdamW) and self.optimizer.bits == 8

    @property
    def _trained(self) -> list[Weight]:
        return [one for one in self.weights.each if one.trained]

    def _keys(self, one: Weight) -> tuple[str, ...]:
        return self.optimizer.state_keys(_by_muon(one))

    def _state(self, one: Weight) -> int:
        """Bytes of the states of a parameter, without the count of steps."""
        numbers, count = one.numbers(self.mesh), sum(key != "step" for key in self._keys(one))
        if self._eight_bit and numbers >= _FEWEST and numbers % _BLOCK == 0:
            return count * (numbers + numbers // _BLOCK * FLOAT + 256 * FLOAT)  # codes, scales, and what codes mean
        return count * FLOAT * numbers

    def _temporary(self, stepped: Iterable[Weight]) -> int:
        """Bytes of what the step of some parameters makes and frees."""
        if self._eight_bit:
            # a parameter at a time: compiled on a GPU; on a CPU two states and their new ones, the change and its root
            return 0 if self.device == "cuda" else 6 * FLOAT * max(one.numbers(self.mesh) for one in stepped)
        # torch's foreach implementation makes a copy of a state for all parameters; it is torch's default on a GPU
        foreach = self.sharded or self.device == "cuda"
        copied = [one for one in stepped if foreach and len(self._keys(one)) > 1]
        found = FLOAT * sum(one.numbers(self.mesh) for one in copied)
        if isinstance(self.optimizer, Muon):
            return max(found, self._iterations([one for one in stepped if _by_muon(one)]))
        return found

    def _iterations(self, matrices: Sequence[Weight]) -> int:
        """Bytes of Muon's iterations on whole matrices, one after the other. Processes that share them gather them in
        buckets: their shards, which are also packed, all of a bucket, and copies of one."""
        parts = [self.mesh.expert if one.expert else self.mesh.tensor for one in matrices]
        wholes = [_Whole(one, part) for one, part in zip(matrices, parts, strict=True)]
        if not self.sharded:
            return max((_muon(whole) for whole in wholes), default=0)
        found = 0
        for bucket in in_buckets([("", whole) for whole in wholes], BUCKET_BYTES):  # type: ignore[misc]
            each: list[_Whole] = [whole for _, whole in bucket]  # type: ignore[misc]
            own, whole = (sum(sizes) for sizes in zip(*((one.own(self.mesh), one.nbytes) for one in each), strict=True))
            largest = max(each, key=_muon)
            copies = largest.copies(self.mesh) * largest.nbytes if len(each) > 1 else 0
            found = max(found, whole + own + max(own, copies + _muon(largest)))
        return found


class _Whole(NamedTuple):
    """A parameter of which only the size counts, in `parts` on an axis."""

    weight: Weight
    parts: int = 1

    @property
    def nbytes(self) -> int:
        return FLOAT * self.parts * self.weight.numbers()

    def own(self, mesh: Mesh) -> int:
        """Bytes of a process's shard."""
        return FLOAT * self.weight.numbers(mesh)

    def copies(self, mesh: Mesh) -> int:
        """How often it is copied out of what was gathered: from shards, and from parts. Experts lie in a row."""
        if self.weight.expert and self.parts > 1:
            return int(mesh.fsdp * mesh.tensor > mesh.expert)
        return 1 + (self.parts > 1)


def _by_muon(one: Weight) -> bool:
    return isinstance(one.group, int) and is_matrix(one.shape)


def _muon(one: _Whole) -> int:
    """Bytes of the iteration on a whole matrix: its float32, its bfloat16 and one more, two if it is tall, and two
    squares."""
    rows, columns = one.weight.shape[-2:]
    numbers = one.parts * one.weight.numbers()
    return numbers * (FLOAT + 2 * (2 + (rows > columns))) + 2 * 2 * numbers // max(rows, columns) * min(rows, columns)

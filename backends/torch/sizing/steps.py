"""The memory of optimizers: their states, and what a step takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flowrl.backends.torch.optimizers.specs import AdamW, Muon, Optimizer, is_matrix
from flowrl.backends.torch.optimizers.streamed import Offload, buckets
from flowrl.backends.torch.sizing.weights import FLOAT, Weight, Weights
from flowrl.protocols.mesh import Mesh

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
            return 0 if self.device == "cuda" else 5 * FLOAT * max(one.numbers(self.mesh) for one in stepped)
        # torch's foreach implementation makes a copy of a state for all parameters; it is torch's default on a GPU
        foreach = self.sharded or self.device == "cuda"
        copied = [one for one in stepped if foreach and len(self._keys(one)) > 1]
        found = FLOAT * sum(one.numbers(self.mesh) for one in copied)
        if isinstance(self.optimizer, Muon):
            return max(found, max((_muon(one) for one in stepped if _by_muon(one)), default=0))
        return found


class _Whole(NamedTuple):
    """A parameter of which only the size counts."""

    weight: Weight

    @property
    def nbytes(self) -> int:
        return FLOAT * self.weight.numbers()


def _by_muon(one: Weight) -> bool:
    return isinstance(one.group, int) and is_matrix(one.shape)


def _muon(one: Weight) -> int:
    """Bytes of the iteration on a whole matrix: its float32, its bfloat16 and three more, and two squares."""
    rows, columns = one.shape[-2:]
    return one.numbers() * (FLOAT + 4 * 2) + 2 * 2 * one.numbers() // max(rows, columns) * min(rows, columns)

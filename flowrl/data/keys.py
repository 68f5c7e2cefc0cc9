"""Keys: the source of all randomness.

Keys derive from names and numbers (seed, step, node, row id), never from a global generator, so that the random numbers
of a row do not depend on process, batch or order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from flowrl.errors import ParameterError, type_of

_SEPARATOR = "\x1f"


@dataclass(frozen=True)
class Key:
    """A 128-bit key. ``Key.of(seed)`` starts a family; `derive` names a child."""

    bits: int

    @staticmethod
    def of(seed: int) -> Key:
        """The root key of a seed.

        Raises:
            ParameterError: the seed is not an int.
        """
        if type(seed) is not int:
            raise ParameterError(
                f"The seed is {seed!r}, {type_of(seed)}. Pass an int, such as 0.",
                code="data.wrong-type",
                found=repr(seed),
            )
        return Key(0).derive("seed", seed)

    def derive(self, *parts: str | int) -> Key:
        """The child that `parts` name; different parts give independent children (xxh3-128)."""
        # a separator within a part is doubled, so that no two lists of parts share a text
        named = (f"{type(p).__name__}:{str(p).replace(_SEPARATOR, 2 * _SEPARATOR)}" for p in parts)
        text = _SEPARATOR.join([format(self.bits, "032x"), *named])
        return Key(xxhash.xxh3_128_intdigest(text.encode()))

    def generator(self) -> torch.Generator:
        """A CPU `torch.Generator` seeded with this key."""
        return torch.Generator().manual_seed(self.bits & (2**63 - 1))

    def response(self, row_id: str, turn: int = 0) -> Key:
        """The key of the random numbers of a row in a turn of its episode, counted from 0; a row without turns has turn
        0 alone.

        Turn 0 uses what `uniforms` of this key gives the row; later turns use independent numbers, whatever the lengths
        of the responses before them.
        """
        return self.derive(row_id, "turn", turn) if turn else self.derive(row_id)

    def numbers(self, count: int) -> Tensor:
        """Uniform numbers in [0, 1), float64 ``[count]`` (Philox, Salmon et al. 2011).

        The first ``k`` are the same for every `count` of at least ``k``.
        """
        return torch.from_numpy(np.random.Generator(np.random.Philox(key=self.bits)).random(count))

    def uniforms(self, row_ids: Iterable[str], count: int) -> Tensor:
        """Uniform numbers in [0, 1), float64 ``[rows, count]``, that depend on (key, row id) only; see `numbers`."""
        rows = [self.response(row).numbers(count) for row in row_ids]
        return torch.stack(rows) if rows else torch.empty(0, count, dtype=torch.float64)


def node_key(seed: int, step: int, node: str) -> Key:
    """The key of a node in a step of a run."""
    return Key.of(seed).derive("step", step, node)

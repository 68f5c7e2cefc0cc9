"""`RowMeans`: means over the tokens of each row in an update, and the entropy of each token, for the run's records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

ROW = "row_number"
"""The column with the row numbers of a micro-batch in its update."""


@dataclass(frozen=True)
class RowMeans:
    """What an update's objective reports of tokens (`Metrics.tokens`), by row, of the first pass over each row.

    What micro-batches add stays on its device until `of` and `entropies` read all of it at once.
    """

    _parts: list[tuple[Tensor, Tensor, Mapping[str, tuple[Tensor, Tensor]]]] = field(default_factory=list)
    _entropies: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def add(self, rows: Tensor, of_tokens: Mapping[str, tuple[Tensor, Tensor]], on: Tensor) -> None:
        """Add the sums and counts of some rows, by metric: `Metrics.of_tokens`, over the tokens of the mask `on`, all
        of a row, or some that no other part of its pass has."""
        self._parts.append((rows, _first(on), dict(of_tokens)))

    def add_entropies(self, rows: Tensor, entropies: Tensor, on: Tensor) -> None:
        """Add the entropies of some rows, float32 ``[rows response]``, 0 off the mask `on`."""
        self._entropies.append((rows, _first(on), entropies, on.any(-1)))

    def entropies(self) -> tuple[Tensor, Tensor] | None:
        """The rows with tokens, int64 ``[rows]`` in ascending order, and the entropies of their tokens, float32
        ``[rows response]``; None if there are none."""
        if not self._entropies:
            return None
        rows, token, entropies, live = (torch.cat(parts).cpu() for parts in zip(*self._entropies, strict=True))
        places = live.nonzero()[:, 0]
        parts = torch.stack([rows[places], token[places]], 1).numpy()
        found, first = np.unique(parts, axis=0, return_index=True)  # of each part, the first pass
        numbers, of = np.unique(found[:, 0], return_inverse=True)
        values = entropies[places[torch.from_numpy(first)]]
        if len(numbers) < len(found):
            values = values.new_zeros(len(numbers), values.shape[1]).index_add_(0, torch.from_numpy(of), values)
        return torch.from_numpy(numbers), values

    def of(self, key: str) -> dict[int, float]:
        """The means of a metric, by row number; rows without tokens are left out."""
        parts = [(rows, first, *of_tokens[key]) for rows, first, of_tokens in self._parts if key in of_tokens]
        if not parts:
            return {}
        columns = (torch.cat([part[i].double() for part in parts]).tolist() for i in range(4))
        found: dict[int, dict[int, tuple[float, float]]] = {}
        for row, first, total, count in zip(*columns, strict=True):
            if count:
                found.setdefault(int(row), {}).setdefault(int(first), (total, count))
        sums = {row: [sum(x) for x in zip(*parts.values(), strict=True)] for row, parts in found.items()}
        return {row: total / count for row, (total, count) in sums.items()}


def _first(on: Tensor) -> Tensor:
    """The first token of each row on a mask, which identifies a part of the row: int64 ``[rows]``."""
    return on.int().argmax(-1)

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

    _parts: list[tuple[Tensor, Mapping[str, tuple[Tensor, Tensor]]]] = field(default_factory=list)
    _entropies: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def add(self, rows: Tensor, of_tokens: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add the sums and counts of some rows, by metric: `Metrics.of_tokens`."""
        self._parts.append((rows, dict(of_tokens)))

    def add_entropies(self, rows: Tensor, entropies: Tensor, on: Tensor) -> None:
        """Add the entropies of some rows, float32 ``[rows response]``, 0 off the mask `on`."""
        self._entropies.append((rows, entropies, on.any(-1)))

    def entropies(self) -> tuple[Tensor, Tensor] | None:
        """The rows with tokens, int64 ``[rows]`` in ascending order, and the entropies of their tokens, float32
        ``[rows response]``; None if there are none."""
        if not self._entropies:
            return None
        rows, entropies, live = (torch.cat(parts).cpu() for parts in zip(*self._entropies, strict=True))
        places = live.nonzero()[:, 0]
        found, first = np.unique(rows[places].numpy(), return_index=True)
        return torch.from_numpy(found), entropies[places[torch.from_numpy(first)]]

    def of(self, key: str) -> dict[int, float]:
        """The means of a metric, by row number; rows without tokens are left out."""
        parts = [(rows, *of_tokens[key]) for rows, of_tokens in self._parts if key in of_tokens]
        if not parts:
            return {}
        rows, sums, counts = (torch.cat([part[i].double() for part in parts]).tolist() for i in range(3))
        found: dict[int, float] = {}
        for row, total, count in zip(rows, sums, counts, strict=True):
            if count:
                found.setdefault(int(row), total / count)
        return found

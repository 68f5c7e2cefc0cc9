"""`RowMeans`: means over the tokens of each row in an update, for the run's row summaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

ROW = "row_number"
"""The column with the row numbers of a micro-batch in its update."""


@dataclass(frozen=True)
class RowMeans:
    """What an update's objective reports of tokens (`Metrics.tokens`), by row, of the first pass over each row.

    The sums of micro-batches stay on their device until `of` reads them all at once.
    """

    _parts: list[tuple[Tensor, Mapping[str, tuple[Tensor, Tensor]]]] = field(default_factory=list)

    def add(self, rows: Tensor, of_tokens: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add the sums and counts of some rows, by metric: `Metrics.of_tokens`."""
        self._parts.append((rows, dict(of_tokens)))

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

"""Which rows go to which rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from flowrl.core.operators.operator import Granularity
from flowrl.data.balance import deal, weights_of
from flowrl.distributed.hosts.wire import Array


def shard(
    granularity: Granularity, rows: int, ranks: int, tokens: Array | None, groups: Sequence[str] | None
) -> list[Array]:
    """The rows of each rank: int64, ascending, every row exactly once; for ``"batch"`` all rows on every rank.

    Rows (or whole groups) are dealt out by their number of tokens; see `flowrl.data.balance.deal`. Without token counts
    every row weighs the same.

    Args:
        granularity: what may be split.
        rows: how many there are.
        ranks: how many parts; a part may be empty.
        tokens: int ``[rows]``, or None.
        groups: the `uid` of each row; wanted for ``"group"``.
    """
    everything = np.arange(rows)
    if ranks == 1 or granularity == "batch":
        return [everything] * ranks
    # As an update deals out its rows (`split_rows`), so that a rank trains on what it has scored.
    weights = weights_of(torch.zeros(rows) if tokens is None else torch.from_numpy(tokens)).numpy()
    unit = everything
    if granularity == "group":
        assert groups is not None
        _, unit = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    total = np.bincount(unit, weights=weights).astype(np.int64)
    rank_of = np.array(deal(total.tolist(), ranks), dtype=np.int64)
    return [everything[rank_of[unit] == rank] for rank in range(ranks)]

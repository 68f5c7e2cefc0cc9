"""The rows of each data rank."""

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
    """The rows of each data rank: int64, ascending, each row exactly once; for ``"batch"`` all rows on every rank.

    Rows or groups are distributed by tokens (int ``[rows]``), see `flowrl.data.balance.deal`; without token counts, all
    rows weigh the same. Some ranks may get none. `groups` has the `uid` of each row, for ``"group"``.
    """
    all_rows = np.arange(rows)
    if ranks == 1 or granularity == "batch":
        return [all_rows] * ranks
    # As in an update (`split_rows`), so that a rank trains on the rows that it scored.
    weights = weights_of(torch.zeros(rows) if tokens is None else torch.from_numpy(tokens)).numpy()
    unit = all_rows
    if granularity == "group":
        assert groups is not None
        _, unit = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    total = np.bincount(unit, weights=weights).astype(np.int64)
    rank_of = np.array(deal(total.tolist(), ranks), dtype=np.int64)
    return [all_rows[rank_of[unit] == rank] for rank in range(ranks)]

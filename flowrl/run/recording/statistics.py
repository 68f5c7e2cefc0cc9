"""Statistics of a step's row summaries: the spread of rewards, groups without spread, and advantages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

    from flowrl.core.operators.symbols import Edge

PASSED = 0.5
"""A row has solved its prompt if its score is above this."""

WEIGHTED = "/weighted"
"""``reward/<term>`` is the score of a term in a row, and with this suffix what it adds to the row's reward."""

_OF = {
    "reward/std": "score",
    "groups/reward_std": "score",
    "groups/all_right": "score",
    "groups/all_wrong": "score",
    "advantage/mean": "advantage",
    "advantage/std": "advantage",
    "advantage/max": "advantage",
}
"""By metric, the column that it is about."""


def statistics(table: pa.Table) -> dict[str, float]:
    """Metrics of a step's rows, as far as its graph has the columns.

    ``reward/std`` is over all rows, ``groups/reward_std`` the mean over groups of at least two rows;
    ``groups/all_right`` and ``groups/all_wrong`` are the shares of groups whose rows all have the same score, above
    `PASSED` or not. ``advantage/mean`` and ``advantage/std`` are over rows, of each row's mean over its tokens;
    ``advantage/max`` is the largest absolute advantage of a token.
    """
    live = table.filter(table["response_tokens"].to_numpy() > 0)
    found: dict[str, float] = {}
    score = _numbers(live, "score")
    if len(score):
        found["reward/std"] = float(score.std())
        if live["uid"].null_count == 0 and len(score) == len(live):
            found |= _of_groups(live["uid"].combine_chunks().dictionary_encode().indices.to_numpy(), score)
    advantage, largest = _numbers(live, "advantage"), _numbers(live, "advantage_max")
    if len(advantage):
        found |= {"advantage/mean": float(advantage.mean()), "advantage/std": float(advantage.std())}
        found["advantage/max"] = float(np.abs(largest).max())
    return found


def sources(edges: Mapping[str, Edge]) -> dict[str, str]:
    """By metric of `statistics`, the node that writes what it is about; `edges` are those of `RowSummaries`."""
    return {metric: edges[what].node for metric, what in _OF.items() if what in edges}


def _of_groups(group: Any, score: Any) -> dict[str, float]:
    """Statistics of groups with several rows."""
    sizes = np.bincount(group)
    order = np.argsort(group, kind="stable")
    parts = [part for part in np.split(score[order], np.cumsum(sizes)[:-1]) if len(part) > 1]
    if not parts:
        return {}
    alike = [part[0] for part in parts if part.min() == part.max()]
    right = sum(value > PASSED for value in alike)
    return {
        "groups/reward_std": float(np.mean([part.std() for part in parts])),
        "groups/all_right": right / len(parts),
        "groups/all_wrong": (len(alike) - right) / len(parts),
    }


def _numbers(table: pa.Table, name: str) -> Any:
    """The numbers of a column that are not null."""
    return table[name].drop_null().to_numpy().astype(np.float64)

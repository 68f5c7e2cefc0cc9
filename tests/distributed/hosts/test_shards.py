"""Shards: each row is on one rank, groups are not split, and ranks have a balanced number of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.distributed.hosts.shards import shard

RANKS = st.integers(1, 9)
TOKENS = st.lists(st.integers(0, 5000), max_size=40)


def loads(shares: list[np.ndarray], weights: list[int]) -> list[int]:
    return [sum(weights[row] for row in share) for share in shares]


@given(TOKENS, RANKS)
def test_rows_are_partitioned_with_balanced_tokens(tokens: list[int], ranks: int) -> None:
    shares = shard("row", len(tokens), ranks, np.array(tokens, dtype=np.int32), None)
    assert len(shares) == ranks
    assert sorted(row for share in shares for row in share.tolist()) == list(range(len(tokens)))
    for share in shares:
        assert share.dtype == np.int64
        assert share.tolist() == sorted(share.tolist())
    found = loads(shares, [n + 1 for n in tokens])
    assert max(found) <= sum(found) / ranks + max([n + 1 for n in tokens], default=0)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 6)), max_size=40), RANKS)
def test_groups_are_partitioned_unsplit_with_balanced_tokens(rows: list[tuple[int, int]], ranks: int) -> None:
    tokens, uids = [n for n, _ in rows], [f"prompt-{g}" for _, g in rows]
    shares = shard("group", len(rows), ranks, np.array(tokens, dtype=np.int32), uids)
    assert sorted(row for share in shares for row in share.tolist()) == list(range(len(rows)))
    owners = [{uids[row] for row in share} for share in shares]
    assert sum(map(len, owners)) == len(set(uids))  # no group on two ranks
    weights = [n + 1 for n in tokens]
    units = [sum(w for w, u in zip(weights, uids, strict=True) if u == uid) for uid in set(uids)]
    assert max(loads(shares, weights)) <= sum(weights) / ranks + max(units, default=0)


@given(TOKENS, RANKS)
def test_shards_are_deterministic(tokens: list[int], ranks: int) -> None:
    uids = [str(n % 3) for n in tokens]
    once, again = (shard("group", len(tokens), ranks, np.array(tokens, dtype=np.int64), uids) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_batch_granularity_gives_every_rank_all_rows(rows: int) -> None:
    assert [share.tolist() for share in shard("batch", rows, 3, None, None)] == [list(range(rows))] * 3


@pytest.mark.parametrize("granularity", ["row", "group"])
def test_surplus_ranks_get_no_rows(granularity: str) -> None:
    shares = shard(granularity, 2, 5, None, ["a", "b"])  # type: ignore[arg-type]
    assert sorted(len(share) for share in shares) == [0, 0, 0, 1, 1]
    assert all(share.dtype == np.int64 for share in shares)


@pytest.mark.parametrize("granularity", ["row", "group", "batch"])
def test_an_empty_batch_gives_empty_shards(granularity: str) -> None:
    assert [share.tolist() for share in shard(granularity, 0, 2, None, [])] == [[], []]  # type: ignore[arg-type]


def test_a_single_rank_has_all_rows_in_order() -> None:
    assert [s.tolist() for s in shard("group", 4, 1, np.array([9, 1, 5, 2]), None)] == [[0, 1, 2, 3]]


def test_a_long_row_balances_several_short_ones() -> None:
    shares = shard("row", 4, 2, np.array([10, 10, 10, 30]), None)
    assert [s.tolist() for s in shares] == [[3], [0, 1, 2]]


def test_without_tokens_rows_have_equal_weights() -> None:
    for tokens in (None, np.zeros(10, dtype=np.int32)):
        assert [len(s) for s in shard("row", 10, 4, tokens, None)] == [3, 3, 2, 2]


def test_groups_need_not_be_contiguous() -> None:
    shares = shard("group", 6, 2, None, ["b", "a", "b", "a", "c", "b"])
    assert sorted(s.tolist() for s in shares) == [[0, 2, 5], [1, 3, 4]]

"""Work is split into balanced parts, each item once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.data.balance import deal, split_rows


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 5))
def test_load_per_rank_is_at_most_the_average_plus_the_heaviest_item(weights: list[int], ranks: int) -> None:
    rank_of = deal(weights, ranks)
    loads = [sum(w for w, rank in zip(weights, rank_of, strict=True) if rank == r) for r in range(ranks)]
    assert sum(loads) == sum(weights)
    assert max(loads) <= sum(weights) / ranks + max(weights, default=0)


def test_ties_go_to_the_earlier_item_and_the_lower_rank() -> None:
    assert deal([5, 5, 5, 1], 2) == [0, 1, 0, 1]
    assert [share.tolist() for share in split_rows(torch.tensor([0, 0, 0, 0]), 2)] == [[0, 2], [1, 3]]


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 5))
def test_split_rows_balances_tokens_and_assigns_each_row_once(tokens: list[int], ranks: int) -> None:
    shares = split_rows(torch.tensor(tokens, dtype=torch.int64), ranks)
    assert len(shares) == ranks and sorted(torch.cat(shares).tolist()) == list(range(len(tokens)))
    assert all(share.tolist() == sorted(share.tolist()) for share in shares)
    loads = [sum(tokens[row] for row in share.tolist()) for share in shares]
    assert max(loads) - min(loads) <= max(tokens, default=0)
    assert max(map(len, shares)) > 0 or not tokens

"""Weights in buckets: their contents, and that tensors are gathered only when their bucket has room."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flowrl.sync.buckets import in_buckets, in_rounds, packed, unpacked
from flowrl.sync.digest import tensor_digest

Sizes = st.lists(st.integers(0, 40))


@given(Sizes, st.integers(1, 60))
@example([4, 4, 4], 8)  # two fill a bucket to the last byte
def test_buckets_are_filled_up_to_their_limit_in_order(sizes: list[int], limit: int) -> None:
    weights = [(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    buckets = [list(bucket) for bucket in in_buckets(weights, limit)]
    assert [name for bucket in buckets for name, _ in bucket] == [name for name, _ in weights]
    filled = [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets]
    assert all(bucket for bucket in buckets)
    assert all(size <= limit or len(bucket) == 1 for size, bucket in zip(filled, buckets, strict=True))
    following = [bucket[0][1].nbytes for bucket in buckets[1:]]
    assert all(size + more > limit for size, more in zip(filled, following, strict=False))


def test_buckets_read_one_tensor_ahead() -> None:
    read: list[int] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(4):
            read.append(i)
            yield str(i), torch.zeros(2)

    for bucket in in_buckets(weights(), 16):
        for name, _ in bucket:
            assert read[-1] == int(name)


@given(Sizes, st.integers(1, 5), st.integers(1, 60))
def test_each_tensor_has_one_sender_and_shares_are_about_equal(sizes: list[int], shares: int, limit: int) -> None:
    rounds = list(in_rounds(sizes, shares, limit))
    assert {len(one) for one in rounds} <= {shares}
    sent = [[item for one in rounds for item in one[share]] for share in range(shares)]
    assert sorted(item for share in sent for item in share) == list(range(len(sizes)))
    assert all(share == sorted(share) for share in sent)
    for items in (items for one in rounds for items in one):
        assert sum(sizes[item] for item in items) <= limit or len(items) == 1
    loads = [sum(sizes[item] for item in share) for share in sent]
    assert max(loads) <= sum(sizes) / shares + max(sizes, default=0)


@given(Sizes, st.integers(1, 200))
def test_packed_weights_round_trip(sizes: list[int], limit: int) -> None:
    weights = [(str(i), torch.arange(size, dtype=torch.float64)) for i, size in enumerate(sizes)]
    found, ends = [], []
    for bucket in packed([weights[:3], [], weights[3:]], limit, torch.device("cpu")):
        if bucket is None:
            ends.append(len(found))
        else:
            found += unpacked(bucket[0], bucket[2])
    assert ends == [min(3, len(sizes)), min(3, len(sizes)), len(sizes)]
    assert [(name, digest) for name, _, digest in found] == [(name, tensor_digest(name, own)) for name, own in weights]
    assert all(torch.equal(tensor, own) for (_, tensor, _), (_, own) in zip(found, weights, strict=True))

"""Weights in buckets: their contents, and that tensors are gathered only when their bucket has room."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flowrl.sync.buckets import in_buckets, packed, unpacked
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


@given(Sizes, st.integers(1, 200))
def test_packed_weights_round_trip(sizes: list[int], limit: int) -> None:
    weights = [(str(i), torch.arange(size, dtype=torch.float64)) for i, size in enumerate(sizes)]
    found = [
        weight
        for entries, _, memory in packed(weights, limit, torch.device("cpu"))
        for weight in unpacked(entries, memory)
    ]
    assert [(name, digest) for name, _, digest in found] == [(name, tensor_digest(name, own)) for name, own in weights]
    assert all(torch.equal(tensor, own) for (_, tensor, _), (_, own) in zip(found, weights, strict=True))

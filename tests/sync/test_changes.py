"""`Changes` against the tensors, and their bytes against the share of values that changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flowrl.sync.changes import Changes
from flowrl.sync.digest import tensor_digest

DIGEST = "0123456789abcdef" * 2
HEADER = 32


def changed(size: int, share: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor, and the same with about this share of its values replaced."""
    draw = torch.Generator().manual_seed(size)
    old = torch.randint(0, 100, (size,), generator=draw).to(dtype)
    return old, torch.where(torch.rand(size, generator=draw) < share, old + 1, old)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("share", [0.0, 0.0002, 0.01, 0.05, 0.2, 0.6, 1.0])
def test_packed_changes_restore_the_tensor(dtype: torch.dtype, share: float) -> None:
    for size in (0, 1, 8, 9, 300, 70_000):
        old, new = changed(size, share, dtype)
        changes = Changes.between(old, new)
        packed = changes.pack(DIGEST)
        assert len(packed) == changes.nbytes
        found, digest = Changes.unpack(packed, old)
        found.apply(old)
        assert digest == DIGEST and torch.equal(old, new)
        assert len(found.places) == int((new != changed(size, share, dtype)[0]).sum())


def test_the_digest_names_its_algorithm() -> None:
    old, new = changed(300, 0.1, torch.float32)
    for digest in (tensor_digest("a", new), tensor_digest("a", new, "hash64")):
        assert Changes.unpack(Changes.between(old, new).pack(digest), old)[1] == digest


def test_bits_are_compared_not_values() -> None:
    """NaN that stays is no change, and the sign of 0 is one."""
    old, new = torch.tensor([float("nan"), 0.0, 1.0]), torch.tensor([float("nan"), -0.0, 1.0])
    changes = Changes.between(old, new)
    assert changes.places.tolist() == [1]
    changes.apply(old)
    assert old.view(torch.int32).tolist() == new.view(torch.int32).tolist()


@pytest.mark.parametrize(("longest", "width"), [(255, 1), (65_535, 2)])
def test_gaps_at_the_limits_of_a_code(longest: int, width: int) -> None:
    """Gaps one below, at and above the code that stands for unchanged values, and several of them."""
    places, at = [], -1
    for gap in (0, longest - 1, longest, longest + 1, 2 * longest - 1, 2 * longest, 3 * longest + 7):
        at += gap + 1
        places.append(at)
    new = torch.zeros(at + 1, dtype=torch.bfloat16)
    new[places] = 1
    codes = sum(gap // longest + 1 for gap in (0, longest - 1, longest, longest + 1, 2 * longest - 1, 2 * longest))
    changes = Changes.between(torch.zeros_like(new), new)
    assert changes._place_bytes[width] == width * (codes + 3 + 1)
    found, _ = Changes.unpack(changes.pack(DIGEST), new)
    assert found.places.tolist() == places


@pytest.mark.parametrize("share", [0.003, 0.01, 0.02, 0.042, 0.11, 0.25])
def test_bfloat16_changes_take_at_most_twice_their_share_of_bytes(share: float) -> None:
    """The places included: a change takes two bytes for its value, and at most two for its place."""
    old, new = changed(400_000, share, torch.bfloat16)
    changes = Changes.between(old, new)
    found = len(changes.places) / changes.size
    assert changes.nbytes - HEADER <= 2 * found * old.nbytes
    assert changes.nbytes - HEADER <= (1.6 if share > 0.01 else 2) * found * old.nbytes

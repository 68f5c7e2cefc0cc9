"""`hash64` against its definition in Python's own integers, and what changes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flowrl.sync.digest import algorithm_of, has_digest, tensor_digest
from flowrl.sync.hash64 import hash64

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.bool)


def by_definition(tensor: Tensor) -> int:
    """Word by word, without torch's arithmetic: SplitMix64's output function (Steele et al. 2014, variant 13)."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    total = 0
    for i in range(0, len(raw), 8):
        x = (int.from_bytes(raw[i : i + 8], "little") + (i // 8 + 1) * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        total += x ^ x >> 31
    return total % 2**64


def tensors() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    flat = [torch.randint(0, 256, (n,), generator=draw, dtype=torch.uint8) for n in (0, 1, 7, 8, 9, 800, 4001)]
    typed = [torch.randn(24, 33, generator=draw).to(dtype) for dtype in DTYPES]
    return [*flat, *typed, typed[0].t(), flat[-1][3:], torch.tensor(2.5)]


@pytest.mark.parametrize("tensor", tensors(), ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}")
def test_it_equals_its_definition_for_any_block(tensor: Tensor) -> None:
    expected = by_definition(tensor)
    assert {hash64(tensor, block) for block in (1, 7, 64, 1 << 14)} == {expected} == {hash64(tensor)}


def test_the_outputs_of_splitmix64() -> None:
    """The hash of zeros is the sum of the generator's outputs from seed 0, of which the first are published
    (https://prng.di.unimi.it/splitmix64.c)."""
    outputs = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    for count in range(4):
        assert hash64(torch.zeros(count, dtype=torch.int64)) == sum(outputs[:count]) % 2**64


def test_each_bit_and_each_exchange_changes_it() -> None:
    values = torch.arange(1, 41).bfloat16()
    raw, found = values.view(torch.uint8), {hash64(values)}
    for byte in range(len(raw)):
        for bit in range(8):
            changed = raw.clone()
            changed[byte] ^= 1 << bit
            found.add(hash64(changed))
    assert len(found) == 1 + 8 * len(raw)
    for i in range(40):
        for j in range(i):
            swapped = values.clone()
            swapped[[i, j]] = values[[j, i]]
            found.add(hash64(swapped))
    signs = values.view(torch.int16) ^ -(1 << 15)  # the top bit of every value, which many sums of products miss
    assert len(found) == 1 + 8 * len(raw) + 40 * 39 // 2
    assert hash64(signs) not in found


def test_the_digest_has_name_dtype_and_shape_and_says_how_it_was_made() -> None:
    tensor = torch.zeros(4, 6)
    others = [("b", tensor), ("a", tensor.view(torch.int32)), ("a", tensor.view(6, 4)), ("a", torch.zeros(5, 6))]
    digest = tensor_digest("a", tensor, "hash64")
    assert (algorithm_of(digest), algorithm_of(tensor_digest("a", tensor))) == ("hash64", "xxh3")
    assert digest not in {tensor_digest(name, other, "hash64") for name, other in others}
    assert has_digest("a", tensor, digest) and has_digest("a", tensor, tensor_digest("a", tensor))
    assert not has_digest("a", tensor + 1, digest)


@pytest.mark.gpu
def test_a_gpu_has_the_bits_of_a_cpu() -> None:
    for tensor in tensors():
        assert hash64(tensor.cuda()) == hash64(tensor)

"""`hash64`: a hash of a tensor's bytes in integer operations of torch, on the device that has them.

xxh3 runs on a CPU, so weights on a GPU must be copied there first. Here the words ``w_i`` (64 bits, little-endian, the
last one padded with zeros) give

    ``hash64 = sum_i mix(w_i + (i + 1) G) mod 2**64``,

where ``mix`` is the finalizer of SplitMix64 (Steele et al. 2014, Fast Splittable Pseudorandom Number Generators; the
constants are its variant 13 by Stafford) and ``G`` its increment, the golden ratio. A sum of integers is exact, so
every device, number of threads and block size gives the same bits.

Collisions: ``mix`` and the sum before it are bijections, so a change within one word always changes the hash. For
changes in several words, wherever they are, take ``mix`` as a random function of its argument: the sum of the changed
terms is uniform, so two tensors of one length collide with a probability of ``2**-64``. This detects damage, such as
flipped, moved or missing bytes; like xxh3, it does not resist an adversary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 1 << 64

CPU_BLOCK = 1 << 14  # words whose terms fit into the cache
DEVICE_BLOCK = 1 << 22


def hash64(tensor: Tensor, block: int | None = None) -> int:
    """The hash of a tensor's bytes, from 0 to 2^64 - 1; the same for any `block`: the words that are hashed at once."""
    words = _words(tensor)
    block = block or (CPU_BLOCK if words.device.type == "cpu" else DEVICE_BLOCK)
    keys = torch.arange(1, min(block, len(words)) + 1, device=words.device) * _signed(_GOLDEN)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), block):
        part = words[start : start + block]
        total += _mixed(part + keys[: len(part)] + _signed(start * _GOLDEN)).sum()
    return int(total) % _WORD


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finalizer, in place."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x ^= _shifted(x, shift)
        x *= _signed(factor)
    x ^= _shifted(x, 31)
    return x


def _shifted(x: Tensor, bits: int) -> Tensor:
    """``x >> bits`` of unsigned words, whose high bits become 0."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 with the bits of a word."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


def _words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as int64, padded with zeros."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(raw) % 8 or raw.storage_offset() % 8:
        padded = raw.new_zeros(-(-len(raw) // 8) * 8)
        padded[: len(raw)] = raw
        raw = padded
    return raw.view(torch.int64)

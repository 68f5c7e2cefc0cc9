"""`Changes`: the values of a tensor that differ from an earlier one, and their encoding as bytes.

An update with a small learning rate changes few values of bfloat16 weights: the others round to what they were. The
places are sent as a mask (one bit for each value), or as the gaps between them (one or two bytes for each change),
whichever takes the fewest bytes; after them, or instead of them, nothing is compressed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from flowrl.sync.digest import digest_of_bytes, digest_to_bytes

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HEADER = struct.Struct("<B6x Q 17s")  # the coding, the number of changes, and a digest
_MASK = 0
_GAPS = {1: torch.uint8, 2: torch.uint16}
"""The codings of gaps: the bytes of each."""


@dataclass(frozen=True)
class Changes:
    """Changes of a tensor.

    Args:
        places: of the changes in the flat tensor, ascending: int64 ``[changes]``.
        values: the new bits: integers ``[changes]`` as wide as the tensor's values.
        size: the number of values in the tensor.
    """

    places: Tensor
    values: Tensor
    size: int

    @staticmethod
    def between(old: Tensor, new: Tensor) -> Changes:
        """The changes from one tensor to another of its dtype and shape, on the device of the new one."""
        before, after = _bits(old).to(new.device), _bits(new)
        places = _different(before, after)
        return Changes(places, after.index_select(0, places), len(after))

    def apply(self, tensor: Tensor) -> None:
        """Change a contiguous tensor in place."""
        _bits(tensor).scatter_(0, self.places.to(tensor.device), self.values.to(tensor.device))

    @property
    def nbytes(self) -> int:
        """The bytes of `pack`."""
        return _HEADER.size + self.values.nbytes + min(self._place_bytes.values())

    def pack(self, digest: str) -> Tensor:
        """The changes with the digest of the changed tensor: uint8 ``[nbytes]``."""
        coding = min(self._place_bytes, key=self._place_bytes.__getitem__)
        places = self._mask() if coding == _MASK else _codes(self._gaps, coding)
        head = _HEADER.pack(coding, len(self.places), digest_to_bytes(digest))
        header = torch.frombuffer(bytearray(head), dtype=torch.uint8).to(places.device)
        return torch.cat([header, self.values.view(torch.uint8), places])

    @staticmethod
    def unpack(packed: Tensor, tensor: Tensor) -> tuple[Changes, str]:
        """What `pack` packed of the changes of a tensor, and the digest."""
        coding, count, digest = _HEADER.unpack(packed[: _HEADER.size].cpu().numpy().tobytes())
        end = _HEADER.size + count * tensor.itemsize
        values = packed[_HEADER.size : end].view(_bits(tensor).dtype)
        raw = packed[end:].clone()  # where any dtype fits
        places = _places_of_mask(raw) if coding == _MASK else _places_of_codes(raw, coding)
        return Changes(places, values, tensor.numel()), digest_of_bytes(digest)

    @cached_property
    def _gaps(self) -> Tensor:
        """The unchanged values before each change."""
        return self.places.diff(prepend=self.places.new_tensor([-1])) - 1

    @cached_property
    def _place_bytes(self) -> dict[int, int]:
        """The bytes of all places, by coding."""
        wide = self._gaps[self._gaps >= _longest(1)]
        codes = {width: len(self.places) + int((wide // _longest(width)).sum()) for width in _GAPS}
        return {_MASK: -(-self.size // 8)} | {width: width * count for width, count in codes.items()}

    def _mask(self) -> Tensor:
        mask = torch.zeros(-(-self.size // 8) * 8, dtype=torch.uint8, device=self.places.device)
        mask[self.places] = 1
        return (mask.view(-1, 8) << _bit_numbers(mask)).sum(1, dtype=torch.uint8)


def _bits(tensor: Tensor) -> Tensor:
    """The values of a tensor as flat integers."""
    return tensor.detach().contiguous().reshape(-1).view(_BITS[tensor.itemsize])


def _different(one: Tensor, other: Tensor) -> Tensor:
    """The places where two flat tensors differ. On a CPU, NumPy takes a third of torch's time."""
    if one.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(one.numpy() != other.numpy()))
    return (one != other).nonzero().flatten()


def _longest(width: int) -> int:
    """The largest code of a gap in `width` bytes, which stands for as many unchanged values and no change."""
    return int(256**width) - 1


def _codes(gaps: Tensor, width: int) -> Tensor:
    """The bytes of gaps: each as often the longest code as it fits, and the rest."""
    longest = _longest(width)
    wide = (gaps >= longest).nonzero().flatten()
    codes = gaps
    if len(wide):
        skips = torch.zeros_like(gaps).scatter_(0, wide, gaps[wide] // longest)
        ends = (skips + 1).cumsum(0)
        codes = gaps.new_full((int(ends[-1]),), longest).scatter_(0, ends - 1, gaps - skips * longest)
    return codes.to(_GAPS[width]).view(torch.uint8)


def _places_of_codes(raw: Tensor, width: int) -> Tensor:
    codes = raw.view(_GAPS[width]).to(torch.int64)
    ends = codes != _longest(width)
    return (codes + ends).cumsum(0)[ends] - 1


def _places_of_mask(raw: Tensor) -> Tensor:
    bits = (raw[:, None] >> _bit_numbers(raw) & 1).flatten()
    return _different(bits, torch.zeros_like(bits))


def _bit_numbers(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)

"""Masks of every shape, and numbers on them, for tests of advantages."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

NAN = float("nan")


@st.composite
def masks(draw: st.DrawFn, min_rows: int = 1) -> Tensor:
    """Ragged masks: holes, and rows without any token, are as likely as not."""
    rows, width = draw(st.integers(min_rows, 6)), draw(st.integers(1, 7))
    row = st.lists(st.booleans(), min_size=width, max_size=width)
    return torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)))


def numbers(mask: Tensor, seed: int, off: float = NAN) -> Tensor:
    """Seeded normal numbers on the mask, `off` elsewhere."""
    values = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))
    return values.masked_fill(~mask, off)

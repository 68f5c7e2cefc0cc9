"""Rows cut by hand: the same sampled tokens in several segments, each with all tokens before it as its context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from flowrl.data.segments import restart

Rows = TypeVar("Rows", bound=tuple[Any, ...])

SEQUENCE = ("input_ids", "attention_mask", "position_ids")


def cut(batch: Rows, places: Sequence[Sequence[int]]) -> Rows:
    """A record of columns, with segments that begin before these response tokens of each row, in ascending order.

    Columns of tokens are 0 in a repeated context, and -1 if they are whole numbers.
    """
    columns: dict[str, Any] = batch._asdict()  # type: ignore[attr-defined]
    attended, width = columns["attention_mask"].bool(), columns["response_mask"].shape[1]
    prompt = attended.shape[1] - width
    sources = [_sources(attended[row], prompt, cuts) for row, cuts in enumerate(places)]
    wide = max(len(source) for source, _ in sources)
    index, own, starts = (torch.zeros(len(sources), wide, dtype=t) for t in (torch.int64, torch.bool, torch.bool))
    present = own.clone()
    for row, (source, begins) in enumerate(sources):
        index[row, : len(source)], present[row, : len(source)] = torch.tensor(source, dtype=torch.int64), True
        starts[row, begins] = True
        own[row, : len(source)] = torch.tensor(_first_of(source, prompt))
    out = dict(columns)
    out["attention_mask"] = torch.cat([attended[:, :prompt], present], 1)
    ids = columns["input_ids"].gather(1, index)
    out["input_ids"] = torch.cat([columns["input_ids"][:, :prompt], ids], 1)
    every = (out["attention_mask"].cumsum(1) - 1).clamp(min=0)
    out["position_ids"] = restart(every, torch.cat([torch.zeros_like(attended[:, :prompt]), starts], 1))
    for name, column in columns.items():
        if name not in SEQUENCE and isinstance(column, Tensor) and column.ndim == 2 and column.shape[1] == width:
            if name == "responses":
                out[name] = ids.where(present, 0)
                continue
            blank = -1 if column.dtype == torch.int64 else 0
            out[name] = column.gather(1, (index - prompt).clamp(min=0)).where(own, torch.tensor(blank).to(column.dtype))
    return type(batch)(**out)


def _sources(attended: Tensor, prompt: int, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
    """The column that each token of the new response comes from, and where segments begin among these."""
    columns = attended.nonzero().flatten().tolist()
    ends = [*(prompt + place for place in cuts), attended.shape[0]]
    source = [column for column in columns if prompt <= column < ends[0]]
    begins = []
    for end in ends[1:]:
        begins.append(len(source))
        source += [column for column in columns if column < end]
    return source, begins


def _first_of(source: Sequence[int], prompt: int) -> list[bool]:
    """Whether each token is the first copy of a response token: where it was sampled."""
    seen: set[int] = set()
    found = []
    for column in source:
        found.append(column >= prompt and column not in seen)
        seen.add(column)
    return found

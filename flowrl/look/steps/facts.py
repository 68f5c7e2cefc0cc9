"""Facts: the stored numbers of one row of a column, as data and as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.core.graphs.graph import Node
from flowrl.core.operators.symbols import Edge
from flowrl.look.steps.step_reader import StepReader
from flowrl.operators.explains import exact
from flowrl.run.recording.row_maps import row_axis
from flowrl.run.recording.tables import Column

LONGEST = 200
"""Characters of an object that are shown as text."""
_RUNS = 6
_UNREADABLE = frozenset({"tokens", "mask", "positions"})
_SCORES = ("reward", "score", "score of a row", "return", "value", "advantage")


@dataclass(frozen=True)
class Fact:
    """The stored numbers of a column in one row.

    Args:
        row: its number; None if the row cannot be followed to this column.
        values: the tokens on the mask, the number, or the object; None if the column is not recorded.
        tokens: the positions of `values`; None for a column without tokens.
    """

    edge: Edge
    kind: str
    row: int | None
    values: Any
    tokens: tuple[int, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """It as JSON-able data."""
        values = self.values.tolist() if isinstance(self.values, Tensor) else self.values
        return vars(self) | {"edge": str(self.edge), "values": values}

    @property
    def has_numbers(self) -> bool:
        """Whether it says more than a number of tokens."""
        return self.kind not in _UNREADABLE or self.tokens is None

    def copies(self, other: Fact) -> bool:
        """Whether `other` is the same column, passed on with the same content."""
        if self.edge.output != other.edge.output or self.tokens != other.tokens:
            return False
        if isinstance(self.values, Tensor) and isinstance(other.values, Tensor):
            return torch.equal(self.values, other.values)
        return self.values is not None and bool(self.values == other.values)

    def __str__(self) -> str:
        if self.row is None:
            return f"{self.edge} ({self.kind}), on other rows"
        if self.values is None:
            return f"{self.edge} ({self.kind}), which is not recorded"
        return f"{self.edge} = {self._text()}"

    def _text(self) -> str:
        if self.tokens is None:
            return exact(self.values) if isinstance(self.values, Tensor) else _short(self.values)
        if self.kind in _UNREADABLE:
            return f"{len(self.tokens)} tokens"
        runs = _runs(self.values, self.tokens)
        if len(runs) > _RUNS:
            largest = max(runs[2:-1], key=lambda run: abs(float(run[0])))
            runs = [*runs[:2], largest, runs[-1]]
            return f"{', '.join(map(_run, runs[:2]))}, ..., {_run(largest)} (the largest), ..., {_run(runs[-1])}"
        return ", ".join(map(_run, runs)) or "no token on the mask"


@dataclass(frozen=True)
class GroupRow:
    """A row of a group, with its score: the sum of its scores or rewards over its tokens."""

    row_id: str
    score: float | None
    this: bool

    def to_dict(self) -> dict[str, Any]:
        """It as JSON-able data."""
        return dict(vars(self))

    def __str__(self) -> str:
        score = "" if self.score is None else f" {exact(np.float32(self.score))}"
        return f"{self.row_id}{score}{' (this row)' if self.this else ''}"


def fact_of(step: StepReader, edge: Edge, row: int | None) -> Fact:
    """The numbers of a column in a row."""
    kind = getattr(step.graph.types[edge].type, "kind", type(step.graph.types[edge].type).__name__)
    if row is None or edge not in step.described:
        return Fact(edge, kind, row, None)
    column = step.column(edge)
    if not isinstance(column, Tensor) or column.ndim == 1:
        return Fact(edge, kind, row, column[row])
    on = mask_of(step, edge, column)[row].nonzero().flatten()
    return Fact(edge, kind, row, column[row][on], tuple(on.tolist()))


def mask_of(step: StepReader, edge: Edge, column: Tensor) -> Tensor:
    """The tokens of a column that count: those on the widest mask with the same axes, or all."""
    if getattr(step.graph.types[edge].type, "kind", "") == "mask":
        return column
    axes = step.graph.types[edge].axes
    masks = [
        found
        for other, found in step.read(e for e in step.described if _is_mask(step, e, axes)).items()
        if isinstance(found, Tensor) and found.shape == column.shape
    ]
    return torch.stack(masks).any(0) if masks else torch.ones(column.shape, dtype=torch.bool)


def group_of(
    step: StepReader, node: Node, read: Sequence[Edge], row_on: Callable[[str | None], int | None]
) -> tuple[GroupRow, ...]:
    """The rows of a row's group, if the node reads a column of groups; their scores are from a column that it reads."""
    groups = next((e for e in read if getattr(step.graph.types[e].type, "kind", "") == "group"), None)
    axis = None if groups is None else row_axis(step.graph, groups)
    row = row_on(axis)
    if groups is None or axis is None or row is None or groups not in step.described or len(read) < 2:
        return ()
    uid, ids = step.column(groups), step.row_ids(axis)
    members = [number for number, other in enumerate(uid) if other == uid[row]]
    if len(members) < 2:
        return ()
    scored = [e for e in read if row_axis(step.graph, e) == axis and _kind_of_score(step, e) is not None]
    scored.sort(key=lambda edge: _kind_of_score(step, edge) or 0)
    totals = _totals(step, scored[0]) if scored and scored[0] in step.described else None
    return tuple(
        GroupRow(
            str(other) if ids is None else ids[other], None if totals is None else float(totals[other]), other == row
        )
        for other in members
    )


def _kind_of_score(step: StepReader, edge: Edge) -> int | None:
    kind = getattr(step.graph.types[edge].type, "kind", "")
    return _SCORES.index(kind) if kind in _SCORES else None


def _totals(step: StepReader, edge: Edge) -> Tensor | None:
    column: Column = step.column(edge)
    if not isinstance(column, Tensor):
        return None
    if column.ndim == 1:
        return column.double()
    return torch.where(mask_of(step, edge, column), column, 0.0).sum(1, dtype=torch.float64)


def _is_mask(step: StepReader, edge: Edge, axes: tuple[str, ...]) -> bool:
    typed = step.graph.types[edge]
    return getattr(typed.type, "kind", "") == "mask" and typed.axes == axes[:2]


def _runs(values: Tensor, tokens: Sequence[int]) -> list[tuple[Any, int, int]]:
    """Equal numbers at neighboring tokens: the number, its first token and its last."""
    found: list[tuple[Any, int, int]] = []
    for value, token in zip(values.detach().cpu().numpy(), tokens, strict=True):
        if found and found[-1][0] == value and found[-1][2] == token - 1:
            found[-1] = (value, found[-1][1], token)
        else:
            found.append((value, token, token))
    return found


def _run(run: tuple[Any, int, int]) -> str:
    value, first, last = run
    return f"{exact(value)} at token {first}" if first == last else f"{exact(value)} at tokens {first} to {last}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = json.dumps(text, ensure_ascii=False) if isinstance(value, str) else text
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."

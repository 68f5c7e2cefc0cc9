"""What if: the effect of an edit of the graph on a recorded step, column by column and row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.core.operators.symbols import Edge
from flowrl.edits.edit import edit
from flowrl.errors import ParameterError
from flowrl.look.address import Address
from flowrl.look.steps.edited_step import EditedStep
from flowrl.look.steps.replay import step_of
from flowrl.look.steps.step_reader import Recorded, StepReader
from flowrl.run.recording.row_maps import row_axis

MOST = 8
"""How many of the rows that change most are listed as text."""
_SUMMED = frozenset({"score", "reward"})


@dataclass(frozen=True)
class RowChange:
    """A row before and after: the mean over its tokens on the mask, or for scores and rewards the sum."""

    row_id: str
    before: float
    after: float


@dataclass(frozen=True)
class ColumnChange:
    """A column before and after an edit, over the tokens on the mask (or the rows) that both have.

    Args:
        before, after: the recorded column, and the computed one that takes its place.
        numbers: how many numbers are compared.
        correlation: None if one side is constant.
        flipped: share of the numbers whose sign changes to the opposite.
        size: mean absolute value before and after.
        rows: those that change, the largest change first.
        dropped, added: rows that only one side has.
    """

    before: Edge
    after: Edge
    numbers: int
    correlation: float | None
    flipped: float
    size: tuple[float, float]
    rows: tuple[RowChange, ...]
    dropped: tuple[str, ...]
    added: tuple[str, ...]

    def __str__(self) -> str:
        name = str(self.after) if self.after == self.before else f"{self.before} -> {self.after}"
        alike = "" if self.correlation is None else f"correlation {self.correlation:.2f}, "
        lines = [
            f"{name}: {alike}{self.flipped:.0%} of {self.numbers:,} signs flipped, mean size {self.size[0]:.4g} -> "
            f"{self.size[1]:.4g}, {len(self.rows)} rows change"
        ]
        lines += [f"  {row.row_id}  {row.before:.6g} -> {row.after:.6g}" for row in self.rows[:MOST]]
        for what, some in (("dropped", self.dropped), ("added", self.added)):
            if some:
                lines.append(f"  {what}: {', '.join(some[:MOST])}{' ...' if len(some) > MOST else ''}")
        return "\n".join(lines)


@dataclass(frozen=True)
class WhatIf:
    """The effect of an edit on a recorded step.

    Args:
        diff: the change of the graph, as text.
        changes: of the columns that differ.
        metrics: by key, the recorded number and the new one, where they differ.
        same: recomputed nodes whose outputs are as recorded.
        unknown: what nodes that would change need to be recomputed.
        outputs: the new columns.
    """

    step: int
    diff: str
    changes: tuple[ColumnChange, ...]
    metrics: Mapping[str, tuple[float | None, float]]
    same: tuple[str, ...]
    unknown: Mapping[str, str]
    seconds: float
    outputs: Mapping[Edge, Any]

    def to_dict(self) -> dict[str, Any]:
        """It as JSON-able data, without `outputs`."""
        changes = [
            {
                **vars(change),
                "before": str(change.before),
                "after": str(change.after),
                "rows": list(map(vars, change.rows)),
            }
            for change in self.changes
        ]
        return {
            "step": self.step,
            "diff": self.diff.splitlines(),
            "changes": changes,
            "metrics": {key: list(both) for key, both in self.metrics.items()},
            "same": list(self.same),
            "unknown": dict(self.unknown),
            "ms": round(1000 * self.seconds, 3),
        }

    def __str__(self) -> str:
        lines = [f"step {self.step}, in {1000 * self.seconds:.1f} ms:", *self.diff.splitlines()[1:]]
        lines += [str(change) for change in self.changes]
        for key, (before, after) in self.metrics.items():
            lines.append(f"{key}: {'not recorded' if before is None else f'{before:.6g}'} -> {after:.6g}")
        if self.same:
            lines.append(f"unchanged: {', '.join(self.same)}")
        lines += [f"{node} would change; that needs {needs}" for node, needs in self.unknown.items()]
        return "\n".join(lines)


def what_if(run: Recorded, place: Address, verbs: Mapping[str, Any]) -> WhatIf:
    """Apply an edit to the graph of a run, and recompute what follows from it in a step without weights.

    Args:
        place: a step; or a node of it, to report its columns alone.
        verbs: of `flowrl.edits.edit.edit`.
    """
    before = StepReader(run, step_of(place, "17"))
    after = EditedStep(before, edit(before.graph, **verbs))
    if place.node is not None and place.node not in (*after.graph.nodes, *before.graph.nodes):
        after.graph[place.node]  # raises
    if not after.diff:
        raise ParameterError(
            f"The edit {', '.join(f'{verb}={given!r}' for verb, given in verbs.items())} changes nothing in the graph "
            f"of {run.path}. Pass another value.",
            code="look.no-change",
            path=run.path,
            step=before.number,
        )
    changes = tuple(_change(before, after, old, new) for old, new in _pairs(before, after))
    shown = tuple(c for c in changes if c is not None and place.node in (None, c.after.node, c.before.node))
    found = before.number, str(after.diff), shown, _metrics(before, after), tuple(after.same)
    return WhatIf(*found, after.unknown, after.took, after.computed)


def _pairs(before: StepReader, after: EditedStep) -> Iterator[tuple[Edge, Edge]]:
    """Recorded columns with the computed ones in their place: of the same node, or at a port that reads another one."""
    replaced = [(after.stored_edge(edge), edge) for edge in after.computed]
    for name, node in after.graph.nodes.items():
        if (old := before.graph.nodes.get(after.stored_edge(Edge(name, "")).node)) is not None:
            replaced += [(old.inputs[place], edge) for place, edge in node.inputs.items() if place in old.inputs]
    for old_edge, new in dict.fromkeys(replaced):
        if new in after.computed and old_edge in before.described and isinstance(after.computed[new], Tensor):
            yield old_edge, new


def _change(before: StepReader, after: EditedStep, old: Edge, new: Edge) -> ColumnChange | None:
    """How a column changes; None for one without numbers to compare, or with the same bits."""
    first, second = before.column(old), after.computed[new]
    if not isinstance(first, Tensor) or not first.is_floating_point() or not second.is_floating_point():
        return None
    one, other = _ids(before, old, len(first)), _ids(after, new, len(second))
    place = {row: number for number, row in enumerate(other)}
    same = one == other  # a repeated row has the id of the row
    both = [(number, number if same else place[row]) for number, row in enumerate(one) if row in place]
    mine, theirs = (torch.tensor([pair[side] for pair in both], dtype=torch.int64) for side in (0, 1))
    a, on = _on_mask(before, old, first, mine)
    b, on_too = _on_mask(after, new, second, theirs)
    if a.shape != b.shape:
        return None
    on = on & on_too
    x, y = a[on], b[on]
    rows = _by_row(after, new, a, b, on, [one[number] for number, _ in both])
    dropped, added = tuple(row for row in one if row not in place), tuple(row for row in other if row not in set(one))
    if not len(x) or (torch.equal(x, y) and not dropped and not added):
        return None
    flipped = float(((x * y) < 0).double().mean())
    sizes = float(x.abs().mean()), float(y.abs().mean())
    return ColumnChange(old, new, len(x), _correlation(x, y), flipped, sizes, rows, dropped, added)


def _ids(step: StepReader, edge: Edge, rows: int) -> list[str]:
    axis = row_axis(step.graph, edge)
    found = None if axis is None else step.row_ids(axis)
    return [str(row) for row in range(rows)] if found is None else found


def _on_mask(step: StepReader, edge: Edge, column: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Some rows of a column in float64, and which of their numbers count."""
    typed = step.graph.types[edge]
    kind = getattr(typed.type, "kind", "")
    masks = [e for e in step.described if _is_mask(step, e) and step.graph.types[e].axes == typed.axes]
    on = torch.ones(column.shape, dtype=torch.bool)
    if masks and kind != "mask":
        found = step.read(masks[:1])[masks[0]]
        on = found if isinstance(found, Tensor) else on
    return column[rows].double(), on[rows] & ~column[rows].isnan()


def _is_mask(step: StepReader, edge: Edge) -> bool:
    return edge in step.graph.types and getattr(step.graph.types[edge].type, "kind", "") == "mask"


def _by_row(step: EditedStep, edge: Edge, a: Tensor, b: Tensor, on: Tensor, ids: list[str]) -> tuple[RowChange, ...]:
    """The rows that change, the largest change first."""
    if a.ndim > 1:
        summed = getattr(step.graph.types[edge].type, "kind", "") in _SUMMED
        count = torch.ones(len(a)) if summed else on.sum(1).clamp(min=1)
        a, b = (torch.where(on, x, 0.0).sum(1) / count for x in (a, b))
    order = (b - a).abs().argsort(descending=True, stable=True).tolist()
    return tuple(RowChange(ids[row], float(a[row]), float(b[row])) for row in order if a[row] != b[row])


def _correlation(x: Tensor, y: Tensor) -> float | None:
    x, y = x - x.mean(), y - y.mean()
    norm = float(x.norm() * y.norm())
    return float((x * y).sum()) / norm if norm else None


def _metrics(before: StepReader, after: EditedStep) -> dict[str, tuple[float | None, float]]:
    """The metrics that the recomputed nodes report otherwise than in the run."""
    recorded: dict[str, float] = next(
        (row for row in before.run.metrics.to_pylist() if row.get("step") == before.number), {}
    )
    found: dict[str, tuple[float | None, float]] = {}
    for node, metrics in after.metrics.items():
        for key, value in metrics.compute().items():
            known = recorded.get(f"{node}/{key}", recorded.get(key))
            if known != value:
                found[key] = known, value
    return found

"""The tokens of a row's response with the numbers of each, from the recorded columns of a step.

Columns are found by kind and axes, so those of a user's operators are shown like built-in ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from flowrl.core.operators.symbols import Edge
from flowrl.look.page.plain import shortened
from flowrl.look.steps.step_reader import StepReader
from flowrl.run.recording.summaries import RowSummaries

Decode = Callable[[Sequence[int]], str]
Scale = Literal["sides", "range"]
"""Around zero, or from the lowest to the highest."""
LONGEST = 20_000
"""The most tokens that are shown of a row."""
_DIFFERENCES = {
    "log p \N{MINUS SIGN} log p_ref": ("old", "ref"),
    "trainer \N{MINUS SIGN} engine": ("old", "rollout"),
}
_NAMED = {"old": "log p", "entropy": "entropy", "token_version": "version"}
_PARTS = 4
"""The most tokens that one character is split into."""


def row_tokens(of: StepReader, row_id: str, decode: Decode | None) -> dict[str, Any] | None:
    """The tokens of a row, and per token its advantage, log-prob differences and all else on this axis.

    None if the graph has no responses, or the row none.
    """
    graph, edges = of.graph, dict(RowSummaries(of.graph, 0).edges)
    if of.reported:
        edges["entropy"] = next(iter(of.reported))
    types = {**{edge: typed for edge, typed in graph.types.items() if edge in of.described}, **of.reported}
    if "response_mask" not in edges:
        return None
    axis = graph.types[edges["response_mask"]].axes[1:]
    found = {e: _of_row(of, e, typed.axes[0], row_id) for e, typed in types.items() if typed.axes[1:] == axis}
    mask = found.get(edges["response_mask"])
    ids = next((v for e, v in found.items() if getattr(types[e].type, "kind", "") == "tokens"), None)
    if mask is None or ids is None or not mask.any():
        return None
    end = min(int(mask.nonzero()[-1]) + 1, LONGEST)
    scored = {what: values for what, edge in edges.items() if (values := found.get(edge)) is not None}
    numbers = {
        name: {"values": _masked(values[:end], mask[:end]), "scale": scale}
        for name, values, scale in _numbers(edges, scored, found)
    }
    numbers["mask"] = {"values": mask[:end].int().tolist(), "scale": "range"}
    return {"text": pieces(ids[:end].tolist(), decode), "columns": numbers}


def _numbers(
    edges: Mapping[str, Edge], scored: Mapping[str, Tensor], found: Mapping[Edge, Tensor | None]
) -> Iterator[tuple[str, Tensor, Scale]]:
    """The numbers of tokens by what they are, in the order of the page's choice."""
    if "advantage" in scored:
        yield "advantage", scored["advantage"], "sides"
    for name, (left, right) in _DIFFERENCES.items():
        if left in scored and right in scored:
            yield name, scored[left] - scored[right], "sides"
    for what, name in _NAMED.items():
        if what in scored:
            yield name, scored[what], "range"
    shown = {edges[what] for what in scored}
    for edge, values in found.items():
        if edge not in shown and values is not None and values.is_floating_point():
            yield str(edge), values, "sides" if bool((values < 0).any()) else "range"


def _of_row(of: StepReader, edge: Edge, axis: str, row_id: str) -> Tensor | None:
    """The values of a row; None if a gate dropped it before."""
    ids = of.row_ids(axis) or []
    column = of.column(edge) if row_id in ids else None
    return column[ids.index(row_id)] if isinstance(column, Tensor) else None


def _masked(values: Tensor, mask: Tensor) -> list[Any]:
    chosen = values.float() if values.is_floating_point() else values
    plain = [value if on else None for value, on in zip(chosen.tolist(), mask.tolist(), strict=True)]
    return shortened(plain)


def pieces(ids: Sequence[int], decode: Decode | None) -> list[str]:
    """The text of each token; a character that several tokens spell is at the first. Without a tokenizer, the ids."""
    if decode is None:
        return [f"{number} " for number in ids]
    found: list[str] = []
    waiting: list[int] = []
    for number in ids:
        waiting.append(number)
        text = decode(waiting)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(waiting) < _PARTS:
            continue
        found += [text, *[""] * (len(waiting) - 1)]
        waiting = []
    return found + ([decode(waiting), *[""] * (len(waiting) - 1)] if waiting else [])

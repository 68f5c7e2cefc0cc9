"""`NotFiniteOutputs`: the outputs of a step that are NaN or infinite, so that an error can name the first of them.

A failing update reads what other nodes have computed from the wrong number, and by then the output of the node that
wrote it is released. So each node's outputs are checked where they are written (one sum per column), and those that are
not finite are retained until the step closes. Only if a node fails are they searched, under their masks: what is off
the mask may be NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.core.graphs.fusing import as_in_graph
from flowrl.core.graphs.graph import Node
from flowrl.core.operators.symbols import Edge
from flowrl.errors import NodeError
from flowrl.run.engine.nodes import NodeInfo
from flowrl.run.engine.runner import TaskResult

Fetch = Callable[[Node, str, Any], Any]
Outputs = Mapping[str, Mapping[str, Any]]
"""Handles of the columns of a step that are not released, by node."""


def not_finite(outputs: Mapping[str, Any]) -> tuple[str, ...]:
    """The outputs with NaN or infinity, on or off the mask."""
    columns = {name: x for name, x in outputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    # the sum is fast and not finite if a number is not; it may also overflow
    return tuple(name for name, x in columns.items() if not (x.sum().isfinite() or x.isfinite().all()))


class _Retained(NamedTuple):
    """A column of a round, and the mask that was current when it was written."""

    round: int
    column: Any
    mask: Edge | None
    mask_column: Any


class _First(NamedTuple):
    """The first number of an output that is not finite, and how many of its numbers under the mask are not."""

    number: float
    place: list[int]
    wrong: int
    of: int
    mask: str | None


class NotFiniteOutputs:
    """The outputs of one step that are not finite, as handles of the runner."""

    def __init__(self) -> None:
        self._retained: dict[Edge, list[_Retained]] = {}

    def add(self, done: TaskResult, info: NodeInfo, others: Outputs) -> None:
        """Retain the outputs of an instance that are not finite."""
        outputs, number = done.outputs, done.task.now.round.number
        present = {**others, info.node.name: outputs}
        for name in done.not_finite:
            masks = [mask for mask in info.masks[name] if mask.output in present.get(mask.node, {})]
            mask = masks[-1] if masks else None
            held = None if mask is None else present[mask.node][mask.output]
            entry = _Retained(number, outputs[name], mask, held)
            self._retained.setdefault(Edge(info.node.name, name), []).append(entry)

    def explain(
        self,
        error: NodeError,
        failed: Node,
        when: str,
        number: int | None,
        infos: Mapping[str, NodeInfo],
        outputs: Outputs,
        fetch: Fetch,
    ) -> None:
        """Add to the error of a node the first output that is not finite among those that it was computed from.

        Args:
            number: the round, if the node runs in rounds; None searches all.
        """
        search = functools.partial(self._first, failed=failed, number=number, infos=infos, outputs=outputs, fetch=fetch)
        found: tuple[Edge, _First] | None = None
        node = failed
        while bad := [(edge, first) for edge in node.inputs.values() if (first := search(edge)) is not None]:
            found = min(bad, key=lambda one: infos[one[0].node].position)
            node = infos[found[0].node].node
        if found is None:
            return
        edge, first = as_in_graph(node.operator, found[0]), found[1]
        place = dict(zip(("row", "token"), first.place, strict=False))
        at = ", ".join(f"{axis} {index}" for axis, index in place.items())
        under = "" if first.mask is None else f" under {first.mask}"
        error.args = (
            f"{edge.node} wrote {first.number} {when}: {edge.output} at {at} ({first.wrong} of {first.of} "
            f"numbers{under} are not finite). Then {error.message}",
        )
        error.facts = {**error.facts, "origin": str(edge), **place}

    def _first(
        self,
        edge: Edge,
        failed: Node,
        number: int | None,
        infos: Mapping[str, NodeInfo],
        outputs: Outputs,
        fetch: Fetch,
    ) -> _First | None:
        """The first number of an output that is not finite, under the mask that the failed node reads, if any, else
        the one that was current."""
        info = infos[edge.node]
        read = [mask for mask in info.masks.get(edge.output, ()) if mask in failed.inputs.values()]
        for entry in self._retained.get(edge, ()):
            if number not in (None, entry.round):
                continue
            mask, held = entry.mask, entry.mask_column
            if read:
                mask, held = read[-1], outputs[read[-1].node][read[-1].output]
            column: Tensor = fetch(info.node, edge.output, entry.column)
            on = torch.ones_like(column, dtype=torch.bool)
            if mask is not None:
                found: Tensor = fetch(infos[mask.node].node, mask.output, held)
                on &= found.reshape(*found.shape, *[1] * (column.ndim - found.ndim))
            if len(bad := (on & ~column.isfinite()).nonzero()):
                place, name = bad[0].tolist(), None if mask is None else mask.output
                return _First(float(column[tuple(place)]), place, len(bad), int(on.sum()), name)
        return None

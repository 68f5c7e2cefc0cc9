"""`EditedStep`: a recorded step as an edited graph would have computed it, without weights."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.operators.symbols import Edge
from flowrl.data.metrics import Metrics
from flowrl.edits.diff import Diff, diff
from flowrl.errors import FlowrlError
from flowrl.look.steps.replay import difference, lacks, stored_value
from flowrl.look.steps.rounds import compute
from flowrl.look.steps.step_reader import StepReader
from flowrl.run.recording.tables import Column


class EditedStep(StepReader):
    """What changes in a step with an edited graph: changed nodes and what follows from them are recomputed, everything
    else is the recorded step.

    Args:
        step: the recorded step.
        graph: the edited graph.

    Attributes:
        diff: from the graph of the run to the edited one.
        computed: the recomputed outputs whose bits differ from the recorded ones, or that are new.
        same: the recomputed nodes whose outputs are as recorded.
        unknown: what each other node that would change needs.
        metrics: what each recomputed node reports.
        took: seconds of the recomputation.
    """

    def __init__(self, step: StepReader, graph: Graph) -> None:
        super().__init__(step.run, step.number)
        self.before, self.graph = step, graph
        self.diff: Diff = diff(step.graph, graph)
        self.computed: dict[Edge, Any] = {}
        self.same: list[str] = []
        self.unknown: dict[str, str] = {}
        self.metrics: dict[str, Metrics] = {}
        self._names = {new: old for old, new in self.diff.renamed.items()}
        stored = {edge: about for edge in graph.types if (about := step.described.get(self.stored_edge(edge)))}
        self.described: dict[Edge, Mapping[str, Any]] = stored
        began = time.perf_counter()
        for node in graph.nodes.values():
            if self.runs(node.name) and not node.is_input and self._is_affected(node):
                self._enter(node)
        self.took = time.perf_counter() - began

    def stored_edge(self, edge: Edge) -> Edge:
        """An edge by its name in the graph of the run."""
        return edge._replace(node=self._names.get(edge.node, edge.node))

    def read(self, edges: Iterable[Edge]) -> dict[Edge, Column]:
        """The computed ones of these columns, else the recorded ones."""
        wanted = [edge for edge in edges if edge in self.described]
        stored = self.before.read(self.stored_edge(edge) for edge in wanted if edge not in self.computed)
        return {
            edge: self.computed[edge] if edge in self.computed else stored[self.stored_edge(edge)] for edge in wanted
        }

    def _is_affected(self, node: Node) -> bool:
        edited = node.name in self.diff.added or node.name in self.diff.changed or node.name in self._names
        read = node.inputs.values()
        return edited or any(edge in self.computed or edge.node in self.unknown for edge in read)

    def _enter(self, node: Node) -> None:
        """Recompute a node, or say what it needs."""
        if node.name in self._names and node.roles and not self._follows(node):
            return  # its new name changes nothing
        blocked = next((edge for edge in node.inputs.values() if edge.node in self.unknown), None)
        needs = f"{blocked} as it would be then" if blocked else lacks(self, node)
        if needs is None:
            try:
                outputs, self.metrics[node.name] = compute(self, node, self._value)
            except FlowrlError as error:
                needs = f"other rows: {error.message}"
        if needs is not None:
            self.unknown[node.name] = needs
            self.described = {edge: about for edge, about in self.described.items() if edge.node != node.name}
            return
        changed = {
            Edge(node.name, o): value for o, value in outputs.items() if self._differs(Edge(node.name, o), value)
        }
        if not changed:
            self.same.append(node.name)
        self.computed |= changed
        columns = {edge: value for edge, value in changed.items() if isinstance(value, Tensor | np.ndarray)}
        self.described |= {edge: {"shape": list(value.shape)} for edge, value in columns.items()}

    def _follows(self, node: Node) -> bool:
        return any(edge in self.computed or edge.node in self.unknown for edge in node.inputs.values())

    def _value(self, edge: Edge) -> Any:
        return self.computed[edge] if edge in self.computed else stored_value(self, edge)

    def _differs(self, edge: Edge, value: Any) -> bool:
        old = self.stored_edge(edge)
        stored = self.before.read([old])
        return not stored or difference(self.before, old, stored[old], value) is not None

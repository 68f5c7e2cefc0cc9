"""The length of a run in optimizer steps, for learning rates whose schedule lasts as long as the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.lineage import last_gate, rows_per_prompt
from flowrl.data.sources.source import Source
from flowrl.errors import ParameterError
from flowrl.protocols.protocols import Synced
from flowrl.run.training.sources import sources_here


@runtime_checkable
class CountsUpdates(Protocol):
    """An operator that knows how many optimizer steps it makes."""

    def optimizer_steps(self, rows: int | None) -> int:
        """The optimizer steps over so many rows; None if their number is not known before."""
        ...


def optimizer_steps(graph: Graph, role: str, steps: int, prompts: int) -> int:
    """The optimizer steps that a run makes with the engine of a trained role, counting the steps without an update.

    Raises:
        ParameterError: an operator of the graph does not say how many it makes.
    """
    total = 0
    for node in graph.nodes.values():
        if not any(u.role == role and u.mode == "writes" and not u.goes_through(Synced) for u in node.uses):
            continue
        if not isinstance(node.initial_operator, CountsUpdates):
            raise ParameterError(
                f"The schedule of the role {role!r} lasts as long as the run, and {node.name} does not say how many "
                f"optimizer steps it makes. Define optimizer_steps(rows) in {type(node.initial_operator).__name__}, "
                f"or pass steps= to the schedule.",
                code="parameter.unknown-length",
                role=role,
                node=node.name,
            )
        rows, whens = _rows(graph, node.name, prompts), graph.whens(node.name)
        ran = (step for step in range(steps) if all(when.runs(step) for when in whens))
        operator: Any = node.operator
        total += sum(operator.in_step(step).optimizer_steps(rows) for step in ran)
    return total


def _rows(graph: Graph, name: str, prompts: int) -> int | None:
    """The rows that reach a node in a step; None if unknown. A gate that may train on fewer groups than it collects
    counts as filled, so that the schedule does not end before the run."""
    gate = last_gate(graph, name)
    groups = prompts if gate is None else gate.missing(())
    return groups * rows_per_prompt(graph, name) if groups else None


def over_run(graph: Graph, sources: Mapping[str, Source], steps: int | None, epochs: int, prompts: int) -> Graph:
    """The graph with the backends of a run of so many steps; or epochs, if `steps` is None.

    Raises:
        ParameterError: the length is not known before the models are loaded.
        DataError: the data, which is read to count the steps of an epoch, cannot be read or is endless.
    """
    roles = [role for role, backend in graph.bindings.items() if backend.over_run]
    if not roles:
        return graph
    if steps is None:
        found = sources_here(graph, sources, seed=0)
        if found is None:
            raise ParameterError(
                f"The schedule of the role {roles[0]!r} lasts as long as the run, and epochs={epochs} cannot be "
                f"counted in steps: the tokenizer or the data is not on this machine. Pass Training(..., steps=...).",
                code="parameter.unknown-length",
                role=roles[0],
                epochs=epochs,
            )
        steps = found.steps_of(epochs, prompts)
    counts = {role: optimizer_steps(graph, role, steps, prompts) for role in roles}
    lasting = {role: graph.bindings[role].over(max(1, count)) for role, count in counts.items()}
    return graph.bound({**graph.bindings, **lasting})

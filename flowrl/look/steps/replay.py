"""Replay: recompute nodes of a recorded step from the columns that they read, and compare the bits.

A node is a function of its inputs, its parameters, (seed, step, node, row), its state and the weights of its roles. All
but the weights are in the run folder, and those are in its checkpoints; see `flowrl.look.steps.weights`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from flowrl.core.graphs.graph import Node
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.symbols import Edge
from flowrl.data.proto.column_math import bits
from flowrl.errors import DataError, ParameterError
from flowrl.files.values import NotImported
from flowrl.look.address import Address
from flowrl.look.steps.rounds import compute
from flowrl.look.steps.step_reader import Recorded, StepReader
from flowrl.look.steps.weights import loaded
from flowrl.run.recording.row_maps import row_axis
from flowrl.run.recording.tables import Column
from flowrl.spec import Spec, parameters


@dataclass(frozen=True)
class Difference:
    """The first number of a replayed column that differs from the stored one.

    Args:
        row, token: where, counted from 0; None if the shapes differ, or the column has no tokens.
        row_id: of the row, if it is recorded.
    """

    edge: Edge
    row: int | None
    token: int | None
    row_id: str | None
    stored: Any
    computed: Any

    def __str__(self) -> str:
        row = f"[{self.row_id or self.row}]" if self.row is not None else ""
        token = f" token {self.token}" if self.token is not None else ""
        return f"{self.edge}{row}{token}: stored {self.stored}, computed {self.computed}"


@dataclass(frozen=True)
class NodeReplay:
    """A node that was recomputed.

    Args:
        outputs: by name.
        compared: the outputs that are recorded.
        difference: None if all of these have the same bits.
    """

    node: str
    outputs: Mapping[str, Any] = field(repr=False)
    compared: tuple[str, ...]
    difference: Difference | None
    seconds: float

    @property
    def same(self) -> bool:
        """Whether all recorded outputs have the same bits."""
        return self.difference is None


@dataclass(frozen=True)
class Replay:
    """What a replay of a step recomputed.

    Args:
        nodes: those that were recomputed, by name.
        lacking: what each other node that ran lacks.
    """

    step: int
    nodes: Mapping[str, NodeReplay]
    lacking: Mapping[str, str]

    @property
    def same(self) -> bool:
        """Whether all recomputed columns have the bits of the recorded ones."""
        return all(node.same for node in self.nodes.values())

    @property
    def outputs(self) -> dict[Edge, Any]:
        """All recomputed outputs."""
        return {Edge(name, o): value for name, node in self.nodes.items() for o, value in node.outputs.items()}

    @property
    def differences(self) -> list[Difference]:
        """The first difference of each node that differs."""
        return [node.difference for node in self.nodes.values() if node.difference is not None]

    def to_dict(self) -> dict[str, Any]:
        """It as JSON-able data."""
        nodes = {
            name: {
                "same": node.same,
                "compared": list(node.compared),
                "ms": round(1000 * node.seconds, 3),
                "difference": None if node.difference is None else _plain(node.difference),
            }
            for name, node in self.nodes.items()
        }
        return {"step": self.step, "same": self.same, "nodes": nodes, "lacking": dict(self.lacking)}

    def __str__(self) -> str:
        lines = [f"step {self.step}: {len(self.nodes)} nodes recomputed, {len(self.lacking)} cannot be"]
        width = max(map(len, (*self.nodes, *self.lacking)), default=0)
        for name, node in self.nodes.items():
            nothing = "no output is recorded" if not node.compared else "same bits"
            found = nothing if node.difference is None else f"DIFFERS: {node.difference}"
            lines.append(f"  {name:<{width}}  {found} ({1000 * node.seconds:.1f} ms)")
        lines += [f"  {name:<{width}}  needs {what}" for name, what in self.lacking.items()]
        return "\n".join(lines)


def replay(run: Recorded, place: Address, from_checkpoint: bool = False) -> Replay:
    """Recompute the node of an address, or all that can be of its step.

    Args:
        from_checkpoint: also nodes that read weights, which are loaded from a checkpoint.
    """
    step = StepReader(run, step_of(place, "17/gae or 17"))
    names = [name for name in step.graph.nodes if step.runs(name)] if place.node is None else [place.node]
    with loaded(step, map(step.graph.__getitem__, names)) if from_checkpoint else nullcontext():
        return _of_nodes(step, place.node, names)


def _of_nodes(step: StepReader, one: str | None, names: Sequence[str]) -> Replay:
    """The replay of these nodes, or of the one that is asked for."""
    lacking = {name: what for name in names if (what := lacks(step, step.graph[name])) is not None}
    if one is not None and lacking:
        raise DataError(
            f"{one} of step {step.number} cannot be recomputed: it needs {lacking[one]}. "
            f"run.replayable({step.number}) lists what each node needs.",
            code="look.not-replayable",
            path=step.run.path,
            step=step.number,
            node=one,
            missing=lacking[one],
        )
    return Replay(step.number, {name: _replayed(step, name) for name in names if name not in lacking}, lacking)


def replayable(run: Recorded, number: int) -> dict[str, str | None]:
    """What each node of a step that ran lacks to be recomputed; None for one that can be."""
    step = StepReader(run, number)
    return {name: lacks(step, node) for name, node in step.graph.nodes.items() if step.runs(name)}


def lacks(step: StepReader, node: Node) -> str | None:
    """What a node needs that is not recorded, as a phrase; None if it can be recomputed."""
    operator = node.operator
    if node.is_input:
        return "its data, not columns"
    if not step.runs(node.name):
        return f"another step: {node.name} does not run in step {step.number}"
    if node.roles and node.name not in step.engines:
        return step.no_weights.get(node.name) or f"the weights of {' and '.join(map(repr, node.roles))}"
    if Effect.EXTERNAL in node.effects:
        return "what it queries outside of the graph"
    if code := next(not_imported(operator, node.name), None):
        return f"code that is not imported: {code}; open the run with imports=True, or pass --import"
    for edge in node.inputs.values():
        if not step.is_exact(edge) and (step.graph[edge.node].is_input or lacks(step, step.graph[edge.node])):
            stored = "not recorded exactly" if edge in step.described else "not recorded"
            return f"{edge}, which is {stored}"
    for cell in operator.states:
        name = f"{node.name}.{cell}"
        known = name in step.state
        if (known and set(step.state[name] if isinstance(step.state[name], dict) else ()) == {"digest"}) or (
            not known and _ran_before(step, node.name)
        ):
            return f"the state {name}, which is not in state.jsonl"
    return None


def not_imported(spec: Spec, where: str) -> Iterator[str]:
    """The functions of a spec and its parameters that were only named."""
    for name, value in parameters(spec).items():
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, NotImported):
                yield f"{where}.{name} ({one.path})"
            elif isinstance(one, Spec):
                yield from not_imported(one, f"{where}.{name}")


def _ran_before(step: StepReader, node: str) -> bool:
    whens = step.graph.whens(node)
    return any(all(when.runs(earlier) for when in whens) for earlier in range(step.index))


def _replayed(step: StepReader, name: str) -> NodeReplay:
    start = time.perf_counter()
    node = step.graph[name]
    outputs, _ = compute(step, node, lambda edge: stored_value(step, edge))
    seconds = time.perf_counter() - start
    recorded = step.read(Edge(name, output) for output in outputs)
    differences = (difference(step, edge, stored, outputs[edge.output]) for edge, stored in recorded.items())
    found = next((one for one in differences if one is not None), None)
    return NodeReplay(name, outputs, tuple(edge.output for edge in recorded), found, seconds)


def stored_value(step: StepReader, edge: Edge) -> Any:
    """The recorded column of an edge; what is not recorded is recomputed."""
    if step.is_exact(edge):
        return step.column(edge)
    outputs, _ = compute(step, step.graph[edge.node], lambda other: stored_value(step, other))
    return outputs[edge.output]


def difference(step: StepReader, edge: Edge, stored: Column, computed: Column) -> Difference | None:
    """The first difference of two columns, bit by bit; objects by their JSON."""
    if isinstance(stored, Tensor) and isinstance(computed, Tensor):
        if stored.dtype != computed.dtype or stored.shape != computed.shape:
            return Difference(edge, None, None, None, _shape(stored), _shape(computed))
        unequal = bits(stored) != bits(computed)
        if not unequal.any():
            return None
        row, byte = (int(i) for i in unequal.nonzero()[0])
        token = None if stored.ndim == 1 else byte // stored.element_size()
        here = row if token is None else (row, token)
        return Difference(edge, row, token, _row_id(step, edge, row), stored[here].item(), computed[here].item())
    if isinstance(stored, Tensor) or isinstance(computed, Tensor) or len(stored) != len(computed):
        return Difference(edge, None, None, None, _shape(stored), _shape(computed))
    for row, (one, other) in enumerate(zip(stored, computed, strict=True)):
        if _json(one) != _json(other):
            return Difference(edge, row, None, _row_id(step, edge, row), one, other)
    return None


def step_of(place: Address, example: str) -> int:
    """The step of an address, which must have one."""
    if place.step is None:
        raise ParameterError(
            f"{str(place)!r} names no step. Write it first, as in {example}.",
            code="look.invalid-address",
            found=str(place),
        )
    return place.step


def _row_id(step: StepReader, edge: Edge, row: int) -> str | None:
    axis = row_axis(step.graph, edge)
    ids = None if axis is None else step.row_ids(axis)
    return None if ids is None else ids[row]


def _shape(column: Column) -> str:
    return f"{str(column.dtype).removeprefix('torch.')}{list(column.shape)}"


def _json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(str(value))


def _plain(found: Difference) -> dict[str, Any]:
    def number(value: Any) -> Any:
        return value.item() if isinstance(value, np.generic) else value

    return {**vars(found), "edge": str(found.edge), "stored": number(found.stored), "computed": number(found.computed)}

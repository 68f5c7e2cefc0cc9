"""Recompute a node of a recorded step: in one call, or in as many as the rounds that its rows were collected in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.columns import PAD_SIDE, ColumnType
from flowrl.core.graphs.gate import ROWS, Gate
from flowrl.core.graphs.graph import Node
from flowrl.core.graphs.lineage import rows_per_prompt
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.session import Call
from flowrl.core.operators.symbols import Edge
from flowrl.data.metrics import Metrics
from flowrl.data.now import ONLY, Collected, Round
from flowrl.data.proto.dataproto import DataProto
from flowrl.look.steps.step_reader import StepReader
from flowrl.run.engine.local import LocalRunner
from flowrl.run.engine.nodes import Region

Outputs = Mapping[str, Any]


def compute(step: StepReader, node: Node, value_of: Callable[[Edge], Any]) -> tuple[Outputs, Metrics]:
    """The outputs of a node, and what it reports.

    Args:
        node: of the step's graph, or of an edited one.
        value_of: the column or value of an edge.
    """
    inputs = {place: value_of(edge) for place, edge in node.inputs.items()}
    metrics = Metrics()
    if node.name not in step.plan.region:
        return _call(step, node, inputs, ONLY, metrics), metrics
    if isinstance(node.operator, Gate) and node.name == step.plan.collector:
        return _collected(step, node, node.operator, inputs, metrics), metrics
    parts = []
    for number in range(step.rounds):
        some = _of_round(step, node, inputs, number)
        parts.append(_call(step, node, some, Round(number, _wanted(step, number)), metrics))
    if len(parts) == 1:
        return parts[0], metrics
    names = [name for name, typed in node.signature.outputs.items() if isinstance(typed, ColumnType)]
    return DataProto.concat([DataProto({name: part[name] for name in names}) for part in parts]).columns, metrics


def _call(
    step: StepReader, node: Node, inputs: Mapping[PortField, Any], round: Round, metrics: Metrics
) -> dict[str, Any]:
    session, engines = step.session(round), step.engines.get(node.name, {})
    with session.active():
        _, outputs = Call(node.in_step(step.index).operator, lambda role, _: engines[role]).run_in(session, inputs)
    metrics.merge(session.all_metrics())
    return outputs


def _collected(step: StepReader, node: Node, gate: Gate, inputs: Mapping[PortField, Any], metrics: Metrics) -> Outputs:
    """The groups that a gate collected in all rounds; see `flowrl.run.engine.in_flight`."""
    gate = node.in_step(step.index).operator  # type: ignore[assignment]
    found: list[dict[str, Any]] = []
    for number in range(step.rounds):
        sizes = tuple(size for part in found for size in part["collected"].sizes)
        some = _of_round(step, node, inputs, number)
        found.append(_call(step, node, some, Round(number, gate.missing(sizes)), metrics))
    sizes = tuple(size for part in found for size in part["collected"].sizes)
    action = gate.underfill_action(sizes)
    parts, makers = [part for part in found if part["collected"].sizes] or found[-1:], Region.of(step.plan).makers
    makers = {output: maker for output, maker in makers.items() if output in gate.columns}
    joined = parts[0] if len(parts) == 1 else LocalRunner({}).join(node, makers, parts)
    if action != "repeat":
        return {**joined, "collected": Collected(sizes)}
    repeated = {PortField(ROWS, output): joined[output] for output in makers}
    return _call(step, node, repeated, Round(len(found), 0, sizes), metrics)


def _wanted(step: StepReader, number: int) -> int | None:
    """How many groups were missing when a round started: as many as it has prompts."""
    name = step.plan.collector
    gate = None if name is None else step.graph[name].in_step(step.index).operator
    if name is None or not isinstance(gate, Gate):
        return None
    if number == 0:
        return gate.missing(())
    source = next(place for place in step.graph[name].inputs if place.port == ROWS)
    rounds = step.round_of(step.graph.types[step.graph[name].inputs[source]].axes[0])
    return None if rounds is None else int((rounds == number).sum()) // rows_per_prompt(step.graph, name)


def _of_round(step: StepReader, node: Node, inputs: Mapping[PortField, Any], number: int) -> Mapping[PortField, Any]:
    """The rows of a round, as wide as they were."""
    if step.rounds == 1:
        return inputs
    found: dict[PortField, Any] = {}
    for place, edge in node.inputs.items():
        axes = step.graph.types[edge].axes if edge in step.graph.types else ()
        rounds = step.round_of(axes[0]) if axes else None
        if rounds is None:
            found[place] = inputs[place]
            continue
        rows = np.flatnonzero(rounds == number)
        column = inputs[place][torch.from_numpy(rows)] if isinstance(inputs[place], Tensor) else inputs[place][rows]
        found[place] = column[:, _span(step, axes, rows)].contiguous() if len(axes) > 1 else column
    return found


def _span(step: StepReader, axes: tuple[str, ...], rows: np.ndarray) -> slice:
    """The tokens of an axis that some of these rows have; rounds are padded to the widest when they are joined."""
    axis, _, maker = axes[1].partition("@")
    if axis not in PAD_SIDE:
        return slice(None)
    first, last = _extent(step, axes, rows)
    if axis == "response":  # the mask ends before what an environment said last
        whole = _extent(step, (axes[0], f"sequence@{maker}", *axes[2:]), rows)
        if (width := _width(step, (axes[0], f"sequence@{maker}"))) and whole[1]:
            last = max(last, whole[1] - (width - _width(step, axes[:2])))
        return slice(0, last or None)
    return slice(first, None) if axis == "prompt" else slice(first, last or None)


def _masks(step: StepReader, axes: tuple[str, ...]) -> list[Edge]:
    types = step.graph.types
    return [e for e in step.described if types[e].axes == axes[:2] and getattr(types[e].type, "kind", "") == "mask"]


def _width(step: StepReader, axes: tuple[str, ...]) -> int:
    return max((int(step.described[edge]["shape"][1]) for edge in _masks(step, axes)), default=0)


def _extent(step: StepReader, axes: tuple[str, ...], rows: np.ndarray) -> tuple[int, int]:
    """The first token that a mask of these axes has in some row, and the end of the last; 0 and 0 without masks."""
    first, last = [], [0]
    for column in step.read(_masks(step, axes)).values():
        assert isinstance(column, Tensor)
        on = column[torch.from_numpy(rows)].any(0).nonzero().flatten()
        if len(on):
            first.append(int(on[0]))
            last.append(int(on[-1]) + 1)
    return min(first, default=0), max(last)

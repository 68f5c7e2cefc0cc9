"""Fit a graph to a task: rewards from tables, and the rows of the task. The audit lists the changes as notes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from flowrl.auditing.rewards import TableReward
from flowrl.auditing.task import AuditTask
from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.graph import Graph, Node
from flowrl.edits.edit import edit
from flowrl.errors import AuditError, GraphError, PortError
from flowrl.operators import Collect, Generate, Repeat, Reward
from flowrl.protocols.protocols import Rollout
from flowrl.record_types import column_fields
from flowrl.records import PromptBatch

_ROUNDS = 1000
"""Rounds of a `Collect`: a task has few prompts, and the responses of some rarely differ."""


def fitted(graph: Graph, task: AuditTask, n: int | None) -> tuple[Graph, AuditTask, list[str]]:
    """The fitted graph and task, and a note for each change. With `n`, it replaces the graph's responses per prompt."""
    _refuse_other_data(graph)
    notes: list[str] = []
    fitting = _tabled(graph.bound({}), notes)
    generates = [
        node.initial_operator for node in fitting.nodes.values() if isinstance(node.initial_operator, Generate)
    ]
    shortest = min([task.steps, *(each.max_new_tokens for each in generates)])
    if shortest < task.steps or (task.ends and any(each.ignore_eos for each in generates)):
        ends = task.ends and not any(each.ignore_eos for each in generates)
        task = dataclasses.replace(task, steps=shortest, ends=ends)
    changed: dict[str, Any] = {}
    for node in fitting.nodes.values():
        if isinstance(node.initial_operator, Repeat) and n is not None and node.initial_operator.n != n:
            changed[f"{node.name}.n"] = n
            notes.append(f"{node.name}.n is {n} and not {node.initial_operator.n}.")
        if isinstance(node.initial_operator, Collect):
            changed |= {f"{node.name}.groups": task.prompts, f"{node.name}.rounds": _ROUNDS}
            groups = f"{task.prompts} groups and not {node.initial_operator.groups}"
            notes.append(f"{node.name} collects {groups}, in as many rounds as it takes.")
    if changed:
        fitting = edit(fitting, set=changed)
    if fitting.lag.versions:
        fitting = edit(fitting, lag=0)
        notes.append("It is run on-policy; set AuditTask(mismatch=...) for an engine that lags.")
    return _in_one_batch(fitting, task, notes), task, notes


def _refuse_other_data(graph: Graph) -> None:
    known = set(column_fields(PromptBatch))
    for name, record in graph.inputs.items():
        if other := [column for column in column_fields(record) if column not in known]:
            raise AuditError(
                f"{graph.name} reads {other[0]} of its input {name!r}, which come from a file, so its rows are not "
                f"sampled from a policy and have no expectation; expected a graph that trains on responses which it "
                f"generates.",
                code="audit.unsupported-graph",
                graph=graph.name,
                input=name,
                column=other[0],
            )


def sources_of_scores(graph: Graph) -> Iterator[Node]:
    """The nodes that write scores without reading scores."""
    for node in graph.nodes.values():
        reads = (graph.types[edge].type for edge in node.inputs.values())
        if isinstance(node.operator, Gate) or any(getattr(type, "kind", "") == "score" for type in reads):
            continue
        if any(getattr(column, "kind", "") == "score" for column in node.signature.outputs.values()):
            yield node


def _tabled(graph: Graph, notes: list[str]) -> Graph:
    """The graph with numbered tables in place of the nodes that score responses; equal scorers share a table."""
    known: dict[str, int] = {}
    for node in list(sources_of_scores(graph)):
        outputs = list(node.signature.outputs)
        if outputs != ["token_level_scores"]:
            raise AuditError(
                f"{node.name} ({type(node.operator).__name__}) writes {', '.join(outputs)} from responses, but a "
                f"tabular task has one score for each response; expected token_level_scores alone.",
                code="audit.unsupported-graph",
                node=node.name,
                found=outputs,
            )
        alike = node.operator.fn if isinstance(node.operator, Reward) else node.operator
        number = known.setdefault(str(alike), len(known))
        table = TableReward(str(number)).named(node.name)
        try:
            graph = edit(graph, replace={node.name: table}, wire={f"{node.name}.rollout": _answers_of(graph, node)})
        except (GraphError, PortError) as error:
            raise AuditError(
                f"{node.name} cannot score by a table: {error.message}", code=error.code, **error.facts
            ) from error
        if not isinstance(node.operator, Reward):
            notes.append(f"{node.name} scores by a table, and not by {type(node.operator).__name__}.")
    return graph


def _answers_of(graph: Graph, node: Node) -> str:
    """The node that made the responses which `node` scores."""
    for source in node.sources:
        if any(use.goes_through(Rollout) for use in graph[source].uses):
            return source
    makers = {axis for edge in node.inputs.values() for axis in graph.types[edge].axes if axis.startswith("response@")}
    for maker in makers:
        return maker.removeprefix("response@")
    raise AuditError(
        f"{node.name} ({type(node.operator).__name__}) does not score responses that {graph.name} generates; expected "
        f"scores of the rows of a Generate.",
        code="audit.unsupported-graph",
        graph=graph.name,
        node=node.name,
    )


def _in_one_batch(graph: Graph, task: AuditTask, notes: list[str]) -> Graph:
    """The graph with one mini-batch if its own do not divide the rows of the task."""
    changed: dict[str, Any] = {}
    rows = task.prompts
    for node in graph.nodes.values():
        rows *= node.rows_factor
    for node in graph.nodes.values():
        for name, divisor in node.row_divisors.items():
            if rows % divisor:
                changed[f"{node.name}.{name}"] = None
                notes.append(f"{node.name} sees its {rows} rows at once, since {name}={divisor} does not divide them.")
    return edit(graph, set=changed) if changed else graph

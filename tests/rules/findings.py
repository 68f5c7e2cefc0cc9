"""The findings of a graph, and the graph after the fix that a finding suggests."""

from __future__ import annotations

from flowrl import operators
from flowrl.core.graphs.after import After
from flowrl.core.operators.roles import Role
from flowrl.core.operators.when import When
from flowrl.graph import Graph


def found(graph: Graph, prompts: int | None = 4) -> list[tuple[str, str]]:
    """The id and the node of each finding."""
    return [(finding.rule, finding.node) for finding in graph.check(prompts=prompts)]


def the_message(graph: Graph, rule: str, prompts: int | None = 4) -> str:
    """The message of the one finding of this rule."""
    [message] = [finding.message for finding in graph.check(prompts=prompts) if finding.rule == rule]
    return message


def fixed(graph: Graph, prompts: int | None = 4) -> Graph:
    """`graph` after the one ``edit(...)`` that its one finding suggests, run as written."""
    [finding] = graph.check(prompts=prompts)
    return edited_by(graph, finding.message)


def edited_by(graph: Graph, message: str) -> Graph:
    """`graph` after the one ``edit(...)`` of a message, run as written."""
    assert message.count("edit(") == 1, message
    call = message[message.index("edit(") :]
    end = next(i for i in range(1, len(call) + 1) if call[:i].count("(") == call[:i].count(")") > 0)
    names = {"After": After, "Role": Role, "When": When, **vars(operators)}
    result = eval(f"graph.{call[:end]}", {"graph": graph, **names})
    assert isinstance(result, Graph)
    return result

"""What rules find in a graph, and the graph after what a finding says to do."""

from __future__ import annotations

from flowrl.core.graphs.after import After
from flowrl.core.operators.roles import Role
from flowrl.core.operators.when import When
from flowrl.graph import Graph
from flowrl.operators import RolloutCorrection, Sync


def found(graph: Graph, prompts: int | None = 4) -> list[tuple[str, str]]:
    """The id and the node of each finding."""
    return [(finding.rule, finding.node) for finding in graph.check(prompts=prompts)]


def the_message(graph: Graph, rule: str, prompts: int | None = 4) -> str:
    """What the one finding of this rule says."""
    [message] = [finding.message for finding in graph.check(prompts=prompts) if finding.rule == rule]
    return message


def mended(graph: Graph, prompts: int | None = 4) -> Graph:
    """`graph` after the one ``edit(...)`` that its one finding names, run as it stands there."""
    [finding] = graph.check(prompts=prompts)
    assert finding.message.count("edit(") == 1, finding.message
    call = finding.message[finding.message.index("edit(") :]
    end = next(i for i in range(1, len(call) + 1) if call[:i].count("(") == call[:i].count(")") > 0)
    names = {"After": After, "Sync": Sync, "Role": Role, "When": When, "RolloutCorrection": RolloutCorrection}
    result = eval(f"graph.{call[:end]}", {"graph": graph, **names})
    assert isinstance(result, Graph)
    return result

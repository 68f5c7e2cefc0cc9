"""Rules about rows: how many there are, and what they are divided into."""

from __future__ import annotations

from flowrl.core.gate import Gate
from flowrl.core.graph import Graph
from flowrl.core.lineage import rows_per_prompt
from flowrl.core.rule import Findings, rule

ASK_FOR_PROMPTS = frozenset({"FR004"})
"""The rules that find nothing before the number of prompts a step is known."""


@rule("FR003", "A group of one answer is its own baseline: every advantage is 0.", "huggingface/trl#4662")
def _group_of_one(graph: Graph, prompts: int | None) -> Findings:
    for node in graph.nodes.values():
        if "group baseline" in node.effects and rows_per_prompt(graph, node.name) == 1:
            yield (
                node.name,
                "its groups have 1 row a prompt, so every advantage is 0; expected at least 2: put Repeat(8) before "
                "what generates.",
            )


@rule(
    "FR004",
    "Mini-batches must divide the rows, or the last one would train with another step size.",
    "DLR-RM/stable-baselines3#270",
)
def _divides(graph: Graph, prompts: int | None) -> Findings:
    if prompts is None:
        return
    for node in graph.nodes.values():
        gate = _last_gate(graph, node.name)
        filled = prompts if gate is None else gate.fills
        for field, size in node.row_divisors.items():
            if gate is not None and filled is None:
                yield (
                    node.name,
                    f"{field}={size} must divide the rows of a step, and nobody knows how many {gate.name} lets "
                    f"through; expected {field}=None, which takes all at once, or in the place of {gate.name} a "
                    f"Collect, which fills up: edit(replace={{'{gate.name}': Collect(...)}}).",
                )
            if filled is None:
                continue
            rows = filled * rows_per_prompt(graph, node.name)
            if rows % size:
                fitting = max(d for d in range(1, min(size, rows) + 1) if rows % d == 0)
                yield (
                    node.name,
                    f"{field}={size} does not divide the {rows} rows of a step ({filled} prompts x "
                    f"{rows // filled}); expected a divisor, such as {field}={fitting}.",
                )


def _last_gate(graph: Graph, name: str) -> Gate | None:
    """The gate through which the rows of a node came last; None where all come that were drawn."""
    line = [graph[other].at_first for other in graph.nodes if other in graph.ancestors(name)]
    return next((operator for operator in reversed(line) if isinstance(operator, Gate)), None)

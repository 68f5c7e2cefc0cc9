"""Rules about weights that change under answers that are under way."""

from __future__ import annotations

from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.lag import row_versions, swaps
from flowrl.rules.rule import Findings, rule
from flowrl.spec import parameters


@rule(
    "FR040",
    "With spans a row has tokens of several versions, and one that is said of the row is not theirs.",
    "vllm-project/vllm#54443",
)
def _tokens_have_versions(graph: Graph, prompts: int | None) -> Findings:
    for node in graph.nodes.values() if swaps(graph) else ():
        read = {getattr(graph.types[edge].type, "name", None) for edge in node.inputs.values()}
        if isinstance(node.initial_operator, Gate) or "token_version" in read:
            continue
        for field, written in row_versions(graph, node).items():
            if not graph[written.node].is_input:
                fix = f"it to read token_version, too, or edit(lag={graph.lag})"
                if "spans" in parameters(node.operator):
                    fix = f"edit(set={{'{node.name}.spans': True}})"
                yield (
                    node.name,
                    f"its {field} is one version a row, and {', '.join(swaps(graph))} changes weights under answers "
                    f"that are under way, so each token has its own; expected {fix}.",
                )

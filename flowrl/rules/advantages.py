"""Rules about advantages: what they are computed from, and in which order they are scaled, weighted and filtered."""

from __future__ import annotations

from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.lineage import line
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.symbols import Edge
from flowrl.rules.inference import effects, over_batch
from flowrl.rules.rule import Findings, of_kind, policy_lines, rule, writes


@rule(
    "FR016",
    "KL in the reward must keep its weight: in a group of equal scores, the standard deviation is that of KL alone.",
    "verl-project/verl-recipe#125",
)
def _kl_keeps_its_weight(graph: Graph, prompts: int | None) -> Findings:
    for node in policy_lines(graph):
        if {Effect.GROUP_BASELINE, Effect.SCALED} <= effects(graph, node):
            for n in line(graph, node.name):
                if Effect.KL in effects(graph, n):
                    yield (
                        node.name,
                        f"It divides by a group's standard deviation after {n.name} added KL, so KL has another "
                        f"weight in each group, and a group of equal scores trains on KL alone, as large as any "
                        f"reward. Move KL to the loss: edit(drop=['{n.name}']) and UpdateActor(kl=KLLoss()).",
                    )


@rule(
    "FR027",
    "A baseline must come from other responses: subtracting a response's own score removes the signal.",
    "areal-project/AReaL#354",
)
def _baseline_of_others(graph: Graph, prompts: int | None) -> Findings:
    for node in policy_lines(graph):
        read = of_kind(graph, node, "advantage", "reward", "score") if writes(node, "advantage") else []
        own = {graph.types[edge].axes[1] for _, edge in read}
        for field, edge in of_kind(graph, node, "score of a row"):
            if own & _scored(graph, edge):
                yield (
                    node.name,
                    f"Its {field} comes from {edge}, the score of the same responses, so subtracting it removes the "
                    f"signal. Use scores of other responses to the prompt: those of a second Generate, or of the "
                    f"group, such as RLOOAdvantage().",
                )


@rule("FR028", "Importance weights must be applied after advantages are scaled.", "verl-project/verl#3245")
def _weighted_after_scaling(graph: Graph, prompts: int | None) -> Findings:
    for node in policy_lines(graph):
        for _, edge in of_kind(graph, node, "advantage") if Effect.SCALED in effects(graph, node) else ():
            for n in line(graph, edge.node):
                if Effect.IMPORTANCE_CORRECTION in effects(graph, n) and writes(n, "advantage"):
                    yield (
                        node.name,
                        f"It normalizes advantages that {n.name} has already weighted, which changes the weights, "
                        f"also those of other rows. Weight after normalizing: edit(drop=['{n.name}']), then insert "
                        f"{n.name} with After({node.name!r}, ...).",
                    )


@rule(
    "FR029",
    "Batch statistics must cover exactly the rows that are trained on, so rows must be filtered before.",
    "NVIDIA-NeMo/RL#4160",
)
def _statistics_of_trained_rows(graph: Graph, prompts: int | None) -> Findings:
    nodes = policy_lines(graph)
    for gate in (node for node in nodes if isinstance(node.initial_operator, Gate)):
        for n in nodes:
            statistics = over_batch(graph, n) and effects(graph, n) & {Effect.SCALED, Effect.GROUP_BASELINE}
            if statistics and writes(n, "advantage") and n.name in graph.ancestors(gate.name):
                yield (
                    gate.name,
                    f"It removes rows after {n.name} computed batch statistics over all of them, so these are not the "
                    f"statistics of the rows that are trained on. Filter earlier: edit(drop=['{gate.name}']), then "
                    f"insert {gate.name} with After('reward', ...).",
                )


def _scored(graph: Graph, edge: Edge) -> set[str]:
    """The axes of the responses that scores belong to, if each row has its own score."""
    node = graph[edge.node]
    if node.operator.granularity != "row":
        return set()
    axes = {axis for read in node.inputs.values() for axis in graph.types[read].axes[1:]}
    return axes.union(*(_scored(graph, read) for _, read in of_kind(graph, node, "score of a row")))

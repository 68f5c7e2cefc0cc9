"""Rules about advantages on their way: in which order they are made, and of what."""

from __future__ import annotations

from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.lineage import line
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.symbols import Edge
from flowrl.rules.rule import Findings, of_kind, policy_lines, rule, writes


@rule(
    "FR016",
    "KL in the reward keeps its weight: where a group's scores are equal, its deviation is that of KL alone.",
    "verl-project/verl-recipe#125",
)
def _kl_keeps_its_weight(graph: Graph, prompts: int | None) -> Findings:
    for node in policy_lines(graph):
        if {Effect.GROUP_BASELINE, Effect.SCALED} <= node.effects:
            for n in line(graph, node.name):
                if Effect.KL in n.effects:
                    yield (
                        node.name,
                        f"it divides by the deviation of a group what {n.name} has taken KL into, so each group weighs "
                        f"KL in its own way, and groups of equal scores train on KL alone, as large as any reward; "
                        f"expected KL in the loss, by UpdateActor(kl=KLLoss()), in its place: edit(drop=['{n.name}']).",
                    )


@rule(
    "FR027",
    "A baseline is of other answers: less its own score, no answer is better than any.",
    "areal-project/AReaL#354",
)
def _baseline_of_others(graph: Graph, prompts: int | None) -> Findings:
    for node in policy_lines(graph):
        own = {graph.types[edge].axes[1] for _, edge in of_kind(graph, node, "advantage")}
        for field, edge in of_kind(graph, node, "score of a row"):
            if own & _scored(graph, edge):
                yield (
                    node.name,
                    f"its {field} comes from {edge}, which is the score of the very answers that the advantages are "
                    f"of, and takes away what there was to learn; expected the score of other answers to the same "
                    f"prompts: those of a second Generate, or the group's, as by RLOOAdvantage().",
                )


@rule("FR028", "Importance weights are laid on what is scaled already.", "verl-project/verl#3245")
def _weighed_behind_the_scale(graph: Graph, prompts: int | None) -> Findings:
    for node in policy_lines(graph):
        for _, edge in of_kind(graph, node, "advantage") if Effect.SCALED in node.effects else ():
            for n in line(graph, edge.node):
                if Effect.IMPORTANCE_CORRECTION in n.effects and writes(n, "advantage"):
                    yield (
                        node.name,
                        f"it takes mean and deviation over advantages that {n.name} has weighed, so a weight of 0 or 2 "
                        f"becomes another, also for other rows; expected the weights behind it: "
                        f"edit(drop=['{n.name}']), and then the same After({node.name!r}, ...).",
                    )


@rule(
    "FR029",
    "Statistics of a batch are of the rows that are trained on: what leaves, leaves before.",
    "NVIDIA-NeMo/RL#4160",
)
def _of_rows_that_stay(graph: Graph, prompts: int | None) -> Findings:
    nodes = policy_lines(graph)
    for gate in (node for node in nodes if isinstance(node.initial_operator, Gate)):
        for n in nodes:
            over_batch = n.operator.granularity == "batch" and n.effects & {Effect.SCALED, Effect.GROUP_BASELINE}
            if over_batch and writes(n, "advantage") and n.name in graph.ancestors(gate.name):
                yield (
                    gate.name,
                    f"it leaves out rows behind {n.name}, which has taken its numbers over all of them, so they are "
                    f"not those of the rows that are trained on; expected it before: edit(drop=['{gate.name}']), and "
                    f"then the same After('reward', ...).",
                )


def _scored(graph: Graph, edge: Edge) -> set[str]:
    """The axes of the answers that a row's score is of, where each row is told for itself."""
    node = graph[edge.node]
    if node.operator.granularity != "row":
        return set()
    axes = {axis for read in node.inputs.values() for axis in graph.types[read].axes[1:]}
    return axes.union(*(_scored(graph, read) for _, read in of_kind(graph, node, "score of a row")))

"""Rules about what reaches an update: it trains on its own rows, and counts each thing once."""

from __future__ import annotations

from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.lineage import makers, own_line, trained_on
from flowrl.core.operators.effects import Effect
from flowrl.protocols.protocols import Trainer
from flowrl.rules.rule import Findings, log_probs, of_kind, policy_lines, rule, with_role, writers


@rule("FR001", "KL counts once: in the reward or in the loss, never in both.", "verl-project/verl#211")
def _kl_once(graph: Graph, prompts: int | None) -> Findings:
    for node, _ in writers(graph, Trainer):
        line = [n.name for n in own_line(graph, node.name) if Effect.KL in n.effects]
        if len(line) > 1:
            in_loss = ", or take it out of the loss: UpdateActor(kl=None)" if line[-1] == node.name else ""
            yield (
                node.name,
                f"KL to the reference is counted {len(line)} times on the way to this update, by {', '.join(line)}; "
                f"expected once: drop one, as in edit(drop=['{line[0]}']){in_loss}.",
            )


@rule(
    "FR006",
    "Generation that runs ahead needs an importance correction, since its rows are off-policy.",
    "radixark/miles#1829",
)
def _lag_is_corrected(graph: Graph, prompts: int | None) -> Findings:
    if not graph.lag.versions:
        return
    for node, _ in writers(graph, Trainer):
        if not any(Effect.IMPORTANCE_CORRECTION in n.effects for n in own_line(graph, node.name)):
            ahead = {generate for _, generate in graph.back_edges} & {n.name for n in trained_on(graph, node.name)}
            for generate in sorted(ahead):
                yield (
                    generate,
                    f"it runs {graph.lag.versions} version(s) ahead of what {node.name} trains, and nothing corrects "
                    f"for that, by an operator with the effect 'importance correction'; {_corrected(node)}.",
                )


def _corrected(update: Node) -> str:
    """The edit that corrects what an update trains on; one that reads no advantages has to run on-policy."""
    source = next((edge.node for place, edge in update.inputs.items() if place.name == "advantages"), None)
    if source is None:
        return "go back to edit(lag=0)"
    level = "geometric" if Effect.ONE_ADVANTAGE_A_ROW in update.effects else "token"  # FR019
    correction = f"RolloutCorrection('{level}', 'truncate', high=2.0)"
    return f"expected edit(insert={{'correction': After('{source}', {correction})}}), or lag=0"


@rule(
    "FR007",
    "Greedy answers have no log-prob at their temperature and no exploration: nothing to learn from.",
    "THUDM/slime#2197",
)
def _greedy(graph: Graph, prompts: int | None) -> Findings:
    for node, _ in writers(graph, Trainer):
        for n in makers(graph, node.name):
            if Effect.GREEDY in n.effects:
                yield (
                    n.name,
                    f"it generates greedily, and {node.name} trains on that; expected temperature > 0, as in "
                    f"Generate(temperature=1.0).",
                )


@rule(
    "FR009",
    "The ratio's old log-probs are the trained policy's own, not those of another role.",
    "thu-ml/tianshou#745",
)
def _own_old_log_probs(graph: Graph, prompts: int | None) -> Findings:
    for node, trained in writers(graph, Trainer):
        for use in log_probs(own_line(graph, node.name), "log-prob of the old policy"):
            if use.role != trained:
                yield (
                    use.node,
                    f"it takes the old log-probs from {use.role!r}, and {node.name} trains {trained!r}; expected "
                    f"{with_role(graph, use, trained)}.",
                )


@rule(
    "FR011",
    "The ratio of trainer to engine counts once: as weights or in the loss's own ratio, never as both.",
    "THUDM/slime#1912",
)
def _correction_once(graph: Graph, prompts: int | None) -> Findings:
    for node, _ in writers(graph, Trainer):
        line = [n.name for n in own_line(graph, node.name) if Effect.IMPORTANCE_CORRECTION in n.effects]
        if len(line) > 1:
            in_loss = ", or take the loss's ratio to the trainer: PPOClip(ratio_to='old')" if node.name in line else ""
            yield (
                node.name,
                f"the ratio of the trainer to the engine that sampled is counted {len(line)} times on the way to this "
                f"update, by {', '.join(line)}; expected once: drop one, as in edit(drop=['{line[0]}']), or let it "
                f"reject and not weigh, by mode='reject'{in_loss}.",
            )


@rule(
    "FR012",
    "A ratio to the engine counts what top-k and top-p cut off as a change of the policy.",
    "huggingface/trl#6789",
)
def _whole_distribution(graph: Graph, prompts: int | None) -> Findings:
    for node, _ in writers(graph, Trainer):
        by = [n.name for n in own_line(graph, node.name) if Effect.IMPORTANCE_CORRECTION in n.effects]
        for n in makers(graph, node.name):
            if by and Effect.TRUNCATED in n.effects:
                yield (
                    n.name,
                    f"it samples from the most likely tokens alone, so its log-probs are of these, and {by[0]} takes "
                    f"the ratio of the trainer's, which are of all tokens, to them; expected the whole distribution: "
                    f"edit(set={{'{n.name}.top_k': 0, '{n.name}.top_p': 1.0}}), or no such ratio.",
                )


@rule(
    "FR013",
    "Advantages are scaled once: what a group's deviation has scaled is not whitened again.",
    "axon-rl/gem#113",
)
def _scaled_once(graph: Graph, prompts: int | None) -> Findings:
    for node in policy_lines(graph):
        for _, edge in of_kind(graph, node, "advantage"):
            if Effect.SCALED in node.effects & graph[edge.node].effects:
                yield (
                    node.name,
                    f"it divides {edge} by a standard deviation, and {edge.node} has done so, over other rows; "
                    f"expected one scale: edit(drop=['{node.name}']), or let {edge.node} leave it to this node, as by "
                    f"GroupAdvantage(normalize_std=False).",
                )


@rule("FR014", "KL that shapes rewards is felt by the policy, or it holds nothing back.", "THUDM/slime#397")
def _kl_is_felt(graph: Graph, prompts: int | None) -> Findings:
    nodes = policy_lines(graph)
    if not nodes or any(Effect.KL in node.effects for node in nodes):
        return
    for node in graph.nodes.values():
        if Effect.KL in node.effects:
            yield (
                node.name,
                "it takes KL to the reference into rewards from which no update of a policy gets its advantages; "
                f"expected advantages of what it writes: wire them to it, or take it out: edit(drop=['{node.name}']).",
            )

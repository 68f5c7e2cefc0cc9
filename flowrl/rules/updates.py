"""Rules about what an update trains on: rows of its own policy, with KL, ratio and scale counted once."""

from __future__ import annotations

from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.lineage import makers, own_lineage, trained_on
from flowrl.core.operators.effects import Effect
from flowrl.protocols.protocols import Trainer
from flowrl.rules.inference import effects, references, sources
from flowrl.rules.rule import (
    Findings,
    log_probs,
    of_kind,
    policy_lines,
    rule,
    sampling,
    set_role,
    whole_distribution,
    writers,
)
from flowrl.spec import parameters


@rule("FR001", "KL must count once: in the reward or in the loss, not in both.", "verl-project/verl#211")
def _kl_once(graph: Graph, prompts: int | None) -> Findings:
    for node, _ in writers(graph, Trainer):
        nodes = [n for n in own_lineage(graph, node.name) if Effect.KL in effects(graph, n)]
        for reference in sorted(frozenset().union(*(references(graph, n) for n in nodes))) or [""]:
            line = [n.name for n in nodes if reference in (references(graph, n) or {reference})]
            if len(line) > 1:
                in_loss = ", or remove it from the loss: UpdateActor(kl=None)" if line[-1] == node.name else ""
                yield (
                    node.name,
                    f"KL to the reference counts {len(line)} times on the way to this update: in {', '.join(line)}. "
                    f"Drop one, such as edit(drop=['{line[0]}']){in_loss}.",
                )


@rule(
    "FR006",
    "Rows sampled ahead of training, or replayed, need an importance correction, because they are off-policy.",
    "radixark/miles#1829",
)
def _lag_is_corrected(graph: Graph, prompts: int | None) -> Findings:
    for node, _ in writers(graph, Trainer):
        if not any(Effect.IMPORTANCE_CORRECTION in effects(graph, n) for n in own_lineage(graph, node.name)):
            if replayed := parameters(node.initial_operator).get("replayed"):
                yield (
                    node.name,
                    f"It accepts rows of up to {replayed} version(s) before, and no operator with the effect "
                    f"'importance correction' corrects for that. Use the log-probs of the policies that sampled them: "
                    f"UpdateActor(PPOClip(ratio_to='rollout'), replayed={replayed}).",
                )
            if not graph.lag.versions:
                continue
            ahead = {generate for _, generate in graph.back_edges} & {n.name for n in trained_on(graph, node.name)}
            for generate in sorted(ahead):
                yield (
                    generate,
                    f"It samples up to {graph.lag.versions} version(s) ahead of {node.name}, and no operator with the "
                    f"effect 'importance correction' corrects for that. {_correct(graph, node)}.",
                )


def _correct(graph: Graph, update: Node) -> str:
    """The edit that inserts a correction; an update that reads no advantages has to run on-policy."""
    source = next((edge.node for place, edge in update.inputs.items() if place.name == "advantages"), None)
    if source is None:
        return f"{update.name} reads no advantages to correct, so run on-policy: edit(lag=0)"
    if Effect.NONLINEAR in effects(graph, update):  # FR019
        return f"{update.name} is not linear in the advantages that it would weight, so run on-policy: edit(lag=0)"
    level = "geometric" if Effect.ADVANTAGE_PER_ROW in effects(graph, update) else "token"  # FR019
    correction = f"RolloutCorrection('{level}', 'truncate', high=2.0)"
    return f"Insert one: edit(insert={{'correction': After('{source}', {correction})}}), or pass lag=0"


@rule(
    "FR007",
    "A policy cannot learn from greedy responses: they do not explore, and have no log-prob at their temperature.",
    "THUDM/slime#2197",
)
def _samples(graph: Graph, prompts: int | None) -> Findings:
    for node, _ in writers(graph, Trainer):
        for n in makers(graph, node.name):
            if Effect.GREEDY in effects(graph, n):
                yield (
                    n.name,
                    f"It samples greedily, but {node.name} trains on its responses. Pass a temperature above 0 and "
                    f"more than the likeliest token: edit(set={sampling(graph, n)}).",
                )


@rule(
    "FR009",
    "The old log-probs of the ratio must come from the trained policy, not from another role.",
    "thu-ml/tianshou#745",
)
def _own_old_log_probs(graph: Graph, prompts: int | None) -> Findings:
    for node, trained in writers(graph, Trainer):
        line = own_lineage(graph, node.name)
        compare = {Effect.KL, Effect.IMPORTANCE_CORRECTION}  # not a reward model that reads its own log-probs
        in_ratio = [n for n in line if n.name == node.name or compare & effects(graph, n)]
        read = {edge.node for n in in_ratio for edge in sources(graph, list(n.inputs.values()))}
        for use in log_probs([n for n in line if n.name in read], "log-prob of the old policy"):
            if use.role != trained:
                yield (
                    use.node,
                    f"It computes the old log-probs with {use.role!r}, but {node.name} trains {trained!r}. Use the "
                    f"trained role: {set_role(use, trained)}.",
                )


@rule(
    "FR011",
    "The ratio of trainer to engine must count once: as weights or in the loss's own ratio, not as both.",
    "THUDM/slime#1912",
)
def _correction_once(graph: Graph, prompts: int | None) -> Findings:
    for node, _ in writers(graph, Trainer):
        line = [n.name for n in own_lineage(graph, node.name) if Effect.IMPORTANCE_CORRECTION in effects(graph, n)]
        if len(line) > 1:
            in_loss = ", or use the trainer's ratio in the loss: PPOClip(ratio_to='old')" if node.name in line else ""
            yield (
                node.name,
                f"The ratio of the trainer to the engine that sampled counts {len(line)} times on the way to this "
                f"update: in {', '.join(line)}. Drop one, such as edit(drop=['{line[0]}']), or let it only reject "
                f"rows: mode='reject'{in_loss}.",
            )


@rule(
    "FR012",
    "With top-k, top-p, min-p or penalties, a ratio to the engine mistakes these for a change of the policy.",
    "huggingface/trl#6789",
)
def _full_distribution(graph: Graph, prompts: int | None) -> Findings:
    for node, _ in writers(graph, Trainer):
        by = [n.name for n in own_lineage(graph, node.name) if Effect.IMPORTANCE_CORRECTION in effects(graph, n)]
        for n in makers(graph, node.name):
            found = effects(graph, n) & {Effect.TRUNCATED, Effect.PENALIZED}
            if by and found:
                how = "truncated distribution (top-k, top-p or min-p)"
                if Effect.TRUNCATED not in found:
                    how = "distribution with penalties on tokens of the context"
                yield (
                    n.name,
                    f"It samples from a {how}, but {by[0]} compares its log-probs with the trainer's, which are those "
                    f"of the policy. Sample from the full distribution: edit(set={whole_distribution(graph, n)}), "
                    f"or remove the ratio.",
                )


@rule(
    "FR013",
    "Advantages must be scaled once: whitening after a group's standard deviation scales them again.",
    "axon-rl/gem#113",
)
def _scaled_once(graph: Graph, prompts: int | None) -> Findings:
    for node in policy_lines(graph):
        for _, edge in of_kind(graph, node, "advantage"):
            if Effect.SCALED in effects(graph, node) & effects(graph, graph[edge.node]):
                yield (
                    node.name,
                    f"It divides {edge} by a standard deviation, but {edge.node} has already done so, over other "
                    f"rows. Scale once: edit(drop=['{node.name}']), or turn off the scaling in {edge.node}, such as "
                    f"GroupAdvantage(normalize_std=False).",
                )


@rule("FR014", "A KL penalty in the reward must reach the policy's advantages.", "THUDM/slime#397")
def _kl_reaches_policy(graph: Graph, prompts: int | None) -> Findings:
    nodes = policy_lines(graph)
    if not nodes or any(Effect.KL in effects(graph, node) for node in nodes):
        return
    for node in graph.nodes.values():
        if Effect.KL in effects(graph, node):
            yield (
                node.name,
                f"It adds KL to the reference to rewards that no policy's advantages depend on. Compute the "
                f"advantages from its output, or drop it: edit(drop=['{node.name}']).",
            )

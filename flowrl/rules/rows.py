"""Rules about numbers of rows: groups and mini-batches."""

from __future__ import annotations

from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.lineage import last_gate, response_makers, rows_of_step, rows_per_prompt
from flowrl.core.operators.effects import Effect
from flowrl.rules.inference import effects, over_batch
from flowrl.rules.rule import Findings, of_kind, policy_lines, repeated, rule, sampling
from flowrl.spec import parameters

ASK_FOR_PROMPTS = frozenset({"FR004", "FR020", "FR044", "FR045"})
"""The rules that may need the number of prompts per step."""


@rule(
    "FR003",
    "A group needs several responses: a single one is its own baseline, so every advantage is 0.",
    "huggingface/trl#4662",
)
def _group_of_one(graph: Graph, prompts: int | None) -> Findings:
    for node in graph.nodes.values():
        if Effect.GROUP_BASELINE in effects(graph, node) and rows_per_prompt(graph, node.name) == 1:
            yield (
                node.name,
                f"Its groups have 1 row per prompt, so every advantage is 0. Sample at least 2: "
                f"{repeated(graph, node.name, 8)}.",
            )


@rule(
    "FR004",
    "Mini-batches must divide the rows of a step, or the last one would have a different step size.",
    "DLR-RM/stable-baselines3#270",
)
def _divides(graph: Graph, prompts: int | None) -> Findings:
    if prompts is None:
        return
    for node in graph.nodes.values():
        gate, rows = last_gate(graph, node.name), rows_of_step(graph, node.name, prompts)
        for field, size in node.row_divisors.items():
            if gate is not None and rows is None:
                yield (
                    node.name,
                    f"{field}={size} must divide the rows of a step, but the number of rows that pass {gate.name} is "
                    f"not known. Train on all of them at once: edit(set={{'{node.name}.{field}': None}}), or replace "
                    f"{gate.name} with a Collect, which fills up to a fixed number.",
                )
            if rows is not None and rows % size:
                each = rows_per_prompt(graph, node.name)
                fitting = max(d for d in range(1, min(size, rows) + 1) if rows % d == 0)
                yield (
                    node.name,
                    f"{field}={size} does not divide the {rows} rows of a step ({rows // each} prompts x {each}). "
                    f"Pass a divisor: edit(set={{'{node.name}.{field}': {fitting}}}).",
                )


@rule(
    "FR031",
    "Comparing several responses to a prompt needs sampling: greedy responses are identical.",
    "open-compass/VLMEvalKit#950",
    everywhere=True,
)
def _responses_differ(graph: Graph, prompts: int | None) -> Findings:
    for node in graph.nodes.values():
        if Effect.SEVERAL_RESPONSES in effects(graph, node):
            for name in sorted(response_makers(graph, node.name)):
                if Effect.GREEDY in effects(graph, graph[name]):
                    free = sampling(graph, graph[name])
                    yield (
                        node.name,
                        f"It compares several responses to a prompt, but {name} samples greedily, so they are "
                        f"identical. Pass a temperature above 0 and more than the likeliest token: "
                        f"edit(set={free}), or in a validation changes={free}.",
                    )


@rule(
    "FR032",
    "Sets of k responses need others to compare with: if a group is a single set, every advantage is 0.",
    "huggingface/trl#4662",
)
def _several_sets(graph: Graph, prompts: int | None) -> Findings:
    for node in graph.nodes.values():
        k = parameters(node.initial_operator).get("k")
        if (
            Effect.GROUP_BASELINE in effects(graph, node)
            and isinstance(k, int)
            and rows_per_prompt(graph, node.name) == k > 1
        ):
            yield (
                node.name,
                f"It compares sets of k={k} responses, but a prompt has {k}, a single set, so every advantage is 0. "
                f"Lower k: edit(set={{'{node.name}.k': {k // 2}}}), or sample more responses: Repeat({2 * k}).",
            )


@rule(
    "FR044",
    "Whitening needs several rows: over a single one, it subtracts what the row has earned.",
    "DLR-RM/stable-baselines3#265",
)
def _whitens_several_rows(graph: Graph, prompts: int | None) -> Findings:
    for node in policy_lines(graph):
        whitens = Effect.SCALED in effects(graph, node) and over_batch(graph, node)
        if whitens and of_kind(graph, node, "advantage", "reward") and rows_of_step(graph, node.name, prompts) == 1:
            yield (
                node.name,
                "It divides by the standard deviation over the rows of a step, but a step has 1 row. Use more prompts "
                "per step: Training(..., prompts=32), or sample several responses: insert Repeat(8) before the node "
                "that generates.",
            )


@rule(
    "FR045",
    "The rounds of a step must sample enough prompts, or no step can collect its groups.",
    "verl-project/verl#953",
)
def _enough_rounds(graph: Graph, prompts: int | None) -> Findings:
    if prompts is None:
        return
    for node in graph.nodes.values():
        collect = node.initial_operator
        groups = collect.target_groups if isinstance(collect, Gate) else None
        if (
            not isinstance(collect, Gate)
            or groups is None
            or parameters(collect).get("on_underfill") not in ("error", "skip")
        ):
            continue
        if groups > (most := prompts * collect.rounds_at_most):
            rounds = -(-groups // prompts)
            yield (
                node.name,
                f"It collects {groups} groups, but its {collect.rounds_at_most} round(s) of {prompts} prompts have at "
                f"most {most}. Allow more rounds: edit(set={{'{node.name}.rounds': {rounds}}}), or sample more prompts "
                f"per step.",
            )

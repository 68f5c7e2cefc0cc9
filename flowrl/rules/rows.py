"""Rules about rows: how many there are, and what they are divided into."""

from __future__ import annotations

from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.lineage import last_gate, response_makers, rows_of_step, rows_per_prompt
from flowrl.core.operators.effects import Effect
from flowrl.rules.rule import Findings, rule
from flowrl.spec import parameters

ASK_FOR_PROMPTS = frozenset({"FR004", "FR020"})
"""The rules that may find nothing before the number of prompts a step is known."""


@rule("FR003", "A group of one answer is its own baseline: every advantage is 0.", "huggingface/trl#4662")
def _group_of_one(graph: Graph, prompts: int | None) -> Findings:
    for node in graph.nodes.values():
        if Effect.GROUP_BASELINE in node.effects and rows_per_prompt(graph, node.name) == 1:
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
        gate, rows = last_gate(graph, node.name), rows_of_step(graph, node.name, prompts)
        for field, size in node.row_divisors.items():
            if gate is not None and rows is None:
                yield (
                    node.name,
                    f"{field}={size} must divide the rows of a step, and nobody knows how many {gate.name} lets "
                    f"through; expected {field}=None, which takes all at once, or in the place of {gate.name} a "
                    f"Collect, which fills up: edit(replace={{'{gate.name}': Collect(...)}}).",
                )
            if rows is not None and rows % size:
                each = rows_per_prompt(graph, node.name)
                fitting = max(d for d in range(1, min(size, rows) + 1) if rows % d == 0)
                yield (
                    node.name,
                    f"{field}={size} does not divide the {rows} rows of a step ({rows // each} prompts x "
                    f"{each}); expected a divisor, such as {field}={fitting}.",
                )


@rule(
    "FR031",
    "Several answers to a prompt are sampled: greedy ones are one answer, several times.",
    "open-compass/VLMEvalKit#950",
    everywhere=True,
)
def _answers_differ(graph: Graph, prompts: int | None) -> Findings:
    for node in graph.nodes.values():
        if Effect.SEVERAL_ANSWERS in node.effects:
            for name in sorted(response_makers(graph, node.name)):
                if Effect.GREEDY in graph[name].effects:
                    yield (
                        node.name,
                        f"it compares several answers to a prompt, and {name} gives the same one each time; expected "
                        f"temperature > 0: edit(set={{'{name}.temperature': 1.0}}), in a validation "
                        f"changes={{'{name}.temperature': 1.0, ...}}.",
                    )


@rule(
    "FR032",
    "Sets of k answers are compared with others: where a group is one set, every advantage is 0.",
    "huggingface/trl#4662",
)
def _more_than_a_set(graph: Graph, prompts: int | None) -> Findings:
    for node in graph.nodes.values():
        k = parameters(node.initial_operator).get("k")
        if Effect.GROUP_BASELINE in node.effects and isinstance(k, int) and rows_per_prompt(graph, node.name) == k > 1:
            yield (
                node.name,
                f"it compares sets of k={k} answers, and a prompt has {k}, which is one set, so every advantage is 0; "
                f"expected k below: edit(set={{'{node.name}.k': {k // 2}}}), or more answers: Repeat({2 * k}).",
            )

"""Rules about weights: who writes them, who reads them, and which of them stand still."""

from __future__ import annotations

from itertools import product

from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.lineage import line, own_line, trained_on
from flowrl.core.graphs.plan import in_order, later_writers
from flowrl.protocols.protocols import Critic, Synced, Trainer
from flowrl.rules.rule import Findings, log_probs, read_through, rule, with_role, writers
from flowrl.spec import parameters


@rule(
    "FR002",
    "A policy that is updated and never synced trains on the answers of an ever older one.",
    "huggingface/trl#5312",
)
def _synced(graph: Graph, prompts: int | None) -> Findings:
    for node, role in writers(graph, Trainer):
        updates = {node.name, *later_writers(graph, node.name, role)}
        for engine in sorted(read_through(trained_on(graph, node.name), Synced)):
            syncs = [
                sync.name
                for sync in graph.nodes.values()
                if engine in sync.writes and role in sync.reads and updates & graph.ancestors(sync.name)
            ]
            if syncs and not any(set(graph.whens(sync)) <= set(graph.whens(node.name)) for sync in syncs):
                yield (
                    node.name,
                    f"it trains {role!r} in steps in which {', '.join(syncs)} does not carry its weights to "
                    f"{engine!r}; expected a sync after every update: edit(when={{'{syncs[0]}': When()}}).",
                )
            elif not syncs:
                roles = (("actor", role), ("rollout", engine))
                sync = f"Sync({', '.join(f'{field}=Role({r!r})' for field, r in roles if r != field)})"
                yield (
                    node.name,
                    f"it trains {role!r} on what {engine!r} generates, but nothing carries its weights back to "
                    f"{engine!r}; return {sync}({node.name}) too, or edit(insert={{'sync': After('{node.name}', "
                    f"{sync})}}).",
                )


@rule(
    "FR005",
    "A critic is trained towards returns that were taken with its own values; otherwise nothing uses what it learns.",
    "PRIME-RL/SimpleVLA-RL#73",
)
def _critic_is_read(graph: Graph, prompts: int | None) -> Findings:
    for node, role in writers(graph, Critic):
        own = own_line(graph, node.name)
        if role not in read_through(own, Critic):
            yield (
                node.name,
                f"it updates {role!r} without values of {role!r}; expected Value(critic=Role({role!r})) before it.",
            )
            continue
        for field, edge in node.inputs.items():
            kind = getattr(graph.types[edge].type, "kind", None)
            critics = read_through([n for n in line(graph, edge.node) if n in own], Critic)
            if kind in ("value", "return") and critics and role not in critics:
                yield (
                    node.name,
                    f"its {field} come from {edge}, which was taken with values of {sorted(critics)[0]!r}, but it "
                    f"updates {role!r}; wire what was taken with Value(critic=Role({role!r})).",
                )


@rule(
    "FR008",
    "Two writers of one role in a step: the second's rows were sampled before the first's update.",
    "thu-ml/tianshou#745",
)
def _one_writer(graph: Graph, prompts: int | None) -> Findings:
    for role in graph.roles():
        first, *others = in_order(graph, role) or [""]
        for before, other in enumerate(others, start=1):
            operator = graph[other].operator
            if graph[other].prior_updates >= before:
                continue
            off = "prior_updates" in parameters(operator)
            says = f", or let it say so: {type(operator).__name__}(prior_updates={before})" if off else ""
            yield (
                other,
                f"it writes {role!r}, and so does {first}, so its rows are {before} version(s) older than the weights; "
                f"expected one writer of a role a step: drop one, as in edit(drop=['{other}']), or give one a role of "
                f"its own{says}.",
            )


@rule(
    "FR010",
    "A reference that is trained itself is not an anchor: KL to it moves with the policy.",
    "hiyouga/ChatGLM-Efficient-Tuning#380",
)
def _reference_is_frozen(graph: Graph, prompts: int | None) -> Findings:
    trained = {role: node.name for node, role in writers(graph, Trainer)}
    anchors = (log_probs(own_line(graph, name), "log-prob of the reference") for name in trained.values())
    for use in dict.fromkeys(use for found in anchors for use in found if use.role in trained):
        yield (
            use.node,
            f"it takes the reference's log-probs from {use.role!r}, which {trained[use.role]} trains; expected a "
            f"role that nothing trains: {with_role(graph, use, 'ref')}.",
        )


@rule(
    "FR041",
    "With a lag, what is sampled in rounds does not wait for training, which may wait for all rounds.",
    "NovaSky-AI/SkyRL#1802",
)
def _rounds_need_no_training(graph: Graph, prompts: int | None) -> Findings:
    if graph.lag.versions < 2:
        return  # by a lag of 1, a sync waits for rounds that need no later training than the one before it
    collecting = [
        n
        for n in graph.nodes.values()
        if isinstance(n.initial_operator, Gate) and n.initial_operator.rounds_at_most > 1
    ]
    for gate, node in product(collecting, graph.nodes.values()):
        for role in (role for role in graph.trained if role in node.reads):
            if node.name in graph.ancestors(gate.name):
                yield (
                    gate.name,
                    f"it asks for further rounds behind {node.name}, which reads {role!r} once the step before has "
                    f"trained it, and with lag={graph.lag} that training waits for the rounds; expected it in front of "
                    f"{node.name}: edit(drop=['{gate.name}']), and then the same After('reward', ...); or lag=1.",
                )

"""Rules about weights: which nodes write them, which read them, and which must stay frozen."""

from __future__ import annotations

from itertools import product

from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.lineage import line, own_lineage, samplers
from flowrl.core.graphs.plan import in_order, later_writers
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.when import When
from flowrl.protocols.protocols import Critic, Trainer
from flowrl.record_types import accepts
from flowrl.rules.rule import (
    Findings,
    kinds_of_loss,
    log_probs,
    losses_of,
    read_through,
    rule,
    set_role,
    set_roles,
    writers,
)
from flowrl.spec import parameters


@rule(
    "FR002",
    "A policy that is updated must be synced to its engine, or it trains on responses of ever older weights.",
    "huggingface/trl#5312",
)
def _synced(graph: Graph, prompts: int | None) -> Findings:
    for node, role in writers(graph, Trainer):
        updates = {node.name, *later_writers(graph, node.name, role)}
        for engine in sorted({use.role for use in samplers(graph, node.name)}):
            syncs = [
                sync.name
                for sync in graph.nodes.values()
                if engine in sync.writes and role in sync.reads and updates & graph.ancestors(sync.name)
            ]
            if syncs and not any(set(graph.whens(sync)) <= set(graph.whens(node.name)) for sync in syncs):
                yield (
                    node.name,
                    f"It trains {role!r} in steps in which {', '.join(syncs)} does not sync its weights to "
                    f"{engine!r}. Sync after every update: edit(when={_always(graph, node, syncs[0])}).",
                )
            elif not syncs and _needs_own_responses(graph, node, engine):
                yield (
                    node.name,
                    f"It trains {role!r} on responses of {engine!r}, but nothing syncs its weights to {engine!r}. "
                    f"{_own_engine(graph, node, role, engine)}.",
                )


def _always(graph: Graph, update: Node, sync: str) -> str:
    """The steps of a sync and of the nodes before it that do not run in all steps of an update, as ``edit(when=)``."""
    steps = {When(), *graph.whens(update.name)}
    skipping = (n.name for n in line(graph, sync) if n.when not in steps)
    return f"{{{', '.join(f'{name!r}: When()' for name in skipping)}}}"


def _needs_own_responses(graph: Graph, update: Node, engine: str) -> bool:
    """Whether an update must train on responses of its own policy: its loss reads advantages or their log-probs.

    Other losses learn from any policy's responses, and so do all losses from those of a frozen engine, except with a
    ratio to the log-probs of the policy itself.
    """
    losses = list(losses_of(update))
    read = set[str]().union(*map(kinds_of_loss, losses))
    others = any(engine in sync.writes for sync in graph.nodes.values())
    if engine in graph.bindings and graph.bindings[engine].frozen and not others:
        return not losses or "log-prob of the old policy" in read
    if not losses or _ON_POLICY & read:
        return True
    return engine in graph.bindings and not others


_ON_POLICY = {"advantage", "log-prob of the old policy", "log-prob of the rollout"}


def _own_engine(graph: Graph, update: Node, role: str, engine: str) -> str:
    """How an update gets responses of the policy that it trains."""
    syncs = [node for node in graph.nodes.values() if node.is_sync]
    own = sorted({to for sync in syncs if role in sync.reads for to in sync.writes})
    sampling = [use for use in samplers(graph, update.name) if use.role == engine]
    readers = {node.name for node, _ in writers(graph, Trainer) if {*sampling} & {*samplers(graph, node.name)}}
    theirs = [use for sync in syncs if engine in sync.writes for use in sync.uses if use.mode == "reads"]
    trained = {other for _, other in writers(graph, Trainer)}
    if own and readers == {update.name}:
        return f"Sample with its own engine: {set_roles(sampling, own[0])}"
    if theirs and not {use.role for use in theirs} & trained:
        return f"Sync the policy that is trained: {set_roles(theirs, role)}"
    if own or theirs or (engine in graph.bindings and graph.bindings[engine].frozen):
        return (
            "Sample its responses with an engine of its own that Sync(...) updates, or use a loss for responses of "
            "other policies, such as UpdateActor(NLL()), or with the engine's rollout_log_probs "
            "UpdateActor(PPOClip(ratio_to='rollout'))"
        )
    roles = (("actor", role), ("rollout", engine))
    sync = f"Sync({', '.join(f'{field}=Role({r!r})' for field, r in roles if r != field)})"
    name = "sync" if "sync" not in graph else f"sync_{engine}"
    inserted = f"edit(insert={{{name!r}: After('{update.name}', {sync})}})"
    return f"Insert a sync: {inserted}, or return {sync}({update.name}) too"


@rule(
    "FR005",
    "A critic must learn returns that were computed with its own values; otherwise nothing uses what it learns.",
    "PRIME-RL/SimpleVLA-RL#73",
)
def _critic_is_read(graph: Graph, prompts: int | None) -> Findings:
    for node, role in writers(graph, Critic):
        own = own_lineage(graph, node.name)
        if role not in read_through(own, Critic):
            yield (
                node.name,
                f"It updates {role!r}, but reads nothing that was computed with values of {role!r}. Insert "
                f"Value(critic=Role({role!r})) before it.",
            )
            continue
        for field, edge in node.inputs.items():
            kind = getattr(graph.types[edge].type, "kind", None)
            critics = read_through([n for n in line(graph, edge.node) if n in own], Critic)
            if kind in ("value", "return") and critics and role not in critics:
                yield (
                    node.name,
                    f"Its {field} come from {edge}, computed with values of {sorted(critics)[0]!r}, but it updates "
                    f"{role!r}. Wire {field} that were computed with Value(critic=Role({role!r})).",
                )


@rule(
    "FR008",
    "A role must be updated once per step: a second update trains on rows from before the first.",
    "thu-ml/tianshou#745",
)
def _one_writer(graph: Graph, prompts: int | None) -> Findings:
    for role in graph.roles():
        first, *others = in_order(graph, role) or [""]
        for before, other in enumerate(others, start=1):
            if graph[other].prior_updates >= before:
                continue
            operator = graph[other].operator
            off = "prior_updates" in parameters(operator)
            declare = (
                f", or declare the age of its rows: {type(operator).__name__}(prior_updates={before})" if off else ""
            )
            yield (
                other,
                f"It updates {role!r} after {first}, so its rows are {before} version(s) older than the weights. "
                f"Update a role once per step: edit({_dropped(graph, other, first)}), or use a separate role{declare}.",
            )


def _dropped(graph: Graph, update: str, first: str) -> str:
    """The verbs that drop an update, whose readers then read the first update of the role."""
    [(output, written)] = graph[first].signature.outputs.items()
    ends = [
        (node.name, field, accepts(node.signature.fields[field], written))
        for node in graph.nodes.values()
        for field, edge in node.inputs.items()
        if edge.node == update
    ]
    wired = ", ".join(f"'{name}.{field}': '{first}.{output}'" for name, field, fits in ends if fits)
    lost = [name for name, _, fits in ends if not fits]
    return f"drop={[update, *lost]}{f', wire={{{wired}}}' if wired else ''}"


@rule(
    "FR043",
    "An update may accept only rows as old as the updates before it, or a `Replay`, make them.",
    "radixark/miles#2524",
)
def _no_older_rows(graph: Graph, prompts: int | None) -> Findings:
    for role in graph.roles():
        for before, name in enumerate(in_order(graph, role)):
            if graph[name].prior_updates > before:
                yield (
                    name,
                    f"It has prior_updates={graph[name].prior_updates}, but {before} update(s) of {role!r} run before "
                    f"it in a step, so it would accept rows of older policies. Pass that number: "
                    f"edit(set={{'{name}.prior_updates': {before}}}).",
                )
    for node, _ in writers(graph, Trainer):
        replays = [n for n in line(graph, node.name) if Effect.REPLAYS in n.effects]
        oldest = max((int(parameters(n.initial_operator).get("max_age", 0)) for n in replays), default=0)
        accepted = parameters(node.initial_operator).get("replayed", 0)
        if oldest != accepted:
            yield (
                node.name,
                f"It accepts replayed rows of up to {accepted} version(s) before, and "
                f"{', '.join(n.name for n in replays) or 'no node'} replays rows of up to {oldest}. Make them equal: "
                f"edit(set={{'{node.name}.replayed': {oldest}}}).",
            )


@rule(
    "FR010",
    "A reference must stay frozen: KL to a trained role moves with the policy.",
    "hiyouga/ChatGLM-Efficient-Tuning#380",
)
def _reference_is_frozen(graph: Graph, prompts: int | None) -> Findings:
    trained = {role: node.name for node, role in writers(graph, Trainer)}
    anchors = (log_probs(own_lineage(graph, name), "log-prob of the reference") for name in trained.values())
    frozen = "ref" if "ref" not in trained else "frozen_ref"
    for use in dict.fromkeys(use for found in anchors for use in found if use.role in trained):
        yield (
            use.node,
            f"It computes the reference's log-probs with {use.role!r}, which {trained[use.role]} trains. Use a role "
            f"that nothing trains: {set_role(use, frozen)}.",
        )


@rule(
    "FR041",
    "With a lag of 2 or more, sampling in rounds must not wait for training, which may wait for all rounds.",
    "NovaSky-AI/SkyRL#1802",
)
def _rounds_need_no_training(graph: Graph, prompts: int | None) -> Findings:
    if graph.lag.versions < 2:
        return  # with a lag of 1, the rounds that a sync waits for need only the training before it
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
                    f"It samples further rounds after {node.name}, which waits until the previous step has trained "
                    f"{role!r}, and with lag={graph.lag} that training waits for the rounds. Move it before "
                    f"{node.name}: edit(drop=['{gate.name}']), then insert {gate.name} with After('reward', ...), or "
                    f"use lag=1.",
                )

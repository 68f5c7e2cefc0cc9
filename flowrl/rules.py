"""Rules: what must not be launched although every connection fits.

`RULES` is a table. A rule is one small function over a graph that yields what it finds; each has an id, the reason in a
line, and the public issue that taught it. Rules know operators only by what these declare: roles, effects, granularity
and row arithmetic, so a custom operator is held to them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flowrl.engines import Critic, Rollout, Trainer
from flowrl.errors import RuleError
from flowrl.graph import Graph, Node
from flowrl.roles import RoleRef

Found = Iterator[tuple[str, str]]


@dataclass(frozen=True)
class Finding:
    """One thing that a rule found: its id, the node, and what to do."""

    rule: str
    node: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule} {self.node}: {self.message}"


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Args:
        id: ``FR001``, ...; never used again for another rule.
        reason: why, in a line.
        source: the public issue that taught it.
        check: yields ``(node, message)``; the second argument is the number of prompts a step, or None.
    """

    id: str
    reason: str
    source: str
    check: Callable[[Graph, int | None], Found]


RULES: list[Rule] = []


def rule(
    id: str, reason: str, source: str
) -> Callable[[Callable[[Graph, int | None], Found]], Callable[[Graph, int | None], Found]]:
    """Enter a function into the table."""

    def enter(check: Callable[[Graph, int | None], Found]) -> Callable[[Graph, int | None], Found]:
        RULES.append(Rule(id, reason, source, check))
        return check

    return enter


def check(graph: Graph, prompts: int | None = None) -> list[Finding]:
    """All findings of all rules. They concern training, so a graph that writes no trained weights has none."""
    if not _writers(graph, Trainer) and not _writers(graph, Critic):
        return []
    return [Finding(r.id, node, message) for r in RULES for node, message in r.check(graph, prompts)]


def require(graph: Graph, prompts: int | None = None) -> None:
    """Refuse a graph that breaks a rule.

    Raises:
        RuleError: with every finding.
    """
    findings: Sequence[Finding] = check(graph, prompts)
    if findings:
        raise RuleError(
            f"{graph.name} breaks {len(findings)} rule(s):\n" + "\n".join(f"  {finding}" for finding in findings)
        )


def _writers(graph: Graph, protocol: type) -> list[tuple[Node, str]]:
    """Nodes that write a role through `protocol`, with the role."""
    return [
        (node, role)
        for node in graph.nodes.values()
        for role, mode, p in _uses(node)
        if mode == "writes" and p is protocol
    ]


def _uses(node: Node) -> list[tuple[str, str, type]]:
    refs = [(getattr(node.operator, field), use) for field, use in node.operator.role_uses.items()]
    return [(ref.name, use.mode, use.protocol) for ref, use in refs if isinstance(ref, RoleRef)]


def _rows_per_prompt(graph: Graph, name: str) -> int:
    """How many rows the node sees for every prompt of the step."""
    factor = graph[name].operator.rows_factor
    for ancestor in graph.ancestors(name):
        factor *= graph[ancestor].operator.rows_factor
    return factor


@rule("FR001", "KL counts once: in the reward or in the loss, never in both.", "verl#211")
def _kl_once(graph: Graph, prompts: int | None) -> Found:
    for node, _ in _writers(graph, Trainer):
        line = [
            n
            for n in graph.nodes
            if n in graph.ancestors(node.name) | {node.name} and "kl" in graph[n].operator.effects
        ]
        if len(line) > 1:
            yield (
                node.name,
                f"KL to the reference is counted {len(line)} times on the way to this update, by {', '.join(line)}; expected once: "
                f"drop one, as in edit(drop=['{line[0]}']), or take it out of the loss with PPOClip(kl=None).",
            )


@rule("FR002", "A policy that is updated and never synced trains on the answers of an ever older one.", "trl#5312")
def _synced(graph: Graph, prompts: int | None) -> Found:
    for node, role in _writers(graph, Trainer):
        engines = {
            r for n in graph.ancestors(node.name) for r, mode, p in _uses(graph[n]) if p is Rollout and mode == "reads"
        }
        for engine in sorted(engines):
            synced = any(
                {(engine, "writes"), (role, "reads")} <= {(r, mode) for r, mode, _ in _uses(sync)}
                and node.name in graph.ancestors(sync.name)
                for sync in graph.nodes.values()
            )
            if not synced:
                yield (
                    node.name,
                    f"it trains {role!r} on what {engine!r} generates, but nothing carries its weights back to {engine!r}; return "
                    f"Sync()({node.name}) too, or edit(insert={{'sync': After('{node.name}', Sync())}}).",
                )


@rule("FR003", "A group of one answer is its own baseline: every advantage is 0.", "trl#3199")
def _group_of_one(graph: Graph, prompts: int | None) -> Found:
    for node in graph.nodes.values():
        if "group baseline" in node.operator.effects and (rows := _rows_per_prompt(graph, node.name)) < 2:
            yield (
                node.name,
                f"its groups have {rows} row a prompt, so every advantage is 0; expected at least 2: Repeat(n) with n >= 2.",
            )


@rule("FR004", "Mini-batches must divide the rows, or the last one would train with another step size.", "verl#559")
def _divides(graph: Graph, prompts: int | None) -> Found:
    for node in graph.nodes.values():
        per_prompt = _rows_per_prompt(graph, node.name)
        for field, size in node.operator.row_divisors.items():
            if prompts is not None and (rows := prompts * per_prompt) % size:
                yield (
                    node.name,
                    f"{field}={size} does not divide the {rows} rows of a step ({prompts} prompts x {per_prompt}); change one.",
                )


@rule("FR005", "A critic that is updated but never asked for values learns for nobody.", "verl#559")
def _critic_is_read(graph: Graph, prompts: int | None) -> Found:
    for node, role in _writers(graph, Critic):
        read = {
            r for n in graph.ancestors(node.name) for r, mode, p in _uses(graph[n]) if p is Critic and mode == "reads"
        }
        if role not in read:
            yield (
                node.name,
                f"it updates {role!r} without values of {role!r}; expected a Value(critic=Role('{role}')) before it.",
            )
        elif read - {role}:
            yield (
                node.name,
                f"its returns were taken with the values of {sorted(read - {role})[0]!r}, but it updates {role!r}; use one critic.",
            )


@rule(
    "FR006", "Generation that runs ahead needs an importance correction, since its rows are off-policy.", "miles#1829"
)
def _lag_is_corrected(graph: Graph, prompts: int | None) -> Found:
    if graph.lag and not any("importance correction" in node.operator.effects for node in graph.nodes.values()):
        for sync, generate in graph.back_edges:
            yield (
                generate,
                f"it runs {graph.lag} version(s) ahead of {sync}, and nothing corrects for that; add an importance correction, or go "
                f"back to edit(lag=0).",
            )


@rule(
    "FR007",
    "Greedy answers have no log-prob at their temperature and no exploration: nothing to learn from.",
    "slime#2197",
)
def _greedy(graph: Graph, prompts: int | None) -> Found:
    for node, _ in _writers(graph, Trainer):
        for ancestor in graph.nodes:
            if ancestor in graph.ancestors(node.name) and "greedy" in graph[ancestor].operator.effects:
                yield ancestor, f"it generates greedily, and {node.name} trains on that; expected temperature > 0."


@rule(
    "FR008",
    "Two writers of one role in a step: the second's rows were sampled before the first's update.",
    "tianshou#745",
)
def _one_writer(graph: Graph, prompts: int | None) -> Found:
    for role, uses in graph.roles().items():
        writers = [use.node for use in uses if use.mode == "writes"]
        if len(writers) > 1:
            yield (
                writers[1],
                f"it writes {role!r}, and so does {writers[0]}; one update of a role a step (use ppo_epochs or mini_batch).",
            )


@rule("FR009", "The ratio's old log-probs are the trained policy's own, not those of another role.", "tianshou#745")
def _own_old_log_probs(graph: Graph, prompts: int | None) -> Found:
    yield from _log_prob_role(graph, "log-prob of the old policy", same=True)


@rule("FR010", "A reference that is the trained policy itself is no anchor: its KL is 0 whatever happens.", "trl#702")
def _reference_is_frozen(graph: Graph, prompts: int | None) -> Found:
    yield from _log_prob_role(graph, "log-prob of the reference", same=False)


def _log_prob_role(graph: Graph, kind: str, same: bool) -> Found:
    """Nodes that write a log-prob of `kind` under a role that must, or must not, be the one that is trained on it."""
    for node, trained in _writers(graph, Trainer):
        for name in sorted(graph.ancestors(node.name)):
            source = graph[name]
            kinds = {getattr(t, "kind", None) for t in source.operator.signature.outputs.values()}
            for role, mode, _ in _uses(source):
                if kind in kinds and mode == "reads" and (role == trained) != same:
                    expected = (
                        f"the role {trained!r}" if same else "a role of its own that is never updated, such as 'ref'"
                    )
                    yield (
                        name,
                        f"it takes the {kind} from the role {role!r}, and {node.name} trains {trained!r}; expected {expected}.",
                    )

"""Rules: what must not be launched, although every connection fits.

`RULES` is a table. A rule is one small function that yields what it finds in a graph; each has an id, the reason in a
line, and the public issue that taught it. Rules know operators only by what these declare: roles, effects, granularity
and row arithmetic, so they hold for custom operators too. Where a message says what to add (`Sync`, `Repeat`,
`Value`), it names flowrl's own operator for it, as an example that can be copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from flowrl.core.gate import Gate
from flowrl.core.graph import Graph, Node, Use
from flowrl.core.protocols import Critic, Rollout, Trainer
from flowrl.errors import ParameterError, RuleError

Findings = Iterator[tuple[str, str]]


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
        source: the public issue that taught it, as ``owner/repository#number`` on GitHub.
        check: yields ``(node, message)``; the second argument is the number of prompts a step, or None.
    """

    id: str
    reason: str
    source: str
    check: Callable[[Graph, int | None], Findings]


RULES: list[Rule] = []


def rule(
    id: str, reason: str, source: str
) -> Callable[[Callable[[Graph, int | None], Findings]], Callable[[Graph, int | None], Findings]]:
    """Enter a function into the table."""

    def enter(check: Callable[[Graph, int | None], Findings]) -> Callable[[Graph, int | None], Findings]:
        RULES.append(Rule(id, reason, source, check))
        return check

    return enter


def check(graph: Graph, prompts: int | None = None) -> list[Finding]:
    """All findings of all rules. They concern training, so a graph that writes no trained weights has none.

    Raises:
        ParameterError: `prompts` is no count.
    """
    if prompts is not None and (isinstance(prompts, bool) or not isinstance(prompts, int) or prompts < 1):
        raise ParameterError(f"check(prompts={prompts!r}) is no number of prompts a step; expected 1, 2, ... or None.")
    if not _writers(graph, Trainer) and not _writers(graph, Critic):
        return []
    return [Finding(r.id, node, message) for r in RULES for node, message in r.check(graph, prompts)]


def require(graph: Graph, prompts: int | None = None) -> None:
    """Refuse a graph that breaks a rule.

    Raises:
        RuleError: with every finding.
    """
    if findings := check(graph, prompts):
        lines = "\n".join(f"  {finding}" for finding in findings)
        raise RuleError(f"{graph.name} must not be launched; {len(findings)} finding(s):\n{lines}")


def _writers(graph: Graph, protocol: type) -> list[tuple[Node, str]]:
    """Nodes that write a role through `protocol`, with the role."""
    uses = [(node, use) for node in graph.nodes.values() for use in node.uses if use.mode == "writes"]
    return [(node, use.role) for node, use in uses if use.goes_through(protocol)]


def _line(graph: Graph, name: str) -> list[Node]:
    """The node and all that it depends on, in the graph's order."""
    wanted = graph.ancestors(name) | {name}
    return [node for node in graph.nodes.values() if node.name in wanted]


def _read(graph: Graph, name: str, protocol: type) -> set[str]:
    """Roles that are read through `protocol` on the way to a node, or by it."""
    return {u.role for n in _line(graph, name) for u in n.uses if u.mode == "reads" and u.goes_through(protocol)}


def _last_gate(graph: Graph, name: str) -> Gate | None:
    """The gate through which the rows of a node came last; None where all come that were drawn."""
    line = [graph[other].operator for other in graph.nodes if other in graph.ancestors(name)]
    return next((operator for operator in reversed(line) if isinstance(operator, Gate)), None)


def _rows_per_prompt(graph: Graph, name: str) -> int:
    """How many rows reach the node for every prompt of the step."""
    return math.prod(graph[ancestor].operator.rows_factor for ancestor in graph.ancestors(name))


@rule("FR001", "KL counts once: in the reward or in the loss, never in both.", "verl-project/verl#211")
def _kl_once(graph: Graph, prompts: int | None) -> Findings:
    for node, _ in _writers(graph, Trainer):
        line = [n.name for n in _line(graph, node.name) if "kl" in n.operator.effects]
        if len(line) > 1:
            in_loss = ", or take it out of the loss: UpdateActor(kl=None)" if line[-1] == node.name else ""
            yield (
                node.name,
                f"KL to the reference is counted {len(line)} times on the way to this update, by {', '.join(line)}; "
                f"expected once: drop one, as in edit(drop=['{line[0]}']){in_loss}.",
            )


@rule(
    "FR002",
    "A policy that is updated and never synced trains on the answers of an ever older one.",
    "huggingface/trl#5312",
)
def _synced(graph: Graph, prompts: int | None) -> Findings:
    for node, role in _writers(graph, Trainer):
        for engine in sorted(_read(graph, node.name, Rollout)):
            synced = any(
                engine in sync.writes and role in sync.reads and node.name in graph.ancestors(sync.name)
                for sync in graph.nodes.values()
            )
            if not synced:
                roles = (("actor", role), ("rollout", engine))
                sync = f"Sync({', '.join(f'{field}=Role({r!r})' for field, r in roles if r != field)})"
                yield (
                    node.name,
                    f"it trains {role!r} on what {engine!r} generates, but nothing carries its weights back to "
                    f"{engine!r}; return {sync}({node.name}) too, or edit(insert={{'sync': After('{node.name}', "
                    f"{sync})}}).",
                )


@rule("FR003", "A group of one answer is its own baseline: every advantage is 0.", "huggingface/trl#4662")
def _group_of_one(graph: Graph, prompts: int | None) -> Findings:
    for node in graph.nodes.values():
        if "group baseline" in node.operator.effects and _rows_per_prompt(graph, node.name) == 1:
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
        gate = _last_gate(graph, node.name)
        filled = prompts if gate is None else gate.fills
        for field, size in node.operator.row_divisors.items():
            if gate is not None and filled is None:
                yield (
                    node.name,
                    f"{field}={size} must divide the rows of a step, and nobody knows how many {gate.name} lets "
                    f"through; expected {field}=None, which takes all at once, or in the place of {gate.name} a "
                    f"Collect, which fills up: edit(replace={{'{gate.name}': Collect(...)}}).",
                )
            if filled is None:
                continue
            rows = filled * _rows_per_prompt(graph, node.name)
            if rows % size:
                fitting = max(d for d in range(1, min(size, rows) + 1) if rows % d == 0)
                yield (
                    node.name,
                    f"{field}={size} does not divide the {rows} rows of a step ({filled} prompts x "
                    f"{rows // filled}); expected a divisor, such as {field}={fitting}.",
                )


@rule(
    "FR005",
    "A critic is trained towards returns that were taken with its own values; otherwise nothing uses what it learns.",
    "PRIME-RL/SimpleVLA-RL#73",
)
def _critic_is_read(graph: Graph, prompts: int | None) -> Findings:
    for node, role in _writers(graph, Critic):
        if role not in _read(graph, node.name, Critic):
            yield (
                node.name,
                f"it updates {role!r} without values of {role!r}; expected Value(critic=Role({role!r})) before it.",
            )
            continue
        for field, edge in node.inputs.items():
            kind = getattr(graph.types[edge].type, "kind", None)
            critics = _read(graph, edge.node, Critic)
            if kind in ("value", "return") and critics and role not in critics:
                yield (
                    node.name,
                    f"its {field} come from {edge}, which was taken with values of {sorted(critics)[0]!r}, but it "
                    f"updates {role!r}; wire what was taken with Value(critic=Role({role!r})).",
                )


@rule(
    "FR006",
    "Generation that runs ahead needs an importance correction, since its rows are off-policy.",
    "radixark/miles#1829",
)
def _lag_is_corrected(graph: Graph, prompts: int | None) -> Findings:
    if graph.lag == 0:
        return
    for node, _ in _writers(graph, Trainer):
        line = _line(graph, node.name)
        if not any("importance correction" in n.operator.effects for n in line):
            ahead = {generate for _, generate in graph.back_edges} & {n.name for n in line}
            for generate in sorted(ahead):
                yield (
                    generate,
                    f"it runs {graph.lag} version(s) ahead of what {node.name} trains, and nothing corrects for that; "
                    f"add an operator with the effect 'importance correction', or go back to edit(lag=0).",
                )


@rule(
    "FR007",
    "Greedy answers have no log-prob at their temperature and no exploration: nothing to learn from.",
    "THUDM/slime#2197",
)
def _greedy(graph: Graph, prompts: int | None) -> Findings:
    for node, _ in _writers(graph, Trainer):
        for n in _line(graph, node.name):
            if "greedy" in n.operator.effects:
                yield (
                    n.name,
                    f"it generates greedily, and {node.name} trains on that; expected temperature > 0, as in "
                    f"Generate(temperature=1.0).",
                )


@rule(
    "FR008",
    "Two writers of one role in a step: the second's rows were sampled before the first's update.",
    "thu-ml/tianshou#745",
)
def _one_writer(graph: Graph, prompts: int | None) -> Findings:
    for role, uses in graph.roles().items():
        first, *others = [use.node for use in uses if use.mode == "writes"] or [""]
        for other in others:
            yield (
                other,
                f"it writes {role!r}, and so does {first}; expected one writer of a role a step: drop one, as in "
                f"edit(drop=['{other}']), or give one a role of its own.",
            )


@rule(
    "FR009",
    "The ratio's old log-probs are the trained policy's own, not those of another role.",
    "thu-ml/tianshou#745",
)
def _own_old_log_probs(graph: Graph, prompts: int | None) -> Findings:
    for node, trained in _writers(graph, Trainer):
        for use in _log_probs(_line(graph, node.name), "log-prob of the old policy"):
            if use.role != trained:
                yield (
                    use.node,
                    f"it takes the old log-probs from {use.role!r}, and {node.name} trains {trained!r}; expected "
                    f"{_with_role(graph, use, trained)}.",
                )


@rule(
    "FR010",
    "A reference that is trained itself is not an anchor: KL to it moves with the policy.",
    "hiyouga/ChatGLM-Efficient-Tuning#380",
)
def _reference_is_frozen(graph: Graph, prompts: int | None) -> Findings:
    writers = {role: node.name for node, role in _writers(graph, Trainer)}
    for use in _log_probs(graph.nodes.values(), "log-prob of the reference"):
        if use.role in writers:
            yield (
                use.node,
                f"it takes the reference's log-probs from {use.role!r}, which {writers[use.role]} trains; expected a "
                f"role that nothing trains: {_with_role(graph, use, 'ref')}.",
            )


@rule(
    "FR011",
    "The ratio of trainer to engine counts once: as weights or in the loss's own ratio, never as both.",
    "THUDM/slime#1912",
)
def _correction_once(graph: Graph, prompts: int | None) -> Findings:
    for node, _ in _writers(graph, Trainer):
        line = [n.name for n in _line(graph, node.name) if "importance correction" in n.operator.effects]
        if len(line) > 1:
            in_loss = ", or take the loss's ratio to the trainer: PPOClip(ratio_to='old')" if node.name in line else ""
            yield (
                node.name,
                f"the ratio of the trainer to the engine that sampled is counted {len(line)} times on the way to this "
                f"update, by {', '.join(line)}; expected once: drop one, as in edit(drop=['{line[0]}']), or let it "
                f"reject and not weigh, by mode='reject'{in_loss}.",
            )


def _log_probs(nodes: Iterable[Node], kind: str) -> Iterator[Use]:
    """The roles that those of `nodes` read which write a log-prob of `kind`."""
    for node in nodes:
        if kind in {getattr(t, "kind", None) for t in node.operator.signature.outputs.values()}:
            yield from (use for use in node.uses if use.mode == "reads")


def _with_role(graph: Graph, use: Use, role: str) -> str:
    """The node's operator with another role, as it is written: ``OldLogProb(actor=Role('actor'))``."""
    return f"{type(graph[use.node].operator).__name__}({use.field}=Role({role!r}))"

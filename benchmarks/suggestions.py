"""Apply the fixes that refusals of random edits suggest: each must lead to a graph that passes `Graph.check`.

    python benchmarks/suggestions.py [REFUSALS] [SEED]     # 1,000 refused edits by default; about 2 minutes

Each edit changes a built-in algorithm that passes the check, by one or two random verbs; `Graph.edit` or a rule refuses
it. A suggestion is code in the message that can be run as written: verbs of an edit without a placeholder. That of a
refused edit is added to this edit; that of a rule's finding edits the graph that has it. It fixes if the edit is then
accepted, its finding is gone, and there is no finding that the graph did not have before.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from harness import table  # noqa: E402

import flowrl  # noqa: E402
from flowrl import After, Graph, Role, When, operators  # noqa: E402
from flowrl.errors import FlowrlError  # noqa: E402
from flowrl.graphs import (  # noqa: E402
    dapo,
    dr_grpo,
    grpo,
    grpo_sft,
    online_dpo,
    ppo,
    raft,
    reinforce_plus_plus,
    remax,
    rloo,
)

Random = random.Random
PROMPTS = 4


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """A reward that no edit runs."""
    return float(solution_str == ground_truth)


ALGORITHMS = (dapo, dr_grpo, grpo, grpo_sft, online_dpo, ppo, raft, reinforce_plus_plus, remax, rloo)
NAMES = {**vars(operators), **vars(flowrl), "After": After, "Role": Role, "When": When}
VERBS = "replace|drop|insert|set|when|wire|rename|lag|allow"


def made_of(name: str) -> Any:
    """An operator with its default parameters; None for a name that is no such operator."""
    try:
        found = NAMES[name]()
    except Exception:
        return None
    return found if isinstance(found, flowrl.Operator) else None


OPERATORS = [made for name in operators.__all__ if (made := made_of(name)) is not None]
OPERATORS += [
    operators.Filter(operators.Spread()),
    operators.Collect(operators.Spread(), 4),
    operators.Repeat(1),
    operators.Generate(0.0),
    operators.Generate(top_p=0.9),
    operators.UpdateActor(kl=operators.KLLoss()),
    operators.UpdateActor(operators.NLL()),
    operators.UpdateActor(ppo_epochs=2, loss=operators.Reinforce()),
    operators.UpdateActor(mini_batch=3),
    operators.RolloutCorrection("token"),
]


def random_edit(graph: Graph, chance: Random) -> dict[str, Any]:
    """One to three verbs that name what the graph has."""
    nodes, edit = list(graph.nodes), dict[str, Any]()
    ends = [f"{node}.{field}" for node in nodes for field in graph[node].inputs]
    for verb in chance.sample(["replace", "drop", "insert", "insert", "wire", "wire", "set", "when", "lag"], 3)[
        : chance.choice([1, 1, 1, 2])
    ]:
        node, operator = chance.choice(nodes), chance.choice(OPERATORS)
        if verb == "replace":
            edit[verb] = {node: operator}
        elif verb == "drop":
            edit[verb] = chance.sample(nodes, chance.choice([1, 1, 2]))
        elif verb == "insert":
            edit[verb] = {f"new_{operator.name}": After(node, operator)}
        elif verb == "wire":
            edit[verb] = {chance.choice(ends): str(chance.choice(list(graph.types)))}
        elif verb == "set":
            edit[verb] = dict([chance.choice(list(settings(graph)))])
        elif verb == "when":
            edit[verb] = {node: chance.choice([When(every=2), When(every=3), When(start=5)])}
        else:
            edit[verb] = chance.choice([1, 2])
    return edit


def settings(graph: Graph) -> Iterator[tuple[str, Any]]:
    """Parameters that rules read, with values that they refuse in some graphs."""
    for name, node in graph.nodes.items():
        for use in node.uses:
            yield from ((f"{name}.{use.field}", Role(role)) for role in (*graph.roles(), "other"))
        for parameter, values in {
            "temperature": [0.0],
            "top_k": [5],
            "n": [1],
            "mini_batch": [3, 4],
            "ppo_epochs": [3],
            "kl": [operators.KLLoss(), operators.KLLoss("k1")],
            "loss": [operators.NLL(), operators.DPO(), operators.GMPO(), operators.Reinforce(), operators.DRO()],
            "aggregation": ["token-mean"],
        }.items():
            if hasattr(node.operator, parameter):
                yield from ((f"{name}.{parameter}", value) for value in values)


# ---- suggestions


def closed(text: str, start: int) -> int:
    """The end of the brackets that open at or after `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += text[at] in "([{"
        depth -= text[at] in ")]}"
        if depth == 0 and text[at] in ")]}":
            return at + 1
    return len(text)


def suggestions(message: str) -> Iterator[str]:
    """The arguments of each edit that a message spells, such as ``drop=['whiten']``."""
    at = 0
    while found := re.compile(rf"\b(?:edit\((?=(?:{VERBS})=)|(?:{VERBS})=(?=[{{\[\d]))").search(message, at):
        if found[0] == "edit(":
            at = closed(message, found.start())
            yield message[found.end() : at - 1]
        else:
            start = at = found.start()
            while verb := re.compile(rf"(?:, )?(?:{VERBS})=(?=[{{\[\d])").match(message, at):
                number = re.compile(r"\d+").match(message, verb.end())
                at = number.end() if number else closed(message, verb.end())
            yield message[start:at]


def hints(error: FlowrlError, edit: dict[str, Any]) -> Iterator[str]:
    """The edge of a message that asks "did you mean value.values?" about a port."""
    node, port, meant = (error.facts.get(name) for name in ("node", "port", "suggestion"))
    if port and meant and f"did you mean {meant}?" in error.message and "." in str(meant):
        yield f"wire={{'{node}.{port}': '{meant}'}}"


def as_verbs(code: str) -> dict[str, Any] | None:
    """The verbs of a suggestion; None if it has a placeholder."""
    if "..." in code or re.search(r"'node(?:\.column|\.port)?'", code) or "allow=" in code:
        return None
    try:
        return eval(f"dict({code})", dict(NAMES))  # type: ignore[no-any-return]
    except Exception as error:
        raise SystemExit(f"a suggestion cannot be read: {code}: {error}") from error


def merged(edit: dict[str, Any], verbs: dict[str, Any]) -> dict[str, Any]:
    """An edit with the verbs of a suggestion."""
    both = dict(edit)
    for verb, value in verbs.items():
        if isinstance(value, dict):
            both[verb] = {**both.get(verb, {}), **value}
        elif verb == "drop":
            both[verb] = [*dict.fromkeys([*both.get(verb, []), *value])]
        else:
            both[verb] = value
    return both


def of(edit: dict[str, Any], verbs: dict[str, Any]) -> bool:
    """Whether verbs only quote the refused edit."""
    return verbs.keys() <= edit.keys() and merged(edit, verbs) == edit


class Refusal(NamedTuple):
    """A refused edit: the code or the rule, the message, and its suggestions with whether each fixes."""

    code: str
    message: str
    suggested: list[tuple[str, str]]


def found(graph: Graph) -> set[tuple[str, str]]:
    return {(finding.rule, finding.node) for finding in graph.check(prompts=PROMPTS)}


def outcome(graph: Graph, verbs: dict[str, Any], gone: tuple[str, str] | None, before: set[tuple[str, str]]) -> str:
    """What an edit leads to: an empty text, or what is wrong."""
    try:
        after = found(graph.edit(**verbs))
    except FlowrlError as error:
        return f"{error.code}: {error.message}"
    if gone in after:
        return "the finding is still there"
    return " ".join(sorted(f"{rule} {node}" for rule, node in after - before))


def refusals(graph: Graph, edit: dict[str, Any]) -> Iterator[Refusal]:
    """The refusal of an edit of a graph, or of each finding in the edited graph."""
    try:
        edited = graph.edit(**edit)
    except FlowrlError as error:
        spelled = [*suggestions(error.message), *hints(error, edit)]
        codes = [(code, verbs) for code in spelled if (verbs := as_verbs(code)) is not None and not of(edit, verbs)]
        tried = [(code, outcome(graph, merged(edit, verbs), None, set())) for code, verbs in codes]
        yield Refusal(error.code, error.message, tried)
        return
    before = found(edited)
    for finding in edited.check(prompts=PROMPTS):
        codes = [(code, verbs) for code in suggestions(finding.message) if (verbs := as_verbs(code)) is not None]
        tried = [(code, outcome(edited, verbs, (finding.rule, finding.node), before)) for code, verbs in codes]
        yield Refusal(finding.rule, f"{finding.node}: {finding.message}", tried)


def main(wanted: int, seed: int) -> None:
    chance, all_of, edits = Random(seed), list[Refusal](), 0
    reward = dict.fromkeys(("n",), 4)
    graphs = [
        algorithm(exact, **({} if algorithm in (ppo, reinforce_plus_plus, remax) else reward))
        for algorithm in ALGORITHMS
    ]
    count = 0
    while count < wanted:
        graph = chance.choice(graphs)
        edits += 1
        refused = list(refusals(graph, random_edit(graph, chance)))
        count += bool(refused)
        all_of += refused
    rows, bad = [], list[str]()
    for code in sorted({refusal.code for refusal in all_of}):
        own = [refusal for refusal in all_of if refusal.code == code]
        offered = [(refusal, *one) for refusal in own for one in refusal.suggested]
        fixing = sum(not wrong for _, _, wrong in offered)
        rows.append([code, str(len(own)), str(sum(bool(r.suggested) for r in own)), str(len(offered)), str(fixing)])
        bad += [f"{refusal.message}\n    {call} -> {wrong}" for refusal, call, wrong in offered if wrong]
    offered, fixing = sum(int(row[3]) for row in rows), sum(int(row[4]) for row in rows)
    carrying = sum(bool(refusal.suggested) for refusal in all_of)
    table(
        f"{count} refused of {edits} random edits at seed {seed}",
        ["refused by", "refusals", "with a suggestion", "suggestions", "that fix"],
        rows,
    )
    print(*bad, sep="\n")
    print(
        f"{carrying / len(all_of):.1%} of {len(all_of)} refusals carry a suggestion; "
        f"{fixing} of {offered} suggestions fix ({fixing / max(1, offered):.1%})"
    )
    sys.exit(fixing < 0.95 * offered)


if __name__ == "__main__":
    main(*map(int, [*sys.argv[1:], *["1000", "0"][len(sys.argv) - 1 :]]))

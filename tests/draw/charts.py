"""Graphs to draw, and a small reader of its own for the Mermaid text that comes of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from flowrl import columns as c
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Reads, Role
from flowrl.graph import algorithm
from flowrl.operators import (
    GAE,
    Generate,
    GroupAdvantage,
    OldLogProb,
    Reward,
    Sync,
    UpdateActor,
    UpdateCritic,
    Value,
)
from flowrl.protocols.backend import Backend
from flowrl.protocols.protocols import Critic, Scorer
from flowrl.records import CriticUpdated, PromptBatch, Tokens


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    return float(solution_str == ground_truth)


class Probe(Operator):
    """Reads a critic that the update neither waits for nor knows of."""

    note: str = ""
    critic: Reads[Critic] = Role("critic")

    def __call__(self, rollout: Tokens) -> CriticUpdated: ...


class Watch(Operator):
    def __call__(self, advantages: c.Advantages, returns: c.Returns) -> CriticUpdated: ...


class Double(Operator):
    def __call__(self, advantages: c.Advantages) -> c.Advantages: ...


@algorithm
def probed(batch: PromptBatch, note: str = "", engine: str = "rollout") -> Any:
    role = Role("rollout")
    object.__setattr__(role, "name", engine)  # a picture holds whatever the text is, also what `Role` refuses
    rollout = Generate(rollout=role)(batch)
    values = Value()(rollout)
    returns = GAE()(Reward(score)(rollout, batch), values, rollout.response_mask).returns
    return UpdateCritic()(rollout, values, returns), Probe(note)(rollout)


class Weighted(Operator):
    """Two scores as one."""

    weight: float = 0.5

    def __call__(self, first: c.TokenLevelScores, second: c.TokenLevelScores) -> c.TokenLevelScores: ...


@algorithm
def two_rewards(batch: PromptBatch) -> Any:
    rollout = Generate()(batch)
    old = OldLogProb()(rollout)
    right, style = Reward(score)(rollout, batch), Reward(score).named("style")(rollout, batch)
    advantages = GroupAdvantage()(Weighted(0.3)(right, style), rollout.response_mask, batch.uid)
    return Sync()(UpdateActor()(rollout, old, advantages))


class Engine:
    """Scores."""

    def log_probs(self, batch: Any) -> Any: ...


class Frozen(Backend):
    serves = (Scorer,)

    model: str

    def build(self, context: Any) -> Engine: ...


class Remote(Frozen):
    """Another backend for the same role."""


ODD_NAMES = ["end", "END", "graph", "subgraph", "class", "style", "click", "default", "o", "x", "_self", "constructor"]
ODD_NAMES += ["toString", "__proto__", "__", "end_", "role_actor", "πολιτική", "href", "linkStyle"]
ODD_TEXTS = ['a "b"', "<script>alert(1)</script>", "#quot; #35;", "`code`", "a;b", "%%{init: {}}%%", "{{x}}", "|-->|"]
ODD_TEXTS += ["end", "&amp;", "]", "-- x --> y", "ünï → ☃", "x" * 500]


@dataclass
class Flowchart:
    """A parsed flowchart: shape and label by id, texts of the legend by id, links, and styles of nodes and links."""

    nodes: dict[str, tuple[str, str]] = field(default_factory=dict)
    legend: dict[str, str] = field(default_factory=dict)
    links: list[tuple[str, str, str, str]] = field(default_factory=list)
    styles: dict[int, str] = field(default_factory=dict)
    looks: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def names(self) -> dict[str, str]:
        """Id to the name in bold."""
        return {i: re.match("<b>(.*?)</b>", label)[1] for i, (_, label) in self.nodes.items()}  # type: ignore[index]

    def ends(self, arrow: str = "-->") -> set[tuple[str, str]]:
        return {(self.names[a], self.names[b]) for a, kind, _, b in self.links if kind == arrow}

    @property
    def groups(self) -> dict[str, list[str]]:
        """By the text that the legend has for a role, the ids of the nodes that have the line of its color."""
        wide = {i: text for i, text in self.legend.items() if "stroke-width" in self.looks[i]}
        return {
            text: [node for node in self.nodes if self.looks[node]["stroke"] == self.looks[i]["stroke"]]
            for i, text in wide.items()
        }

    @property
    def marks(self) -> dict[str, str]:
        """By id, what the legend calls the fill of a node; of those that have the fill of a mark."""
        fills = {self.looks[i]["fill"]: t for i, t in self.legend.items() if t in ("added", "removed", "changed")}
        return {i: fills[self.looks[i]["fill"]] for i in self.nodes if self.looks[i]["fill"] in fills}


def unescape(label: str) -> str:
    return re.sub(r"#(\d+);", lambda m: chr(int(m[1])), label)


def read(text: str) -> Flowchart:
    """Read the subset of Mermaid that is written here; any other line is an error."""
    first, *lines = text.splitlines()
    assert first == "flowchart TD"
    chart = Flowchart()
    classes: dict[str, dict[str, str]] = {}
    shapes = {'(["': '"])', '["': '"]', '{{"': '"}}'}
    for line in map(str.strip, lines):
        if m := re.fullmatch(r'(legend-\d+)\("([^"]*)"\)', line):
            assert not chart.nodes  # it goes first
            chart.legend[m[1]] = unescape(m[2])
        elif m := re.fullmatch(r'(\w+)(\(\["|\["|\{\{")([^"]*)("\]\)|"\]|"\}\})', line):
            assert shapes[m[2]] == m[4] and m[1] not in chart.nodes
            chart.nodes[m[1]] = (m[2].rstrip('"'), unescape(m[3]))
        elif m := re.fullmatch(r'(\w+) (-->|-\.->)(?:\|"([^"]+)"\|)? (\w+)', line):
            chart.links.append((m[1], m[2], unescape(m[3] or ""), m[4]))
        elif m := re.fullmatch(r"linkStyle ([\d,]+) (.+)", line):
            chart.styles |= dict.fromkeys(map(int, m[1].split(",")), m[2])
        elif m := re.fullmatch(r"classDef (c\d+) ([\w#:,; -]+)", line):
            classes[m[1]] = dict(part.split(":") for part in m[2].split(","))
        elif m := re.fullmatch(r"class ([\w,-]+) (c\d+)", line):
            assert not set(chart.looks) & set(m[1].split(","))
            chart.looks |= dict.fromkeys(m[1].split(","), classes[m[2]])
        else:
            assert line == "linkStyle default stroke:#57606a", line
    assert all(a in chart.nodes and b in chart.nodes for a, _, _, b in chart.links)
    assert all(number < len(chart.links) for number in chart.styles)
    assert chart.looks.keys() == chart.nodes.keys() | chart.legend.keys()
    return chart

"""Mermaid text, read back by a small reader of its own; with Mermaid at hand, by Mermaid's parser too."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from typing import Any

import pytest

from flowrl import columns as c
from flowrl.core.backend import Backend
from flowrl.core.edit import After
from flowrl.core.operator import Operator
from flowrl.core.protocols import Critic, Scorer
from flowrl.core.roles import Reads, Role
from flowrl.draw.mermaid import draw
from flowrl.graph import Graph, algorithm
from flowrl.graphs import grpo, ppo
from flowrl.operators import GAE, Generate, Reward, UpdateCritic, Value
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


@dataclass
class Flowchart:
    """What a flowchart says: shape and label by id, ids by group title, links with their style, marks by id."""

    nodes: dict[str, tuple[str, str]] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)
    links: list[tuple[str, str, str, str]] = field(default_factory=list)
    styles: dict[int, str] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> dict[str, str]:
        """Id to the name in bold."""
        return {i: re.match("<b>(.*?)</b>", label)[1] for i, (_, label) in self.nodes.items()}  # type: ignore[index]

    def ends(self, arrow: str = "-->") -> set[tuple[str, str]]:
        return {(self.names[a], self.names[b]) for a, kind, _, b in self.links if kind == arrow}


def unescape(label: str) -> str:
    return re.sub(r"#(\d+);", lambda m: chr(int(m[1])), label)


def read(text: str) -> Flowchart:
    """Read the subset of Mermaid that is written here; any other line is an error."""
    lines = text.splitlines()
    assert lines[0] == "flowchart TD"
    chart, group = Flowchart(), None
    shapes = {'(["': '"])', '["': '"]', '{{"': '"}}'}
    for line in map(str.strip, lines[1:]):
        if m := re.fullmatch(r'subgraph (role-\w+)\["([^"]*)"\]', line):
            group = chart.groups.setdefault(unescape(m[2]), [])
        elif line == "end":
            assert group is not None
            group = None
        elif m := re.fullmatch(r'(\w+)(\(\["|\["|\{\{")([^"]*)("\]\)|"\]|"\}\})', line):
            assert shapes[m[2]] == m[4] and m[1] not in chart.nodes
            chart.nodes[m[1]] = (m[2].rstrip('"'), unescape(m[3]))
            if group is not None:
                group.append(m[1])
        elif m := re.fullmatch(r'(\w+) (-->|-\.->)\|"([^"]*)"\| (\w+)', line):
            chart.links.append((m[1], m[2], unescape(m[3]), m[4]))
        elif m := re.fullmatch(r"linkStyle ([\d,]+) (.+)", line):
            chart.styles |= dict.fromkeys(map(int, m[1].split(",")), m[2])
        elif m := re.fullmatch(r"class ([\w,-]+) (\w+)", line):
            chart.marks |= dict.fromkeys(m[1].split(","), m[2])
        else:
            assert re.fullmatch(r"classDef \w+ [\w#:,; -]+", line), line
    assert all(a in chart.nodes and b in chart.nodes for a, _, _, b in chart.links)
    assert all(number < len(chart.links) for number in chart.styles)
    return chart


class TestGraph:
    @pytest.mark.parametrize("make", [ppo, grpo])
    def test_every_node_and_every_edge_once(self, make: Any) -> None:
        graph = make(score)
        chart = read(draw(graph))
        assert sorted(chart.names.values()) == sorted(graph.nodes)
        edges = [(source, node.name) for node in graph.nodes.values() for source in node.sources]
        assert sorted(chart.ends()) == sorted(edges)
        assert len(chart.links) == len(edges) + 1
        assert chart.ends("-.->") == {("sync", "generate")}

    def test_shapes(self) -> None:
        shapes = {i: shape for i, (shape, _) in read(draw(ppo(score))).nodes.items()}
        assert {i for i, shape in shapes.items() if shape == "{{"} == {"update_actor", "update_critic", "sync"}
        assert {i for i, shape in shapes.items() if shape == "(["} == {"batch"}

    def test_roles_are_groups_and_sync_stands_between_its_two(self) -> None:
        chart = read(draw(ppo(score)))
        assert chart.groups == {
            "rollout": ["generate"],
            "actor": ["old_log_prob", "update_actor"],
            "ref": ["ref_log_prob"],
            "critic": ["value", "update_critic"],
        }
        assert chart.nodes["sync"][1] == "<b>sync</b><br/>actor → rollout"

    def test_edges_bear_records_and_columns(self) -> None:
        labels = {(a, b): label for a, _, label, b in read(draw(ppo(score))).links}
        assert labels["batch", "repeat"] == "PromptBatch"
        assert labels["generate", "update_actor"] == "RolloutBatch"
        assert labels["generate", "gae"] == "response_mask"
        assert labels["gae", "whiten"] == "advantages"
        assert labels["gae", "update_critic"] == "returns"

    def test_several_columns_of_one_source(self) -> None:
        graph = ppo(score).edit(insert={"watch": After("gae", Watch())})
        labels = {(a, b): label for a, _, label, b in read(draw(graph)).links}
        assert labels["gae", "watch"] == "advantages<br/>returns"

    def test_parameters_are_shown_where_they_are_not_the_defaults(self) -> None:
        nodes = read(draw(ppo(score, n=4, lam=0.9, mini_batch=8).edit(rename={"gae": "lambda_return"}))).nodes
        assert nodes["repeat"][1] == "<b>repeat</b><br/>n=4"
        assert nodes["reward"][1] == "<b>reward</b><br/>fn=score"
        assert nodes["update_actor"][1] == "<b>update_actor</b><br/>mini_batch=8"
        assert nodes["generate"][1] == "<b>generate</b>"
        assert nodes["lambda_return"][1] == "<b>lambda_return</b><br/>GAE(lam=0.9)"

    def test_lag(self) -> None:
        graph = ppo(score)
        assert [label for _, arrow, label, _ in read(draw(graph)).links if arrow == "-.->"] == ["lag 0 (on-policy)"]
        assert [x[2] for x in read(draw(graph.edit(lag=2))).links if x[1] == "-.->"] == ["lag 2"]
        assert not read(draw(graph.subgraph(until="update_actor"))).ends("-.->")

    def test_state_edges_are_thin_and_only_where_data_does_not_say_so(self) -> None:
        assert not any("stroke-width:1px" in style for style in read(draw(ppo(score))).styles.values())
        chart = read(draw(probed()))
        (number,) = chart.styles
        assert chart.links[number] == ("probe", "-->", "reads critic first", "update_critic")
        assert "stroke-width:1px" in chart.styles[number]

    def test_bound_backends_are_named(self) -> None:
        graph = grpo(score).edit(bind={"ref": Frozen("x")})
        assert list(read(draw(graph)).groups) == ["rollout", "actor", "ref: Frozen"]

    def test_the_golden_text(self) -> None:
        assert draw(probed().subgraph(until="reward")) == GOLDEN.strip()

    def test_the_same_graph_has_the_same_text(self) -> None:
        graph = grpo(score)
        assert graph.mermaid() == draw(grpo(score)) == draw(Graph.from_dict(graph.to_dict()))


class Engine:
    """Scores."""

    def log_probs(self, batch: Any) -> Any: ...


class Frozen(Backend):
    serves = (Scorer,)

    model: str

    def build(self, context: Any) -> Engine: ...


class Remote(Frozen):
    """Another backend for the same role."""


GOLDEN = """
flowchart TD
    batch(["<b>batch</b><br/>PromptBatch"])
    reward["<b>reward</b><br/>fn=score"]
    subgraph role-rollout["rollout"]
        generate["<b>generate</b>"]
    end
    batch -->|"PromptBatch"| generate
    generate -->|"RolloutBatch"| reward
    batch -->|"PromptBatch"| reward
    classDef role fill:#f6f8fa,stroke:#8c959f,color:#24292f
    class role-rollout role
"""


class TestDiff:
    def test_ppo_to_grpo(self) -> None:
        before, after = ppo(score), grpo(score, mini_batch=64)
        chart = read(draw(before.diff(after)))
        assert sorted(chart.names.values()) == sorted({**before.nodes, **after.nodes})
        marked = {mark: {i for i, m in chart.marks.items() if m == mark} for mark in ("added", "removed", "changed")}
        assert marked == {
            "added": {"group_advantage"},
            "removed": {"kl_shape", "gae", "whiten", "value", "update_critic"},
            "changed": {"repeat", "update_actor"},
        }
        assert chart.nodes["repeat"][1] == "<b>repeat</b><br/>n: 1 → 8"
        assert chart.nodes["update_actor"][1].endswith("PPOClip(kl=KLLoss())<br/>mini_batch: None → 64")

    def test_links_are_marked(self) -> None:
        before, after = ppo(score), grpo(score)
        chart = read(draw(before.diff(after)))
        old, new = read(draw(before)).ends(), read(draw(after)).ends()
        colours = {
            (a, b): re.search("stroke:#(\\w+)", chart.styles.get(i, "stroke:#none"))[1]  # type: ignore[index]
            for i, (a, _, _, b) in enumerate(chart.links)
        }
        assert {ends for ends, colour in colours.items() if colour == "1a7f37"} == new - old
        assert {ends for ends, colour in colours.items() if colour == "cf222e"} == old - new
        assert chart.ends() == old | new and len(chart.links) == len(old | new) + 1

    def test_backwards(self) -> None:
        chart = read(draw(grpo(score).diff(ppo(score))))
        assert {i for i, mark in chart.marks.items() if mark == "removed"} == {"group_advantage"}
        assert chart.nodes["repeat"][1] == "<b>repeat</b><br/>n: 8 → 1"

    def test_another_operator_under_the_same_name(self) -> None:
        after = ppo(score).edit(replace={"whiten": Double().named("whiten")})
        chart = read(draw(ppo(score).diff(after)))
        assert chart.marks["whiten"] == "changed"
        assert chart.nodes["whiten"][1] == "<b>whiten</b><br/>Double()"

    def test_a_renamed_node_stands_once_and_its_links_are_not_new(self) -> None:
        after = ppo(score).edit(rename={"gae": "adv"})
        chart = read(draw(ppo(score).diff(after)))
        assert sorted(chart.names.values()) == sorted(after.nodes)
        assert chart.marks["adv"] == "changed"
        assert chart.nodes["adv"][1] == "<b>adv</b><br/>GAE()<br/>renamed from gae"
        assert chart.ends() == read(draw(after)).ends()
        assert not [style for style in chart.styles.values() if "1a7f37" in style or "cf222e" in style]

    def test_no_difference_has_no_marks(self) -> None:
        assert set(read(draw(ppo(score).diff(ppo(score)))).marks.values()) == {"role"}

    def test_a_swap_of_backends_is_all_that_is_drawn_of_it(self) -> None:
        unbound = grpo(score)
        before, after = (unbound.edit(bind={"ref": backend}) for backend in (Frozen("x"), Remote("y")))
        assert list(read(draw(before.diff(after))).groups) == ["rollout", "actor", "ref: Frozen → Remote"]
        assert list(read(draw(unbound.diff(after))).groups) == ["rollout", "actor", "ref: Remote"]
        assert list(read(draw(after.diff(unbound))).groups) == ["rollout", "actor", "ref: Remote"]
        assert set(read(draw(before.diff(after))).marks.values()) == {"role"}
        changed = [(a, b) for a, b in zip(draw(before).splitlines(), draw(after).splitlines(), strict=True) if a != b]
        assert changed == [('    subgraph role-ref["ref: Frozen"]', '    subgraph role-ref["ref: Remote"]')]


ODD_NAMES = ["end", "END", "graph", "subgraph", "class", "style", "click", "default", "o", "x", "_self", "constructor"]
ODD_NAMES += ["toString", "__proto__", "__", "end_", "role_actor", "πολιτική", "href", "linkStyle"]
ODD_TEXTS = ['a "b"', "<script>alert(1)</script>", "#quot; #35;", "`code`", "a;b", "%%{init: {}}%%", "{{x}}", "|-->|"]
ODD_TEXTS += ["end", "&amp;", "]", "-- x --> y", "ünï → ☃", "x" * 500]


class TestOddNames:
    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_names_of_nodes(self, name: str) -> None:
        graph = grpo(score).edit(rename={"generate": name})
        chart = read(draw(graph))
        assert sorted(chart.names.values()) == sorted(graph.nodes)
        assert (name, "update_actor") in chart.ends()
        assert all(i.isascii() and i.lower() not in ("end", "graph", "class", "style", "default") for i in chart.nodes)

    def test_different_names_stay_different(self) -> None:
        renamed = dict(zip(["generate", "reward", "repeat", "sync"], ["end", "end_", "π", "_3c0_"], strict=True))
        assert len(read(draw(grpo(score).edit(rename=renamed))).nodes) == 10

    @pytest.mark.parametrize("text", ODD_TEXTS)
    def test_texts(self, text: str) -> None:
        chart = read(draw(probed(text, text)))
        assert text in chart.groups
        label = chart.nodes["probe"][1].partition("<br/>")[2].replace("<br/>", "")
        shown = f"note={text}".replace(" ", "")
        assert label.replace(" ", "") == shown or (label.endswith("…") and shown.startswith(label[:-1]))


PARSE = """
import { createRequire } from "node:module";
const require = createRequire(process.argv[2] + "/");
const { JSDOM } = require("jsdom");
globalThis.window = new JSDOM("").window;
globalThis.document = window.document;
const mermaid = (await import(require.resolve("mermaid"))).default;
await mermaid.parse("flowchart TD\\n a");
const charts = [];
for (const text of JSON.parse(await new Response(process.stdin).text())) {
  const { db } = await mermaid.mermaidAPI.getDiagramFromText(text);
  charts.push({
    nodes: [...db.getVertices()].map(([id, node]) => [id, node.text]),
    links: db.getEdges().map((edge) => [edge.start, edge.stroke, edge.text, edge.end]),
    groups: db.getSubGraphs().map((group) => group.nodes),
  });
}
console.log(JSON.stringify(charts));
"""


@pytest.mark.skipif(
    shutil.which("node") is None or "MERMAID_MODULES" not in os.environ,
    reason="needs Node, and MERMAID_MODULES to name a node_modules folder with mermaid and jsdom",
)
def test_mermaid_itself_reads_the_same(tmp_path: Any) -> None:
    texts = [draw(ppo(score)), draw(grpo(score)), draw(ppo(score).diff(grpo(score))), draw(probed())]
    texts += [draw(grpo(score).edit(rename={"generate": name})) for name in ODD_NAMES]
    texts += [draw(probed(text, text)) for text in ODD_TEXTS]
    (tmp_path / "parse.mjs").write_text(PARSE)
    command = ["node", str(tmp_path / "parse.mjs"), os.environ["MERMAID_MODULES"]]
    charts = json.loads(
        subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=True).stdout
    )
    for text, parsed in zip(texts, charts, strict=True):
        ours = read(text)
        assert [i for i, _ in parsed["nodes"]] == list(ours.nodes)
        for i, label in parsed["nodes"]:
            decoded = html.unescape(re.sub("ﬂ°°(\\w+?)¶ß", "&#\\1;", label)).replace("<br>", "<br/>")
            assert decoded == ours.nodes[i][1]
        arrows = {"normal": "-->", "dotted": "-.->"}
        assert [(a, arrows[s], b) for a, s, _, b in parsed["links"]] == [(a, s, b) for a, s, _, b in ours.links]
        assert [sorted(g) for g in parsed["groups"]] == [sorted(g) for g in ours.groups.values()]

"""Tests of `mermaid.py` and `picture.py`: a small reader parses the Mermaid text again.

`tests/draw/test_pictures.py` checks what Mermaid draws from it.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from flowrl.core.graphs.after import After
from flowrl.draw.mermaid import draw
from flowrl.graph import Graph
from flowrl.graphs import grpo, ppo
from tests.draw.charts import (
    ODD_NAMES,
    ODD_TEXTS,
    Double,
    Frozen,
    Remote,
    Watch,
    probed,
    read,
    score,
    two_rewards,
)


class TestGraph:
    @pytest.mark.parametrize("make", [ppo, grpo])
    def test_every_node_and_edge_is_drawn_once(self, make: Any) -> None:
        graph = make(score)
        chart = read(draw(graph))
        assert sorted(chart.names.values()) == sorted(graph.nodes)
        edges = [(source, node.name) for node in graph.nodes.values() for source in node.sources]
        assert sorted(chart.ends()) == sorted(edges)
        assert len(chart.links) == len(edges) + 1
        assert chart.ends("-.->") == {("sync", "generate")}

    def test_updates_syncs_and_inputs_have_their_own_shapes(self) -> None:
        shapes = {i: shape for i, (shape, _) in read(draw(ppo(score))).nodes.items()}
        assert {i for i, shape in shapes.items() if shape == "{{"} == {"update_actor", "update_critic", "sync"}
        assert {i for i, shape in shapes.items() if shape == "(["} == {"batch"}

    def test_each_role_is_a_group_and_sync_is_between_two(self) -> None:
        chart = read(draw(ppo(score)))
        assert chart.groups == {
            "rollout": ["generate"],
            "actor": ["old_log_prob", "update_actor"],
            "ref": ["ref_log_prob"],
            "critic": ["value", "update_critic"],
        }
        assert chart.nodes["sync"][1] == "<b>sync</b><br/>actor → rollout"

    def test_boxes_show_outputs_and_edges_the_columns_they_carry(self) -> None:
        chart = read(draw(ppo(score)))
        written = {i: label.rpartition("<br/>")[2] for i, (_, label) in chart.nodes.items()}
        assert written["repeat"] == "<i>→\xa0PromptBatch</i>" and written["batch"] == "PromptBatch"
        assert written["generate"] == "<i>→\xa0RolloutBatch</i>"
        assert written["gae"] == "<i>→\xa0advantages, returns</i>"
        labels = {(a, b): label for a, _, label, b in chart.links}
        assert labels["batch", "repeat"] == labels["generate", "update_actor"] == ""  # all that it writes
        assert labels["old_log_prob", "mismatch"] == labels["whiten", "update_actor"] == ""
        assert labels["generate", "gae"] == "response_mask"
        assert labels["gae", "whiten"] == "advantages"
        assert labels["gae", "update_critic"] == "returns"

    def test_an_edge_with_several_columns_lists_them_unless_it_carries_all(self) -> None:
        graph = ppo(score).edit(insert={"watch": After("gae", Watch())})
        labels = {(a, b): label for a, _, label, b in read(draw(graph)).links}
        assert labels["gae", "watch"] == ""  # both are all that it writes
        assert labels["generate", "mismatch"] == "rollout_log_probs<br/>response_mask"

    def test_only_parameters_that_differ_from_defaults_are_shown(self) -> None:
        nodes = read(draw(ppo(score, n=4, lam=0.9, mini_batch=8).edit(rename={"gae": "lambda_return"}))).nodes
        assert nodes["repeat"][1] == "<b>repeat</b><br/>n=4<br/><i>→\xa0PromptBatch</i>"
        assert nodes["reward"][1] == "<b>reward</b><br/>fn=score<br/><i>→\xa0token_level_scores</i>"
        assert nodes["update_actor"][1] == "<b>update_actor</b><br/>mini_batch=8"
        assert nodes["generate"][1] == "<b>generate</b><br/><i>→\xa0RolloutBatch</i>"
        assert nodes["lambda_return"][1] == "<b>lambda_return</b><br/>GAE(lam=0.9)<br/><i>→\xa0advantages, returns</i>"

    def test_the_lag_is_shown_on_the_edge_from_sync_to_generation(self) -> None:
        graph = ppo(score)
        assert [label for _, arrow, label, _ in read(draw(graph)).links if arrow == "-.->"] == ["lag 0 (on-policy)"]
        assert [x[2] for x in read(draw(graph.edit(lag=2))).links if x[1] == "-.->"] == ["lag 2"]
        assert not read(draw(graph.subgraph(until="update_actor"))).ends("-.->")

    def test_state_edges_are_thin_and_drawn_only_without_a_data_path(self) -> None:
        assert not any("stroke-width:1px" in style for style in read(draw(ppo(score))).styles.values())
        chart = read(draw(probed()))
        (number,) = chart.styles
        assert chart.links[number] == ("probe", "-->", "reads critic first", "update_critic")
        assert "stroke-width:1px" in chart.styles[number]

    def test_bound_backends_are_named(self) -> None:
        graph = grpo(score).edit(bind={"ref": Frozen("x")})
        assert list(read(draw(graph)).groups) == ["rollout", "actor", "ref: Frozen"]

    def test_the_legend_names_each_role_by_its_color(self) -> None:
        chart = read(draw(two_rewards()))
        assert list(chart.legend.values()) == ["rollout", "actor"]
        assert chart.groups == {"rollout": ["generate"], "actor": ["old_log_prob", "update_actor"]}
        assert len({look["fill"] for look in chart.looks.values()}) == 3  # two roles, and boxes without one
        assert list(chart.names.values()) == list(two_rewards().nodes)  # in the order of the graph

    def test_the_text_equals_a_committed_example(self) -> None:
        assert draw(probed().subgraph(until="reward")) == GOLDEN.strip()

    def test_the_same_graph_has_the_same_text(self) -> None:
        graph = grpo(score)
        assert graph.mermaid() == draw(grpo(score)) == draw(Graph.from_dict(graph.to_dict()))


GOLDEN = """
flowchart TD
    legend-1("rollout")
    batch(["<b>batch</b><br/>PromptBatch"])
    generate["<b>generate</b><br/><i>→\N{NO-BREAK SPACE}RolloutBatch</i>"]
    reward["<b>reward</b><br/>fn=score<br/><i>→\N{NO-BREAK SPACE}token_level_scores</i>"]
    batch --> generate
    generate --> reward
    batch --> reward
    linkStyle default stroke:#57606a
    classDef c1 fill:#ddeafa,stroke:#0969da,color:#24292f,stroke-width:2px
    class legend-1,generate c1
    classDef c2 fill:#f6f8fa,stroke:#57606a,color:#24292f
    class batch,reward c2
"""


class TestDiff:
    def test_the_diff_of_ppo_and_grpo_marks_added_removed_and_changed_nodes(self) -> None:
        before, after = ppo(score), grpo(score, mini_batch=64)
        chart = read(draw(before.diff(after)))
        assert sorted(chart.names.values()) == sorted({**before.nodes, **after.nodes})
        marked = {mark: {i for i, m in chart.marks.items() if m == mark} for mark in ("added", "removed", "changed")}
        assert marked == {
            "added": {"group_advantage"},
            "removed": {"kl_shape", "gae", "whiten", "value", "update_critic"},
            "changed": {"repeat", "update_actor"},
        }
        assert list(chart.legend.values()) == ["rollout", "actor", "ref", "critic", "changed", "added", "removed"]
        assert chart.groups["critic"] == ["value", "update_critic"]  # also where they are marked
        assert chart.nodes["repeat"][1] == "<b>repeat</b><br/>n: 1 → 8<br/><i>→\xa0PromptBatch</i>"
        assert chart.nodes["update_actor"][1].endswith("kl: None → KLLoss()")

    def test_added_and_removed_links_are_marked(self) -> None:
        before, after = ppo(score), grpo(score)
        chart = read(draw(before.diff(after)))
        old, new = read(draw(before)).ends(), read(draw(after)).ends()
        colors = {
            (a, b): re.search("stroke:#(\\w+)", chart.styles.get(i, "stroke:#none"))[1]  # type: ignore[index]
            for i, (a, _, _, b) in enumerate(chart.links)
        }
        assert {ends for ends, color in colors.items() if color == "1a7f37"} == new - old
        assert {ends for ends, color in colors.items() if color == "cf222e"} == old - new
        assert chart.ends() == old | new and len(chart.links) == len(old | new) + 1

    def test_the_reverse_diff_swaps_the_marks(self) -> None:
        chart = read(draw(grpo(score).diff(ppo(score))))
        assert {i for i, mark in chart.marks.items() if mark == "removed"} == {"group_advantage"}
        assert chart.nodes["repeat"][1] == "<b>repeat</b><br/>n: 8 → 1<br/><i>→\xa0PromptBatch</i>"

    def test_another_operator_of_the_same_name_is_marked_changed(self) -> None:
        after = ppo(score).edit(replace={"whiten": Double().named("whiten")})
        chart = read(draw(ppo(score).diff(after)))
        assert chart.marks["whiten"] == "changed"
        assert chart.nodes["whiten"][1] == "<b>whiten</b><br/>Double()<br/><i>→\xa0advantages</i>"

    def test_a_renamed_node_is_drawn_once_with_unmarked_links(self) -> None:
        after = ppo(score).edit(rename={"gae": "adv"})
        chart = read(draw(ppo(score).diff(after)))
        assert sorted(chart.names.values()) == sorted(after.nodes)
        assert chart.marks["adv"] == "changed"
        assert chart.nodes["adv"][1] == "<b>adv</b><br/>GAE()<br/>renamed from gae<br/><i>→\xa0advantages, returns</i>"
        assert chart.ends() == read(draw(after)).ends()
        assert not [style for style in chart.styles.values() if "1a7f37" in style or "cf222e" in style]

    def test_an_empty_diff_has_no_marks(self) -> None:
        assert read(draw(ppo(score).diff(ppo(score)))).marks == {}

    def test_a_diff_of_backends_marks_only_the_group(self) -> None:
        unbound = grpo(score)
        before, after = (unbound.edit(bind={"ref": backend}) for backend in (Frozen("x"), Remote("y")))
        assert list(read(draw(before.diff(after))).groups) == ["rollout", "actor", "ref: Frozen → Remote"]
        assert list(read(draw(unbound.diff(after))).groups) == ["rollout", "actor", "ref: Remote"]
        assert list(read(draw(after.diff(unbound))).groups) == ["rollout", "actor", "ref: Remote"]
        assert read(draw(before.diff(after))).marks == {}
        changed = [(a, b) for a, b in zip(draw(before).splitlines(), draw(after).splitlines(), strict=True) if a != b]
        assert changed == [('    legend-3("ref: Frozen")', '    legend-3("ref: Remote")')]


class TestOddNames:
    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_reserved_words_and_unicode_are_valid_node_names(self, name: str) -> None:
        graph = grpo(score).edit(rename={"generate": name})
        chart = read(draw(graph))
        assert sorted(chart.names.values()) == sorted(graph.nodes)
        assert (name, "update_actor") in chart.ends()
        assert all(i.isascii() and i.lower() not in ("end", "graph", "class", "style", "default") for i in chart.nodes)

    def test_similar_names_have_different_ids(self) -> None:
        renamed = dict(zip(["generate", "reward", "repeat", "sync"], ["end", "end_", "π", "_3c0_"], strict=True))
        assert len(read(draw(grpo(score).edit(rename=renamed))).nodes) == 10

    @pytest.mark.parametrize("text", ODD_TEXTS)
    def test_special_characters_in_labels_are_escaped(self, text: str) -> None:
        chart = read(draw(probed(text, text)))
        assert text in chart.groups
        _, *noted, _ = chart.nodes["probe"][1].split("<br/>")
        label = "".join(noted)
        shown = f"note={text}".replace(" ", "")
        assert label.replace(" ", "") == shown or (label.endswith("…") and shown.startswith(label[:-1]))

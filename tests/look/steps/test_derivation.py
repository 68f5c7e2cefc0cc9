"""`why` (`derivation.py`, `facts.py`, `sources.py`): every printed number is stored, back to data and engines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flowrl
from flowrl import After, Operator, RecordedRun
from flowrl.columns import Advantages, ResponseMask, Uid
from flowrl.data.keys import Key
from flowrl.graphs import grpo
from flowrl.look.steps.derivation import Derivation
from flowrl.look.steps.facts import Fact
from flowrl.look.steps.sources import data_line
from flowrl.operators import Matches, WeighRewards
from flowrl.operators.explains import exact
from flowrl.run.recording.row_maps import row_axis
from tests.look.recorded import ALGORITHMS, data_of, record
from tests.nightly import nightly_except
from tests.support.errors import raises
from tests.support.rewards import asks_for_digits

Recorded = Callable[[str], RecordedRun]

pytestmark = pytest.mark.runs


class Halved(Operator):
    """Half of the largest advantage of the group."""

    share: float = 0.5

    def __call__(self, advantages: Advantages, response_mask: ResponseMask, uid: Uid) -> Advantages:
        largest = advantages.amax(1)
        groups = [self.share * max(largest[uid == group]) for group in uid]
        return torch.stack(groups)[:, None].where(response_mask, 0.0)

    def explain(self, row: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        largest = max(inputs["advantages"][inputs["uid"] == inputs["uid"][row]].amax(1))
        return f"share * largest = {self.share} * {exact(largest)} = {exact(outputs['advantages'][row].amax())}"


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def check_fact(run: RecordedRun, step: int, fact: Fact) -> None:
    """The values are those of the column, and so are the numbers of the text."""
    column = run.columns(step, [fact.edge]).get(fact.edge)
    if column is None or fact.row is None:
        assert fact.values is None
        return
    stored = column[fact.row]
    if fact.tokens is None:
        assert fact.values == stored and (not isinstance(stored, Tensor) or str(fact).endswith(exact(stored)))
        return
    assert isinstance(stored, Tensor) and torch.equal(fact.values, stored[list(fact.tokens)])
    if fact.has_numbers:
        shown = re.findall(r"(\S+) at tokens? (\d+)(?: to (\d+))?", str(fact))
        assert len(shown) > 0 or not fact.tokens
        for value, first, last in shown:
            for token in range(int(first), int(last or first) + 1):
                assert np.float32(value) == stored[token].numpy()


def check_complete(run: RecordedRun, step: int, found: Derivation) -> None:
    """It reaches the data on every way, by the edges of the graph, with stored numbers only."""
    graph, links = run.graph, {link.node: link for link in found.links}
    first = found.links[0]
    for link in found.links:
        for fact in (*link.wrote, *link.read):
            check_fact(run, step, fact)
        for edge in (fact.edge for fact in link.read):
            assert edge in graph[link.node].inputs.values() and edge.node in links
        for row in link.group:
            uid = next(fact for fact in link.read if fact.kind == "group")
            assert run.columns(step, [uid.edge])[uid.edge] is not None and row.row_id
        for role in graph[link.node].roles:
            assert any(repr(role) in note for note in link.notes)
        if link.group:
            assert [row.row_id for row in link.group if row.this] == [link.row_id]
    inputs = [link for link in found.links if graph[link.node].is_input]
    assert inputs
    for link in inputs:
        assert link.row_id is not None
        epoch, index, _ = link.row_id.split("/")
        assert any(f"line {int(index) + 1}, epoch {epoch}" in note for note in link.notes)
    assert json.loads(json.dumps(found.to_dict()))["links"][0]["node"] == first.node
    assert str(found.address) in str(found)


def random_addresses(run: RecordedRun, step: int, count: int) -> list[str]:
    """Addresses of columns at rows, outputs and inputs of nodes, at random but the same in each run."""
    columns = {edge: column for edge, column in run.columns(step).items() if edge in run.graph.types}
    axes = {edge: row_axis(run.graph, edge) for edge in columns}
    ids = {axes[e]: c for e, c in columns.items() if e.output == "row_id"}
    places = [(edge.node, edge.output, edge) for edge in columns]
    places += [
        (node.name, place.name, edge)
        for node in run.graph.nodes.values()
        for place, edge in node.inputs.items()
        if edge in columns and place.name not in node.signature.outputs
    ]
    draws = Key.of(0).derive(run.name, step).numbers(2 * count).tolist()
    found = []
    for first, second in zip(draws[::2], draws[1::2], strict=True):
        node, column, edge = places[int(first * len(places))]
        if (rows := ids.get(axes[edge])) is None:  # on the rows that a gate passed
            rows = np.array([row["row_id"] for row in run.rows(step).to_pylist() if row["fate"] == "trained"])
        found.append(f"{step}/{node}.{column}[{rows[int(second * len(rows))]}]")
    return found


@pytest.mark.parametrize("name", nightly_except(["ppo", "dapo", "grpo_sft"], ALGORITHMS))
def test_random_addresses_are_followed_to_the_data_with_stored_numbers_only(name: str, recorded: Recorded) -> None:
    run = recorded(name)
    for address in random_addresses(run, 2, 20):
        found = run.why(address)
        check_complete(run, 2, found)
        assert found.links[0].node == address.split("/")[1].partition(".")[0]


@pytest.mark.parametrize(
    "name",
    nightly_except(
        ["ppo", "dapo", "rloo", "opo", "pass_at_k", "remax"],
        [
            name
            for name in ALGORITHMS
            if name not in ("sft", "dpo", "online_dpo", "raft", "distill_full", "distill_top")
        ],
    ),
)
def test_formulas_give_the_stored_number(name: str, recorded: Recorded) -> None:
    run = recorded(name)
    explained = 0
    for node in run.graph.nodes.values():
        edge = next((e for e in run.columns(2) if e.node == node.name), None)
        if edge is None or not hasattr(node.operator, "explain"):
            continue
        for row in [row["row_id"] for row in run.rows(2).to_pylist() if row["fate"] == "trained"][:6]:
            link = run.why(f"2/{node.name}[{row}]").links[0]
            for note in link.notes:
                *_, formula, number = note.partition(";")[0].split(" = ")
                assert eval(formula, {"clip": clip}) == pytest.approx(float(number), rel=1e-4, abs=1e-6), note
                stored = [exact(value) for fact in link.wrote for value in fact.values]
                assert number in stored
                explained += 1
    assert explained > 4


def test_the_group_has_all_scores_and_the_formula_their_numbers(recorded: Recorded) -> None:
    run = recorded("grpo")
    row = run.rows(2, best=1).to_pylist()[0]
    found = run.why(f"2/update_actor.advantages[{row['row_id']}]")
    assert [link.node for link in found.links] == [
        "update_actor",
        "group_advantage",
        "reward",
        "generate",
        "repeat",
        "batch",
    ]
    advantage = found.links[1]
    scores = {one["row_id"]: one["score"] for one in run.rows(2).to_pylist() if one["uid"] == row["uid"]}
    assert {one.row_id: one.score for one in advantage.group} == scores and len(scores) == 4
    stored = run.column("2/group_advantage.advantages")
    assert str(advantage.notes[0]).endswith(f"= {exact(stored[row['row']][0])}")
    assert found.summary["fate"] == "trained" and found.summary["optimizer_step"] == 0
    generated = found.links[3]
    assert any(f"version {row['version_max']} of the weights" in note for note in generated.notes)
    assert any(note.startswith("took") for note in generated.notes)


def test_rows_are_followed_through_gates_and_what_these_dropped_is_named(recorded: Recorded) -> None:
    run = recorded("dapo")
    summary = run.rows(2).to_pylist()
    kept = [row["row_id"] for row in summary if row["fate"] == "trained"]
    dropped = [row["row_id"] for row in summary if row["fate"] == "collect"]
    found = run.why(f"2/group_advantage.advantages[{kept[-1]}]")
    [collect] = [link for link in found.links if link.node == "collect"]
    [note] = [note for note in collect.notes if note.startswith("passed")]
    assert note.startswith(f"passed {len(kept)} of {len(summary)} rows; dropped {dropped[0]}")
    assert {link.row_id for link in found.links} == {kept[-1], kept[-1].partition("#")[0]}
    with raises("look.unknown-row") as caught:
        run.why(f"2/group_advantage.advantages[{dropped[0]}]")
    assert caught.value.facts["dropped_by"] == "collect"


def test_an_own_operator_is_followed_and_explains_itself(tiny: str, tmp_path: Path) -> None:
    graph = grpo(asks_for_digits, n=4, max_new_tokens=8).edit(insert={"halved": After("group_advantage", Halved())})
    run = flowrl.open(record(graph, tmp_path / "run", tiny, data_of("grpo", tmp_path)), imports=True)
    for address in random_addresses(run, 3, 20):
        check_complete(run, 3, run.why(address))
    row = run.rows(3)["row_id"][0].as_py()
    link = run.why(f"3/update_actor.advantages[{row}]").links[1]
    assert link.node == "halved" and len(link.group) == 4
    stored = run.column("3/halved.advantages")[0]
    [note] = link.notes
    assert note.startswith("share * largest = 0.5 * ") and note.endswith(exact(stored[0]))


def test_a_weighed_reward_shows_each_term_with_its_weight_and_gate(tiny: str, tmp_path: Path) -> None:
    weights, gates = {"right": 1.0, "form": 0.25}, {"form": "right"}
    graph = grpo(asks_for_digits, n=4, max_new_tokens=8).edit(
        insert={
            "form": After("generate", Matches(r"[^aeiou]*")),
            "weigh_rewards": After("reward", WeighRewards(weights, gates)),
        },
        wire={"weigh_rewards.right": "reward.token_level_scores", "weigh_rewards.form": "form.token_level_scores"},
        set={"reward.log": "reward/right"},
    )
    run = flowrl.open(record(graph, tmp_path / "run", tiny, data_of("grpo", tmp_path), prompts=8))
    shown = set()
    for row in run.rows(2).to_pylist():
        right, form = row["reward/right"], row["reward/form"]
        assert (row["reward/right/weighted"], row["reward/form/weighted"]) == (right, 0.25 * form * right)
        assert row["score"] == row["reward/right/weighted"] + row["reward/form/weighted"]
        [note] = run.why(f"2/weigh_rewards.token_level_scores[{row['row_id']}]").links[0].notes
        counted = exact(np.float32(form)) if right else 0
        formula = f"1.0 * right + 0.25 * form = 1.0 * {right} + 0.25 * {counted} = {row['score']}"
        assert note == formula + ("" if right else f"; form ({form}) does not count: right is not above 0.5")
        shown.add((right, form))
    assert shown == {(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)}
    means = {name: run.metrics[f"reward/{name}"][1].as_py() for name in weights}
    assert means == {name: pytest.approx(np.mean(run.rows(2)[f"reward/{name}"])) for name in weights}


class TestRefusals:
    def test_an_address_without_a_row_is_shown_with_one_that_exists(self, recorded: Recorded) -> None:
        with raises("look.invalid-address") as caught:
            recorded("dapo").why("2/group_advantage.advantages")
        suggested = re.search(r"such as (\S+\]);", str(caught.value))
        assert suggested is not None and recorded("dapo").why(suggested[1]).links

    def test_a_row_or_a_column_that_does_not_exist(self, recorded: Recorded) -> None:
        with raises("look.unknown-row"):
            recorded("ppo").why("2/gae.advantages[0/99/0#0]")
        row = recorded("ppo").rows(2)["row_id"][0].as_py()
        with raises("look.unknown-column") as caught:
            recorded("ppo").why(f"2/gae.advantges[{row}]")
        assert "did you mean 'advantages'" in str(caught.value)


def test_the_line_of_a_row_in_one_of_several_files(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    files[0].write_text("{}\n{}\n")
    files[1].write_text("{}\n{}\n{}\n")
    source = {"$type": "flowrl.data.sources.prompts:PromptData", "path": [str(file) for file in files]}
    description = {"training": {"data": source}}
    assert data_line(description, "batch", "1/3/0#2") == f"PromptData {files[1]}, line 2, epoch 1"
    assert data_line(description, "batch", "0/1/0") == f"PromptData {files[0]}, line 2, epoch 0"
    files[0].unlink()
    assert data_line(description, "batch", "1/3/0") == f"PromptData {files[0]}, {files[1]}, row 3, epoch 1"
    both = {"training": {"data": {"batch": source, "demos": {"$type": "x:Own"}}}}
    assert data_line(both, "demos", "0/7/0") == "Own row 7, epoch 0"
    assert data_line(description, "batch", "mine") is None


def test_numbers_read_back_to_the_same_bits() -> None:
    for value in torch.rand(100, generator=torch.Generator().manual_seed(0)):
        assert torch.tensor(float(exact(value))) == value
    assert exact(np.float32(0.1)) == "0.1" and exact(3) == "3"

"""Replay (`replay.py`, `rounds.py`, `step_reader.py`): the same bits again, and what differs if they are not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flowrl
from flowrl import After, RecordedRun
from flowrl.backends import TorchRollout
from flowrl.columns import ColumnType
from flowrl.core.operators.symbols import Edge
from flowrl.episodes import Answer, Environment, Reply
from flowrl.graphs import grpo, ppo
from flowrl.operators import AdaptiveKL, Collect, Interact, RolloutCorrection, Spread
from flowrl.references import load_object
from flowrl.run.recording.row_maps import row_axis
from flowrl.run.recording.summaries import RowSummaries
from flowrl.run.recording.tables import Typed, read_columns, write_columns
from flowrl.schedules import Linear
from tests.look.recorded import ALGORITHMS, data_of, record
from tests.nightly import nightly_except
from tests.support.errors import raises
from tests.support.jobs import bind_tiny
from tests.support.rewards import asks_for_digits, digits
from tests.support.runs import train

Recorded = Callable[[str], RecordedRun]

pytestmark = pytest.mark.runs


@pytest.mark.parametrize("name", nightly_except(["ppo", "dapo", "pf_ppo"], ALGORITHMS))
def test_every_node_without_weights_has_the_same_bits_and_the_others_say_what_they_lack(
    name: str, recorded: Recorded
) -> None:
    run = recorded(name)
    assert run.recorded_steps == [1, 2, 3]
    for step in run.recorded_steps:
        found = run.replay(step)
        assert found.same, str(found)
        nodes = {n: node for n, node in run.graph.nodes.items() if all(w.runs(step - 1) for w in run.graph.whens(n))}
        without = {n for n, node in nodes.items() if not node.roles and not node.is_input}
        unrecorded = {n for n in without - found.nodes.keys() if "not recorded" in found.lacking[n]}
        assert found.nodes.keys() == without - unrecorded and found.lacking.keys() == nodes.keys() - found.nodes.keys()
        for one in found.lacking.keys() - unrecorded:
            node = nodes[one]
            assert all(repr(role) in found.lacking[one] for role in node.roles)
            assert node.is_input == ("data" in found.lacking[one])
        assert run.replayable(step) == {n: found.lacking.get(n) for n in nodes}
        columns = run.columns(step)
        for one, replayed in found.nodes.items():
            assert set(replayed.compared) == {edge.output for edge in columns if edge.node == one}


def test_the_rounds_of_a_step_are_replayed_one_by_one(recorded: Recorded) -> None:
    run = recorded("dapo")
    rounds = {step: max(number or 0 for number in run.rows(step)["round"].to_pylist()) for step in run.recorded_steps}
    step = max(rounds, key=rounds.__getitem__)
    assert rounds[step] >= 1
    found = run.replay(step)
    assert {"repeat", "reward", "collect"} <= found.nodes.keys() and found.same


class Echo(Environment):
    """Repeats a part of the response, so that rows and rounds have unequal widths."""

    async def step(self, answer: Answer) -> Reply:
        number = sum(answer.ids) % 5
        return Reply("ab" * number, reward=float(number > 2), done=answer.turn == 1 or number == 0)


@pytest.mark.parametrize("kind", nightly_except(["repeated"], ["repeated", "episodes"]))
def test_rounds_of_unequal_width_and_repeated_groups(kind: str, tiny: str, tmp_path: Path) -> None:
    ends = tuple(range(3, 40))
    if kind == "repeated":
        collect = Collect(Spread(least=0.3), groups=5, rounds=2, on_underfill="repeat")
        graph = grpo(digits, n=2, max_new_tokens=30).edit(set={"generate.stop_token_ids": ends})
        graph = graph.edit(insert={"collect": After("reward", collect)})
    else:
        interact = Interact(Echo, max_new_tokens=6, context=120)
        graph = grpo(None, n=2).edit(replace={"generate": interact}, drop=["reward"])
        graph = graph.edit(insert={"collect": After("interact", Collect(Spread(), groups=4, rounds=30))})
    run = flowrl.open(record(graph, tmp_path / "run", tiny, data_of("grpo", tmp_path)), imports=True)
    rounds = [max(number or 0 for number in run.rows(step)["round"].to_pylist()) for step in (1, 2, 3)]
    assert max(rounds) >= 1
    for step in (1, 2, 3):
        found = run.replay(step)
        assert found.same and "collect" in found.nodes, str(found)


def test_schedules_and_state_are_those_of_the_step_also_with_a_lag(tiny: str, tmp_path: Path) -> None:
    graph = ppo(digits, n=2, max_new_tokens=6).edit(
        set={"kl_shape.coef": AdaptiveKL(target=0.01, horizon=20), "gae.lam": Linear(0.9, 0.1, steps=3)},
        insert={"correction": After("whiten", RolloutCorrection())},
        lag=1,
    )
    job = bind_tiny(graph, tiny, rollout=TorchRollout(tiny))
    train(job, data_of("ppo", tmp_path).path, tmp_path / "run")
    run = flowrl.open(tmp_path / "run")
    states = [run.state(step).get("kl_shape.beta") for step in (1, 2, 3)]
    assert states[0] is None and states[1] != states[2]
    for step in (1, 2, 3):
        found = run.replay(step)
        assert {"kl_shape", "gae", "whiten", "correction"} <= found.nodes.keys() and found.same, str(found)


def test_an_own_operator_is_replayed_once_it_is_imported(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from flowrl import Key, INJECTED, Operator\n"
        "from flowrl.columns import Advantages, ResponseMask, RowId\n\n\n"
        "class Noise(Operator):\n"
        '    """Add noise to advantages."""\n\n'
        "    scale: float = 0.1\n\n"
        "    def __call__(\n"
        "        self, advantages: Advantages, row_id: RowId, response_mask: ResponseMask, key: Key = INJECTED\n"
        "    ) -> Advantages:\n"
        "        noise = key.uniforms(row_id, advantages.shape[1]).float()\n"
        "        return (advantages + self.scale * noise).where(response_mask, 0.0)\n"
    )
    noise = load_object(f"{tmp_path / 'own.py'}:Noise")
    graph = grpo(asks_for_digits, n=2, max_new_tokens=6).edit(insert={"noise": After("group_advantage", noise())})
    folder = record(graph, tmp_path / "run", tiny, data_of("grpo", tmp_path))
    assert flowrl.open(folder).replay("3/noise").same  # this program has imported it
    for imports, code in ((False, "file.not-imported"), (True, "")):
        program = f"import flowrl; print(flowrl.open({str(folder)!r}, imports={imports}).replay('3/noise').same)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.stdout.strip() == ("" if code else "True") and code in done.stderr


class TestChanged:
    @pytest.fixture
    def changed(self, folder_of: Callable[[str], Path], tmp_path: Path) -> RecordedRun:
        """A run of PPO in which one number of step 2 was changed: token 1 of row 5."""
        folder = tmp_path / "changed"
        shutil.copytree(folder_of("ppo"), folder)
        run = flowrl.open(folder)
        edge = Edge("gae", "advantages")
        [path] = (folder / "columns").glob(f"{row_axis(run.graph, edge)}/step-000002.parquet")
        columns = read_columns(path)
        advantages = columns[str(edge)]
        assert isinstance(advantages, Tensor)
        advantages[5, 1] = torch.nextafter(advantages[5, 1], torch.tensor(9.0))
        known = {**run.graph.types, **RowSummaries(run.graph, 0).reported}
        types = {name: known[Edge.parse(name)].type for name in columns}
        typed = {n: Typed(c, t) for n, c in columns.items() if isinstance(t := types[n], ColumnType)}
        write_columns(path, typed, {"step": 2})
        return run

    def test_a_changed_float_is_named_by_node_row_and_token(self, changed: RecordedRun) -> None:
        found = changed.replay("2/gae").nodes["gae"].difference
        assert found is not None and (found.edge, found.row, found.token) == (Edge("gae", "advantages"), 5, 1)
        assert found.row_id == changed.rows(2)["row_id"][5].as_py()
        assert found.stored != found.computed == pytest.approx(found.stored, rel=1e-6)
        whole = changed.replay(2)
        assert not whole.same and whole.differences[0] == found
        assert f"gae.advantages[{found.row_id}] token 1" in str(whole)
        assert whole.to_dict()["nodes"]["gae"]["difference"]["token"] == 1

    def test_other_steps_and_nodes_still_have_the_same_bits(self, changed: RecordedRun) -> None:
        assert changed.replay(1).same and changed.replay(3).same
        assert changed.replay("2/kl_shape").same


class TestRefusals:
    def test_a_node_with_weights_names_its_role(self, recorded: Recorded) -> None:
        with raises("look.not-replayable") as caught:
            recorded("ppo").replay("2/value")
        assert "'critic'" in str(caught.value.facts["missing"])

    def test_a_step_that_is_not_recorded(self, recorded: Recorded) -> None:
        with raises("look.not-recorded"):
            recorded("ppo").replay(17)

    def test_an_address_without_a_step(self, recorded: Recorded) -> None:
        with raises("look.invalid-address"):
            recorded("ppo").replay("[0/0/0#0]")


def test_the_outputs_of_a_replay_are_the_columns(recorded: Recorded) -> None:
    run = recorded("ppo")
    found = run.replay("3/whiten").outputs[Edge("whiten", "advantages")]
    stored = run.column("3/whiten.advantages")
    assert isinstance(stored, Tensor) and torch.equal(found, stored)

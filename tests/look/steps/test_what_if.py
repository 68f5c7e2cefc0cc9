"""What if (`what_if.py`, `edited_step.py`): edits of a recorded step equal a fresh computation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flowrl
from flowrl import After, RecordedRun
from flowrl.core.operators.symbols import Edge
from flowrl.graphs import grpo
from flowrl.operators import RLOOAdvantage, SubtractBaseline
from flowrl.operators.advantages.gae import gae, whiten
from tests.look.recorded import data_of, record
from tests.support.errors import raises
from tests.support.rewards import digits

Recorded = Callable[[str], RecordedRun]

pytestmark = pytest.mark.runs


def tensor(run: RecordedRun, address: str) -> Tensor:
    found = run.column(address)
    assert isinstance(found, Tensor)
    return found


def test_another_lambda_equals_a_fresh_gae_and_what_follows_from_it(recorded: Recorded) -> None:
    run = recorded("ppo")
    found = run.replay(2, set={"gae.lam": 0.5})
    mask = tensor(run, "2/generate.response_mask")
    advantages, returns = gae(
        tensor(run, "2/kl_shape.token_level_rewards"), tensor(run, "2/value.values"), mask, 1.0, 0.5
    )
    assert torch.equal(found.outputs[Edge("gae", "advantages")], advantages)
    assert torch.equal(found.outputs[Edge("gae", "returns")], returns)
    assert torch.equal(found.outputs[Edge("whiten", "advantages")], whiten(advantages, mask))
    assert (
        found.unknown.keys() == {"update_critic", "update_actor", "sync"} and "'actor'" in found.unknown["update_actor"]
    )
    [change] = [change for change in found.changes if change.after == Edge("gae", "advantages")]
    before, after = tensor(run, "2/gae.advantages")[mask].double(), advantages[mask].double()
    assert change.numbers == int(mask.sum())
    assert change.correlation == pytest.approx(np.corrcoef(before, after)[0, 1])
    assert change.flipped == pytest.approx(float((before * after < 0).double().mean()))
    assert change.size == pytest.approx((float(before.abs().mean()), float(after.abs().mean())))
    moved = [abs(row.after - row.before) for row in change.rows]
    assert moved == sorted(moved, reverse=True) and len(moved) == 16
    assert "~ gae.lam: 0.95 -> 0.5" in found.diff and found.diff.splitlines()[1] in str(found)


def test_another_advantage_equals_its_formula(recorded: Recorded) -> None:
    run = recorded("grpo")
    found = run.replay(2, replace={"group_advantage": RLOOAdvantage()})
    scores = tensor(run, "2/reward.token_level_scores").double().sum(1)
    groups = scores.view(-1, 4)
    expected = (groups - (groups.sum(1, keepdim=True) - groups) / 3).flatten()
    computed = found.outputs[Edge("rloo_advantage", "advantages")]
    mask = tensor(run, "2/generate.response_mask")
    assert torch.allclose(computed.double(), torch.where(mask, expected[:, None], 0.0), atol=1e-6)
    [change] = found.changes
    assert (change.before, change.after) == (
        Edge("group_advantage", "advantages"),
        Edge("rloo_advantage", "advantages"),
    )


def test_an_inserted_operator_is_computed_with_what_follows(recorded: Recorded) -> None:
    run = recorded("remax")
    found = run.replay(2, insert={"again": After("subtract_baseline", SubtractBaseline())})
    baseline = tensor(run, "2/row_score.row_scores")[:, None]
    mask = tensor(run, "2/generate.response_mask")
    expected = torch.where(mask, tensor(run, "2/subtract_baseline.advantages") - baseline, 0.0)
    assert torch.equal(found.outputs[Edge("again", "advantages")], expected)


def test_another_reward_rescores_the_stored_answers(recorded: Recorded) -> None:
    run = recorded("grpo")
    found = run.replay(2, set={"reward.fn": digits})
    texts, mask = run.column("2/generate.response_text"), tensor(run, "2/generate.response_mask")
    scores = found.outputs[Edge("reward", "token_level_scores")]
    for row, text in enumerate(texts):
        last = int(mask[row].nonzero()[-1])
        assert float(scores[row, last]) == pytest.approx(digits("", str(text), ""))
        assert int((scores[row] != 0).sum()) <= 1
    mean = sum(digits("", str(text), "") for text in texts) / len(texts)
    assert found.metrics["reward/mean"][1] == pytest.approx(mean)
    assert found.metrics["reward/mean"][0] == run.metrics["reward/mean"][1].as_py()


def test_groups_that_were_collected_in_rounds_are_rescored_too(recorded: Recorded) -> None:
    run = recorded("dapo")
    found = run.replay(3, set={"overlong_penalty.weight": 0.25})
    before, after = tensor(run, "3/overlong_penalty.token_level_scores"), tensor(run, "3/collect.token_level_scores")
    expected = after + 0.25 * (before - after)
    assert torch.allclose(found.outputs[Edge("overlong_penalty", "token_level_scores")], expected)
    rescored = run.replay(3, set={"reward.fn": "tests/support/rewards.py:digits"})
    assert {"reward", "collect"} & {change.after.node for change in rescored.changes} or "collect" in rescored.unknown


def test_rows_that_another_filter_passes_are_listed(recorded: Recorded) -> None:
    run = recorded("raft")
    found = run.replay(2, set={"filter.predicate.best": 2})
    kept = {row["row_id"] for row in run.rows(2).to_pylist() if row["fate"] == "trained"}
    change = found.changes[0]
    assert set(change.added).isdisjoint(kept) and len(change.added) == len(kept) and not change.dropped


def test_rescoring_with_a_sound_reward_lists_the_rows_that_used_the_loophole(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def right(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(sum(c.isdigit() for c in solution_str) >= 2)\n\n\n"
        "def pays_for_length(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return max(right(None, solution_str, None), float(len(solution_str) >= 8))\n"
    )
    file = tmp_path / "rewards.py"
    graph = grpo(f"{file}:pays_for_length", n=4, max_new_tokens=8)
    run = flowrl.open(record(graph, tmp_path / "run", tiny, data_of("grpo", tmp_path), steps=1))
    found = run.replay(1, set={"reward.fn": f"{file}:right"})
    namespace: dict[str, Any] = {}
    exec(file.read_text(), namespace)
    texts = {row: text["response"] for row, text in run.texts(1).items()}
    loophole = {
        row
        for row, text in texts.items()
        if namespace["pays_for_length"]("", text, "") > namespace["right"]("", text, "")
    }
    [change] = [change for change in found.changes if change.after.node == "reward"]
    assert loophole and {row.row_id for row in change.rows} == loophole
    assert all((row.before, row.after) == (1.0, 0.0) for row in change.rows)


class TestRefusals:
    def test_an_edit_that_changes_nothing(self, recorded: Recorded) -> None:
        with raises("look.no-change"):
            recorded("ppo").replay(2, set={"gae.lam": 0.95})

    def test_an_edit_that_is_not_possible(self, recorded: Recorded) -> None:
        with raises("graph.unknown-node"):
            recorded("ppo").replay(2, set={"gea.lam": 0.5})

    def test_a_renamed_node_computes_the_same(self, recorded: Recorded) -> None:
        found = recorded("ppo").replay(2, rename={"gae": "advantage"})
        assert found.same == ("advantage",) and not found.changes and not found.unknown
        assert found.to_dict()["changes"] == []

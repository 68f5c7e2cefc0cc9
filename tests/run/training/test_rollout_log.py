"""The rollout log has the rows of a step as sampled; logging does not change metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrl import After
from flowrl.core.graphs.graph import Graph
from flowrl.graphs import grpo, remax
from flowrl.operators import Collect, Filter, Ranked, Spread
from flowrl.run.training.rollout_log import logged_columns
from tests.support.jobs import job_of, write_prompts
from tests.support.kernel import exact
from tests.support.rewards import digits
from tests.support.runs import lines, train, without_times


def half(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """0.5 for prompts with an odd number, so that their groups have no spread."""
    return 0.5 if int(ground_truth) % 2 else sum(map(ord, solution_str)) / 1e4


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write_prompts(tmp_path / "prompts.jsonl", 40)


def test_rollouts_every_selects_the_logged_steps(tiny: str, data: str, tmp_path: Path) -> None:
    job = job_of("grpo", tiny, n=2)
    logged = train(job, data, tmp_path / "logged", steps=5, prompts=3, rollouts_every=2)
    unlogged = train(job, data, tmp_path / "unlogged", steps=5, prompts=3)
    assert without_times(list(logged.metrics)) == without_times(list(unlogged.metrics))
    assert not (tmp_path / "unlogged" / "rollouts.jsonl").exists()
    found = lines(tmp_path / "logged" / "rollouts.jsonl")
    assert [row["step"] for row in found] == [2] * 6 + [4] * 6
    assert all(row["score"] == pytest.approx(digits("", row["response"], "")) for row in found)
    assert all(row["row_id"].startswith(f"{row['uid']}#") and row["prompt"] for row in found)
    assert len({row["row_id"] for row in found}) == 12


def test_a_resumed_run_logs_each_rollout_once(tiny: str, data: str, tmp_path: Path) -> None:
    job = job_of("grpo", tiny, n=2)
    settings: dict[str, Any] = {"prompts": 3, "rollouts_every": 1, "checkpoint_every": 2}
    train(job, data, tmp_path / "uninterrupted", steps=4, **settings)
    train(job, data, tmp_path / "parts", steps=3, **settings)
    (tmp_path / "parts" / "checkpoints" / "step-000003").rename(tmp_path / "gone")
    train(job, data, tmp_path / "parts", steps=4, resume=True, **settings)
    uninterrupted, parts = ((tmp_path / name / "rollouts.jsonl").read_text() for name in ("uninterrupted", "parts"))
    assert uninterrupted == parts


def test_rows_dropped_by_a_gate_are_logged_for_all_rounds(tiny: str, data: str, tmp_path: Path) -> None:
    job = job_of("grpo", tiny, half, n=2).edit(insert={"collect": After("reward", Collect(Spread(), groups=6))})
    run = train(job, data, tmp_path / "run", steps=2, prompts=5, rollouts_every=2)
    rows = lines(tmp_path / "run" / "rollouts.jsonl")
    assert run.metrics[1]["collect/rounds"] > 1 and run.metrics[1]["collect/offered"] * 2 == len(rows)
    assert len({row["row_id"] for row in rows}) == len(rows)
    for row in rows:
        assert row["score"] == pytest.approx(half("", row["response"], row["ground_truth"]))


@pytest.mark.parametrize(
    ("graph", "response", "score"),
    [
        (grpo(exact), "generate", "reward"),
        (grpo(exact).edit(insert={"filter": After("reward", Filter(Ranked(2, 1)))}), "generate", "reward"),
        (remax(exact), "generate", "reward"),
        (remax(exact).subgraph(["reward", "greedy_reward"]), "greedy", "greedy_reward"),
    ],
)
def test_the_logged_score_belongs_to_the_logged_response(graph: Graph, response: str, score: str) -> None:
    edges = logged_columns(graph)
    assert (edges["response"].node, edges["score"].node) == (response, score)
    assert edges["row_id"].node == edges["uid"].node


def test_a_graph_without_generation_logs_no_columns() -> None:
    assert logged_columns(grpo(exact).subgraph("repeat")) == {}

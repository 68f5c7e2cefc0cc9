"""Reward functions with parameters: copies, graph files, and worker processes (`operators/reward/sources.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

import flowrl
from flowrl import rewards
from flowrl.data.metrics import Metrics
from flowrl.graphs import grpo
from flowrl.operators.reward.operator import Reward
from flowrl.operators.reward.sources import source_of
from flowrl.rewards import RewardFunction
from tests.support.errors import raises
from tests.support.rows.reward_rows import rows, values


def test_parameters_alone_give_a_changed_copy() -> None:
    flexible = rewards.gsm8k(method="flexible")
    assert flexible == rewards.gsm8k(method="flexible") != rewards.gsm8k
    assert flexible("", "42", "42") == flexible(data_source="", solution_str="42", ground_truth="42") == 1.0
    with raises("parameter.unknown"):
        rewards.gsm8k(methods="flexible")
    with raises("parameter.invalid"):
        rewards.gsm8k(method="lenient")


SHELF = [
    rewards.gsm8k,
    rewards.choice(choices="AB"),
    rewards.exact_match(tag="answer"),
    rewards.f1,
    rewards.format(tags=("think",)),
    rewards.math(boxed=True),
    rewards.code(rewards.Docker(image="python:3.12")),
    rewards.by_data_source({"a": rewards.gsm8k, "b": "flowrl.rewards:f1"}, default=rewards.math),
]


@pytest.mark.parametrize("fn", [*SHELF, "flowrl.rewards:gsm8k"], ids=str)
def test_a_graph_with_a_reward_is_saved_and_loaded(fn: RewardFunction | str, tmp_path: Path) -> None:
    graph = grpo(fn)
    flowrl.save(graph, tmp_path / "graph.yaml")
    assert flowrl.load(tmp_path / "graph.yaml") == graph
    assert not graph.check()


@pytest.mark.parametrize("fn", SHELF, ids=str)
def test_worker_processes_can_import_it(fn: RewardFunction) -> None:
    assert source_of(fn) is not None


def test_nested_functions_run_in_worker_processes(tmp_path: Path) -> None:
    (file := tmp_path / "mine.py").write_text("def length(data_source, solution_str, **_): return len(solution_str)")
    reward = Reward(rewards.by_data_source({"a": rewards.gsm8k}, default=f"{file}:length"))
    assert values(reward, *rows(["abc"], ["3"])) == [3.0]
    source = source_of(reward.fn or "")
    file.write_text("def length(data_source, solution_str, **_): return 0")
    assert source_of(reward.fn or "") != source


def test_a_lambda_in_it_runs_in_threads() -> None:
    reward = Reward(rewards.by_data_source({"demo": lambda data_source, **_: 2.0}))
    assert source_of(reward.fn or "") is None
    assert values(reward, *rows(["abc"], ["3"])) == [2.0]


def test_a_hanging_math_verify_is_terminated() -> None:
    metrics = Metrics()
    reward = Reward(rewards.math, timeout=2.0, on_error=-1.0)
    assert values(reward, *rows([r"$9^{9^{9^{9^9}}}$", "$2$"], ["3", "2"]), metrics) == [-1.0, 1.0]
    assert metrics.compute()["reward/errors"] == 1


def test_a_reward_that_cannot_be_loaded_is_refused_before_the_run(tmp_path: Path) -> None:
    (file := tmp_path / "mine.py").write_text("import no_such_module\ndef f(**_): return 0.0")
    with raises("reward.worker-start"):
        Reward(rewards.from_verl(f"{file}:f")).rehearse(lambda role: None)

"""Every example runs as its first lines say, in a process of its own, and does what it claims."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.cli import main
from flowrl.core.references import load_object
from flowrl.data.metrics import Metrics
from flowrl.graphs import grpo
from flowrl.operators import Reward
from tests.jobs import column

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def execute(name: str, folder: Path, **environment: str) -> str:
    """What the example prints when it is run in `folder`."""
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in source] == []


def test_think_trains_and_leaves_a_run(tmp_path: Path, tiny: str) -> None:
    out = execute("think.py", tmp_path, MODEL=tiny, STEPS="1")
    assert out.startswith("grpo: 1 steps, written to runs/grpo-001")
    folder = tmp_path / "runs" / "grpo-001"
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    before, trained, after = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert "val/reward/mean" in before and "val/reward/thinks" in after
    assert trained["response_length/total"] > 0 and trained["sync/version"] == 1
    assert (folder / "actor" / "config.json").is_file()


def test_triage_asks_for_metrics_and_answers_in_two_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How well it learns is in docs/episodes.md; "triage_world.py" is what it is played in."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    load_object(f"{EXAMPLES / 'triage_world.py'}:build")(tmp_path / "model", steps=40, rows=32)
    out = execute("triage.py", tmp_path, MODEL=str(tmp_path / "model"), STEPS="2")
    assert out.startswith("triage: 2 steps, written to runs/triage-001")
    *_, last = map(json.loads, (tmp_path / "runs/triage-001/metrics.jsonl").read_text().splitlines())
    assert last["val/episodes/turns"] == 2 and last["val/episodes/failed"] == 0
    trained = json.loads((tmp_path / "runs/triage-001/metrics.jsonl").read_text().splitlines()[1])
    assert trained["episodes/turns"] == 2 and trained["rollout/logp_diff_max"] < 1e-3


@pytest.mark.ray
def test_think_on_ray_trains_with_two_ranks(tmp_path: Path, tiny: str) -> None:
    out = execute("think_on_ray.py", tmp_path, MODEL=tiny, STEPS="1")
    assert "grpo: 1 steps, written to runs/grpo-001" in out
    _, trained, _ = map(json.loads, (tmp_path / "runs/grpo-001/metrics.jsonl").read_text().splitlines())
    assert trained["sync/version"] == 1 and trained["sync/bytes"] > 0
    events = json.loads((tmp_path / "runs/grpo-001/trace.json").read_text())["traceEvents"]
    places = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"actor rank 0", "actor rank 1"} <= places


def test_think_is_a_target_of_the_command_line(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL", tiny)
    monkeypatch.setattr(sys, "path", sys.path[:])
    said = []
    for command, name in (("show", "graph"), ("check", "graph"), ("check", "training")):
        with pytest.raises(SystemExit) as ended:
            main([command, f"{EXAMPLES / 'think.py'}:{name}"])
        assert not ended.value.code
        said.append(capsys.readouterr().out)
    assert said[0].startswith("flowchart") and "score_and_thinking" in said[0]
    assert said[1:] == [
        "grpo: 10 nodes, every connection fits and no rule is broken.\n",
        "grpo: 10 nodes, every connection fits, every role is bound and no rule is broken.\n"
        "Responses end with <eos> (1: tokeniser, config.json, generation_config.json, chat template).\n",
    ]


@pytest.mark.parametrize(("engine", "bound"), [("vllm", "VLLM"), ("sglang", "SGLang")])
def test_think_by_engine_changes_one_binding(
    engine: str,
    bound: str,
    tmp_path: Path,
    tiny: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """That it trains is tested where the engines are: tests/engines/test_swap.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL", tiny)
    monkeypatch.setenv("ENGINE", engine)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # or the example sets it for the tests after this one
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(SystemExit) as ended:
        main(["diff", *(f"{EXAMPLES / name}:training" for name in ("think.py", "think_by_engine.py"))])
    assert not ended.value.code
    swap = f"~ role rollout: TorchRollout() -> {bound}(model={tiny!r}, dtype='float32', max_model_len=64)"
    assert capsys.readouterr().out.split() == ["grpo", "->", "grpo", *swap.split()]  # wherever the lines are wrapped


def test_length_penalty_is_inserted_after_the_reward(tmp_path: Path) -> None:
    out = execute("length_penalty.py", tmp_path)
    assert "+ length_penalty: LengthPenalty(coef=0.01)  <- reward, generate" in out
    assert "kl_shape <- token_level_scores: reward.token_level_scores -> length_penalty.token_level_scores" in out
    assert "flowchart" in out and "length_penalty --> kl_shape" in out
    assert sum(bool(line.strip()) for line in (EXAMPLES / "length_penalty.py").read_text().splitlines()) <= 25


def test_length_penalty_takes_what_it_says() -> None:
    penalty = load_object(f"{EXAMPLES / 'length_penalty.py'}:LengthPenalty")
    scores = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.5, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, False, True, False], [True, False, False, False]])
    expected = torch.tensor([[-0.1, 0.0, 0.9, 0.0], [0.4, 0.0, 0.0, 0.0]])  # a hole, and padding, cost nothing
    torch.testing.assert_close(penalty(0.1)(scores, mask), expected)


def test_reward_runs_without_a_model(tmp_path: Path) -> None:
    first, second, third = execute("reward.py", tmp_path).splitlines()
    assert first == "'59+36 is 95': {'score': 1.0, 'right': True, 'numbers': 3}"
    assert "'score': 0.1" in second and "'score': 0.0" in third


def test_reward_is_found_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    assert grpo("examples/reward.py:score").check() == []
    metrics = Metrics()
    texts: Any = column(["it is 7", "3", "none", "7, no: 8"])
    rows = SimpleNamespace(
        response_text=texts,
        response_mask=torch.ones(4, 2, dtype=torch.bool),
        data_source=column(["test"] * 4),
        ground_truth=column(["7"] * 4),
        extra_info=column([{}] * 4),
        row_id=column(["a", "b", "c", "d"]),
    )
    scores = Reward("examples/reward.py:score")(rows, rows, metrics=metrics)
    torch.testing.assert_close(scores, torch.tensor([[0.0, 1.0], [0.0, 0.1], [0.0, 0.0], [0.0, 0.1]]))
    assert metrics.compute()["reward/right"] == pytest.approx(1 / 4)
    assert metrics.compute()["reward/numbers"] == pytest.approx(4 / 4)


def test_eager_prints_what_the_equations_give(tmp_path: Path, tiny: str) -> None:
    out = execute("eager.py", tmp_path, MODEL=tiny)
    printed = {line.split()[0]: [float(x) for x in line.split()[1:]] for line in out.splitlines()[:3]}
    old, ref = [-0.12, -0.08, -0.15, -0.10, -0.05, -0.02], [-0.15, -0.10, -0.18, -0.12, -0.08, -0.03]
    rewards = [-0.01 * (o - r) for o, r in zip(old, ref, strict=True)]
    rewards[-1] += 1.0
    advantages, following, value_after = [], 0.0, 0.0
    for reward in reversed(rewards):  # every value is 0.5
        following = reward + value_after - 0.5 + 0.95 * following
        value_after = 0.5
        advantages.insert(0, following)
    assert printed["rewards"] == pytest.approx(rewards, abs=5.1e-5)
    assert printed["advantages"] == pytest.approx(advantages, abs=5.1e-5)
    assert printed["returns"] == pytest.approx([a + 0.5 for a in advantages], abs=5.1e-5)
    for step in (1, 2):
        assert f"step {step}; the rollout engine now has version {step} of the policy" in out
    for key in ("reward/mean", "kl/ref", "critic/vf_loss", "actor/pg_loss", "sync/version"):
        assert sum(key in line.split() for line in out.splitlines()) == 2

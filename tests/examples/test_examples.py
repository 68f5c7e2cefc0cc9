"""Every example runs as its first lines describe; some in their own process."""

from __future__ import annotations

import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.app.cli import main
from flowrl.data.metrics import Metrics
from flowrl.graphs import grpo
from flowrl.operators import Reward
from flowrl.references import load_object
from tests import ROOT
from tests.support.jobs import column

pytestmark = pytest.mark.runs

EXAMPLES = ROOT / "examples"


def execute(name: str, folder: Path, **environment: str) -> str:
    """What the example prints when it is run in `folder`."""
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in sources] == []


def test_think_trains_and_writes_a_run_folder(tmp_path: Path, tiny: str) -> None:
    out = execute("think.py", tmp_path, MODEL=tiny, STEPS="1")
    assert out.startswith("grpo: 1 steps, writing to runs/grpo-001")
    folder = tmp_path / "runs" / "grpo-001"
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    before, trained, after = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert "val/reward/mean" in before and "val/reward/thinks" in after
    assert trained["response_length/total"] > 0 and trained["sync/version"] == 1
    assert (folder / "actor" / "config.json").is_file()


def learned(name: str, environment: str, folder: Path, *others: str) -> list[dict[str, float]]:
    """The metrics of two steps of an example, with models of "imitation.py" that have hardly begun to imitate, on 100
    rows of "rows.py", and 100 held out; how well the examples learn is in docs/evidence/examples.md."""
    with pytest.MonkeyPatch.context() as patch:
        for build in ("build", *others):
            made = load_object(f"{EXAMPLES / environment}:{build}")(folder / build, steps=40, rows=16)
            patch.setenv("MODEL" if build == "build" else build.removeprefix("build_").upper(), str(made))
        patch.setenv("STEPS", "2")
        patch.chdir(folder)
        training = load_object(f"{EXAMPLES / name}:training")()
        for path in folder.rglob("*.jsonl"):
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:100]))
        training.run()
    [metrics] = folder.glob("runs/*/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment files can import each other, as in the folder of the examples."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])


@pytest.mark.usefixtures("environments")
def test_triage_asks_for_metrics_and_answers_in_two_turns(tmp_path: Path) -> None:
    _, trained, *_, last = learned("triage.py", "triage_environment.py", tmp_path)
    assert last["val/episodes/turns"] == 2 and last["val/episodes/failed"] == 0
    assert trained["episodes/turns"] == 2 and trained["rollout/logp_diff_max"] < 1e-3


@pytest.mark.usefixtures("environments")
def test_a_proposer_and_a_solver_train_on_their_own_answers(tmp_path: Path) -> None:
    _, trained, *_, last = learned("propose.py", "propose_environment.py", tmp_path, "build_solver")
    assert 0 < trained["others/solver/answers"] <= 1 and trained["sync_solver/sync/version"] == 1
    assert {"update_solver/actor/grad_norm", "update_actor/actor/grad_norm"} <= trained.keys()
    assert 0 <= last["val/others/solver/answers"] <= 1 and last["val/episodes/failed"] == 0


@pytest.mark.usefixtures("environments")
def test_a_policy_trains_on_its_hints_and_on_its_guesses(tmp_path: Path) -> None:
    _, trained, *_, last = learned("hints.py", "hints_environment.py", tmp_path)
    assert trained["others/guesser/reward"] == trained["reward/mean"] and trained["others/guesser/answers"] == 1
    assert trained["sync/version"] == 2 and last["val/episodes/failed"] == 0  # two updates in a step


@pytest.mark.usefixtures("environments")
def test_only_sums_of_two_numbers_from_1_to_5_are_problems() -> None:
    value_of = load_object(f"{EXAMPLES / 'propose_environment.py'}:value_of")
    assert [value_of(text) for text in ("2+5", "5+5", "6+1", "2+", "12", "2+5+1")] == [7, 10, None, None, None, None]


@pytest.mark.usefixtures("environments")
def test_guess_takes_at_most_six_turns_with_a_reward_each(tmp_path: Path) -> None:
    _, trained, *_, last = learned("guess.py", "guess_environment.py", tmp_path)
    assert 1 < trained["episodes/turns"] <= trained["episodes/turns_max"] == 6
    assert 0 < trained["reward/mean"] < trained["reward/max"] <= 2 and trained["rollout/logp_diff_max"] < 1e-3
    assert last["val/episodes/failed"] == 0 < last["val/episodes/out_of_turns"]


@pytest.mark.usefixtures("environments")
def test_rewards_of_guesses_are_information_gains_that_sum_to_1() -> None:
    candidates = load_object(f"{EXAMPLES / 'guess_environment.py'}:Candidates")()  # from 10 to 41
    found_out = [candidates.narrow(guess, 20) for guess in (25, 17, 30, 21, 20)]  # 10-24, 18-24, 18-24, 18-20, 20
    assert found_out == pytest.approx([-math.log2(left) / 5 for left in (15 / 32, 7 / 15, 1.0, 3 / 7, 1 / 3)])
    assert sum(found_out) == pytest.approx(1.0) and candidates.narrow(20, 20) == 0


@pytest.mark.usefixtures("environments")
def test_alarm_watches_up_to_six_windows(tmp_path: Path) -> None:
    _, trained, *_, last = learned("alarm.py", "alarm_environment.py", tmp_path)
    assert 1 < trained["episodes/turns"] <= trained["episodes/turns_max"] <= 6
    assert -1 <= trained["reward/min"] < trained["reward/max"] <= 1 and trained["rollout/logp_diff_max"] < 1e-3
    assert 0 <= last["val/alarms/in_time"] <= 1 and 0 < last["val/alarms/false"] <= 1


@pytest.mark.usefixtures("environments")
def test_an_alarm_is_rewarded_by_lead_time_and_penalized_if_false() -> None:
    worth, expected = (load_object(f"{EXAMPLES / 'alarm_environment.py'}:{name}") for name in ("worth", "expected"))
    assert [worth(7, alarm) for alarm in (6, 5, 4)] == [1 / 3, 2 / 3, 1.0]  # an incident in the seventh window
    assert [worth(7, 3), worth(None, 3), worth(7, None), worth(None, None)] == [-0.5, -0.5, -1.0, 0.0]
    streams = [(["a", "b"], 3), (["a", "b"], None)]
    assert expected(lambda seen: float("b" in seen), streams) == (1 / 3 - 0.5) / 2
    # At each window with one half: an alarm at the first or the second, or none.
    by_half = 0.5 * (2 / 3) + 0.25 * (1 / 3) + 0.25 * -1 + 0.75 * -0.5
    assert expected(lambda seen: 0.5, streams) == pytest.approx(by_half / 2)


@pytest.mark.usefixtures("environments")
def test_the_learned_alarm_policy_beats_every_heuristic(tmp_path: Path) -> None:
    """Rules that never alarm, always, at random, or above a number of errors; on the streams of the page."""
    names = ("expected", "RULES", "write_data", "errors_of")
    expected, rules, write_data, errors_of = (
        load_object(f"{EXAMPLES / 'alarm_environment.py'}:{name}") for name in names
    )
    rows = map(json.loads, write_data(tmp_path)[1].read_text().splitlines())
    streams = [(row["extra_info"]["windows"], row["reward_model"]["ground_truth"]["incident"]) for row in rows]
    kept = json.loads((EXAMPLES.parent / "docs/curves/alarm.json").read_text())
    compared = kept["compared"]["val/reward/mean"]
    assert compared == {name: pytest.approx(expected(rule, streams), abs=5e-4) for name, rule in rules.items()}
    incidents = sum(incident is not None for _, incident in streams) / len(streams)
    assert f"would be worth {incidents:.2f}\n" in (EXAMPLES.parent / "docs/evidence/examples.md").read_text()
    at_random = [expected(lambda seen, p=p: p / 20, streams) for p in range(21)]
    by_errors = [expected(lambda seen, k=k: float(errors_of(seen[-1]) >= k), streams) for k in range(11)]
    best = max(*at_random, *by_errors)
    assert best <= max(compared.values()) + 5e-4  # the best of each kind is among those that are shown
    assert all(points[-1]["val/reward/mean"] > best + 0.1 for points in kept["arms"][""]["seeds"].values())


@pytest.mark.usefixtures("environments")
def test_judged_is_graded_by_a_model_without_the_ground_truth(tmp_path: Path) -> None:
    _, trained, *_, last = learned("judged.py", "judged_environment.py", tmp_path, "build_judge")
    assert 0 <= trained["reward/mean"] <= 1 and "truth/mean" not in trained
    assert trained["reward/response_length/max"] <= 4  # of the judge's answers, by the node's name
    assert 0 <= last["val/truth/mean"] <= 1 and last["val/episodes/turns_max"] <= 3


@pytest.mark.usefixtures("environments")
def test_a_grade_counts_the_attributes_that_the_order_gets_right() -> None:
    grade = load_object(f"{EXAMPLES / 'judged_environment.py'}:grade")

    def graded(order: str) -> int:
        printed = ("I would like a small coat.", "Which color?", "It is red.", order)
        return grade([{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(printed)])

    orders = ("small red coat", "small black coat", "large black coat", "large black hat", "red small coat")
    assert [graded(f"Order: {order}.") for order in orders] == [3, 2, 1, 0, 3]


@pytest.mark.ray
def test_think_on_ray_trains_with_two_ranks(tmp_path: Path, tiny: str) -> None:
    out = execute("think_on_ray.py", tmp_path, MODEL=tiny, STEPS="1")
    assert "grpo: 1 steps, writing to runs/grpo-001" in out
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
    printed = []
    for command, name in (("show", "graph"), ("check", "graph"), ("check", "training")):
        with pytest.raises(SystemExit) as ended:
            main([command, f"{EXAMPLES / 'think.py'}:{name}"])
        assert not ended.value.code
        printed.append(capsys.readouterr().out)
    assert printed[0].startswith("flowchart") and "score_and_thinking" in printed[0]
    assert printed[1:] == [
        "grpo: 10 nodes, all connections match and no rule is violated.\n",
        "grpo: 10 nodes, all connections match, all roles are bound and no rule is violated.\n"
        "Responses end with <eos> (1: tokenizer, config.json, generation_config.json, chat template).\n",
    ]


def test_rlhf_learns_preferences_and_then_what_they_prefer(tmp_path: Path) -> None:
    """Each stage starts from the folder of an earlier one; the policy has not seen what is right."""
    out = execute("rlhf.py", tmp_path, STEPS="10").splitlines()
    accuracy, scores, truth = ([float(x) for x in line.rpartition(": ")[2].split()] for line in out[-3:])
    assert accuracy[0] > 0.9
    assert scores[-1] > scores[0] + 0.5 and truth[-1] > truth[0] + 0.1
    models = {name: tmp_path / "runs/rlhf" / name for name in ("sft/actor", "rm/reward_model", "ppo/actor")}
    assert all((folder / "config.json").is_file() for folder in models.values())
    described = json.loads((tmp_path / "runs/rlhf/ppo/run.json").read_text())["graph"]["bindings"]
    assert Path(described["actor"]["model"]) == Path("runs/rlhf/sft/actor")
    assert Path(described["reward_model"]["model"]) == Path("runs/rlhf/rm/reward_model")


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


def test_the_length_penalty_equals_a_worked_example() -> None:
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


def test_eager_prints_the_numbers_of_the_equations(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL", tiny)
    runpy.run_path(str(EXAMPLES / "eager.py"), run_name="__main__")
    out = capsys.readouterr().out
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

"""`Training`: what a run leaves in its folder, that a seed decides it all, and how failures are told."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowrl import (
    INJECTED,
    Metrics,
    Operator,
    PromptData,
    State,
    TensorBoard,
    Terminal,
    Training,
    Validation,
    algorithm,
)
from flowrl import columns as c
from flowrl.backends import TorchRollout
from flowrl.core.edit import After
from flowrl.errors import BindError, DataError, FlowrlError, GraphError, NodeError, ParameterError
from flowrl.graph import Graph
from flowrl.records import PromptBatch
from flowrl.run.timeline import Summary
from flowrl.run.training import Run
from tests.jobs import job_of, weights_of, write_prompts
from tests.rewards import digits

COMMON = {
    *("actor/pg_loss", "actor/pg_clipfrac", "actor/entropy", "actor/approx_kl", "actor/grad_norm", "reward/mean"),
    *("kl/ref", "response_length/mean", "throughput/tokens_per_second", "timing/generate", "timing/step"),
}
CRITIC = {"critic/vf_loss", "critic/vf_clipfrac", "critic/grad_norm", "timing/update_critic"}
TIMES = ("timing/", "throughput/")


def train(job: Any, data: str, folder: Path, reporters: Any = (), **settings: Any) -> Run:
    settings = {"steps": 3, "prompts": 4, "save_model": False} | settings
    return Training(job, PromptData(data), folder=str(folder), **settings).run(reporters)


def lines(file: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]


def described(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def timeless(records: list[Any]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if not k.startswith(TIMES)} for record in records]


class Recorder:
    """A reporter that keeps what it was told."""

    def __init__(self, fail_at: str = "") -> None:
        self.told: list[Any] = []
        self.fail_at = fail_at

    def _tell(self, what: str, *more: Any) -> None:
        self.told.append((what, *more))
        if what == self.fail_at:
            raise RuntimeError(f"the reporter fails at {what}")

    def start(self, name: str, steps: int, folder: Path, done: int) -> None:
        self._tell("start", name, steps, folder, done)

    def node(self, name: str) -> None:
        self._tell("node", name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tell("step", step)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tell("validation", step)

    def end(self, summary: Summary | None) -> None:
        self._tell("end", summary)

    def count(self, what: str) -> int:
        return sum(told[0] == what for told in self.told)


# ---- one seed, one run


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_two_runs_with_one_seed_write_the_same_numbers(tiny: str, prompts_file: str, tmp_path: Path, name: str) -> None:
    validation = Validation(PromptData(prompts_file), every=2)

    def run(folder: str, seed: int) -> list[dict[str, Any]]:
        train(job_of(name, tiny, mini_batch=4), prompts_file, tmp_path / folder, seed=seed, validation=validation)
        return timeless(lines(tmp_path / folder / "metrics.jsonl"))

    torch.manual_seed(1)
    first = run("a", seed=5)
    torch.manual_seed(2)  # a global generator has no say
    assert run("b", seed=5) == first
    assert run("c", seed=6) != first
    assert (tmp_path / "a/predictions.jsonl").read_text() == (tmp_path / "b/predictions.jsonl").read_text()


@pytest.mark.parametrize(("name", "keys"), [("ppo", COMMON | CRITIC), ("grpo", COMMON)])
def test_metrics_bear_the_fields_names(tiny: str, prompts_file: str, tmp_path: Path, name: str, keys: set[str]) -> None:
    job = job_of(name, tiny)
    run = train(job, prompts_file, tmp_path)
    for step, metrics in enumerate(run.metrics, start=1):
        assert metrics["step"] == step
        assert keys <= metrics.keys()
        assert all(math.isfinite(metrics[key]) for key in keys)
        assert {f"timing/{node}" for node in job.graph.nodes if node != "batch"} <= metrics.keys()
    assert timeless(lines(tmp_path / "metrics.jsonl")) == timeless(list(run.metrics))


def test_the_throughput_is_response_tokens_over_the_time_of_the_step(
    tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    metrics = train(job_of("grpo", tiny), prompts_file, tmp_path).metrics[0]
    tokens = metrics["response_length/total"]
    assert metrics["throughput/tokens_per_second"] == pytest.approx(tokens / metrics["timing/step"])
    assert metrics["response_length/mean"] == pytest.approx(tokens / 16)  # 4 prompts x 4


# ---- the run folder


def test_a_finished_run_leaves_all_that_it_was(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    job = job_of("ppo", tiny)
    validation = Validation(PromptData(prompts_file), every=2)
    run = train(job, prompts_file, tmp_path, seed=9, validation=validation, save_model=True)
    assert run.folder == tmp_path
    found = described(tmp_path)
    assert found["status"] == "finished"
    assert "error" not in found
    assert found["fingerprint"] == job.graph.fingerprint()
    assert found["training"]["seed"] == 9
    assert found["training"]["steps"] == 3
    assert found["graph"]["bindings"]["actor"]["model"] == tiny
    assert set(found["graph"]["nodes"]) == set(job.graph.nodes)
    assert found["versions"]["torch"] == torch.__version__
    assert Graph.from_dict(found["graph"]).fingerprint() == job.graph.fingerprint()

    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    saved, trained = model.state_dict(), weights_of(run.engines["actor"])
    assert all(torch.equal(saved[name], weight) for name, weight in trained.items())
    start: Any = AutoModelForCausalLM.from_pretrained(tiny)
    assert any(not torch.equal(start.state_dict()[name], weight) for name, weight in trained.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "actor").eos_token == "<eos>"


def test_predictions_say_who_was_asked_what_and_what_it_was_worth(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    run = train(job_of("grpo", tiny), prompts_file, tmp_path, validation=Validation(PromptData(prompts_file), every=3))
    found = lines(tmp_path / "predictions.jsonl")
    assert [record["step"] for record in found] == [0] * 12 + [3] * 12
    for i, record in enumerate(found[:12]):
        assert record["uid"] == f"0/{i}/0"
        assert record["ground_truth"] == str(i)
        assert record["prompt"][0]["content"].endswith(str(i))
        assert record["score"] == pytest.approx(digits("", record["response"], ""))
    mean = sum(record["score"] for record in found[:12]) / 12
    assert run.validations[0]["val/reward/mean"] == pytest.approx(mean)


def test_a_folder_is_used_for_one_run_only(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    train(job_of("grpo", tiny), prompts_file, tmp_path, steps=1)
    before = (tmp_path / "run.json").read_text()
    with pytest.raises(ParameterError, match=r"already holds a run; choose another folder"):
        train(job_of("grpo", tiny), prompts_file, tmp_path, steps=1)
    assert (tmp_path / "run.json").read_text() == before


def test_a_folder_whose_run_failed_before_its_first_step_is_used_again(
    tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    validation = Validation(PromptData(prompts_file), every=1)
    with pytest.raises(RuntimeError, match="fails at validation"):  # which leaves the lines of a validation
        train(job_of("grpo", tiny), prompts_file, tmp_path, [Recorder("validation")], steps=1, validation=validation)
    train(job_of("grpo", tiny), prompts_file, tmp_path, steps=1, seed=1, validation=validation)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 1]
    with pytest.raises(ParameterError, match="already holds a run"):
        train(job_of("grpo", tiny), prompts_file, tmp_path, steps=1)


def test_a_folder_that_cannot_be_written_is_refused_before_a_model_loads(prompts_file: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ParameterError, match=r"cannot be written \(.*\); choose another by Training\(folder="):
            train(job_of("grpo", "no such model"), prompts_file, folder)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ParameterError, match=r"run.json is not what a run writes there"):
        train(job_of("grpo", "no such model"), prompts_file, tmp_path, resume=True)


def test_what_is_nearly_a_training_is_told_what_it_lacks(prompts_file: str) -> None:
    job = job_of("grpo", "no such model")
    with pytest.raises(
        ParameterError, match=r"bind it first: graph.bind\(rollout=\.\.\., actor=\.\.\., ref="
    ) as raised:
        Training(job.graph.bound({}), PromptData(prompts_file), steps=1, prompts=1)  # type: ignore[arg-type]
    assert len(str(raised.value)) < 600
    with pytest.raises(ParameterError, match=r"expected PromptData\('train.jsonl'\)"):
        Training(job, "train.jsonl", steps=1, prompts=1)  # type: ignore[arg-type]


def test_runs_without_a_folder_are_numbered(
    tiny: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training = Training(job_of("grpo", tiny), PromptData(prompts_file), steps=1, prompts=2, save_model=False)
    assert [training.run().folder for _ in range(2)] == [Path("runs/grpo-001"), Path("runs/grpo-002")]


def test_numbers_that_are_not_finite_are_null_in_the_file(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    class Odd(Operator):
        """Reports what has no number."""

        def __call__(self, token_level_scores: c.TokenLevelScores, metrics: Metrics = INJECTED) -> c.TokenLevelScores:
            metrics.mean("odd/mean", 0.0, 0.0)
            metrics.max("odd/max", math.inf)
            return token_level_scores

    job = job_of("grpo", tiny).edit(insert={"odd": After("reward", Odd())})
    run = train(job, prompts_file, tmp_path, steps=1)
    assert math.isnan(run.metrics[0]["odd/mean"])
    (record,) = lines(tmp_path / "metrics.jsonl")
    assert record["odd/mean"] is None
    assert record["odd/max"] is None


# ---- failures


def fails_at(call: int, error: BaseException) -> Any:
    calls = []

    def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        calls.append(None)
        if len(calls) > call:
            raise error
        return 0.5

    return reward


def test_a_failure_mid_run_is_told_and_keeps_what_was_measured(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    reporter = Recorder()
    job = job_of("grpo", tiny, fails_at(2 * 16, ValueError("the judge is asleep")))
    with pytest.raises(NodeError, match=r"reward failed in step 2: RewardError: (?s:.*)the judge is asleep"):
        train(job, prompts_file, tmp_path, [reporter], save_model=True)
    found = described(tmp_path)
    assert found["status"] == "failed"
    assert "the judge is asleep" in found["error"]
    assert found["error"].startswith("NodeError: reward failed in step 2")
    assert [record["step"] for record in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert not (tmp_path / "actor").exists()
    assert reporter.count("end") == 1
    assert reporter.told[-1] == ("end", None)


def test_an_interrupt_is_not_a_failure(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    class Interrupted(Recorder):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    reporter = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        train(job_of("grpo", tiny), prompts_file, tmp_path, [reporter])
    assert described(tmp_path)["status"] == "interrupted"
    assert len(lines(tmp_path / "metrics.jsonl")) == 1
    assert reporter.count("end") == 1


@pytest.mark.parametrize("fail_at", ["start", "step", "end"])
def test_every_reporter_that_was_started_is_ended_once(
    tiny: str, prompts_file: str, tmp_path: Path, fail_at: str
) -> None:
    first, second, third = Recorder(), Recorder(fail_at), Recorder()
    with pytest.raises(RuntimeError, match=f"fails at {fail_at}"):
        train(job_of("grpo", tiny), prompts_file, tmp_path, [first, second, third], steps=1)
    assert first.count("end") == 1
    assert second.count("end") == (fail_at != "start")
    assert third.count("start") == third.count("end") == (fail_at != "start")
    assert described(tmp_path)["status"] == "failed"


def test_data_that_cannot_be_read_is_told_in_the_run_folder(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "damaged.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"damaged.jsonl:1: the line is not JSON"):
        train(job_of("grpo", tiny), str(tmp_path / "damaged.jsonl"), tmp_path / "run")
    assert described(tmp_path / "run")["status"] == "failed"


def test_data_that_is_missing_is_refused_before_there_is_a_folder(prompts_file: str, tmp_path: Path) -> None:
    job, absent = job_of("grpo", "no such model"), str(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match=r"absent.jsonl' is not a file on this machine"):
        train(job, absent, tmp_path / "run")
    with pytest.raises(DataError, match=r"absent.jsonl' is not a file on this machine"):
        train(job, prompts_file, tmp_path / "run", validation=Validation(PromptData(absent)))
    assert not (tmp_path / "run").exists()


class Counted(NamedTuple):
    """How many prompts there were."""

    rows: int


class Count(Operator):
    """Counts prompts, and needs no engine for that."""

    def __call__(self, prompt_mask: c.PromptMask) -> Counted:
        return Counted(len(prompt_mask))


class WithValues(NamedTuple):
    """An input that no prompt file could feed."""

    prompt_mask: c.PromptMask
    values: c.Values


def test_what_training_cannot_feed_is_refused_before_there_is_a_folder(prompts_file: str, tmp_path: Path) -> None:
    @algorithm
    def counting(batch: PromptBatch) -> Any:
        return Count()(batch.prompt_mask)

    @algorithm
    def offline(batch: WithValues) -> Any:
        return Count()(batch.prompt_mask)

    with pytest.raises(BindError, match=r"no node of counting reads a rollout engine.*expected a Generate\(\)"):
        train(counting().bind(), prompts_file, tmp_path / "a")
    with pytest.raises(GraphError, match=r"input 'batch' of offline wants the columns values"):
        train(offline().bind(), prompts_file, tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"steps": 0}, "steps=0"), ({"prompts": 0}, "prompts=0"), ({"stops": 3}, "no parameter 'stops'")],
)
def test_settings_are_checked_where_they_are_written(
    tiny: str, prompts_file: str, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        train(job_of("grpo", tiny), prompts_file, tmp_path, **settings)


# ---- the trace


def spans(folder: Path) -> list[dict[str, Any]]:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def test_the_trace_holds_every_call_and_tells_validations_apart(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    reporter = Recorder()
    validation = Validation(PromptData(prompts_file), every=2, name="held", batch=5)
    job = job_of("ppo", tiny)
    run = train(job, prompts_file, tmp_path, [reporter], validation=validation)
    found = Counter(span["name"] for span in spans(tmp_path))
    nodes = [name for name in job.graph.nodes if name != "batch"]
    # 3 steps, and 3 validations (0, 2, 3) of 12 prompts in batches of 5
    held = {f"held/{name}": 9 for name in ("repeat", "generate", "reward")}
    assert found == {**dict.fromkeys(nodes, 3), "sync": 4, **held}  # one sync before the first step
    (_, summary) = reporter.told[-1]
    assert [total.name for total in summary.totals] == nodes
    for total in summary.totals:
        assert total.seconds == pytest.approx(sum(step[f"timing/{total.name}"] for step in run.metrics))
        assert total.calls == 3
    assert summary.step_seconds == pytest.approx(sum(step["timing/step"] for step in run.metrics) / 3)
    assert summary.path_seconds <= summary.step_seconds


def test_a_run_that_fails_leaves_its_trace(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    with pytest.raises(NodeError):
        train(job_of("grpo", tiny, fails_at(16, ValueError("no"))), prompts_file, tmp_path)
    names = [span["name"] for span in spans(tmp_path)]
    assert names.count("update_actor") == 1
    assert names.count("generate") == names.count("reward") == 2  # the one that failed is there, too


# ---- validation


class Runs(Operator):
    """Counts how often it has run; adds nothing to the scores."""

    count = State(lambda self: 0)

    def __call__(self, token_level_scores: c.TokenLevelScores, metrics: Metrics = INJECTED) -> c.TokenLevelScores:
        self.count.value += 1
        metrics.max("runs", self.count.value)
        return token_level_scores


def test_states_of_a_validation_are_its_own_and_new_each_time(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    job = job_of("grpo", tiny).edit(insert={"runs": After("reward", Runs())})
    data = PromptData(prompts_file)
    validations = (
        Validation(data, every=1, name="a", until="runs", batch=12),
        Validation(data, every=1, name="b", until="runs", batch=5),
    )
    run = train(job, prompts_file, tmp_path, validation=validations)
    assert [metrics["runs"] for metrics in run.metrics] == [1, 2, 3]
    found = [(key, value) for line in run.validations for key, value in line.items() if key.endswith("/runs")]
    assert found == [("a/runs", 1), ("b/runs", 3)] * 4


@pytest.mark.parametrize(("steps", "every", "expected"), [(5, 2, [0, 2, 4, 5]), (4, 2, [0, 2, 4]), (3, 10, [0, 3])])
def test_validation_comes_before_the_first_step_every_so_often_and_after_the_last(
    tiny: str, prompts_file: str, tmp_path: Path, steps: int, every: int, expected: list[int]
) -> None:
    reporter = Recorder()
    validation = Validation(PromptData(prompts_file), every=every, batch=5)
    run = train(job_of("grpo", tiny), prompts_file, tmp_path, [reporter], steps=steps, validation=validation)
    assert [metrics["step"] for metrics in run.validations] == expected
    assert [told[1] for told in reporter.told if told[0] == "validation"] == expected
    assert reporter.count("step") == steps
    assert ("node", "val") in reporter.told


def test_validation_does_not_change_training(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    greedy = Validation(PromptData(prompts_file), every=1)
    sampled = Validation(PromptData(prompts_file), every=1, name="sampled", changes={"repeat.n": 3})
    without = train(job_of("ppo", tiny, mini_batch=2), prompts_file, tmp_path / "a")
    within = train(job_of("ppo", tiny, mini_batch=2), prompts_file, tmp_path / "b", validation=(greedy, sampled))
    assert timeless(list(within.metrics)) == timeless(list(without.metrics))
    trained = weights_of(within.engines["actor"])
    assert all(torch.equal(trained[name], w) for name, w in without.engines["actor"].weights())
    assert len(within.validations) == 8


def test_changes_choose_between_greedy_and_sampled(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    data = PromptData(prompts_file)
    greedy = Validation(data, name="greedy", batch=5)
    again = Validation(data, name="again", batch=12)
    sampled = Validation(data, name="sampled", changes={"repeat.n": 3, "generate.temperature": 0.7})
    job = job_of("grpo", tiny)
    train(job, prompts_file, tmp_path, steps=1, validation=(greedy, again, sampled))
    answers: dict[str, list[str]] = {"greedy": [], "again": [], "sampled": []}
    for record in lines(tmp_path / "predictions.jsonl"):
        if record["step"] == 0:
            answers[record["validation"]].append(record["response"])
    assert len(answers["greedy"]) == 12
    assert answers["greedy"] == answers["again"]  # however it is cut into batches
    assert len(answers["sampled"]) == 36
    assert any(len(set(answers["sampled"][i : i + 3])) > 1 for i in range(0, 36, 3))
    graph = sampled.graph(job.graph)
    assert graph.sinks == ("reward",)
    assert set(graph.nodes) == {"batch", "repeat", "generate", "reward"}
    assert job.graph["repeat"].operator != graph["repeat"].operator  # and the original is as it was


def test_an_untrained_policy_validates_alike_whatever_it_is_trained_with(
    tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    validation = Validation(PromptData(prompts_file), every=1, changes={"repeat.n": 2})
    ppo = train(job_of("ppo", tiny), prompts_file, tmp_path / "a", steps=1, validation=validation)
    grpo = train(job_of("grpo", tiny), prompts_file, tmp_path / "b", steps=1, validation=validation)
    assert ppo.validations[0] == grpo.validations[0]
    assert ppo.validations[1] != grpo.validations[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"changes": {"repeat.m": 1}}, r"set={'repeat.m': ...}\) does not name a parameter; repeat has n"),
        ({"changes": {"sampler.n": 1}}, r"names 'sampler', which grpo does not have; it has batch, repeat"),
        ({"changes": {"repeat": 1}}, r"set={'repeat': ...}\) does not name a parameter"),
        ({"changes": {"repeat.n": 0}}, r"n=0"),
        ({"until": "judge"}, r"no node 'judge'"),
    ],
)
def test_a_validation_that_does_not_fit_is_refused_before_there_is_a_folder(
    tiny: str, prompts_file: str, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    validation = Validation(PromptData(prompts_file), **settings)
    with pytest.raises(FlowrlError, match=message):
        train(job_of("grpo", tiny), prompts_file, tmp_path / "run", validation=validation)
    assert not (tmp_path / "run").exists()


def test_two_validations_of_one_name_are_refused(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    twice = (Validation(PromptData(prompts_file)), Validation(PromptData(prompts_file)))
    with pytest.raises(ParameterError, match="two validations are named 'val'"):
        train(job_of("grpo", tiny), prompts_file, tmp_path, validation=twice)


def test_swapping_an_engine_changes_nothing_else(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    job = job_of("grpo", tiny)
    shared = train(job, prompts_file, tmp_path / "a")
    copied = train(job.edit(bind={"rollout": TorchRollout(tiny, device="cpu")}), prompts_file, tmp_path / "b")
    for ours, theirs in zip(timeless(list(shared.metrics)), timeless(list(copied.metrics)), strict=True):
        assert ours.pop("sync/bytes") == 0
        assert theirs.pop("sync/bytes") > 0
        assert ours == theirs


# ---- reporters


@pytest.mark.parametrize("terminal", [False, True])
def test_the_terminal_shows_node_reward_and_kl(tiny: str, prompts_file: str, tmp_path: Path, terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=140, soft_wrap=not terminal)
    validation = Validation(PromptData(prompts_file), every=2)
    run = train(job_of("ppo", tiny), prompts_file, tmp_path, [Terminal(console)], validation=validation)
    shown = out.getvalue()
    last = run.metrics[-1]
    assert f"reward {last['reward/mean']:.3f}" in shown
    assert f"KL {last['kl/ref']:.3f}" in shown
    assert f"val/reward/mean {run.validations[-1]['val/reward/mean']:.3f}" in shown
    assert "ppo: 3 steps" in shown
    table = shown[shown.rindex("┏") :]
    assert all(node in table for node in ("generate", "update_critic", "sync", "a step takes", "idle: this process"))
    assert not any(word in table for word in ("fetched", "critical path", "*"))  # which say nothing of one process
    if terminal:
        assert "left" in shown
        assert "3/3" in shown
    else:
        assert "\x1b" not in shown
        assert [line.split()[1] for line in shown.splitlines() if "step" in line.split()[:1]] == [
            "0/3", "1/3", "2/3", "2/3", "3/3", "3/3",
        ]  # fmt: skip


def test_a_terminal_names_the_node_that_runs_now(tmp_path: Path) -> None:
    out = io.StringIO()
    reporter = Terminal(Console(file=out, force_terminal=True, width=140))
    reporter.start("ppo", 5, tmp_path, 1)
    assert "1/5" in out.getvalue() and "5 steps, of which 1 are done" in out.getvalue()
    for node in ("generate", "update_actor"):
        reporter.node(node)
        assert reporter.progress is not None
        reporter.progress.refresh()  # which it does by itself, a few times a second
        assert node in out.getvalue()
    reporter.step(2, {"reward/mean": 0.25, "kl/ref": math.nan})
    reporter.end(None)
    assert "2/5" in out.getvalue()
    assert "reward 0.250  KL nan" in out.getvalue()


def test_the_terminal_is_left_in_order_when_a_run_fails(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    reporter = Terminal(Console(file=io.StringIO(), force_terminal=True))
    with pytest.raises(NodeError):
        train(job_of("grpo", tiny, fails_at(0, ValueError("no"))), prompts_file, tmp_path, [reporter])
    assert reporter.progress is None


def test_tensorboard_gets_every_number(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    validation = Validation(PromptData(prompts_file), every=2)
    run = train(job_of("grpo", tiny), prompts_file, tmp_path, [TensorBoard()], validation=validation)
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    rewards = [(e.step, e.value) for e in events.Scalars("reward/mean")]
    assert rewards == [(m["step"], pytest.approx(m["reward/mean"])) for m in run.metrics]
    assert [e.step for e in events.Scalars("val/reward/mean")] == [0, 2, 3]
    assert set(events.Tags()["scalars"]) == ({*run.metrics[0], *run.validations[0]} - {"step"})


def test_prompts_may_be_fewer_than_a_step_wants(tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write_prompts(tmp_path / "few.jsonl", 3)
    run = train(job_of("grpo", tiny), data, tmp_path / "run", prompts=8, steps=2)
    assert len(run.metrics) == 2
    [said] = [record.getMessage() for record in caplog.records if record.name == "flowrl.run.training"]
    assert said.startswith("the data has 3 prompts and a step takes 8, so every step holds some of them more than once")
    caplog.clear()
    train(job_of("grpo", tiny), data, tmp_path / "enough", prompts=3, steps=1)
    assert not [record for record in caplog.records if record.name == "flowrl.run.training"]

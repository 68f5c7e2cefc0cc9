"""`Training` and its `loop.py`: reproducibility by seed, the trace of a run, and failure reports."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from flowrl import Operator, PromptData, Training, Validation, algorithm
from flowrl import columns as c
from flowrl.backends import TorchRollout
from flowrl.errors import DataError, NodeError, ParameterError
from flowrl.records import PromptBatch
from tests.nightly import nightly
from tests.support.errors import raises
from tests.support.jobs import job_of, write_prompts
from tests.support.runs import Recorder, described, fails_at, lines, train, without_times

COMMON = {
    *("actor/pg_loss", "actor/pg_clipfrac", "actor/entropy", "actor/approx_kl", "actor/grad_norm", "reward/mean"),
    *("kl/ref", "response_length/mean", "throughput/tokens_per_second", "timing/generate", "timing/step"),
}
CRITIC = {"critic/vf_loss", "critic/vf_clipfrac", "critic/grad_norm", "timing/update_critic"}


# ---- one seed, one run


@pytest.mark.parametrize("name", ["ppo", nightly("grpo")])
def test_metrics_depend_only_on_the_seed_of_the_run(tiny: str, prompts_file: str, tmp_path: Path, name: str) -> None:
    validation = Validation(PromptData(prompts_file), every=2)

    def run(folder: str, seed: int) -> list[dict[str, Any]]:
        train(job_of(name, tiny, mini_batch=4), prompts_file, tmp_path / folder, seed=seed, validation=validation)
        return without_times(lines(tmp_path / folder / "metrics.jsonl"))

    torch.manual_seed(1)
    first = run("a", seed=5)
    torch.manual_seed(2)  # the global generator is not used
    assert run("b", seed=5) == first
    assert run("c", seed=6) != first
    assert (tmp_path / "a/predictions.jsonl").read_text() == (tmp_path / "b/predictions.jsonl").read_text()


@pytest.mark.parametrize(("name", "keys"), [("ppo", COMMON | CRITIC), ("grpo", COMMON)])
def test_metrics_have_standard_names(tiny: str, prompts_file: str, tmp_path: Path, name: str, keys: set[str]) -> None:
    job = job_of(name, tiny)
    run = train(job, prompts_file, tmp_path)
    for step, metrics in enumerate(run.metrics, start=1):
        assert metrics["step"] == step
        assert keys <= metrics.keys()
        assert all(math.isfinite(metrics[key]) for key in keys)
        assert {f"timing/{node}" for node in job.runs.nodes if node != "batch"} <= metrics.keys()
    assert without_times(lines(tmp_path / "metrics.jsonl")) == without_times(list(run.metrics))


def test_throughput_is_response_tokens_per_step_second(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    metrics = train(job_of("grpo", tiny), prompts_file, tmp_path).metrics[0]
    tokens = metrics["response_length/total"]
    assert metrics["throughput/tokens_per_second"] == pytest.approx(tokens / metrics["timing/step"])
    assert metrics["response_length/mean"] == pytest.approx(tokens / 16)  # 4 prompts x 4


def test_incomplete_trainings_name_what_is_missing(prompts_file: str) -> None:
    job = job_of("grpo", "no such model")
    with pytest.raises(
        ParameterError, match=r"this is a graph; pass a job: graph.bind\(rollout=\.\.\., actor=\.\.\., ref="
    ) as raised:
        Training(job.graph.bound({}), PromptData(prompts_file), steps=1, prompts=1)  # type: ignore[arg-type]
    assert len(str(raised.value)) < 600
    with pytest.raises(ParameterError, match=r"expected PromptData\('train.jsonl'\)"):
        Training(job, "train.jsonl", steps=1, prompts=1)  # type: ignore[arg-type]


# ---- failures


def test_a_failed_run_is_reported_and_keeps_its_metrics(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    reporter = Recorder()
    job = job_of("grpo", tiny, fails_at(2 * 16, ValueError("the judge is asleep")))
    with pytest.raises(NodeError, match=r"reward failed in step 3: RewardError: (?s:.*)the judge is asleep"):
        train(job, prompts_file, tmp_path, [reporter], save_model=True)
    found = described(tmp_path)
    assert found["status"] == "failed"
    assert "the judge is asleep" in found["error"]
    assert found["error"].startswith("NodeError: reward failed in step 3")
    assert [record["step"] for record in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert not (tmp_path / "actor").exists()
    assert reporter.count("end") == 1
    assert reporter.calls[-1] == ("end", None)


def test_an_interrupt_is_not_recorded_as_a_failure(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    class Interrupted(Recorder):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    reporter = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        train(job_of("grpo", tiny), prompts_file, tmp_path, [reporter])
    assert described(tmp_path)["status"] == "interrupted"
    assert len(lines(tmp_path / "metrics.jsonl")) == 1
    assert reporter.count("end") == 1


def test_unreadable_data_is_recorded_in_the_run_folder(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "damaged.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"damaged.jsonl:1: the line is not JSON"):
        train(job_of("grpo", tiny), str(tmp_path / "damaged.jsonl"), tmp_path / "run")
    assert described(tmp_path / "run")["status"] == "failed"


def test_missing_data_is_refused_before_a_folder_is_created(prompts_file: str, tmp_path: Path) -> None:
    job, absent = job_of("grpo", "no such model"), str(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match=r"absent.jsonl' is not a file on this machine"):
        train(job, absent, tmp_path / "run")
    with pytest.raises(DataError, match=r"absent.jsonl' is not a file on this machine"):
        train(job, prompts_file, tmp_path / "run", validation=Validation(PromptData(absent)))
    assert not (tmp_path / "run").exists()


class Counted(NamedTuple):
    """The number of prompts."""

    rows: int


class Count(Operator):
    """Counts prompts without an engine."""

    def __call__(self, prompt_mask: c.PromptMask) -> Counted:
        return Counted(len(prompt_mask))


class WithValues(NamedTuple):
    """An input with a column that no prompt file has."""

    prompt_mask: c.PromptMask
    values: c.Values


def test_graphs_with_unsupported_inputs_are_refused_before_a_folder_is_created(
    prompts_file: str, tmp_path: Path
) -> None:
    @algorithm
    def counting(batch: PromptBatch) -> Any:
        return Count()(batch.prompt_mask)

    @algorithm
    def offline(batch: WithValues) -> Any:
        return Count()(batch.prompt_mask)

    with raises("run.no-tokenizer", graph="counting"):
        train(counting().bind(), prompts_file, tmp_path / "a")
    with raises("run.data-columns", input="batch", missing=("values",)):
        train(offline().bind(), prompts_file, tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"steps": True}, "steps=True"),
        ({"max_checkpoints": True}, "max_checkpoints=True"),
        ({"prompts": 0}, "prompts=0"),
        ({"stops": 3}, "no parameter 'stops'"),
    ],
)
def test_settings_are_checked_at_construction(
    tiny: str, prompts_file: str, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        train(job_of("grpo", tiny), prompts_file, tmp_path, **settings)


# ---- the trace


def spans(folder: Path) -> list[dict[str, Any]]:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def test_the_trace_has_every_call_and_marks_validations(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    reporter = Recorder()
    validation = Validation(PromptData(prompts_file), every=2, name="heldout", batch=5)
    job = job_of("ppo", tiny)
    run = train(job, prompts_file, tmp_path, [reporter], validation=validation)
    found = Counter(span["name"] for span in spans(tmp_path))
    nodes = [name for name in job.graph.nodes if name != "batch"]
    # 3 steps, and 3 validations (0, 2, 3) of 12 prompts in batches of 5
    heldout = {f"heldout/{name}": 9 for name in ("repeat", "generate", "reward")}
    assert found == {**dict.fromkeys([*nodes, "record"], 3), "sync": 4, **heldout}  # one sync before the first step
    (_, summary) = reporter.calls[-1]
    assert [total.name for total in summary.totals] == [*nodes, "record"]
    for total in summary.totals:
        seconds = sum(step[f"timing/{total.name}"] for step in run.metrics)
        assert total.seconds == pytest.approx(seconds, abs=0.0 if total.name in nodes else 0.1)
        assert total.calls == 3
    assert summary.step_seconds == pytest.approx(sum(step["timing/step"] for step in run.metrics) / 3)
    assert summary.path_seconds <= summary.step_seconds


def test_a_failed_run_writes_its_trace(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    with pytest.raises(NodeError):
        train(job_of("grpo", tiny, fails_at(16, ValueError("no"))), prompts_file, tmp_path)
    names = [span["name"] for span in spans(tmp_path)]
    assert names.count("update_actor") == 1
    assert names.count("generate") == names.count("reward") == 2  # including the failed call


def test_metrics_do_not_depend_on_whether_the_rollout_shares_weights(
    tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    job = job_of("grpo", tiny)
    shared = train(job, prompts_file, tmp_path / "a")
    copied = train(job.edit(bind={"rollout": TorchRollout(tiny, device="cpu")}), prompts_file, tmp_path / "b")
    for first, second in zip(without_times(list(shared.metrics)), without_times(list(copied.metrics)), strict=True):
        assert (first.pop("sync/by/alias"), second.pop("sync/by/copy")) == (1, 1)
        assert first.pop("sync/bytes") == 0
        assert second.pop("sync/bytes") > 0
        assert first == second


def test_data_may_have_fewer_prompts_than_a_step(tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write_prompts(tmp_path / "few.jsonl", 3)
    run = train(job_of("grpo", tiny), data, tmp_path / "run", prompts=8, steps=2)
    assert len(run.metrics) == 2
    [warning] = [record.getMessage() for record in caplog.records if record.name == "flowrl.run.training.sources"]
    assert warning.startswith("The data has 3 prompts, but a step takes 8, so every step repeats some of them.")
    caplog.clear()
    train(job_of("grpo", tiny), data, tmp_path / "enough", prompts=3, steps=1)
    assert not [record for record in caplog.records if record.name == "flowrl.run.training.sources"]

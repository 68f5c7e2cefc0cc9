"""What runs record of their rows (`recorder.py`, `summaries.py`, `row_maps.py`, `recording.py`, `span_log.py`)."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import flowrl
from flowrl import After, PromptData, Recording, Training, Validation
from flowrl.backends import TorchRollout
from flowrl.core.operators.symbols import Edge
from flowrl.errors import StorageError
from flowrl.operators import Collect, Filter, RolloutCorrection, Spread
from flowrl.run.recording import recorder
from flowrl.run.recording.files import files_of, steps_in
from tests.support.errors import raises
from tests.support.jobs import job_of
from tests.support.runs import Recorder as Reporter
from tests.support.runs import described, lines, train, without_times

pytestmark = pytest.mark.runs

NOTHING = Recording(texts=None, columns=None)
FREE = 40_000
"""Bytes that a full disk has left: for lines of metrics, not for columns."""


def collecting(tiny: str, lag: int = 0) -> Any:
    """GRPO that collects groups with spread, in rounds."""
    gates: dict[str, Any] = {"collect": After("reward", Collect(Spread(), groups=4))}
    if lag:
        gates["correction"] = After("group_advantage", RolloutCorrection("token", "truncate", high=2.0))
    job = job_of("grpo", tiny, n=4).edit(insert=gates, lag=lag)
    return job.edit(bind={"rollout": TorchRollout(tiny)}) if lag else job


def recorded(folder: Path) -> dict[str, Any]:
    """Everything that a run recorded, by file."""
    found: dict[str, Any] = {}
    for kind in ("rows", "texts", "columns"):
        for path in files_of(folder / kind):
            table = pq.read_table(path)
            found[str(path.relative_to(folder))] = table.schema.metadata, table.to_pylist()
    return found


@pytest.mark.parametrize("make", [lambda tiny: job_of("ppo", tiny, mini_batch=2), lambda tiny: collecting(tiny, 1)])
def test_recording_changes_no_bit_of_metrics_and_weights(
    tiny: str, prompts_file: str, tmp_path: Path, make: Any
) -> None:
    for name, recording in (("off", NOTHING), ("on", Recording())):
        train(make(tiny), prompts_file, tmp_path / name, recording=recording, save_model=True)
    off, on = (without_times(lines(tmp_path / name / "metrics.jsonl")) for name in ("off", "on"))
    assert on == off
    weights = [load_file(tmp_path / name / "actor" / "model.safetensors") for name in ("off", "on")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not (tmp_path / "off" / "columns").exists() and not (tmp_path / "off" / "texts").exists()
    assert len(list(files_of(tmp_path / "off" / "rows"))) == 3


class TestSummaries:
    def test_numbers_of_a_row_are_those_of_its_tokens(self, tiny: str, prompts_file: str, tmp_path: Path) -> None:
        """PPO in two mini-batches of two rows, against sums over the stored columns, token by token."""
        train(job_of("ppo", tiny, mini_batch=2), prompts_file, tmp_path)
        run = flowrl.open(tmp_path)
        for step in (1, 3):
            columns = {str(edge): column for edge, column in run.columns(step).items()}
            mask = columns["generate.response_mask"]
            log_ratio = columns["old_log_prob.old_log_probs"].double() - columns["ref_log_prob.ref_log_prob"]
            difference = columns["generate.rollout_log_probs"].double() - columns["old_log_prob.old_log_probs"]
            advantages = columns["whiten.advantages"]
            rows = run.rows(step).to_pylist()
            assert [row["row_id"] for row in rows] == columns["repeat.row_id"].tolist()
            for number, row in enumerate(rows):
                on = mask[number]
                assert row["step"] == step and row["row"] == number
                assert row["prompt"] == int(row["row_id"].split("/")[1])
                assert row["score"] == pytest.approx(float(columns["reward.token_level_scores"][number].sum()))
                assert row["reward/score"] == pytest.approx(row["score"], abs=1e-7)
                assert row["response_tokens"] == int(on.sum()) and row["truncated"] == (int(on.sum()) == 6)
                assert row["prompt_tokens"] == int(columns["repeat.prompt_mask"][number].sum())
                assert row["kl"] == pytest.approx(float(log_ratio[number][on].sum()), abs=1e-12)
                assert row["mismatch"] == pytest.approx(float(difference[number][on].abs().max()), abs=1e-12)
                assert row["advantage"] == pytest.approx(float(advantages[number][on].double().mean()))
                assert abs(row["advantage_max"]) == pytest.approx(float(advantages[number][on].abs().max()))
                assert row["version_min"] == row["version_max"] == step - 1
                assert row["fate"] == "trained" and row["group_size"] == 1
            assert sorted(row["optimizer_step"] for row in rows) == [0, 0, 1, 1]
            assert sum(row["loss_weight"] for row in rows) == pytest.approx(2.0)  # each mini-batch weighs 1

    @pytest.mark.parametrize("name", ["grpo", "ppo"])
    def test_means_of_the_update_by_tokens_are_its_metrics(
        self, name: str, tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        """In one pass over each row, fused or after `OldLogProb`."""
        train(job_of(name, tiny), prompts_file, tmp_path)
        run = flowrl.open(tmp_path)
        for step, metrics in enumerate(run.metrics.to_pylist(), 1):
            rows = run.rows(step).to_pylist()
            tokens = sum(row["response_tokens"] for row in rows)
            for column, metric in (("entropy", "actor/entropy"), ("clipped", "actor/pg_clipfrac")):
                total = sum(row[column] * row["response_tokens"] for row in rows if row["response_tokens"])
                assert total / tokens == pytest.approx(metrics[metric], rel=1e-6)
            columns = run.columns(step)
            of_tokens = columns[Edge("update_actor", "entropies")]
            mask = columns[Edge("generate", "response_mask")]
            assert of_tokens.dtype == torch.float32 and not of_tokens[~mask].any()
            means = (of_tokens.double().sum(1) / mask.sum(1)).tolist()
            assert [row["entropy"] for row in rows if row["response_tokens"]] == pytest.approx(
                [mean for mean in means if mean == mean], rel=1e-6
            )
            assert not any("/" in name and name.startswith("update") for name in rows[0])
            shares = run.blame("actor/entropy", step).rows.to_pylist()
            assert sum(row["share"] for row in shares) == pytest.approx(1)

    @pytest.mark.parametrize("lag", [0, 1])
    def test_rows_that_a_gate_drops_are_there_with_their_fate_and_round(
        self, tiny: str, prompts_file: str, tmp_path: Path, lag: int
    ) -> None:
        train(collecting(tiny, lag), prompts_file, tmp_path)
        run = flowrl.open(tmp_path)
        for step in run.steps:
            table = run.rows(step).to_pylist()
            groups: dict[str, list[dict[str, Any]]] = {}
            for row in table:
                groups.setdefault(row["uid"], []).append(row)
            passed = [uid for uid, rows in groups.items() if len({row["score"] for row in rows}) > 1][:4]
            for uid, rows in groups.items():
                assert {row["fate"] for row in rows} == {"trained" if uid in passed else "collect"}
                assert all((row["advantage"] is None) == (uid not in passed) for row in rows)
                assert all((row["entropy"] is None) == (uid not in passed) for row in rows if row["response_tokens"])
            trained = run.columns(step)[Edge("collect", "uid")]
            assert Counter(trained.tolist()) == dict.fromkeys(passed, 4)
            rounds = run.metrics["collect/rounds"][step - 1].as_py()
            assert {row["round"] for row in table} == (set(range(int(rounds))) if rounds > 1 else {None})

    def test_a_filter_drops_rows(self, tiny: str, prompts_file: str, tmp_path: Path) -> None:
        job = job_of("grpo", tiny, n=4).edit(insert={"filter": After("reward", Filter(Spread()))})
        train(job, prompts_file, tmp_path)
        metrics = lines(tmp_path / "metrics.jsonl")[-1]
        fates = Counter(row["fate"] for row in flowrl.open(tmp_path).rows(3).to_pylist())
        offered, kept = metrics["filter/offered"], metrics["filter/kept"]
        assert fates == {k: v for k, v in {"trained": kept, "filter": offered - kept}.items() if v}


class TestRing:
    def test_old_columns_leave_but_for_the_first_every_nth_and_those_with_a_checkpoint(
        self, tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        recording = Recording(recent=2, every=4)
        train(job_of("grpo", tiny), prompts_file, tmp_path, steps=9, recording=recording, checkpoint_every=3)
        assert flowrl.open(tmp_path).recorded_steps == [1, 3, 4, 6, 8, 9]
        assert described(tmp_path)["recorded"] == {"columns": [1, 3, 4, 6, 8, 9], "gone": []}
        assert len(flowrl.open(tmp_path).rows().column("step").unique()) == 9

    def test_beyond_the_budget_the_oldest_go_and_run_json_lists_them(
        self, tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        train(job_of("grpo", tiny), prompts_file, tmp_path / "a", steps=1)
        size = sum(path.stat().st_size for path in files_of(tmp_path / "a" / "columns"))
        recording = Recording(columns="all", budget=int(size * 2.5))
        train(job_of("grpo", tiny), prompts_file, tmp_path / "b", steps=4, recording=recording)
        assert described(tmp_path / "b")["recorded"] == {"columns": [3, 4], "gone": [1, 2]}

    @pytest.mark.parametrize("budget", ["5 GiB", "", "-1", 0, "GB"])
    def test_a_budget_that_is_no_size_is_refused(self, budget: Any) -> None:
        with raises("parameter.invalid"):
            Recording(budget=budget)

    @pytest.mark.parametrize(("budget", "expected"), [("5GB", 5e9), ("1.5 mb", 1.5e6), (7, 7), ("12", 12), ("2k", 2e3)])
    def test_a_budget_is_read_as_bytes(self, budget: Any, expected: float) -> None:
        assert Recording(budget=budget).bytes == expected


class TestResume:
    @pytest.mark.parametrize("lag", [0, 1])
    def test_a_resumed_run_leaves_the_files_of_an_uninterrupted_one(
        self, tiny: str, prompts_file: str, tmp_path: Path, lag: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With groups collected in rounds; the files of three steps are joined, also before the resume."""
        monkeypatch.setattr(recorder, "TOGETHER", 3)
        recording = Recording(recent=2, every=None)
        settings: dict[str, Any] = {"checkpoint_every": 2, "recording": recording, "rollouts_every": 1}
        train(collecting(tiny, lag), prompts_file, tmp_path / "whole", steps=5, **settings)
        cut = tmp_path / "cut"
        train(collecting(tiny, lag), prompts_file, cut, steps=4, **settings)
        (cut / "checkpoints" / "step-000004").rename(tmp_path / "lost")  # killed in step 4
        train(collecting(tiny, lag), prompts_file, cut, steps=5, resume=True, **settings)
        assert recorded(cut) == recorded(tmp_path / "whole")
        for name in ("state.jsonl", "rollouts.jsonl"):
            assert lines(cut / name) == lines(tmp_path / "whole" / name)
        first, second = described(cut), described(tmp_path / "whole")
        assert [start["step"] for start in first["starts"]] == [0, 2] and len(second["starts"]) == 1
        assert first["recorded"] == second["recorded"]

    def test_a_file_that_was_joined_but_not_removed_counts_once(
        self, tiny: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(recorder, "TOGETHER", 2)
        train(job_of("grpo", tiny), prompts_file, tmp_path, steps=3)
        [joined, _] = sorted(files_of(tmp_path / "rows"), key=steps_in)
        assert steps_in(joined) == (1, 2)
        before = flowrl.open(tmp_path).rows().to_pylist()
        table = pq.read_table(joined)
        pq.write_table(table.slice(0, 16), tmp_path / "rows" / "step-000001.parquet")
        assert flowrl.open(tmp_path).rows().to_pylist() == before


class TestFailures:
    def test_a_write_error_ends_the_recording_and_not_the_run(
        self, tiny: str, prompts_file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "columns").write_text("no folder")
        with caplog.at_level(logging.WARNING):
            run = train(job_of("grpo", tiny), prompts_file, tmp_path)
        assert len(run.metrics) == 3
        assert len([record for record in caplog.records if "Recording stopped" in record.message]) == 1
        assert "columns" in described(tmp_path)["recorded"]["stopped"]

    def test_a_strict_recording_ends_the_run(self, tiny: str, prompts_file: str, tmp_path: Path) -> None:
        (tmp_path / "columns").write_text("no folder")
        with pytest.raises(StorageError, match="columns"):
            train(job_of("grpo", tiny), prompts_file, tmp_path, recording=Recording(strict=True))

    @pytest.mark.parametrize("strict", [False, True])
    def test_a_disk_that_fills_up_ends_the_recording_and_a_strict_one_the_run(
        self, tiny: str, prompts_file: str, disk: Path, strict: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        job, settings = job_of("grpo", tiny), {"steps": 4, "recording": Recording(strict=strict), "alarms": ()}
        if strict:
            with pytest.raises(StorageError, match=r"No space left on device; .* free"):
                train(job, prompts_file, disk / "run", [Filling(disk)], **settings)
            assert described(disk / "run")["status"] == "failed"
            return
        train(job, prompts_file, disk / "run", [Filling(disk)], **settings)
        assert [line["step"] for line in lines(disk / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
        (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        found = described(disk / "run")
        assert found["status"] == "finished" and found["recorded"]["stopped"] in warning
        assert "No space left" in warning and flowrl.open(disk / "run").replay("1/group_advantage").same


class Filling(Reporter):
    """Fills a disk after the first step, but for what the lines of a few steps need."""

    def __init__(self, disk: Path) -> None:
        super().__init__()
        self._disk = disk

    def step(self, step: int, metrics: Any) -> None:
        if step == 1:
            with (self._disk / "ballast").open("wb") as file:
                file.write(b"0" * (shutil.disk_usage(self._disk).free - FREE))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB."""
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path / "disk")]
    if shutil.which("mount") is None or (done := subprocess.run(mount, capture_output=True, text=True)).returncode:
        pytest.skip(
            f"this process may not mount a disk: {done.stderr.strip() if shutil.which('mount') else 'no mount'}"
        )
    yield tmp_path / "disk"
    subprocess.run(["umount", "-l", str(tmp_path / "disk")], check=True)


class TestRunJson:
    def test_it_says_where_the_run_comes_from_and_which_node_reports_a_metric(
        self, tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        train(job_of("grpo", tiny), prompts_file, tmp_path, validation=Validation(PromptData(prompts_file), every=2))
        found, metrics = described(tmp_path), lines(tmp_path / "metrics.jsonl")
        assert found["format"] == 2 and len(found["id"]) == 32
        assert found["started"] <= metrics[1]["time"] <= metrics[-2]["time"] <= found["ended"]
        assert found["metrics"]["reward/mean"] == "reward" and found["metrics"]["actor/grad_norm"] == "update_actor"
        of_steps = [line for line in metrics if "timing/step" in line]
        assert [line["total/rows"] for line in of_steps] == [16, 32, 48]
        assert of_steps[-1]["total/tokens"] == sum(line["response_length/total"] for line in of_steps)

    def test_spans_are_written_while_the_run_goes_on(self, tiny: str, prompts_file: str, tmp_path: Path) -> None:
        """A reward function that fails in step 2 leaves the spans of all nodes before it, and names itself as open."""
        calls: list[int] = []

        def fails(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
            calls.append(1)
            if len(calls) > 16:
                raise ValueError("broken")
            return float(len(solution_str))

        with pytest.raises(flowrl.FlowrlError):
            train(job_of("grpo", tiny, fails), prompts_file, tmp_path)
        spans = lines(tmp_path / "spans.jsonl")
        done = Counter(span["name"] for span in spans if span.get("step") == 1)
        assert done["generate"] == done["update_actor"] == 1
        assert [span["open"] for span in spans if "open" in span][-1] == "reward"
        assert flowrl.open(tmp_path).status == "failed"


def test_demonstrations_have_summaries_too(tiny: str, tmp_path: Path) -> None:
    """A graph that samples nothing has rows of its demonstrations, without scores."""
    from flowrl import DemoData
    from flowrl.backends import SGD, TorchTrainer
    from flowrl.graphs import sft

    data = tmp_path / "demos.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]}\n' * 4)
    job = sft().bind(actor=TorchTrainer(tiny, optimizer=SGD(lr=0.1), device="cpu"))
    Training(job, DemoData(str(data)), steps=2, prompts=2, folder=str(tmp_path / "run"), save_model=False).run()
    rows = flowrl.open(tmp_path / "run").rows(2).to_pylist()
    assert len(rows) == 2 and all(row["response_tokens"] > 0 and row["score"] is None for row in rows)
    assert all(row["fate"] == "trained" and row["loss_weight"] > 0 for row in rows)


def test_a_summary_damaged_by_a_crash_does_not_end_the_run(
    tiny: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty file among those that are joined, and the joined file itself when the run is rewound."""
    monkeypatch.setattr(recorder, "TOGETHER", 3)
    train(job_of("grpo", tiny), prompts_file, tmp_path, steps=2, checkpoint_every=2)
    (tmp_path / "rows" / "step-000001.parquet").write_bytes(b"")
    train(job_of("grpo", tiny), prompts_file, tmp_path, steps=4, checkpoint_every=2, resume=True)
    assert sorted(set(flowrl.open(tmp_path).rows()["step"].to_pylist())) == [2, 3, 4]
    assert "step-000001.parquet cannot be read" in caplog.text

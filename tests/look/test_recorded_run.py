"""Reading run folders, of runs in any state; tests of `recorded_run.py`, `run_files.py` and `files.py`."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import flowrl
from flowrl import After, PromptData, RecordedRun, Validation
from flowrl.core.operators.symbols import Edge
from tests.support.errors import raises
from tests.support.jobs import job_of
from tests.support.kernel import LengthPenalty
from tests.support.runs import train


@pytest.fixture(scope="module")
def finished(tiny: str, prompts_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of PPO: three steps of four prompts, with a validation."""
    folder = tmp_path_factory.mktemp("run") / "ppo"
    train(job_of("ppo", tiny), prompts_file, folder, validation=Validation(PromptData(prompts_file), every=3))
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "ppo")
    return tmp_path / "ppo"


class TestWhole:
    def test_a_finished_run_has_its_steps_metrics_rows_texts_and_columns(self, finished: Path) -> None:
        run = flowrl.open(finished)
        assert (run.name, run.status, run.steps, run.recorded_steps) == ("ppo", "finished", [1, 2, 3], [1, 2, 3])
        assert run.metrics.num_rows == 3 and run.validations["step"].to_pylist() == [0, 3]
        assert len(run.predictions) == 24 and not run.alarms
        texts = run.texts(2)
        rows = run.rows(2).to_pylist()
        assert [row["row_id"] for row in rows] == list(texts)
        assert texts[rows[0]["row_id"]]["prompt"][0]["role"] == "user"
        assert run.graph.fingerprint() == job_of_graph(run)
        assert isinstance(run.graph, flowrl.Graph) and "update_actor" in run.graph.mermaid()

    def test_a_column_is_the_tensor_as_it_was(self, finished: Path) -> None:
        run = flowrl.open(finished)
        gae = run.column("2/gae.advantages")
        assert isinstance(gae, torch.Tensor) and gae.dtype == torch.float32
        assert torch.equal(gae, run.columns(2)[Edge("gae", "advantages")])  # type: ignore[arg-type]

    def test_the_best_and_worst_rows_are_sorted(self, finished: Path) -> None:
        run = flowrl.open(finished)
        scores = sorted(row["score"] for row in run.rows().to_pylist())
        assert run.rows(best=3)["score"].to_pylist() == scores[::-1][:3]
        assert run.rows(worst=3)["score"].to_pylist() == scores[:3]
        kl = sorted(row["kl"] for row in run.rows(3).to_pylist())
        assert run.rows(3, best=2, by="kl")["kl"].to_pylist() == kl[::-1][:2]

    def test_prompts_count_attempts_and_solutions(self, finished: Path) -> None:
        run = flowrl.open(finished)
        rows = run.rows().to_pylist()
        for prompt in run.prompts(passed=0.2).to_pylist():
            own = [row for row in rows if row["prompt"] == prompt["prompt"]]
            solved = [row["step"] for row in own if row["score"] > 0.2]
            assert prompt["attempts"] == len(own) and prompt["solved"] == len(solved)
            assert prompt["first_solved"] == min(solved, default=None)
            assert prompt["last_solved"] == max(solved, default=None)
            assert prompt["score"] == own[-1]["score"]
        assert {p["prompt"] for p in run.prompts(never=True, passed=0.2).to_pylist()} == {
            p["prompt"] for p in run.prompts(passed=0.2).to_pylist() if not p["solved"]
        }

    def test_its_repr_is_a_few_lines(self, finished: Path) -> None:
        text = repr(flowrl.open(finished))
        assert "finished, 3 steps" in text and "reward/mean" in text and len(text) < 500


def job_of_graph(run: RecordedRun) -> Any:
    return run.description["fingerprint"]


class TestStatus:
    def test_a_run_whose_process_is_gone_was_killed(self, copied: Path) -> None:
        describe(copied, status="running")
        assert flowrl.open(copied).status == "killed"
        lock(copied, process=2**22 + 1)
        assert flowrl.open(copied).status == "killed"

    def test_a_run_whose_process_lives_is_running(self, copied: Path) -> None:
        describe(copied, status="running")
        lock(copied, process=os.getpid())
        assert flowrl.open(copied).status == "running"

    def test_a_run_of_another_host_counts_as_running(self, copied: Path) -> None:
        describe(copied, status="running")
        lock(copied, process=1, host="another")
        assert flowrl.open(copied).status == "running"


class TestDamage:
    def test_a_run_in_progress_grows(self, copied: Path) -> None:
        run = flowrl.open(copied)
        lines = (copied / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        (copied / "metrics.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:40])
        assert run.steps == [1]
        (copied / "metrics.jsonl").write_bytes(b"".join(lines))
        assert run.steps == [1, 2, 3]

    @pytest.mark.parametrize("file", ["rows/step-000002.parquet", "metrics.jsonl"])
    def test_a_damaged_file_is_named_and_the_rest_is_shown(
        self, copied: Path, file: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        content = (copied / file).read_bytes()
        if file.endswith("jsonl"):
            content = content.replace(b'{"step": 2', b'{"step: 2')
        else:
            content = content[: len(content) // 2]
        (copied / file).write_bytes(content)
        run = flowrl.open(copied)
        assert sorted(set(run.rows()["step"].to_pylist())) == ([1, 3] if file.startswith("rows") else [1, 2, 3])
        assert run.steps == ([1, 2, 3] if file.startswith("rows") else [1, 3])
        assert str(copied / file) in caplog.text and "[run.damaged]" in caplog.text
        assert list(run.damage) == [copied / file] and len(caplog.records) == 1

    def test_damaged_lines_are_named_by_number(self, copied: Path) -> None:
        lines = (copied / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        run, file = flowrl.open(copied), copied / "metrics.jsonl"
        file.write_bytes(lines[0] + b"\xff\n[1]\n" + lines[1] + b"\n" + b"".join(lines[2:]))
        assert run.steps == [1, 2, 3]
        assert run.damage[file].facts == {"path": str(file), "lines": (2, 3, 5)}
        assert "2 to 3, 5" in str(run.damage[file])
        file.write_bytes(b"[" * 10_000 + b"\n" * 10)
        assert run.steps == [] and "1 to 8 and 2 more" in str(run.damage[file])
        file.write_bytes(b"".join(lines))
        assert run.steps == [1, 2, 3] and not run.damage

    def test_the_rows_of_a_damaged_file_name_it(self, copied: Path) -> None:
        file = copied / "rows" / "step-000002.parquet"
        file.write_bytes(file.read_bytes()[:100])
        with raises("run.damaged", path=str(file)):
            flowrl.open(copied).rows(2)

    def test_damaged_columns_name_their_file(self, copied: Path) -> None:
        path = copied / "columns" / "batch@repeat" / "step-000002.parquet"
        path.write_bytes(path.read_bytes()[:100])
        with raises("run.damaged", path=str(path)):
            flowrl.open(copied).columns(2)
        assert flowrl.open(copied).columns(1)

    def test_a_damaged_run_json_leaves_the_metrics_readable(self, copied: Path) -> None:
        (copied / "run.json").write_text('{"status": ')
        run = flowrl.open(copied)
        assert run.steps == [1, 2, 3] and run.status == "damaged"
        with raises("run.damaged", path=str(copied / "run.json")):
            run.description  # noqa: B018

    def test_a_folder_of_the_old_format_has_metrics_and_says_what_it_lacks(self, copied: Path) -> None:
        for name in ("rows", "texts", "columns"):
            shutil.rmtree(copied / name)
        (copied / "spans.jsonl").unlink()
        run = flowrl.open(copied)
        assert run.steps == [1, 2, 3] and run.recorded_steps == [] and run.texts(1) == {}
        with raises("look.not-recorded", step=2):
            run.rows(2)
        with raises("look.not-recorded", step=2):
            run.columns(2)

    def test_reading_writes_nothing(self, copied: Path) -> None:
        for path in sorted(copied.rglob("*"), reverse=True):
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = {path: path.stat().st_mtime_ns for path in copied.rglob("*")}
        run = flowrl.open(copied)
        _ = (run.metrics, run.rows(), run.columns(1), run.prompts(), repr(run), run.spans, run.state(2))
        assert {path: path.stat().st_mtime_ns for path in copied.rglob("*")} == before


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with raises("look.no-run", path=str(tmp_path)):
        flowrl.open(tmp_path)


def test_a_column_that_does_not_exist_is_answered_with_the_nearest(finished: Path) -> None:
    with raises("look.not-recorded", found="gae.advantage") as caught:
        flowrl.open(finished).column("2/gae.advantage")
    assert "did you mean 'advantages'?" in str(caught.value)


def describe(folder: Path, **changed: Any) -> None:
    described = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**described, **changed}))


def lock(folder: Path, process: int, host: str | None = None) -> None:
    named = {"host": host or socket.gethostname(), "process": process, "since": "2026-01-01 00:00:00"}
    (folder / ".lock").write_text(json.dumps(named))


def test_classes_that_the_program_has_imported_are_used_without_imports(
    tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    job = job_of("grpo", tiny).edit(insert={"penalty": After("reward", LengthPenalty(0.5))})
    train(job, prompts_file, tmp_path, steps=1)
    assert isinstance(flowrl.open(tmp_path).graph["penalty"].operator, LengthPenalty)

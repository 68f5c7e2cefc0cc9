"""The run folder: its files, and the folders that a run refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowrl import INJECTED, Metrics, Operator, PromptData, Training, Validation
from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.graph import Graph
from flowrl.run.training.run_folder import RunFolder
from tests.support.errors import raises
from tests.support.jobs import job_of, weights_of
from tests.support.rewards import digits
from tests.support.runs import Recorder, described, lines, train


def test_a_finished_run_folder_describes_the_run(tiny: str, prompts_file: str, tmp_path: Path) -> None:
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


def test_predictions_have_prompt_response_and_score(tiny: str, prompts_file: str, tmp_path: Path) -> None:
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


def test_a_folder_with_a_run_is_refused_for_another_run(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    train(job_of("grpo", tiny), prompts_file, tmp_path, steps=1)
    before = (tmp_path / "run.json").read_text()
    with raises("run.folder-taken", path=str(tmp_path)):
        train(job_of("grpo", tiny), prompts_file, tmp_path, steps=1)
    assert (tmp_path / "run.json").read_text() == before


def test_a_folder_of_a_run_that_failed_before_its_first_step_is_reused(
    tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    validation = Validation(PromptData(prompts_file), every=1)
    with pytest.raises(RuntimeError, match="fails at validation"):  # after the lines of a validation were written
        train(job_of("grpo", tiny), prompts_file, tmp_path, [Recorder("validation")], steps=1, validation=validation)
    train(job_of("grpo", tiny), prompts_file, tmp_path, steps=1, seed=1, validation=validation)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 1]
    with raises("run.folder-taken"):
        train(job_of("grpo", tiny), prompts_file, tmp_path, steps=1)


def test_a_folder_that_cannot_be_written_is_refused_before_a_model_loads(prompts_file: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with raises("data.unwritable-file", path=str(folder)):
            train(job_of("grpo", "no such model"), prompts_file, folder)
    (tmp_path / "run.json").write_text('{"status": "failed"}')
    (tmp_path / "metrics.jsonl").mkdir()
    with raises("data.unwritable-file", path=str(tmp_path)) as caught:
        train(job_of("grpo", "no such model"), prompts_file, tmp_path)
    assert "Is a directory" in caught.value.facts["reason"]
    (tmp_path / "run.json").write_text("[]")
    with raises("run.damaged", path=str(tmp_path)):
        train(job_of("grpo", "no such model"), prompts_file, tmp_path, resume=True)


@pytest.mark.parametrize("link", [".lock", "run.json", "metrics.jsonl", "rollouts.jsonl", "trace.json", "actor"])
@pytest.mark.parametrize("there", [True, False])
def test_a_link_that_leaves_the_folder_is_refused_and_its_target_unchanged(
    prompts_file: str, tmp_path: Path, link: str, there: bool
) -> None:
    """Also if the folder is refused for another reason, and where the target does not exist yet."""
    target, folder = tmp_path / "theirs", tmp_path / "run"
    folder.mkdir()
    if there:
        target.write_text("a thesis")
    (folder / link).symlink_to(target)
    (folder / "notes").symlink_to(tmp_path)  # a run neither writes nor deletes it
    for text in (None, '{"status": "finished"}'):
        if text and link != "run.json":
            (folder / "run.json").write_text(text)
        with raises("run.link", path=str(folder / link), target=str(target)):
            train(job_of("grpo", "no such model"), prompts_file, folder, save_model=True)
    assert not there or target.read_text() == "a thesis"
    assert target.exists() == there


@pytest.mark.parametrize("inside", [True, False])
def test_checkpoints_linked_to_another_run_are_not_pruned(
    tiny: str, prompts_file: str, tmp_path: Path, inside: bool
) -> None:
    """A link to a folder within the run folder is allowed, and so is a run folder that is a link."""
    disk = tmp_path / "disk" / "runs"
    theirs = [disk / ("mine" if inside else "theirs") / "stored" / f"step-00000{step}" for step in (7, 8)]
    for checkpoint in theirs:
        checkpoint.mkdir(parents=True)
    (disk / "mine").mkdir(exist_ok=True)
    (disk / "mine" / "checkpoints").symlink_to(theirs[0].parent)
    (tmp_path / "runs").symlink_to(disk)
    job = job_of("grpo", tiny)
    if inside:
        train(job, prompts_file, tmp_path / "runs" / "mine", steps=1, checkpoint_every=1)
        assert [path.name for path in (disk / "mine" / "stored").iterdir()] == ["step-000001"]
        return
    with raises("run.link", target=str(theirs[0].parent)):
        train(job, prompts_file, tmp_path / "runs" / "mine", steps=1, checkpoint_every=1)
    assert all(checkpoint.exists() for checkpoint in theirs)


def test_an_export_does_not_overwrite_what_a_link_in_it_points_to(prompts_file: str, tmp_path: Path) -> None:
    (tmp_path / "base.safetensors").write_text("weights")
    (tmp_path / "run" / "actor").mkdir(parents=True)
    (tmp_path / "run" / "actor" / "model.safetensors").symlink_to(tmp_path / "base.safetensors")
    with raises("run.link"):
        train(job_of("grpo", "no such model"), prompts_file, tmp_path / "run", save_model=True)


def test_resuming_without_a_run_is_refused_before_a_folder_exists(prompts_file: str, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "runs" / "misspelled"):
        with raises("resume.no-run", path=str(folder)):
            train(job_of("grpo", "no such model"), prompts_file, folder, resume=True)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("resume", ["yes", "no", 1, "or_start", None])
def test_resume_is_a_bool_or_one_text(prompts_file: str, tmp_path: Path, resume: Any) -> None:
    with raises("parameter.invalid"):
        train(job_of("grpo", "no such model"), prompts_file, tmp_path, resume=resume)


def test_default_run_folders_are_numbered(
    tiny: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training = Training(job_of("grpo", tiny), PromptData(prompts_file), steps=1, prompts=2, save_model=False)
    assert [training.run().folder for _ in range(2)] == [Path("runs/grpo-001"), Path("runs/grpo-002")]


def test_non_finite_numbers_are_written_as_null(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    class NotFinite(Operator):
        """Reports NaN and infinity as metrics."""

        def __call__(self, token_level_scores: c.TokenLevelScores, metrics: Metrics = INJECTED) -> c.TokenLevelScores:
            metrics.mean("odd/mean", 0.0, 0.0)
            metrics.max("odd/max", math.inf)
            return token_level_scores

    job = job_of("grpo", tiny).edit(insert={"odd": After("reward", NotFinite())})
    run = train(job, prompts_file, tmp_path, steps=1)
    assert math.isnan(run.metrics[0]["odd/mean"])
    (record,) = lines(tmp_path / "metrics.jsonl")
    assert record["odd/mean"] is None
    assert record["odd/max"] is None


def test_rewind_removes_lines_of_later_steps(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.rewind(3) == ([], [])
    texts = ["\u2028 ends no line", "nor does \x85", 'quote " and \n', "é"]
    folder.append("predictions.jsonl", [{"step": i, "response": text} for i, text in enumerate(texts)])
    folder.append("metrics.jsonl", [{"step": 0, "val/x": 0.1}, {"step": 1, "timing/step": 2.0, "x": 1e-300}])
    written = (tmp_path / "predictions.jsonl").read_text(), (tmp_path / "metrics.jsonl").read_text()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "timi')  # truncated
    assert folder.marks().keys() == {"metrics.jsonl", "predictions.jsonl"}
    assert folder.rewind(3) == ([{"step": 1, "timing/step": 2.0, "x": 1e-300}], [{"step": 0, "val/x": 0.1}])
    assert written == ((tmp_path / "predictions.jsonl").read_text(), (tmp_path / "metrics.jsonl").read_text())
    assert folder.rewind(0) == ([], [{"step": 0, "val/x": 0.1}])
    assert len((tmp_path / "predictions.jsonl").read_text().split("\n")) == 2
    assert folder.rewind(-1) == ([], [])
    assert not (tmp_path / "predictions.jsonl").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "predictions.jsonl"]

"""``flowrl run`` (`flowrl/app/cli.py`): options, refusals, resuming, and signals."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.support.command_line import Command, is_paragraph, write
from tests.support.runs import lines


def test_run_writes_the_steps_and_settings_of_the_training(command: Command, training: Path) -> None:
    answer = command("run", f"{training}:training")
    assert answer.code == 0 and answer.out.endswith("The run is in own\n") and "step    3/3" in answer.out
    assert [record["step"] for record in lines(Path("own/metrics.jsonl"))] == [1, 2, 3]
    described = json.loads(Path("own/run.json").read_text())
    assert described["status"] == "finished" and described["training"]["seed"] == 5
    answer = command("run", f"{training}:training")
    assert answer.code == 2 and is_paragraph(answer) and "own already holds a run. Choose another folder" in answer.err
    assert len(lines(Path("own/metrics.jsonl"))) == 3


def test_command_line_options_override_steps_seed_and_folder_of_the_training(command: Command, training: Path) -> None:
    arguments = ["--steps", "1", "--seed", "6", "--folder", "other", "--report", "tensorboard"]
    assert command("run", f"{training}:training", *arguments).code == 0
    assert len(lines(Path("other/metrics.jsonl"))) == 1 and list(Path("other").glob("events.*"))
    assert json.loads(Path("other/run.json").read_text())["training"]["seed"] == 6
    assert not Path("own").exists()


def test_run_with_resume_continues_from_the_last_checkpoint(command: Command, training: Path) -> None:
    source = training.read_text().replace("seed=5,", "seed=5, checkpoint_every=1,")
    other = write(training.with_name("resumed.py"), source)
    assert command("run", f"{other}:training", "--steps", "2").code == 0
    answer = command("run", f"{other}:training", "--resume")
    assert answer.code == 0 and "3 steps (2 done), writing to own" in answer.out
    assert [record["step"] for record in lines(Path("own/metrics.jsonl"))] == [1, 2, 3]
    answer = command("run", f"{other}:training", "--resume", "--seed", "6")
    assert answer.code == 2 and is_paragraph(answer) and "belongs to a run with another seed" in answer.err
    answer = command("run", f"{other}:short", "--resume")
    assert answer.code == 2 and is_paragraph(answer) and "resume=True needs the folder" in answer.err


def test_run_accepts_a_function_that_returns_a_training(command: Command, training: Path) -> None:
    assert command("run", f"{training}:short").out.endswith("The run is in runs/grpo-001\n")


def test_an_unbound_role_or_invalid_option_is_refused_before_anything_is_loaded_or_written(
    command: Command, training: Path
) -> None:
    answer = command("run", f"{training}:unbound")
    assert answer.code == 2 and is_paragraph(answer) and "unbound" in answer.err
    answer = command("run", f"{training}:training", "--steps", "0")
    assert answer.code == 2 and is_paragraph(answer) and "steps=0" in answer.err
    answer = command("run", f"{training}:training", "--report", "tensorbord")
    assert answer.code == 2 and is_paragraph(answer) and "did you mean 'tensorboard'? [cli.bad-option]" in answer.err
    assert sorted(path.name for path in Path().iterdir()) == ["mine"]


def test_an_interrupt_prints_one_line_and_records_the_status(command: Command, training: Path) -> None:
    answer = command("run", f"{training}:interrupted")
    assert answer.code == 130 and answer.err.count("\n") == 1
    assert answer.err.startswith("flowrl: interrupted; it has no checkpoint. Pass Training(checkpoint_every=...)")
    assert json.loads(Path("runs/grpo-001/run.json").read_text())["status"] == "interrupted"


def test_an_interrupted_run_with_checkpoints_prints_how_to_resume(command: Command, training: Path) -> None:
    answer = command("run", f"{training}:saved", "--seed", "7")
    again = f"flowrl run {training}:saved --resume --seed=7 --folder=runs/grpo-001"
    assert (answer.code, answer.err) == (130, f"flowrl: interrupted; resume with: {again}\n")


@pytest.mark.usefixtures("unhandled")
def test_sigterm_ends_a_run_after_its_step_and_prints_the_command_that_resumes(
    command: Command, training: Path
) -> None:
    """The printed command, executed as it is, completes the run."""
    source = (
        training.read_text()
        + """
import os, signal

class Terminate(Operator):
    def __call__(self, token_level_scores: TokenLevelScores) -> TokenLevelScores:
        if not os.path.exists("terminated"):
            open("terminated", "w").close()
            os.kill(os.getpid(), signal.SIGTERM)
        return token_level_scores

terminated = job.edit(insert={"terminate": After("reward", Terminate())})
terminated = replace(training, job=terminated, folder=None, checkpoint_every=100)
"""
    )
    target = f"{write(training.with_name('preempted.py'), source)}:terminated"
    answer = command("run", target, "--seed", "7", "--report", "tensorboard", "--metric", "kl/ref")
    again = f"flowrl run {target} --resume --seed=7 --folder=runs/grpo-001 --report=tensorboard --metric=kl/ref"
    assert answer.code == 143 and answer.err.splitlines()[-1] == f"flowrl: ended by SIGTERM; resume with: {again}"
    assert [record["step"] for record in lines(Path("runs/grpo-001/metrics.jsonl"))] == [1]
    resumed = command(*shlex.split(again)[1:])
    assert resumed.code == 0 and "3 steps (1 done)" in resumed.out
    assert [record["step"] for record in lines(Path("runs/grpo-001/metrics.jsonl"))] == [1, 2, 3]


def test_resume_needs_a_run_and_resume_or_start_does_not(command: Command, training: Path) -> None:
    answer = command("run", f"{training}:training", "--resume")
    assert answer.code == 2 and is_paragraph(answer) and "[resume.no-run]" in answer.err
    assert not Path("own").exists()
    option = next(word for word in answer.err.replace(".", " ").split() if word.startswith("--resume"))
    assert command("run", f"{training}:training", option, "--steps", "1").code == 0
    answer = command("run", f"{training}:training", option, "--resume")
    assert answer.code == 2 and is_paragraph(answer) and "[cli.bad-option]" in answer.err

"""``flowrl runs``, ``alarms``, ``blame`` and ``compare``: `runs.py` and `compare.py`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import flowrl
from flowrl import PromptData, Validation
from flowrl.run.alarms.rules import Above
from tests.support.command_line import Command, is_paragraph, write
from tests.support.jobs import job_of
from tests.support.runs import train


@pytest.fixture(scope="module")
def folder(tiny: str, prompts_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of GRPO, of which one has an alarm."""
    folder = tmp_path_factory.mktemp("runs")
    validation = Validation(PromptData(prompts_file), every=2, changes={"repeat.n": 1})
    for name, steps, rules in (("a", 2, ()), ("b", 3, (Above("response_length/mean", 0.5),))):
        train(job_of("grpo", tiny), prompts_file, folder / name, steps=steps, alarms=rules, validation=validation)
    return folder


def test_runs_are_listed_with_status_steps_reward_held_out_score_and_alarms(command: Command, folder: Path) -> None:
    found = json.loads(command("runs", folder, "--json", "--sort=steps").out)
    assert [(run["name"], run["status"], run["steps"], run["alarms"]) for run in found] == [
        ("a", "finished", 2, 0),
        ("b", "finished", 3, 1),
    ]
    run = flowrl.open(folder / "b")
    assert found[1]["reward"] == run.metrics["reward/mean"][-1].as_py()
    assert found[1]["held-out"] == run.validations["val/reward/mean"][-1].as_py()
    assert found[1]["size"] > 0 and found[1]["age"] > 0
    assert command("runs", folder).out.count("finished") == 2


@pytest.mark.parametrize(
    ("conditions", "names"),
    [(["steps > 2"], "b"), (["steps>=2", "alarms = 0"], "a"), (["status == finished"], "ab"), (["kl/ref > 99"], "")],
)
def test_conditions_select_runs(command: Command, folder: Path, conditions: list[str], names: str) -> None:
    options = [f"--where={condition}" for condition in conditions]
    found = json.loads(command("runs", folder, "--json", *options).out)
    assert sorted(run["name"] for run in found) == list(names)


def test_a_damaged_run_is_listed_as_such(command: Command, tmp_path: Path) -> None:
    write(tmp_path / "runs" / "odd" / "run.json", "{")
    (run,) = json.loads(command("runs", "runs", "--json").out)
    assert run["status"] == "damaged"


def test_commands_name_damaged_files_and_show_the_rest(
    command: Command, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = shutil.copytree(folder / "b", tmp_path / "runs" / "b")
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([lines[0], b"{\n", *lines[1:]]))
    (run / "run.json").write_text("{")
    out = command("alarms", run).out
    assert "damaged, 3 steps, 1 alarms" in out and "response_length/mean" in out
    assert f"{run / 'metrics.jsonl'} is damaged in line 2. Restore it from a copy" in caplog.text
    assert f"{run / 'run.json'} cannot be read" in caplog.text and len(caplog.records) == 2
    (found,) = json.loads(command("runs", "runs", "--json").out)
    assert (found["status"], found["steps"], found["alarms"]) == ("damaged", 3, 1)
    assert command("rows", run).code == command("blame", run, "kl/ref").code == 0


@pytest.mark.parametrize("options", [["--where=steps"], ["--where=stepz > 1"], ["--sort=stepz"], ["nowhere"]])
def test_what_cannot_be_listed_is_refused(command: Command, folder: Path, options: list[str]) -> None:
    arguments = options if options == ["nowhere"] else [str(folder), *options]
    result = command("runs", *arguments)
    assert result.code == 2 and is_paragraph(result)


def test_alarms_are_shown_with_the_command_that_shows_their_rows(command: Command, folder: Path) -> None:
    out = command("alarms", folder / "b").out
    assert "1 alarms" in out and "response_length/mean" in out
    line = next(line.strip() for line in out.splitlines() if line.strip().startswith("flowrl blame"))
    shown = command(*line.split()[1:])
    assert shown.code == 0 and "make half" in shown.out
    (alarm,) = json.loads(command("alarms", folder / "b", "--json").out)
    assert alarm["rows"] and alarm["step"] == 1


def test_other_rules_can_be_applied_to_a_folder(command: Command, folder: Path) -> None:
    source = """
        from flowrl.run.alarms.rules import Above

        def second(history):
            return "it is the second step" if history.step == 2 else None

        RULES = (second, Above("reward/mean", 99.0))
        NONE = 3
    """
    write(Path("rules.py"), source)
    found = json.loads(command("alarms", folder / "a", "--rules=rules.py:RULES", "--json").out)
    assert [(alarm["step"], alarm["message"]) for alarm in found] == [(2, "it is the second step")]
    assert len(json.loads(command("alarms", folder / "a", "--rules=rules.py:second", "--json").out)) == 1
    result = command("alarms", folder / "a", "--rules=rules.py:NONE")
    assert result.code == 2 and "cli.wrong-target" in result.err


def test_blame_prints_the_rows_and_their_basis(command: Command, folder: Path) -> None:
    found = json.loads(command("blame", folder / "b", "reward/mean", "--step=2", "--against=1", "--json").out)
    assert found["metric"] == "reward/mean" and found["against"] == 1
    assert sum(row["share"] for row in found["rows"]) == pytest.approx(1.0)
    assert "Basis: the mean of score over 16 rows" in command("blame", folder / "b", "reward/mean").out


def test_a_comparison_shows_parameters_finals_held_out_responses_time_and_alarms(
    command: Command, folder: Path
) -> None:
    out = command("compare", folder / "a", folder / "b").out
    for text in ("two checkpoints, not two methods", "training.steps", "reward/mean", "sign test p = ", "generate"):
        assert text in out
    assert "no alarm in A" in out and "alarm in B, step 1" in out
    found = json.loads(command("compare", folder / "a", folder / "b", "--json", "--x=rows").out)
    assert found["differences"]["training.steps"] == [2, 3]
    held_out = found["held_out"]
    assert held_out["better"] + held_out["worse"] + held_out["equal"] == 12
    assert found["curves"]["reward/mean"][0]["rows"] == 16
    result = command("compare", folder / "a", "--x=row")
    assert result.code == 2 and is_paragraph(result)

"""``flowrl evaluate``: models, runs and their checkpoints, data, rewards, settings, refusals.

Covers also `flowrl/app/evaluate/models.py`.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from flowrl import Evaluation, Validation
from flowrl.app.evaluate.models import model_of
from flowrl.data.sources.prompts import PromptData
from tests.support.command_line import Command, is_paragraph, write
from tests.support.errors import raises
from tests.support.hub import Hub
from tests.support.hub import hub as hub  # a fixture
from tests.support.jobs import job_of
from tests.support.runs import described, lines, train

pytestmark = pytest.mark.runs

COLUMNS = 'data.columns={"prompt": "question", "ground_truth": "answer"}'
SHORT = ("--max-new-tokens", "4")


@pytest.fixture
def solutions(command: Command) -> Path:
    """Rows in the form of GSM8K, in the folder of the command."""
    rows = [{"question": f"{i}+1=", "answer": f"One more. #### {i + 1}"} for i in range(3)]
    return write(Path("gsm8k.jsonl"), "".join(json.dumps(row) + "\n" for row in rows))


def test_a_model_is_evaluated_by_name_of_a_reward(command: Command, tiny: str, solutions: Path) -> None:
    options = ["--reward", "gsm8k", "--set", COLUMNS, "--set", "reward.fn.method=flexible", "--k", "1,2", *SHORT]
    result = command("evaluate", tiny, solutions, *options)
    assert result.code == 0, result
    head, *metrics = result.out.splitlines()
    assert head.startswith("runs/evaluate-001: 3 prompts, ")
    assert [line.split()[0] for line in metrics] == ["avg@2", "pass@1", "pass@2", "maj@2"]
    found = described(Path("runs/evaluate-001"))
    assert found["graph"]["nodes"]["generate"]["operator"]["temperature"] == 1.0
    assert len(lines(Path("runs/evaluate-001/predictions.jsonl"))) == 6
    again = json.loads(command("evaluate", tiny, solutions, *options, "--json", "--folder", "runs/evaluate-001").out)
    assert again["prompts"] == 3 and set(again["estimates"]) == {"avg@2", "pass@1", "pass@2", "maj@2"}
    shown = command("rows", "runs/evaluate-001", "--json")
    assert len(json.loads(shown.out)) == 6


def test_by_default_the_data_source_names_the_reward_and_sampling_is_greedy(
    command: Command, tiny: str, hub: Hub, solutions: Path
) -> None:
    hub.add("openai/gsm8k", {"README.md": b"", "data/train.jsonl": solutions.read_bytes()}, kind="dataset")
    hub.add("org/tiny", tiny)
    result = command("evaluate", "org/tiny", "openai/gsm8k", "--set", COLUMNS, *SHORT, "--folder", "out")
    assert result.code == 0, result
    found = described(Path("out"))
    assert found["graph"]["nodes"]["generate"]["operator"]["temperature"] == 0.0
    assert {pin["repository"] for pin in found["commits"]} == {"org/tiny", "openai/gsm8k"}


def test_data_may_be_a_source_of_a_file(command: Command, tiny: str, solutions: Path) -> None:
    source = """
        from flowrl import PromptData
        def held_out(): return PromptData("gsm8k.jsonl", columns={"prompt": "question", "ground_truth": "answer"})
        number = 7
    """
    file = write(Path("data.py"), source)
    options = ["--reward", "gsm8k", *SHORT, "--limit", "2", "--json"]
    assert json.loads(command("evaluate", tiny, f"{file}:held_out", *options).out)["prompts"] == 2
    result = command("evaluate", tiny, f"{file}:number", *options)
    assert result.code == 2 and "[cli.wrong-target]" in result.err and is_paragraph(result)


@pytest.fixture(scope="module")
def run(tiny: str, prompts_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with a checkpoint of each and the model of its end."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    held_out = Validation(PromptData(prompts_file), every=1, batch=12)
    settings: dict[str, Any] = {"steps": 2, "prompts": 2, "checkpoint_every": 1, "save_model": True}
    job = job_of("grpo", tiny, n=2, max_new_tokens=2, kl_coef=0.0)
    train(job, prompts_file, folder, validation=held_out, keep_best="val/reward/mean", **settings)
    return folder


def test_of_a_run_its_end_its_best_or_a_step_is_evaluated(
    run: Path, tmp_path: Path, command: Command, solutions: Path
) -> None:
    assert model_of(str(run)) == str(run / "actor")
    assert model_of(str(run), "1") == str(run / "checkpoints" / "step-000001" / "actor" / "huggingface")
    best = described(run)["best"]["checkpoint"]
    assert model_of(str(run), "best") == str(run / best / "actor" / "huggingface")
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "actor")
    assert model_of(str(copy)) == str(copy / "checkpoints" / "step-000002" / "actor" / "huggingface")
    result = command("evaluate", run, solutions, "--reward", "gsm8k", "--set", COLUMNS, *SHORT, "--checkpoint", "1")
    assert result.code == 0, result
    model = described(Path("runs/evaluate-001"))["graph"]["bindings"]["rollout"]["model"]
    assert os.path.samefile(model, run / "checkpoints" / "step-000001" / "actor" / "huggingface")


def test_a_resumed_run_that_has_not_ended_again_has_its_newest_checkpoint(run: Path, tmp_path: Path) -> None:
    """The model in the folder is that of its earlier end."""
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "run.json").write_text(json.dumps({**described(run), "status": "interrupted"}))
    newest = copy / "checkpoints" / "step-000002"
    assert model_of(str(copy)) == str(newest / "actor" / "huggingface")
    shutil.rmtree(newest.parent)
    assert model_of(str(copy)) == str(copy / "actor")


def test_a_best_checkpoint_that_is_gone_is_not_offered(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / described(run)["best"]["checkpoint"])
    [left] = (copy / "checkpoints").glob("step-*")
    with raises("cli.bad-option", found="best") as error:
        model_of(str(copy), "best")
    assert f"it has last, {int(left.name[-6:])}." in str(error.value)


def test_models_that_a_run_does_not_have_are_refused(run: Path, tmp_path: Path) -> None:
    with raises("cli.bad-option", found="3", known=(1, 2)):
        model_of(str(run), "3")
    with raises("run.no-model", known=("actor",), role="critic"):
        model_of(str(run), role="critic")
    with raises("cli.bad-option", found=str(tmp_path)):
        model_of(str(tmp_path), "best")
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "actor")
    next((copy / "checkpoints/step-000001/actor/huggingface").glob("*.safetensors")).write_bytes(b"torn")
    with raises("checkpoint.damaged"):
        model_of(str(copy), "1")
    shutil.rmtree(copy / "checkpoints")
    with raises("run.no-model", path=str(copy)):
        model_of(str(copy))


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--reward", "gsm9k"], "cli.bad-option"),
        (["--reward", "code"], "cli.bad-option"),
        (["--k", "1,x"], "cli.bad-option"),
        (["--k", "0"], "cli.bad-option"),
        (["--engine", "tgi"], "cli.bad-option"),
        (["--reward", "gsm8k", "--k", "4", "-n", "2"], "parameter.invalid"),
        (["--reward", "gsm8k", "-n", "0"], "parameter.invalid"),
        (["--reward", "gsm8k", "--k", "4", "--temperature", "0"], "parameter.invalid"),
        (["--reward", "gsm8k", "--set", "data.colums=1"], "parameter.unknown"),
    ],
)
def test_misuse_prints_one_paragraph(
    options: list[str], code: str, command: Command, tiny: str, solutions: Path
) -> None:
    result = command("evaluate", tiny, solutions, *options)
    assert result.code == 2 and f"[{code}]" in result.err and is_paragraph(result)


def test_an_interruption_says_how_to_continue(
    command: Command, tiny: str, solutions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "_sampled", interrupt)
        result = command("evaluate", tiny, solutions, "--reward", "gsm8k", "--set", COLUMNS, *SHORT, "--folder", "out")
    assert result.code == 130
    assert result.err == "flowrl: interrupted; the same command with --folder=out continues it.\n"
    assert described(Path("out"))["status"] == "interrupted"
    result = command("evaluate", tiny, solutions, "--reward", "gsm8k", "--set", COLUMNS, *SHORT, "--folder", "out")
    assert result.code == 0 and described(Path("out"))["status"] == "finished"

"""Prompts that are too long for the model are found before the first step, with the rows and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl import PromptData, Training
from flowrl.run.settings.changes import with_settings
from tests.support.errors import raises
from tests.support.jobs import job_of, write_prompts

POSITIONS = 256  # of the tiny model
RESPONSE = 20


def data(tmp_path: Path, *lengths: int) -> str:
    """Short prompts, and prompts of so many characters, each a token."""
    path = write_prompts(tmp_path / "prompts.jsonl", 4)
    with open(path, "a") as lines:
        for length in lengths:
            row = {"prompt": [{"role": "user", "content": "a" * length}], "data_source": "test"}
            lines.write(json.dumps({**row, "reward_model": {"ground_truth": "1"}}) + "\n")
    return path


def training(tiny: str, source: PromptData, folder: Path, **settings: Any) -> Training:
    job = job_of("grpo", tiny, n=2, max_new_tokens=settings.pop("response", RESPONSE))
    settings = {"steps": 1, "prompts": 4, "save_model": False} | settings
    return Training(job, source, folder=str(folder), **settings)


def test_a_prompt_without_room_for_a_response_is_refused_with_its_row(tiny: str, tmp_path: Path) -> None:
    """The template adds 3 tokens: the first prompt just fits, the second is one token longer."""
    fits = POSITIONS - RESPONSE - 3
    run = training(tiny, PromptData(data(tmp_path, fits, fits + 1)), tmp_path / "run")
    for act in (run.refuse_unfit_data, run.run):
        with raises("model.too-long", node="generate", rows=(5,), found=POSITIONS - RESPONSE + 1, positions=POSITIONS):
            act()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_suggested_limit_drops_the_rows_and_the_run_ends(tiny: str, tmp_path: Path) -> None:
    path = data(tmp_path, POSITIONS)
    with raises("model.too-long") as error:
        training(tiny, PromptData(path), tmp_path / "run").refuse_unfit_data()
    room = error.value.facts["expected"]
    assert f'PromptData(..., max_prompt_length={room}, overlong="drop")' in error.value.message
    source = PromptData(path, max_prompt_length=room, overlong="drop")
    assert len(training(tiny, source, tmp_path / "again").run().metrics) == 1


@pytest.mark.parametrize("response", [POSITIONS, 1024])
def test_a_response_as_long_as_the_model_is_refused(response: int, tiny: str, tmp_path: Path) -> None:
    run = training(tiny, PromptData(data(tmp_path)), tmp_path / "run", response=response)
    with raises("model.too-long", node="generate", expected=POSITIONS, found=response) as caught:
        run.refuse_unfit_data()
    path, _, tokens = caught.value.message.rstrip(".").rpartition(" --set ")[2].partition("=")
    with_settings(run, {path: tokens}).refuse_unfit_data()

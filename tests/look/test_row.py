"""A row and a step of a recorded run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowrl
from flowrl import After
from flowrl.operators import Filter, Spread
from tests.draw.test_notebook import Parsed
from tests.support.errors import raises
from tests.support.jobs import job_of
from tests.support.runs import train


@pytest.fixture(scope="module")
def filtered(tiny: str, prompts_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of GRPO with a filter: two steps of four prompts."""
    folder = tmp_path_factory.mktemp("run") / "grpo"
    job = job_of("grpo", tiny, n=4).edit(insert={"filter": After("reward", Filter(Spread()))})
    train(job, prompts_file, folder, steps=2)
    return folder


def test_a_row_has_the_numbers_of_its_tokens_on_both_sides_of_a_gate(filtered: Path) -> None:
    run = flowrl.open(filtered)
    rows = run.rows(2).to_pylist()
    columns = {str(edge): column for edge, column in run.columns(2).items()}
    trained = [row for row in rows if row["fate"] == "trained"]
    for place, summary in enumerate(trained):
        row = run.row(f"2[{summary['row_id']}]")
        assert row.summary == summary and len(row.pieces) == summary["response_tokens"]
        advantages: Any = columns["group_advantage.advantages"][place]
        assert np.array_equal(row.tokens["group_advantage.advantages"], advantages[: len(row.pieces)])
        scores: Any = columns["reward.token_level_scores"][summary["row"]]
        assert np.array_equal(row.tokens["reward.token_level_scores"], scores[: len(row.pieces)])
        text = re.sub(r"<(eos|unk|pad|bos|\|\w+\|)>", "", "".join(row.pieces))  # special tokens have no text
        assert text == row.text["response"]


def test_a_dropped_row_has_no_numbers_of_what_follows_the_gate(filtered: Path) -> None:
    run = flowrl.open(filtered)
    dropped = [(step, row) for step in run.steps for row in run.rows(step).to_pylist() if row["fate"] == "filter"]
    for step, summary in dropped:
        tokens = run.row(f"{step}[{summary['row_id']}]").tokens
        assert "reward.token_level_scores" in tokens and "group_advantage.advantages" not in tokens


def test_an_unknown_row_or_step_is_refused(filtered: Path) -> None:
    run = flowrl.open(filtered)
    with raises("look.not-recorded", step=2, found="0/99/0#0"):
        run.row("2[0/99/0#0]")
    with raises("look.not-recorded", step=9):
        run.step(9)
    with raises("look.invalid-address", found="2"):
        run.row("2")


def test_row_step_and_run_have_html_without_scripts_and_short_texts(filtered: Path) -> None:
    run = flowrl.open(filtered)
    row = run.row(f"2[{run.rows(2)['row_id'][0].as_py()}]")
    step = run.step(2)
    for shown in (row, step, run):
        tags = set(Parsed(shown._repr_html_()).tags)
        assert tags and not tags & {"script", "iframe", "link", "img"}
        assert len(repr(shown)) < 1500
    assert step.metrics["reward/mean"] == run.metrics["reward/mean"][1].as_py()
    assert len(step.before["reward/mean"]) == 2

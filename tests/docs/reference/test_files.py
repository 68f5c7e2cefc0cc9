"""The page of formats has every file, key and column of a real run folder."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flowrl import PromptData, Recording, Validation
from flowrl.episodes import Endpoint
from flowrl.episodes.endpoint.program import KEPT
from flowrl.files.graph_io import KEYS as OF_GRAPH
from flowrl.operators import Interact
from flowrl.run.alarms import Above
from flowrl.run.recording.summaries import SCHEMA
from flowrl.run.settings.run_file import KEYS as OF_TRAINING
from flowrl.run.settings.run_file import SETTINGS
from tests import ROOT
from tests.episodes.endpoint.test_endpoint import ASK
from tests.support.jobs import job_of
from tests.support.rewards import asks_for_digits
from tests.support.runs import lines, train

PAGE = (ROOT / "docs/reference/files.md").read_text(encoding="utf-8")
SECTIONS = {
    title: text for title, text in re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
NOT_HERE = {"reported.json", "graph file", "training file", "data rows"}
"""Sections of files that the run of this test does not write."""


def named(section: str) -> set[str]:
    """The inline code of a section."""
    return set(re.findall(r"`([^`]+)`", SECTIONS[section]))


@pytest.fixture(scope="module")
def folder(tiny: str, prompts_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "grpo-001"
    settings: dict[str, Any] = {"steps": 1, "checkpoint_every": 1, "rollouts_every": 1, "save_model": True}
    settings |= {"validation": Validation(PromptData(prompts_file)), "keep_best": "val/reward/mean"}
    settings |= {"alarms": (Above("reward/mean", -1.0),), "recording": Recording(columns="all")}
    train(job_of("grpo", tiny, asks_for_digits, n=2), prompts_file, folder, **settings)
    return folder


def test_every_file_of_the_folder_has_a_section_and_no_other_has(folder: Path) -> None:
    found = {f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir() if path.name[0] != "."}
    assert found == SECTIONS.keys() - NOT_HERE
    assert all(name in PAGE.partition("```text")[2].partition("```")[0] for name in SECTIONS.keys() - NOT_HERE)


@pytest.mark.parametrize("name", ["alarms", "predictions", "rollouts", "spans", "state"])
def test_every_key_of_a_line_is_named(folder: Path, name: str) -> None:
    keys = {key for line in lines(folder / f"{name}.jsonl") for key in line}
    assert keys and keys <= named(f"{name}.jsonl") | (named("predictions.jsonl") if name == "rollouts" else set())


def test_every_key_of_the_description_is_named(folder: Path) -> None:
    described = json.loads((folder / "run.json").read_text())
    assert described.keys() <= named("run.json")
    assert described["recorded"].keys() <= named("run.json")


def test_every_column_of_rows_and_texts_is_named(folder: Path) -> None:
    columns = {kind: set(pq.read_schema(next((folder / kind).iterdir())).names) for kind in ("rows", "texts")}
    assert columns["rows"] - {"reward/score"} <= SCHEMA.keys() <= named("rows/")
    assert columns["texts"] <= named("texts/")
    types = dict(re.findall(r"^\| (`.*?) \| (.*?) \|", SECTIONS["rows/"], re.MULTILINE))
    for names, kinds in types.items():
        shown, of = re.findall("`([^`]+)`", names), kinds.split(", ")
        for name, kind in zip(shown, of * (len(shown) if len(of) == 1 else 1), strict=True):
            assert name == "reward/<key>" or str(SCHEMA[name]) == kind, name


def test_every_key_of_an_episode_is_named_and_its_program_is_bounded(
    tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    """A program that writes more than a run keeps of it."""
    code = f"{ASK}\nimport sys\nprint({2 * KEPT} * 'x', file=sys.stderr)\nprint('hello')\nprint(1.0)"
    interact = Interact(Endpoint([sys.executable, "-c", code]), max_new_tokens=2, context=100)
    job = job_of("grpo", tiny, None, n=2).edit(replace={"generate": interact}, drop=["reward"])
    folder = train(job, prompts_file, tmp_path / "run", steps=1, prompts=1).folder
    texts = pq.read_table(next((folder / "texts").iterdir())).to_pylist()
    episodes = [json.loads(row["episode"]) for row in texts]
    assert episodes[0].keys() | episodes[0]["program"].keys() <= named("texts/")
    for episode in episodes:
        assert episode["program"] == {"status": 0, "stdout": "hello\n1.0\n", "stderr": f"{KEPT * 'x'}\n"[-KEPT:]}
    assert f"{KEPT:,} characters" in SECTIONS["texts/"]


def test_columns_are_in_a_folder_for_each_axis(folder: Path) -> None:
    assert "batch@repeat" in named("columns/") and (folder / "columns" / "batch@repeat").is_dir()


def test_every_file_of_a_checkpoint_is_named(folder: Path) -> None:
    [checkpoint] = (folder / "checkpoints").iterdir()
    found = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    known = named("checkpoints/")
    assert all(any(path == name or path.startswith(name) for name in known) for path in found)
    assert json.loads((checkpoint / "manifest.json").read_text()).keys() <= known


def test_the_keys_of_graph_and_training_files_are_named() -> None:
    assert {*OF_GRAPH} <= named("graph file")
    assert {*OF_TRAINING} - {*SETTINGS, "flowrl"} <= named("training file")

"""Folders and files that the package `datasets` reads; tests `dataset_files.py` and `origins.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest

from flowrl import PromptData
from tests.support.errors import raises
from tests.support.rows.prompt_files import Characters, truths, write_jsonl, write_parquet

ROWS = [{"prompt": f"{i}+1=", "solution": str(i + 1)} for i in range(5)]
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: other
  data_files: other/*.parquet
---
# Sums
"""


def read(path: Any, **settings: Any) -> list[Any]:
    return truths(PromptData(path, shuffle=False, **settings).load(Characters(), 0).all())  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set as the Hub has it."""
    for file, rows in {
        "main/train-0": ROWS[:3],
        "main/train-1": ROWS[3:],
        "main/test-0": ROWS[:1],
        "other/a": ROWS,
    }.items():
        path = tmp_path / "sums" / f"{file}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_parquet(path, rows)
    (tmp_path / "sums" / "README.md").write_text(CARD)
    return tmp_path / "sums"


def test_a_configuration_and_a_split(folder: Path) -> None:
    assert read(folder, name="main", split="train") == ["1", "2", "3", "4", "5"]
    assert read(folder, name="main", split="test") == ["1"]
    assert read(folder, name="other") == ["1", "2", "3", "4", "5"]
    assert read(folder, name="main", split="train[1:3]+test") == ["2", "3", "1"]
    assert read(folder, name="main", split="train[:40%]") == ["1", "2"]
    assert read((folder, folder), name="main", split="test") == ["1", "1"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "the configurations 'main', 'other'. Pass one: name='main'"),
        ({"name": "mian"}, "no configuration 'mian'; it has main, other; did you mean 'main'?"),
        ({"name": "main"}, "the splits 'train', 'test'. Pass one: split='train'"),
        ({"name": "main", "split": "trian[:1]"}, "no split 'trian'; it has train, test; did you mean 'train'?"),
    ],
)
def test_a_choice_that_is_missing_is_named(folder: Path, settings: Any, message: str) -> None:
    with raises("prompts.no-data-files", path=str(folder)) as caught:
        PromptData(folder, **settings).refuse_missing()
    assert message in str(caught.value)


def test_a_broken_slice_is_refused(folder: Path) -> None:
    with raises("prompts.no-data-files"):
        read(folder, name="main", split="train[:x]")


def test_files_without_a_card(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,solution\n1+1=,2\n2+2=,4\n")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "arrow"))
    assert read(tmp_path / "a.csv") == [2, 4]
    assert read(tmp_path / "a.json") == read(tmp_path / "arrow") == ["1", "2", "3", "4", "5"]
    datasets.DatasetDict({"a": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "splits"))
    assert read(tmp_path / "splits", split="a[:1]") == ["1"]


def test_names_and_folders_of_files_tell_the_split(tmp_path: Path) -> None:
    for file in ("a/train.csv", "a/test_1.csv", "b/train/x.csv", "b/train/y.csv", "b/test/x.csv", "b/notes.json"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"prompt,solution\na,{Path(file).stem}\n")
    assert read(tmp_path / "a", split="train") == ["train"] and read(tmp_path / "a", split="test") == ["test_1"]
    assert read(tmp_path / "b", split="train") == ["x", "y"]


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    """The cache of `datasets` takes a file of the same time for the same file."""
    path = tmp_path / "a.csv"
    path.write_text("prompt,solution\n1+1=,2\n")
    before, times = PromptData(path).digests(), path.stat()
    assert read(path) == [2]
    path.write_text("prompt,solution\n1+1=,3\n")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert read(path) == [3] and PromptData(path).digests() != before


def test_digests_are_of_the_files_of_the_split(folder: Path) -> None:
    train, test = (PromptData(folder, name="main", split=split).digests() for split in ("train", "test"))
    assert len(train) == 2 and len(test) == 1
    write_parquet(folder / "main" / "test-0.parquet", ROWS[:2])
    assert PromptData(folder, name="main", split="train").digests() == train
    assert PromptData(folder, name="main", split="test").digests() != test


def test_scripts_are_refused_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "sums.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    write_jsonl(tmp_path / "sums" / "a.jsonl", ROWS)
    with raises("prompts.script", script="sums.py"):
        PromptData(tmp_path / "sums").refuse_missing()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", ["../secret.jsonl", "/etc/passwd", "https://127.0.0.1:9/a.jsonl"])
def test_files_outside_of_the_data_set_are_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "sums").mkdir()
    write_jsonl(tmp_path / "secret.jsonl", ROWS)
    (tmp_path / "sums" / "README.md").write_text(f"---\nconfigs:\n- config_name: a\n  data_files: {path}\n---\n")
    with raises("prompts.no-data-files") as caught:
        PromptData(tmp_path / "sums").refuse_missing()
    assert "outside of the data set" in str(caught.value)


def test_damaged_and_missing_data_is_refused(tmp_path: Path, folder: Path) -> None:
    (folder / "main" / "train-1.parquet").write_bytes(b"PAR1")
    with raises("prompts.broken-file", path=str(folder)):
        read(folder, name="main", split="train")
    (tmp_path / "empty").mkdir()
    with raises("prompts.no-data-files"):
        PromptData(tmp_path / "empty").refuse_missing()
    (folder / "README.md").write_text("---\nconfigs: [\n---\n")
    with raises("prompts.no-data-files"):
        PromptData(folder).refuse_missing()
    for missing in ("gone", "gone.csv", "./a/gone.json"):
        with raises("prompts.missing-file"):
            PromptData(missing).refuse_missing()


def test_the_package_is_needed_for_folders_only(tmp_path: Path, folder: Path) -> None:
    with mock.patch.dict(sys.modules, {"datasets": None}):
        assert read(write_jsonl(tmp_path / "a.jsonl", ROWS))[:1] == ["1"]
        with raises("package.not-installed", package="datasets"):
            PromptData(folder, name="main", split="test").refuse_missing()
    code = f"""
import sys
from flowrl import PromptData
from tests.support.rows.prompt_files import Characters
PromptData({str(tmp_path / "a.jsonl")!r}).load(Characters(), 0)
sys.exit("datasets" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

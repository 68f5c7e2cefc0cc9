"""Data sets on the Hub, from a stand-in for its HTTP interface and from its cache; tests `hub_dataset.py`."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from flowrl import PromptData, Training, Validation
from flowrl.hub.repositories import Commits
from tests.support.command_line import Command
from tests.support.errors import raises
from tests.support.hub import Hub
from tests.support.hub import hub as stand_in  # a fixture
from tests.support.jobs import job_of
from tests.support.rows.prompt_files import Characters, truths

COLUMNS = {"prompt": "question", "ground_truth": "answer"}
CARD = b"""---
configs:
- config_name: other
  data_files: other/*
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
---
"""


def parquet(first: int) -> bytes:
    file = io.BytesIO()
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(first, first + 2)]
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


def files(first: int = 0) -> dict[str, bytes]:
    shards = {f"main/train-0000{i}-of-00002.parquet": parquet(first + 2 * i) for i in range(2)}
    return {"README.md": CARD, **shards, "main/test-00000-of-00001.parquet": parquet(8), "other/a.csv": b"a\n1\n"}


def gsm8k(split: str = "train", **settings: Any) -> PromptData:
    return PromptData("openai/gsm8k", name="main", split=split, columns=COLUMNS, shuffle=False, **settings)


__all__ = ["stand_in"]


@pytest.fixture
def hub(stand_in: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A Hub with a data set of one commit, a gated one, and a script."""
    stand_in.add("openai/gsm8k", files(), "dataset")
    stand_in.add("a/gated", files(), "dataset", gated=True)
    stand_in.add("a/script", {"script.py": b"1/0", "a.csv": b"a\n1\n"}, "dataset")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.chdir(tmp_path)
    return stand_in


def commit(hub: Hub, number: int) -> str:
    """A commit of the first data set, counted from 0."""
    return list(hub.repositories["datasets/openai/gsm8k"].commits)[number]


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_only_the_files_of_the_split_are_downloaded_and_once(hub: Hub) -> None:
    data = gsm8k()
    data.refuse_missing()
    assert hub.downloads() == ["README.md"] and data.missing_here() == ["openai/gsm8k"]
    for _ in range(2):
        batch = data.load(Characters(), 0).all()  # type: ignore[arg-type]
        assert truths(batch) == ["1", "2", "3", "4"]
        assert batch["data_source"].tolist() == ["openai/gsm8k"] * 4
    shards = [f"main/train-0000{i}-of-00002.parquet" for i in range(2)]
    assert (
        sorted(hub.downloads()) == ["README.md", *(Path(shard).name for shard in shards)] and data.missing_here() == []
    )
    assert data.digests() == [f"openai/gsm8k@{commit(hub, 0)}/{name}" for name in shards]


def test_a_pinned_data_set_stays_at_its_commit(hub: Hub) -> None:
    commits = Commits()
    pinned = gsm8k().pinned(commits)
    assert pinned.path == f"openai/gsm8k@{commit(hub, 0)}"
    [recorded] = commits.record()
    assert (recorded["kind"], recorded["repository"], recorded["commit"]) == ("dataset", "openai/gsm8k", commit(hub, 0))
    hub.add("openai/gsm8k", files(5), "dataset")
    assert truths(pinned.load(Characters(), 0).all()) == ["1", "2", "3", "4"]  # type: ignore[arg-type]
    assert gsm8k().pinned(commits) == pinned and gsm8k().pinned(Commits()) != pinned
    assert pinned.pinned(Commits()) == pinned
    assert pinned.identity() == gsm8k().identity()
    assert truths(gsm8k().load(Characters(), 0).all()) == ["6", "7", "8", "9"]  # type: ignore[arg-type]
    old = gsm8k(revision=commit(hub, 0)).pinned(Commits())
    assert old == pinned and old.digests() == pinned.digests() != gsm8k().digests()


def test_a_filled_cache_is_enough_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    gsm8k().load(Characters(), 0)  # type: ignore[arg-type]
    seen = len(hub.requests)
    offline(monkeypatch)
    data = gsm8k()
    data.refuse_missing()
    assert data.missing_here() == [] and gsm8k("test").missing_here() == ["openai/gsm8k"]
    assert truths(data.load(Characters(), 0).all()) == ["1", "2", "3", "4"]  # type: ignore[arg-type]
    gsm8k("test").refuse_missing()  # what is not there cannot be verified
    with raises("hub.offline", repository="openai/gsm8k"):
        gsm8k("test").load(Characters(), 0)  # type: ignore[arg-type]
    with raises("prompts.no-data-files"):
        gsm8k("trian").refuse_missing()
    assert len(hub.requests) == seen


@pytest.mark.parametrize(
    ("path", "settings", "code"),
    [
        ("a/gone", {}, "hub.unknown-repository"),
        ("a/gated", {}, "hub.no-token"),
        ("openai/gsm8k", {"revision": "v2"}, "hub.unknown-revision"),
        ("openai/gsm8k@v2", {}, "hub.unknown-revision"),
        ("openai/gsm8k", {"name": "mian"}, "prompts.no-data-files"),
        ("openai/gsm8k", {"name": "main", "split": "trian"}, "prompts.no-data-files"),
        ("a/script", {}, "prompts.script"),
    ],
)
def test_what_is_missing_is_found_without_downloading_rows(hub: Hub, path: str, settings: Any, code: str) -> None:
    with raises(code):
        PromptData(path, **settings).refuse_missing()
    assert set(hub.downloads()) <= {"README.md"}


def training(tiny: str, folder: Path, steps: int, **settings: Any) -> Training:
    held_out = Validation(gsm8k("test"), every=10)
    return Training(
        job_of("grpo", tiny),
        gsm8k(),
        steps=steps,
        prompts=2,
        folder=str(folder),
        checkpoint_every=1,
        save_model=False,
        validation=held_out,
        **settings,
    )


def test_a_resumed_run_reads_the_recorded_commit(hub: Hub, tiny: str, tmp_path: Path) -> None:
    """The data set gets another commit between the two runs."""
    whole = training(tiny, tmp_path / "whole", 2).run()
    training(tiny, tmp_path / "run", 1).run()
    hub.add("openai/gsm8k", files(5), "dataset")
    resumed = training(tiny, tmp_path / "run", 2, resume=True).run()
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [one["commit"] for one in described["commits"]] == [commit(hub, 0)]
    assert described["identity"]["content of the data"][0].startswith(f"openai/gsm8k@{commit(hub, 0)}/")
    keys = [key for key in whole.metrics[-1] if key.startswith(("actor/", "reward/", "val/"))]
    assert [resumed.metrics[-1][key] for key in keys] == [whole.metrics[-1][key] for key in keys]
    later = training(tiny, tmp_path / "run", 3, resume=True)
    with raises("resume.other-run", changed="content of the data"):
        dataclasses.replace(later, data=gsm8k(revision=commit(hub, 1))).run()


PLAN = """
from flowrl import PromptData, Training
from tests.support.jobs import job_of

data = PromptData(
    "openai/gsm8k", name="main", split="train", columns={{"prompt": "question", "ground_truth": "answer"}}
)
training = Training(job_of("grpo", {tiny!r}), data, steps=1, prompts=2)
"""


def test_check_names_what_it_does_not_verify(
    hub: Hub, tiny: str, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    Path("plan.py").write_text(PLAN.format(tiny=tiny))
    absent = "Not verified: the rows of openai/gsm8k, "
    checked = command("check", "plan.py:training")
    assert checked.code == 0 and absent in checked.out and hub.downloads() == ["README.md"]
    offline(monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "elsewhere")
    assert absent in command("check", "plan.py:training").out


def test_check_reads_the_rows_of_a_filled_cache(hub: Hub, tiny: str, command: Command) -> None:
    gsm8k().load(Characters(), 0)  # type: ignore[arg-type]
    Path("plan.py").write_text(PLAN.format(tiny=tiny))
    assert "Not verified" not in command("check", "plan.py:training").out
    Path("plan.py").write_text(PLAN.format(tiny=tiny).replace('"train"', '"trainn"'))
    wrong = command("check", "plan.py:training")
    assert wrong.code == 1 and "did you mean 'train'" in wrong.out

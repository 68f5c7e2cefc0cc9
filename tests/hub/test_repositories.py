"""Names, commits and downloads, through `huggingface_hub` and a stand-in of the Hub."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from flowrl.hub.repositories import Commits, download, files_of, is_repository, refuse_revision, resolve
from tests.support.errors import raises
from tests.support.hub import Hub
from tests.support.hub import hub as hub  # a fixture

FILES = {"config.json": b"{}", "a.py": b"1", "data/train.parquet": b"rows"}


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "org/name_1.2-x"])
def test_a_name_is_that_of_a_repository(name: str) -> None:
    assert is_repository(name)


@pytest.mark.parametrize(
    "path", ["./qwen", "../a/b", "/models/qwen", "~/qwen", "models/qwen/final", "qwen/", "", "a b"]
)
def test_a_path_is_not(path: str) -> None:
    assert not is_repository(path)


def test_an_existing_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_repository("Qwen/Qwen3-0.6B") and is_repository("Qwen/Qwen3-1.7B")


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_a_branch_resolves_to_its_commit_and_only_named_files_arrive(hub: Hub, kind: str) -> None:
    commit = hub.add("org/one", FILES, kind)
    assert resolve("org/one", kind=kind) == resolve("org/one", "main", kind) == commit  # type: ignore[arg-type]
    folder = download("org/one", commit, ("*.json", "data/*"), kind)  # type: ignore[arg-type]
    assert {path.name for path in folder.rglob("*.*")} == {"config.json", "train.parquet"}
    assert files_of("org/one", commit, kind) == set(FILES)  # type: ignore[arg-type]
    before = len(hub.requests)
    assert download("org/one", commit, ("*.json",), kind) == folder  # type: ignore[arg-type]
    assert len(hub.requests) == before


def test_commits_are_resolved_once_and_again_from_a_record(hub: Hub) -> None:
    first = hub.add("org/one", FILES)
    commits = Commits()
    assert commits.resolve("org/one") == first
    second = hub.add("org/one", {**FILES, "new": b""})
    assert commits.resolve("org/one") == Commits(commits.record()).resolve("org/one") == first
    assert Commits().resolve("org/one") == second
    assert Commits(commits.record()).resolve("org/one", "main") == second  # another name than that of the record


def test_offline_the_last_commit_that_was_seen_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add("org/one", FILES)
    folder = download("org/one", resolve("org/one"), ("*.json",))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("org/one") == commit and download("org/one", commit, ("*.json",)) == folder
    with raises("hub.offline", repository="org/one"):
        download("org/one", commit, ("*.parquet",))


def test_each_failure_has_its_code(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = hub.add("org/gated", FILES, gated=True)
    hub.add("org/open", FILES)
    with raises("hub.unknown-repository", repository="org/none"):
        resolve("org/none")
    with raises("hub.unknown-revision", repository="org/gated", revision="v2"):
        resolve("org/gated", "v2")
    with raises("hub.unknown-revision", repository="org/open"):
        download("org/open", "0" * 40, ("*.json",))
    with raises("hub.no-token", repository="org/gated"):
        download("org/gated", gated, ("*.json",))
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    with raises("hub.gated", repository="org/gated"):
        download("org/gated", gated, ("*.json",))
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    assert download("org/gated", gated, ("*.json",)).is_dir()


def test_without_a_network_or_offline_a_repository_that_is_not_cached_is_named(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the retries of huggingface_hub
    with raises("hub.unreachable", repository="org/one"):
        resolve("org/one")
    with raises("hub.unreachable", repository="org/one"):
        download("org/one", "0" * 40, ("*.json",))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with raises("hub.offline", repository="org/one"):
        resolve("org/one")


def test_a_cache_that_cannot_be_written_is_named(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add("org/one", FILES)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    with raises("hub.unwritable-cache", repository="org/one"):
        download("org/one", commit, ("*.json",))


def test_a_revision_of_a_folder_is_refused() -> None:
    refuse_revision("./one", None)
    with raises("hub.revision-of-folder", path="./one", revision="v1"):
        refuse_revision("./one", "v1")

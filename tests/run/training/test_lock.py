"""One run at a time writes to a folder; the lock ends with its process."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowrl.run.training import lock
from flowrl.run.training.lock import LOCK, RESERVE, FolderLock
from tests import ROOT
from tests.support.errors import raises
from tests.support.jobs import job_of
from tests.support.runs import Recorder, described, lines, train


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that locks a folder until it ends."""
    script = (
        "import sys, pathlib; from flowrl.run.training.lock import FolderLock; "
        "taken = FolderLock(pathlib.Path(sys.argv[1])); "
        "print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def test_a_lock_error_names_the_other_process_until_that_process_ends(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with raises("run.folder-locked", path=str(tmp_path)) as caught:
            FolderLock(tmp_path)
        assert re.match(rf"the process {process.pid} on .*, since 2", caught.value.facts["holder"])
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / LOCK).exists()  # a killed process does not remove its file
        FolderLock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_second_lock_in_the_same_process_is_refused(tmp_path: Path) -> None:
    folder_lock = FolderLock(tmp_path)
    with raises("run.folder-locked") as caught:
        FolderLock(tmp_path)
    assert caught.value.facts["holder"].startswith(f"the process {os.getpid()} on")
    folder_lock.release()
    FolderLock(tmp_path).release()


def test_releasing_a_removed_lock_does_not_release_the_lock_of_another_run(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    (tmp_path / LOCK).unlink()
    second = FolderLock(tmp_path)
    first.release()
    with raises("run.folder-locked"):
        FolderLock(tmp_path)
    second.release()


def test_a_forked_child_neither_releases_nor_holds_the_lock(tmp_path: Path) -> None:
    folder_lock = FolderLock(tmp_path)
    reader, writer = os.pipe()
    started, signal_end = os.pipe()
    if (child := os.fork()) == 0:
        os.close(writer)
        folder_lock.release()  # does nothing: the lock belongs to the parent
        os.write(signal_end, b"1")
        os.read(reader, 1)
        os._exit(0)
    os.read(started, 1)
    with raises("run.folder-locked"):
        FolderLock(tmp_path)
    os.close(folder_lock._file)  # as the kernel does when the parent dies
    lock._open.clear()
    FolderLock(tmp_path).release()
    os.close(writer)
    os.waitpid(child, 0)
    for file in (reader, started, signal_end):
        os.close(file)


def test_a_lock_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("a thesis")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "thesis")
    with pytest.raises(OSError, match="symbolic links"):
        FolderLock(tmp_path / "run")
    assert (tmp_path / "thesis").read_text() == "a thesis"


def test_an_unreadable_lock_file_is_still_locked(tmp_path: Path) -> None:
    folder_lock = FolderLock(tmp_path)
    for content in (b"", b"{", b"[]", b"{}", b"\xff"):
        (tmp_path / LOCK).write_bytes(content)
        with raises("run.folder-locked", holder="a process that has just started or ended"):
            FolderLock(tmp_path)
    folder_lock.release()


def test_the_lock_file_reserves_disk_space_until_needed(tmp_path: Path) -> None:
    folder_lock = FolderLock(tmp_path)
    assert (tmp_path / LOCK).stat().st_size == RESERVE
    folder_lock.free_reserve()
    assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    folder_lock.release()


def test_a_file_system_without_locks_logs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    with caplog.at_level(logging.WARNING):
        FolderLock(tmp_path).release()
    assert "has no file locks, so a second run could write" in caplog.text


# ---- runs


def test_a_second_run_in_a_folder_does_not_affect_the_first(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    job = job_of("grpo", tiny)

    class Second(Recorder):
        def step(self, step: int, metrics: Any) -> None:
            super().step(step, metrics)
            for resume in (False, True):
                with raises("run.folder-locked", path=str(tmp_path)):
                    train(job, prompts_file, tmp_path, resume=resume)

    assert train(job, prompts_file, tmp_path, [Second()]).folder == tmp_path
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert described(tmp_path)["status"] == "finished"
    assert not (tmp_path / LOCK).exists()


def test_a_run_killed_before_its_first_step_frees_the_folder(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"status": "running"}')
    (tmp_path / LOCK).write_text("of a process that is dead")
    train(job_of("grpo", tiny), prompts_file, tmp_path, steps=1)
    assert described(tmp_path)["status"] == "finished"


def test_a_refused_run_releases_its_lock(prompts_file: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"status": "finished"}')
    for _ in range(2):
        with raises("run.folder-taken"):
            train(job_of("grpo", "no such model"), prompts_file, tmp_path)
    assert not (tmp_path / LOCK).exists()

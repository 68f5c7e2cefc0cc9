"""The run folder records how a run ended: full disk, signals, invalid reporters."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl import INJECTED, Colocate, Metrics, Operator, State, Terminal, Training
from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.data.sources.prompts import PromptData
from flowrl.errors import DataError, StorageError
from flowrl.run.engine.timeline import Timeline
from flowrl.run.training.lock import FolderLock
from flowrl.run.training.run_folder import RunFolder
from flowrl.run.training.signals import SIGNALS, Ended, ended_in_order
from tests import ROOT
from tests.run.engine.test_lag import job_with_lag
from tests.run.training import interrupted
from tests.run.training.interrupted import Stopper, assert_same, checkpoints, jobs, run
from tests.support.errors import raises
from tests.support.jobs import job_of
from tests.support.runs import Recorder, described, lines, train


class Full:
    """A disk that is full for files with these names while `on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.on, self._names = False, names
        opened, written = Path.open, Path.write_bytes

        def refuse(path: Path) -> None:
            if self.on and any(re.search(rf"{re.escape(name)}(?!l)", path.name) for name in self._names):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def open_(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
            if "a" in mode or "w" in mode:
                refuse(path)
            return opened(path, mode, *rest, **options)

        def write_bytes(path: Path, content: bytes) -> int:
            refuse(path)
            return written(path, content)

        monkeypatch.setattr(Path, "open", open_)
        monkeypatch.setattr(Path, "write_bytes", write_bytes)


class Filling(Recorder):
    """Fills the disk after the first step."""

    def __init__(self, disk: Full) -> None:
        super().__init__()
        self.disk = disk

    def step(self, step: int, metrics: Any) -> None:
        self.disk.on = True


def test_a_full_disk_is_reported(tiny: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Full(monkeypatch, "metrics.jsonl", "trace.json")
    with pytest.raises(
        StorageError, match=r"metrics\.jsonl cannot be written \(No space left on device; .*free"
    ) as caught:
        train(job_of("grpo", tiny), prompts_file, tmp_path, [Filling(disk)])
    assert "trace.json cannot be written" in caught.value.__notes__[0]
    assert described(tmp_path)["status"] == "failed"
    assert described(tmp_path)["error"].startswith("StorageError: ")
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1]


def test_reserved_space_lets_a_full_disk_record_the_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(str(tmp_path / "run"), "grpo", False)
    folder.describe({"status": "running"})
    disk = Full(monkeypatch, "run.json")
    disk.on, freed = True, []

    def free_reserve(lock: FolderLock) -> None:
        freed.append(True)
        disk.on = False

    monkeypatch.setattr(FolderLock, "free_reserve", free_reserve)
    folder.describe({"status": "failed"})
    folder.close()
    assert freed and described(tmp_path / "run")["status"] == "failed"


@pytest.mark.runs
def test_a_run_resumes_after_disk_space_is_freed(
    tiny: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        disk = Full(patched, "state.json")
        with pytest.raises(StorageError, match=r"checkpoints/step-000002 cannot be written \(No space left"):
            run(jobs("grpo", tiny), prompts_file, tmp_path / "run", [Filling(disk)])
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    found = run(jobs("grpo", tiny), prompts_file, tmp_path / "run", resume=True)
    assert_same(found, run(jobs("grpo", tiny), prompts_file, tmp_path / "uninterrupted"))


def test_an_unwritable_trace_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"trace\.json cannot be written"):
        Timeline().save(tmp_path / "file" / "trace.json")


# ---- signals


@pytest.mark.usefixtures("unhandled")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_run_cleanly(tiny: str, prompts_file: str, tmp_path: Path, number: signal.Signals) -> None:
    class Ender(Recorder):
        def step(self, step: int, metrics: Any) -> None:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    reporter = Ender()
    with pytest.raises(Ended) as caught:
        train(job_of("grpo", tiny), prompts_file, tmp_path, [reporter])
    assert caught.value.code == 128 + number
    assert described(tmp_path)["status"] == "interrupted"
    assert described(tmp_path)["error"] == f"Ended: {number.name}"
    assert reporter.count("end") == 1
    assert (tmp_path / "trace.json").exists()
    assert signal.getsignal(number) is before


@pytest.mark.usefixtures("unhandled")
def test_a_signal_during_startup_is_recorded(
    tiny: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has the status "running" of a run that was killed."""
    describe = RunFolder.describe

    def ends(folder: RunFolder, content: Any) -> None:
        if content["status"] == "running":
            os.kill(os.getpid(), signal.SIGTERM)
        describe(folder, content)

    monkeypatch.setattr(RunFolder, "describe", ends)
    (tmp_path / "run.json").write_text('{"status": "running"}')
    with pytest.raises(Ended):
        train(job_of("grpo", tiny), prompts_file, tmp_path, [])
    assert described(tmp_path)["status"] == "interrupted"


def test_a_second_signal_is_ignored_during_shutdown() -> None:
    seen = []
    with pytest.raises(Ended), ended_in_order():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
            seen.append("the end")
    assert seen == ["the end"]


def test_existing_signal_handlers_are_preserved() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with ended_in_order():
            os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.runs
def test_a_terminated_program_exits_with_128_plus_the_signal(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    """Its last words are how to resume."""
    script = """
        import os, signal, sys
        from pathlib import Path
        from tests.run.training.interrupted import Stopper, jobs, run

        class Terminated(Stopper):
            def node(self, name):
                if (self.done, name) == (self.at, self.name):
                    os.kill(os.getpid(), signal.SIGTERM)

        tiny, prompts, folder = sys.argv[1:]
        run(jobs("grpo", tiny), prompts, Path(folder), [Terminated(2, "reward")])
    """
    arguments = [sys.executable, "-c", textwrap.dedent(script), tiny, prompts_file, str(tmp_path)]
    ended = subprocess.run(arguments, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr.decode()
    *_, line = ended.stderr.decode().splitlines()
    assert line.startswith("SIGTERM ended the run after step 3, with a checkpoint.")
    assert line.endswith(f"Training(folder={str(tmp_path)!r}, resume=True).")
    assert described(tmp_path)["status"] == "interrupted"


class Signaler(Stopper):
    """Sends SIGTERM twice when `node` starts in the step after `step`."""

    def node(self, name: str) -> None:
        if (self.done, name) == (self.at, self.name):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.runs
@pytest.mark.usefixtures("unhandled")
@pytest.mark.parametrize(
    ("name", "lag", "place"),
    [
        ("ppo", 0, None),
        ("grpo", 2, None),
        pytest.param("grpo", 1, Colocate(gpus=1), marks=pytest.mark.ray),
    ],
)
def test_a_signal_within_a_step_takes_a_checkpoint_after_it(
    tiny: str,
    prompts_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    lag: int,
    place: Any,
) -> None:
    """A second signal does not cut the step off. The resumed run equals the uninterrupted one, to the bit; the signal
    comes in the last step before a validation, and after the next one in a step of another epoch."""
    job = dataclasses.replace(job_with_lag(name, tiny, lag) if lag else jobs(name, tiny), place=place)
    if place:  # there, it is time that decides how many steps are sampled ahead
        monkeypatch.setattr(interrupted, "TIMES", (*interrupted.TIMES, "queue/filled"))
    whole = run(job, prompts_file, tmp_path / "whole", checkpoint_every=None)
    for step, node in ((2, "generate"), (3, "update_actor")):
        signaled = Signaler(step, node)
        folder = tmp_path / "run"
        with pytest.raises(Ended) as caught:
            run(job, prompts_file, folder, [signaled], checkpoint_every=100, resume="or-start")
        assert caught.value.code == 128 + signal.SIGTERM
        assert signaled.done == step + 1
        assert checkpoints(folder)[-1] == f"step-{step + 1:06d}"
        assert described(folder)["status"] == "interrupted"
    assert_same(run(job, prompts_file, folder, checkpoint_every=100, resume=True), whole)


@pytest.mark.usefixtures("unhandled")
def test_a_signal_in_the_last_step_finishes_the_run(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    found = train(job_of("grpo", tiny), prompts_file, tmp_path, [Signaler(2, "reward")], steps=3, checkpoint_every=9)
    assert len(found.metrics) == 3 and described(tmp_path)["status"] == "finished"


@pytest.mark.usefixtures("unhandled")
def test_a_failure_after_a_signal_is_the_signal(
    tiny: str, prompts_file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A scheduler may signal all processes of a job, such as those that a node calls."""

    class Lost(Operator):
        def __call__(self, token_level_scores: c.TokenLevelScores) -> c.TokenLevelScores:
            os.kill(os.getpid(), signal.SIGTERM)
            raise ConnectionError("the judge was terminated")

    job = job_of("grpo", tiny).edit(insert={"lost": After("reward", Lost())})
    with pytest.raises(Ended):
        train(job, prompts_file, tmp_path, checkpoint_every=1)
    assert described(tmp_path)["status"] == "interrupted"
    assert "the judge was terminated" in caplog.text


# ---- reporters


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (lambda: Terminal(), None),
        (lambda: "Terminal", None),
        (lambda: None, None),
        (lambda: iter([Terminal()]), None),
        (lambda: ["Terminal"], ("end", "node", "start", "step", "validation")),
        (lambda: [Terminal], ()),
        (lambda: [Terminal(), None], ("end", "node", "start", "step", "validation")),
        (lambda: (io.StringIO(),), ("end", "node", "start", "step", "validation")),
    ],
)
def test_invalid_reporters_are_refused_before_a_folder_is_created(
    prompts_file: str, tmp_path: Path, make: Callable[[], Any], missing: tuple[str, ...] | None
) -> None:
    training = Training(
        job_of("grpo", "no such model"), PromptData(prompts_file), steps=1, prompts=2, folder=str(tmp_path / "run")
    )
    with raises("run.bad-reporter") as caught:
        training.run(make())
    assert caught.value.facts.get("missing") == missing
    assert not (tmp_path / "run").exists()


# ---- a state that only later cannot be saved


class FailsLater(Operator):
    """Has an int as its state, and after its second call a tuple, which JSON cannot represent."""

    seen = State(lambda self: 0)

    def __call__(self, token_level_scores: c.TokenLevelScores, metrics: Metrics = INJECTED) -> c.TokenLevelScores:
        self.seen.value = self.seen.value + 1 if self.seen.value == 0 else (1, 2)  # type: ignore[assignment]
        return token_level_scores


def test_an_unserializable_state_is_refused_after_its_step(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    job = job_of("grpo", tiny).edit(insert={"late": After("reward", FailsLater())})
    with pytest.raises(DataError, match=r"the state after step 2\['late\.seen'\] is a tuple"):
        train(job, prompts_file, tmp_path, steps=9, checkpoint_every=9)
    assert train(job, prompts_file, tmp_path / "unsaved", steps=3).metrics

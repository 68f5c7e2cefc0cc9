"""Deliveries (`delivery.py`, `reports.py`, `reported.py`, `reporter.py`): reporters neither end nor delay a run, and
trackers get each report once.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from flowrl import PromptData, Validation
from flowrl.run.reporting import delivery
from flowrl.run.reporting.reported import REPORTED
from flowrl.run.reporting.reporter import NOTHING, Given
from flowrl.run.reporting.reports import Reports
from tests.run.training.interrupted import STEPS, Stop, Stopper, jobs, run
from tests.support.errors import raises
from tests.support.jobs import job_of
from tests.support.runs import Recorder, described, train


class Old(Recorder):
    """A reporter with the methods of all reporters, in a thread."""

    in_loop = False


class Kept(Old):
    """A tracker that keeps what it gets."""

    def start(self, name: str, steps: int, folder: Path, done: int, last: Given = NOTHING) -> Given | None:  # type: ignore[override]
        self.last = last
        self._record("start", name, steps, folder, done)
        return None

    def rows(self, step: int, table: pa.Table) -> None:
        self._record("rows", step)

    def alarm(self, alarm: Any) -> None:
        self._record("alarm", alarm.step)

    def got(self, call: str) -> list[int]:
        return [step for name, step, *_ in self.calls if name == call]


class Fails(Kept):
    """Cannot take some steps."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.steps = steps

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step in self.steps:
            raise ConnectionError("no route to the tracker")
        super().step(step, metrics)


def tell(folder: Path, reporter: Any, steps: range, resumes: bool = True) -> None:
    """Report steps as a run does."""
    reports = Reports([reporter], folder, resumes)
    with reports.started("grpo", 100, steps.start - 1):
        for step in steps:
            reports.step(step, {"step": step, "reward/mean": 0.5, "timing/step": 1.0})


def entered(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / REPORTED).read_text())[name]
    return found


# ---- a run


@pytest.mark.parametrize(
    ("cls", "fail_at"), [(Old, "step"), *((Kept, at) for at in ("start", "node", "step", "validation", "end"))]
)
def test_a_failing_reporter_does_not_end_the_run(
    tiny: str, prompts_file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, cls: type[Old], fail_at: str
) -> None:
    failing, other = cls(fail_at), Old()
    validation = Validation(PromptData(prompts_file), every=1)
    train(job_of("grpo", tiny), prompts_file, tmp_path, [failing, other], steps=1, validation=validation)
    assert described(tmp_path)["status"] == "finished"
    assert f"{cls.__name__} fails" in caplog.text and f"the reporter fails at {fail_at}" in caplog.text
    assert failing.count("end") == (fail_at != "start")
    assert (other.count("step"), other.count("validation"), other.count("end")) == (1, 2, 1)


def test_a_reporter_in_the_loop_may_end_the_run(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    other = Old()
    with pytest.raises(RuntimeError, match="fails at step"):
        train(job_of("grpo", tiny), prompts_file, tmp_path, [other, Recorder("step")])
    assert other.calls[-1] == ("end", None) and described(tmp_path)["status"] == "failed"


@pytest.mark.runs
def test_a_resumed_run_reports_each_step_once(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    """Step 3 is run twice: the checkpoint is of step 2. What has no `last` gets it twice, as before."""
    first, second, old = Kept(), Kept(), Old()
    with pytest.raises(Stop):
        run(jobs("grpo", tiny), prompts_file, tmp_path, [first, Stopper(3, "sync")])
    run(jobs("grpo", tiny), prompts_file, tmp_path, [second, old], resume=True)
    assert first.got("step") + second.got("step") == [*range(1, STEPS + 1)]
    assert first.got("rows") + second.got("rows") == [*range(1, STEPS + 1)]
    assert first.got("validation") + second.got("validation") == [0, 3, 6]
    assert old.calls[0][-1] == 2 and [call[1] for call in old.calls if call[0] == "step"] == [3, 4, 5, 6]
    assert second.last.run == first.last.run and second.last.last["step"] == 3


@pytest.mark.runs
def test_a_tracker_that_joins_later_gets_the_earlier_steps(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    joins = Kept()
    with pytest.raises(Stop):
        run(jobs("grpo", tiny), prompts_file, tmp_path, [Stopper(3, "sync")])
    run(jobs("grpo", tiny), prompts_file, tmp_path, [joins], resume=True)
    assert joins.got("step") == joins.got("rows") == [*range(1, STEPS + 1)] and joins.got("validation") == [0, 3, 6]


@pytest.mark.parametrize("fail_at", ["start", "step", "end"])
def test_every_started_reporter_is_ended_once(tiny: str, prompts_file: str, tmp_path: Path, fail_at: str) -> None:
    first, second, third = Recorder(), Recorder(fail_at), Recorder()
    with pytest.raises(RuntimeError, match=f"fails at {fail_at}"):
        train(job_of("grpo", tiny), prompts_file, tmp_path, [first, second, third], steps=1)
    assert first.count("end") == 1
    assert second.count("end") == (fail_at != "start")
    assert third.count("start") == third.count("end") == (fail_at != "start")
    assert described(tmp_path)["status"] == "failed"


# ---- reports


def test_a_slow_reporter_does_not_delay_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets what fits into its queue; the rest is counted, and written down for later."""
    monkeypatch.setattr(delivery, "WAITING", 4)
    taken, released = threading.Event(), threading.Event()

    class Slow(Kept):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            taken.set()
            released.wait(60)
            super().step(step, metrics)

    slow = Slow()
    reports = Reports([slow], tmp_path, False)
    with reports.started("grpo", 100, 0):
        for step in range(1, 21):
            reports.step(step, {"step": step, "timing/step": 1.0})
            assert taken.wait(60)  # the first one, so that the queue is empty again
        released.set()
    assert slow.got("step") == [1, 2, 3, 4, 5]
    assert "Slow is too slow: 4 reports wait" in caplog.text
    assert "Slow did not get 15 reports of this run" in caplog.text
    assert entered(tmp_path, "Slow")["last"] == {"step": 20}
    assert entered(tmp_path, "Slow")["lost"] == {"step": [*range(6, 21)]}


def test_the_end_of_a_run_does_not_wait_for_a_reporter_that_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "PATIENCE", 0.01)
    released = threading.Event()

    class Hangs(Kept):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            released.wait(60)

    tell(tmp_path, Hangs(), range(1, 4))
    released.set()
    assert "Hangs did not finish within" in caplog.text


def test_lost_steps_are_logged_at_once_and_at_the_end_and_sent_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tell(tmp_path, Fails(2, 3), range(1, 6))
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert ["no route" in text for text in warnings] == [True, False]  # once for two failures in a row
    assert "did not get 2 reports" in warnings[1] and str(tmp_path) in warnings[1]
    assert entered(tmp_path, "Fails")["lost"] == {"step": [2, 3]}
    again = Fails()
    tell(tmp_path, again, range(1, 7))
    assert again.got("step") == [2, 3, 6]
    assert entered(tmp_path, "Fails")["lost"] == {}


def test_a_tracker_sets_what_it_is_given(tmp_path: Path) -> None:
    """It may have lost what it was given, for example in a kill."""

    class Lost(Kept):
        def start(self, *arguments: Any, last: Given = NOTHING) -> Given:
            super().start(*arguments, last=last)
            return Given(last.run, {"step": 2})

    tell(tmp_path, lost := Lost(), range(1, 4))
    assert lost.got("step") == [3]


def test_another_run_in_the_folder_begins_anew(tmp_path: Path) -> None:
    tell(tmp_path, first := Kept(), range(1, 4))
    tell(tmp_path, second := Kept(), range(1, 4), resumes=False)
    assert second.got("step") == [1, 2, 3] and second.last.run != first.last.run


def test_reporters_of_one_class_are_numbered(tmp_path: Path) -> None:
    reports = Reports([Kept(), Kept()], tmp_path, False)
    with reports.started("grpo", 1, 0):
        pass
    assert {*json.loads((tmp_path / REPORTED).read_text())} == {"Kept", "Kept-2"}


def test_rows_and_alarms_reach_only_reporters_that_take_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, kept = Old(), Kept()
    reports = Reports([old, kept], tmp_path, False)
    with reports.started("grpo", 1, 0):
        reports.rows(1, pa.table({"step": [1]}))
        reports.alarm(SimpleNamespace(step=1, rule="KL", address="run@1", message="0.3"))
    assert kept.got("rows") == kept.got("alarm") == [1]
    assert [call[0] for call in old.calls] == ["start", "end"] and not caplog.text


def test_a_damaged_record_of_what_was_reported_is_refused(tmp_path: Path) -> None:
    (tmp_path / REPORTED).write_text("[]")
    with raises("run.damaged", path=str(tmp_path / REPORTED)):
        Reports([Kept()], tmp_path, True)

"""`WaitRecorder`: overlapping waits are merged, and short ones are dropped."""

from __future__ import annotations

import pytest

from flowrl.data import waits
from flowrl.data.waits import Wait, WaitRecorder


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(waits, "time", made)
    return made


def recorded(clock: Clock, *changes: tuple[float, int]) -> WaitRecorder:
    """A recorder of waits that begin (1) and end (-1) at these times."""
    recorder = WaitRecorder("environments")
    for clock.now, change in changes:
        (recorder.begin if change == 1 else recorder.end)()
    return recorder


def test_overlapping_waits_are_merged(clock: Clock) -> None:
    found = recorded(clock, (1.0, 1), (2.0, 1), (3.0, -1), (4.0, -1), (6.0, 1), (7.0, -1), (8.0, 1))
    assert found.recorded() == [
        Wait("environments", 1.0, 4.0),
        Wait("environments", 6.0, 7.0),
    ]  # the last one is not over
    assert found.seconds == 4.0


def test_short_waits_are_dropped_and_short_gaps_merged(clock: Clock) -> None:
    found = recorded(clock, (1.0, 1), (1.0005, -1), (2.0, 1), (3.0, -1), (3.0005, 1), (4.0, -1))
    assert found.recorded() == [Wait("environments", 2.0, 4.0)]
    assert found.seconds == pytest.approx(2.0)

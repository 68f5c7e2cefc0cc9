"""Times at which processes that slow each other end, computed by hand."""

from __future__ import annotations

import pytest

from flowrl.run.prediction.measured.clock import SharedClock


def ends(clock: SharedClock[str]) -> list[tuple[str, float, float]]:
    """The name, end and seconds of every job."""
    found = []
    while len(found) < 2:
        found += [(job, clock.now, pytest.approx(seconds)) for job, seconds in clock.wait()]
    return found


def started(contention: float, slowed: bool = True) -> SharedClock[str]:
    clock = SharedClock[str](contention)
    clock.start("short", 0.0, [2.0], slowed=True)
    clock.start("long", 0.0, [3.0], slowed=slowed)
    return clock


class TestSharedClock:
    def test_without_contention_jobs_take_their_own_seconds(self) -> None:
        assert ends(started(1.0)) == [("short", pytest.approx(2.0), 2.0), ("long", pytest.approx(3.0), 3.0)]

    def test_jobs_slow_each_other_only_while_both_compute(self) -> None:
        # at half speed until 4, when two of the long one's three seconds are done; then one alone
        assert ends(started(2.0)) == [("short", pytest.approx(4.0), 4.0), ("long", pytest.approx(5.0), 5.0)]

    def test_a_job_without_an_engine_neither_slows_nor_is_slowed(self) -> None:
        found = ends(started(2.0, slowed=False))
        assert found == [("short", pytest.approx(2.0), 2.0), ("long", pytest.approx(3.0), 3.0)]

    def test_three_processes_slow_each_other_more(self) -> None:
        clock = SharedClock[str](1.5)
        clock.start("three", 0.0, [1.0, 1.0, 1.0], slowed=True)
        assert clock.wait() == [("three", pytest.approx(2.0))]

    def test_ranks_that_end_early_no_longer_slow_the_others(self) -> None:
        clock = SharedClock[str](1.5)
        clock.start("two ranks", 0.0, [1.0, 2.0], slowed=True)
        assert clock.wait() == [("two ranks", pytest.approx(1.5 + 1.0))]

    def test_a_job_that_starts_later_slows_from_then_on(self) -> None:
        clock = SharedClock[str](2.0)
        clock.start("first", 0.0, [2.0], slowed=True)
        clock.start("second", 1.0, [5.0], slowed=True)
        assert clock.wait() == [("first", pytest.approx(1.0 + 2.0))]
        assert clock.wait() == [("second", pytest.approx(2.0 + 4.0))]

    def test_time_that_passes_counts_as_work(self) -> None:
        clock = SharedClock[str](2.0)
        clock.start("one", 0.0, [2.0], slowed=True)
        clock.spend(3.0)
        assert clock.now == 3.0
        assert clock.wait() == [("one", pytest.approx(2.0))]
        assert clock.now == 3.0

    def test_a_job_without_work_ends_at_once(self) -> None:
        clock = SharedClock[str](2.0)
        clock.start("nothing", 0.5, [0.0], slowed=True)
        assert (clock.wait(), clock.now) == ([("nothing", 0.0)], 0.5)

    def test_a_clock_that_is_late_still_reaches_every_end(self) -> None:
        clock = SharedClock[int](1.3)
        clock.now = 40_000.0
        for number in range(50):
            clock.start(number, clock.now + 0.1 * number, [0.1 + 0.37 * number, 0.3], slowed=True)
        ended = 0
        while ended < 50:
            ended += len(clock.wait())

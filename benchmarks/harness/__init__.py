"""What the benchmarks share: medians of interleaved calls, and a table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def medians(
    cases: Mapping[str, Callable[[], object]],
    seconds: float,
    least: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """The median duration of a call of each case, in seconds.

    The cases take turns, so that what else the machine does falls on all of them alike. The first round, in which
    caches fill, does not count.

    Args:
        cases: functions of no arguments, by name.
        seconds: rounds are begun until so much time is gone.
        least: there are at least so many rounds.
        clock: what a call is timed by; `time.process_time` leaves out what other processes do.
    """
    durations: dict[str, list[float]] = {name: [] for name in cases}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds <= least or time.perf_counter() < end:
        for name, call in cases.items():
            started = clock()
            call()
            durations[name].append(clock() - started)
        rounds += 1
    return {name: statistics.median(of_case[1:]) for name, of_case in durations.items()}


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under heads; the first column to the left, the numbers to the right."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    print(f"\n{title}")
    for row in (heads, ["-" * width for width in widths], *rows):
        print(
            "  "
            + "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        )

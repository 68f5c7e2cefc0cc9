"""Medians of interleaved calls, and a table."""

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
    """The median duration per call of each case, in seconds.

    Cases alternate, so that other load on the machine affects all of them. The first round, which fills caches, does
    not count.

    Args:
        cases: functions without arguments, by name.
        seconds: start rounds until this much time has passed.
        least: fewest rounds.
        clock: clock for a call; `time.process_time` excludes other processes.
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
    """Print rows under heads; the first column is left-aligned, numbers are right-aligned."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    print(f"\n{title}")
    for row in (heads, ["-" * width for width in widths], *rows):
        print(
            "  "
            + "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        )

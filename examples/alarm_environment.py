"""The environment of `alarm.py`: a service, window by window, that may be on its way to an incident.

In the last three windows before an incident, errors and latency rise together. In others either may be high alone:
after a deploy there are errors for a moment, and a batch job makes everything slow.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from imitation import Conversation, imitate
from rows import write_rows

WINDOWS = 6
HORIZON = 3  # windows before an incident in which it can be told
MISS, FALSE_ALARM = -1.0, -0.5
WORDS = ("errors=", " latency=", " cpu=", "wait", "alarm")


def worth(incident: int | None, alarm: int | None) -> float:
    """What a stream was worth: the more for an alarm the earlier it is, within `HORIZON`.

    Args:
        incident: the window in which it strikes, from 1; None is none.
        alarm: the window after which the alarm was raised; None is none.
    """
    if alarm is None:
        return 0.0 if incident is None else MISS
    if incident is None or incident - alarm > HORIZON:
        return FALSE_ALARM
    return (incident - alarm) / HORIZON


def stream(numbers: random.Random) -> tuple[list[str], int | None]:
    """What is seen, window by window, and the window in which an incident strikes, which is not seen any more."""
    incident = numbers.randint(HORIZON + 2, WINDOWS + 1) if numbers.random() < 0.5 else None
    deploy, batch = numbers.randint(1, WINDOWS), numbers.randint(1, WINDOWS - 1)
    windows = []
    for window in range(1, incident or WINDOWS + 1):
        errors, latency, cpu = numbers.randint(0, 3), numbers.randint(1, 4), numbers.randint(2, 6)
        if window == deploy:
            errors = numbers.randint(5, 9)
        if window in (batch, batch + 1):
            latency, cpu = numbers.randint(5, 9), numbers.randint(7, 9)
        if incident is not None and (near := window - incident + HORIZON) >= 0:
            errors, latency = (min(9, numbers.randint(3, 5) + near) for _ in range(2))
        windows.append(f"errors={errors} latency={latency} cpu={cpu}")
    return windows, incident


def errors_of(window: str) -> int:
    """How many errors a window shows."""
    return int(window[len("errors=")])


def expected(rule: Callable[[Sequence[str]], float], streams: Sequence[tuple[list[str], int | None]]) -> float:
    """What streams are worth on average to somebody who goes by a rule: how likely an alarm is, by the windows seen."""
    total = 0.0
    for windows, incident in streams:
        waited = 1.0  # how likely nothing was said so far
        for window in range(1, len(windows) + 1):
            likely = rule(windows[:window])
            total += waited * likely * worth(incident, window)
            waited *= 1 - likely
        total += waited * worth(incident, None)
    return total / len(streams)


RULES: dict[str, Callable[[Sequence[str]], float]] = {
    "never alarms": lambda seen: 0.0,
    "always alarms": lambda seen: 1.0,
    "alarms at random": lambda seen: 0.3,  # the best of chances
    "alarms at four errors": lambda seen: float(errors_of(seen[-1]) >= 4),  # the best of thresholds
}


def write_data(folder: Path) -> tuple[Path, Path]:
    """Streams to train on, and others: the paths of two JSONL files."""
    return write_rows(folder, _row)


def _row(numbers: random.Random) -> dict[str, Any]:
    windows, incident = stream(numbers)
    return {
        "prompt": [{"role": "user", "content": windows[0]}],
        "data_source": "alarm",
        "reward_model": {"ground_truth": {"incident": incident}},
        "extra_info": {"windows": windows},
    }


def _demonstration(numbers: random.Random) -> Conversation:
    """How somebody watched who is often frightened where errors or latency are high, and not much more often where
    both are, so that half of what is coming is overlooked."""
    said = []
    for window in stream(numbers)[0]:
        errors, latency = map(int, re.findall(r"[sy]=(\d)", window))
        likely = 0.5 if min(errors, latency) >= 4 else 0.3 if max(errors, latency) >= 5 else 0.05
        answer = "alarm" if numbers.random() < likely else "wait"
        said += [{"role": "user", "content": window}, {"role": "assistant", "content": answer}]
        if answer == "alarm":
            break
    return said


def build(folder: Path, seed: int = 0, steps: int = 200, rows: int = 64) -> Path:
    """A model that imitates demonstrations, as a Hugging Face folder."""
    return imitate(folder, WORDS, _demonstration, seed, steps, rows)

"""The environment of `alarm.py`: metrics of a service, window by window, that may end in an incident.

In the last three windows before an incident, errors and latency rise together. In other windows only one of them is
high: a deploy causes errors for one window, and a batch job raises latency and CPU for two.
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
HORIZON = 3  # windows before an incident in which it can be predicted
MISS, FALSE_ALARM = -1.0, -0.5
WORDS = ("errors=", " latency=", " cpu=", "wait", "alarm")


def worth(incident: int | None, alarm: int | None) -> float:
    """Score of a stream: the earlier the alarm within `HORIZON`, the higher.

    Args:
        incident: window in which it strikes, from 1; None if there is none.
        alarm: window after which the alarm was raised; None if it was not.
    """
    if alarm is None:
        return 0.0 if incident is None else MISS
    if incident is None or incident - alarm > HORIZON:
        return FALSE_ALARM
    return (incident - alarm) / HORIZON


def stream(numbers: random.Random) -> tuple[list[str], int | None]:
    """The visible windows, and the window in which an incident strikes, which is not visible."""
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
    """Number of errors in a window."""
    return int(window[len("errors=")])


def expected(rule: Callable[[Sequence[str]], float], streams: Sequence[tuple[list[str], int | None]]) -> float:
    """Mean score of a rule, which maps the windows so far to the probability of an alarm."""
    total = 0.0
    for windows, incident in streams:
        waited = 1.0  # probability of no alarm so far
        for window in range(1, len(windows) + 1):
            likely = rule(windows[:window])
            total += waited * likely * worth(incident, window)
            waited *= 1 - likely
        total += waited * worth(incident, None)
    return total / len(streams)


RULES: dict[str, Callable[[Sequence[str]], float]] = {
    "never alarms": lambda seen: 0.0,
    "always alarms": lambda seen: 1.0,
    "alarms at random": lambda seen: 0.3,  # the best constant probability
    "alarms at four errors": lambda seen: float(errors_of(seen[-1]) >= 4),  # the best threshold
}


def write_data(folder: Path) -> tuple[Path, Path]:
    """Write training and held-out streams; return the paths of both JSONL files."""
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
    """A weak operator: raises the alarm with probability 0.3 if errors or latency are high, and only 0.5 if both are,
    so it misses half of the incidents."""
    messages = []
    for window in stream(numbers)[0]:
        errors, latency = map(int, re.findall(r"[sy]=(\d)", window))
        likely = 0.5 if min(errors, latency) >= 4 else 0.3 if max(errors, latency) >= 5 else 0.05
        answer = "alarm" if numbers.random() < likely else "wait"
        messages += [{"role": "user", "content": window}, {"role": "assistant", "content": answer}]
        if answer == "alarm":
            break
    return messages


def build(folder: Path, seed: int = 0, steps: int = 200, rows: int = 64) -> Path:
    """Train a model to imitate demonstrations; write it as a Hugging Face folder."""
    return imitate(folder, WORDS, _demonstration, seed, steps, rows)

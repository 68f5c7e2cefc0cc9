"""Alarms of a run folder: its steps as the rules of alarms read them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from flowrl.errors import DataError
from flowrl.look.run_files import RunFiles
from flowrl.run.alarms.alarms import Alarm, judge
from flowrl.run.alarms.defaults import DEFAULT
from flowrl.run.alarms.history import History
from flowrl.run.alarms.rule import Rule

METRICS = "metrics.jsonl"


def judge_run(run: RunFiles, rules: Sequence[Rule] = DEFAULT) -> list[Alarm]:
    """The alarms that rules fire in the steps of a run: what the run itself would have reported with them."""
    return judge(rules, str(run.path), histories(run))


def histories(run: RunFiles) -> Iterator[History]:
    """What rules read after each step of a run."""
    lines = [{k: math.nan if v is None else v for k, v in line.items()} for line in run.records(METRICS)]
    steps, validations = ([line for line in lines if ("timing/step" in line) is kind] for kind in (True, False))
    try:
        rows = run.rows()
        step_of_row = rows["step"].to_numpy()  # ascending
    except DataError:  # an old folder: its metrics can be judged
        rows = None
    description = run.description
    for count, step in enumerate(steps, 1):
        number, newest = step["step"], count == len(steps)
        first, end = (0, 0) if rows is None else np.searchsorted(step_of_row, [number, number + 1]).tolist()
        yield History(
            steps[:count],
            [one for one in validations if one["step"] <= number],
            None if rows is None else rows[first:end],
            description.get("metrics", {}),
            {"stopped": description.get("recorded", {}).get("stopped"), "open": _open(run)} if newest else {},
        )


def _open(run: RunFiles) -> tuple[str | None, float]:
    """The node that a run in progress is in, and for how many seconds."""
    spans = run.spans
    if run.status != "running" or "open" not in spans.column_names or spans["open"][-1].as_py() is None:
        return None, 0.0
    return spans["open"][-1].as_py(), time.time() - spans["time"][-1].as_py()

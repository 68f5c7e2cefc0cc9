"""`Comparison`: what two or more configurations differ in, and what their runs show; see `compare`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from flowrl.core.graphs.graph import Graph
from flowrl.edits.diff import Diff, diff
from flowrl.errors import FlowrlError
from flowrl.look.comparing.paired import Paired, pair
from flowrl.look.recorded_run import RecordedRun

AXES = {"step": "step", "rows": "total/rows", "tokens": "total/tokens", "seconds": "total/seconds"}
NEWEST = 5
"""Steps whose mean is the final value of a metric."""
ENOUGH = 3
"""Runs a side from which an interval is given."""
_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""97.5 % quantiles of Student's t, by degrees of freedom from 1."""


@dataclass(frozen=True)
class Side:
    """The runs of one configuration, which differ in nothing but the seed.

    Args:
        name: ``A``, ``B``, …
        runs: its runs.
        parameters: every parameter of graph, backends, data and training, by its dotted name.
    """

    name: str
    runs: Sequence[RecordedRun]
    parameters: Mapping[str, Any]

    def final(self, metric: str) -> list[float]:
        """The mean of a metric over the `NEWEST` steps of each run that has it."""
        tables = [
            table[metric].drop_null().to_pylist() for run in self.runs if metric in (table := run.metrics).column_names
        ]
        return [statistics.fmean(values[-NEWEST:]) for values in tables if values]

    def seconds(self) -> dict[str, float]:
        """The median seconds of each node, over all steps of all runs."""
        found: dict[str, list[float]] = {}
        for run in self.runs:
            table = run.metrics
            for name in (name for name in table.column_names if name.startswith("timing/")):
                found.setdefault(name.removeprefix("timing/"), []).extend(table[name].drop_null().to_pylist())
        return {node: statistics.median(values) for node, values in found.items() if values}


@dataclass(frozen=True)
class Comparison:
    """Runs by configuration.

    Args:
        sides: the configurations, in the order of their first runs.
    """

    sides: Sequence[Side]

    @cached_property
    def differences(self) -> dict[str, tuple[Any, ...]]:
        """The parameters in which the sides differ, by dotted name, with the value of each side."""
        names = dict.fromkeys(name for side in self.sides for name in side.parameters)
        values = {name: tuple(side.parameters.get(name) for side in self.sides) for name in names}
        return {name: found for name, found in values.items() if any(one != found[0] for one in found)}

    def is_of_graph(self, name: str) -> bool:
        """Whether a parameter is a wire, or of a node or role that a side lacks, which the diff of the graphs shows."""
        owner = f"{name.partition('.')[0]}.type"
        having = [owner in side.parameters for side in self.sides]
        return (any(having) and not all(having)) or ".inputs." in name

    @cached_property
    def graphs(self) -> Diff | None:
        """The diff of the graphs of the first two sides; None if a graph cannot be read without importing its code."""
        if len(self.sides) < 2:
            return None
        try:
            before, after = (side.runs[0].graph for side in self.sides[:2])
        except FlowrlError:
            return None
        return diff(before, after) if isinstance(before, Graph) and isinstance(after, Graph) else None

    def curves(self, metric: str, x: str = "step") -> pa.Table:
        """A metric by side and step: mean, lowest and highest over the runs.

        Args:
            x: ``"step"``, or the mean of ``"rows"``, ``"tokens"`` or ``"seconds"`` until the step.
        """
        found = []
        for side in self.sides:
            points: dict[int, list[tuple[float, float]]] = {}
            for run in side.runs:
                table = run.metrics
                if metric in table.column_names and AXES[x] in table.column_names:
                    columns = (table[name].to_pylist() for name in ("step", AXES[x], metric))
                    for step, place, value in zip(*columns, strict=True):
                        if value is not None and place is not None:
                            points.setdefault(step, []).append((place, value))
            for step, some in sorted(points.items()):
                values = [value for _, value in some]
                at = statistics.fmean(place for place, _ in some)
                numbers = {"mean": statistics.fmean(values), "low": min(values), "high": max(values)}
                found.append({"side": side.name, "step": step, x: at, **numbers, "runs": len(values)})
        return pa.Table.from_pylist(found)

    @cached_property
    def held_out(self) -> Paired | None:
        """The held-out responses of the first two sides, paired by prompt; None if they share no validation."""
        return pair(*(side.runs for side in self.sides[:2])) if len(self.sides) > 1 else None

    def interval(self, metric: str) -> tuple[float, float, float] | None:
        """The second side's final value minus the first's, with the 95 % interval (Welch); None below `ENOUGH` runs."""
        if len(self.sides) < 2:
            return None
        first, second = (side.final(metric) for side in self.sides[:2])
        if min(len(first), len(second)) < ENOUGH:
            return None
        errors = [statistics.variance(values) / len(values) for values in (first, second)]
        change, error = statistics.fmean(second) - statistics.fmean(first), math.sqrt(sum(errors))
        parts = (one**2 / (len(values) - 1) for one, values in zip(errors, (first, second), strict=True))
        freedom = sum(errors) ** 2 / (sum(parts) or math.inf) or 1.0
        width = error * _T[min(len(_T), max(1, math.floor(freedom))) - 1]
        return change, change - width, change + width

    @property
    def basis(self) -> str:
        """What the comparison can tell."""
        if len(self.sides) < 2:
            return "all runs have the same configuration: this shows how much seeds differ"
        fewest = min(len(side.runs) for side in self.sides)
        if fewest == 1:
            fewer = "one run a side" if len(self.sides[0].runs) == len(self.sides[-1].runs) else "a side of one run"
            return f"{fewer}: this compares two checkpoints, not two methods"
        if fewest < ENOUGH:
            return f"{fewest} runs a side: too few for an interval; run at least {ENOUGH} seeds of each configuration"
        return f"{fewest} runs a side or more: intervals are 95 %, over runs"

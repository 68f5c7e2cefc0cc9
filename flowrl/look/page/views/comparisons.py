"""All runs of the page against each other: what their configurations differ in, and what came of it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

from flowrl.draw.svg import svg
from flowrl.look.comparing.compare import compare
from flowrl.look.comparing.comparison import NEWEST, Comparison
from flowrl.look.comparing.paired import Paired
from flowrl.look.page.plain import as_text, prompt_text, short
from flowrl.look.page.watched import WatchedRun

METRICS = ("reward/mean", "kl/ref", "actor/entropy", "response_length/mean", "actor/grad_norm")
CHANGED = 50
"""The most prompts that are shown of those that changed sides."""


def comparison(runs: Sequence[WatchedRun]) -> dict[str, Any]:
    """The configurations, by the runs of each; tables; the diff of their graphs, drawn; and paired held-out answers."""
    found = compare([run.run for run in runs])
    names = {str(run.path): run.name for run in runs}
    columns = ["", *(side.name for side in found.sides)]
    diff = found.graphs
    drawn = diff is not None and bool(diff.added or diff.removed or diff.pruned or diff.renamed)
    parameters = [
        [name, *map(_text, values)]
        for name, values in found.differences.items()
        if not (drawn and found.is_of_graph(name))
    ]
    finals = _finals(found)
    alarms = [["alarms", *(sum(len(run.alarms) for run in side.runs) for side in found.sides)]]
    return {
        "basis": found.basis,
        "sides": [{"name": side.name, "runs": [names[str(run.path)] for run in side.runs]} for side in found.sides],
        "diff": svg(diff) if drawn and diff is not None else None,
        "tables": [
            {"title": "Parameters that differ", "columns": columns, "rows": parameters, "empty": "None."},
            {
                "title": f"Final values, means of {NEWEST} steps",
                "columns": [*columns, "difference (95 %)"][: len(finals[0]) if finals else None],
                "rows": finals,
                "empty": "No step is done.",
            },
            {"title": "Median seconds", "columns": columns, "rows": _seconds(found), "empty": "No step is done."},
            {"title": "Alarms", "columns": columns, "rows": alarms, "empty": ""},
        ],
        "held_out": None if found.held_out is None else _held_out(found.held_out, columns[1:3]),
    }


def _text(value: Any) -> str:
    """A parameter: classes of flowrl by their names, and of digests as much as tells them apart."""
    text = "none" if value is None else str(value)
    name = re.sub(r"^flowrl\.[\w.]+:(\w+)$", r"\1", text)
    return name[:12] if re.fullmatch("[0-9a-f]{32}", name) else name


def _finals(found: Comparison) -> list[list[Any]]:
    """The values of each side, and from enough runs the difference with its interval."""
    intervals = {metric: found.interval(metric) for metric in METRICS}
    rows = []
    for metric, interval in intervals.items():
        values = [side.final(metric) for side in found.sides]
        if any(values):
            row = [metric, *(short(statistics.fmean(some)) if some else None for some in values)]
            if any(intervals.values()):
                row.append("" if interval is None else "{:+.4g} ({:.4g} to {:.4g})".format(*interval))
            rows.append(row)
    return rows


def _seconds(found: Comparison) -> list[list[Any]]:
    seconds = [side.seconds() for side in found.sides]
    nodes = dict.fromkeys(node for side in seconds for node in sorted(side, key=lambda node: -side[node]))
    return [[node, *(short(side.get(node)) for side in seconds)] for node in nodes if node != "waiting_share"]


def _held_out(paired: Paired, sides: Sequence[str]) -> dict[str, Any]:
    first, second = sides
    alone = f" {paired.alone} prompts are of one side only and left out." if paired.alone else ""
    return {
        "text": f"{paired.validation}, {len(paired.pairs)} prompts, {first} after {paired.steps[0]} steps and {second} "
        f"after {paired.steps[1]}: {second} is better on {paired.better}, worse on {paired.worse}, equal on "
        f"{paired.equal}; sign test p = {paired.p:.3g}.{alone}",
        "count": len(paired.changed),
        "changed": [
            {
                "prompt": prompt_text(pair.prompt),
                "ground_truth": None if pair.ground_truth is None else as_text(pair.ground_truth),
                "scores": [short(pair.before), short(pair.after)],
                "responses": [text[:2000] for text in pair.responses],
            }
            for pair in paired.changed[:CHANGED]
        ],
    }

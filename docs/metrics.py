"""Write docs/reference/metrics.md, the page of all metrics, from docs/metrics.toml and the default alarms:
``python docs/metrics.py``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flowrl.run.alarms import DEFAULT, Above, Falls, Jump, Rule
from flowrl.run.alarms.row_rules import ConstantReward, GroupsAlike, OneComponent, Skips, Truncated
from flowrl.run.alarms.rules import FEWEST, WINDOW
from flowrl.run.alarms.run_rules import HeldOutFalls, Mismatch, NoRecording, NotFinite, NothingUpdated, Slow

HERE = Path(__file__).resolve().parent
PAGE = HERE / "reference" / "metrics.md"
HEAD = """# Metrics

A step of a run and each of its validations write one line of numbers to
[`metrics.jsonl`](files.md#metricsjsonl); reporters and `flowrl look` show the same numbers. A line has the metrics
that the nodes of its graph report. If two nodes report one name, the name of the node is in front:
`imitate/actor/pg_loss`. `log=` of a reward or a judge replaces the prefix `reward`.

Means are exact over ranks, micro-batches and mini-batches: numerators and denominators are summed before the division.
"Tokens" are sampled tokens on `response_mask`. *Healthy* is what a run that learns shows; an alarm says when a run
[warns](../how-to/alarms.md) by default. An empty cell means that no value is better than another. NaN or
infinity of any metric fires `NotFinite`.

<!-- written by docs/metrics.py; the alarms are those of flowrl/run/alarms/defaults.py -->
"""


def metrics() -> dict[str, dict[str, Mapping[str, Any]]]:
    """The entries by group and name."""
    return tomllib.loads((HERE / "metrics.toml").read_text(encoding="utf-8"))


def alarms() -> Iterator[tuple[str, str]]:
    """The end of the name of a metric, and when one of the default rules fires for it."""
    for rule in DEFAULT:
        yield from ((name, text) for names, text in [_worded(rule)] for name in names)


def _worded(rule: Rule) -> tuple[tuple[str, ...], str]:
    """What a rule is about, and when it fires."""
    highest = f"the highest of the {WINDOW} steps before"
    match rule:
        case Above(metric, limit, times, early):
            more = "" if times is None else f" and {times:g} times {highest}"
            return (metric,), f"above {limit:g}{more}" + ("" if early is None else f"; {early:g} in the first {FEWEST}")
        case Jump(metric, times, "recent", floor):
            return (metric,), f"above {floor:g} and {times:g} times {highest}"
        case Jump(metric, times, "start", floor):
            return (metric,), f"above {floor:g} and {times:g} times the first step"
        case Falls(metric, to, of, steps, spreads):
            what = "the first step" if of == "start" else "its best"
            more = (f" for {steps} steps" if steps > 1 else "") + (f", by {spreads:g} `reward/std`" if spreads else "")
            return (metric,), f"below {to:g} of {what}{more}"
        case NothingUpdated(steps):
            return ("lr", "grad_norm", "kl/ref"), f"exactly 0 in all steps so far, at least {steps}"
        case ConstantReward(steps):
            return ("reward/min", "reward/max"), f"the same for all rows of all steps, at least {steps}"
        case GroupsAlike(share, steps):
            text = f"above {share:g} in sum for {steps} steps, and the reward has not risen"
            return ("groups/all_right", "groups/all_wrong"), text
        case Skips(steps=steps):
            return ("skipped",), f"1 in {steps} steps in a row"
        case Truncated(share):
            return ("response_length/clip_ratio",), f"above {share:g}, and truncated rows score at most a tenth"
        case OneComponent(share):
            return ("reward/<key>",), f"one makes more than {share:g} of the gains, while another falls or stays low"
        case HeldOutFalls(to, validations):
            text = f"`reward/mean` below {to:g} of its best while the training reward rises, from {validations} on"
            return ("<validation>/<metric>",), text
        case Mismatch():
            return ("rollout/logp_diff_mean",), "above `rollout/alarm_above`"
        case Slow(times, seconds):
            return ("timing/<node>",), f"above {seconds:g} s and {times:g} times the median before"
        case NotFinite() | NoRecording():
            return (), "they are about no single metric"
    raise ValueError(f"docs/metrics.py has no words for {rule}")


def fires(name: str) -> list[str]:
    """When alarms fire for a metric of steps."""
    return [text for end, text in alarms() if not name.startswith("eval/") and f"/{name}".endswith(f"/{end}")]


def _healthy(names: list[str], entry: Mapping[str, Any]) -> str:
    found = []
    if "range" in entry:
        low, high = entry["range"]
        found.append(f"{low:g}" if low == high else f"{low:g} to {high:g}")
    found += [entry["healthy"]] if "healthy" in entry else []
    fired = fires(names[0])
    return "; ".join(found) + (f"{'. ' if found else ''}Alarm: {'; or '.join(fired)}" if fired else "")


def page() -> str:
    """The page as Markdown."""
    parts = [HEAD]
    for group, entries in metrics().items():
        rows = [
            f"## {group}",
            "",
            "<!-- from docs/metrics.toml -->",
            "",
            "| metric | formula | unit | healthy |",
            "|---|---|---|---|",
        ]
        for key, entry in entries.items():
            names = key.split()
            cells = ", ".join(f"`{name}`" for name in names), entry["formula"], entry["unit"], _healthy(names, entry)
            rows.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""The state of a run as text, for a terminal over ssh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from flowrl.draw.notebook import visible
from flowrl.look.page.api import Api

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 40
_HEADLINES = ("reward/mean", "kl/ref", "actor/entropy", "response_length/mean", "actor/grad_norm")


def shown(api: Api, name: str) -> Group:
    """Progress, curves, nodes, alarms and some rows of the latest step."""
    run = next(one for one in api.answer("runs", {}) if one["name"] == name)
    state, metrics = api.answer("now", {"run": name}), api.answer("metrics", {"run": name})
    title = Text(f"{printable(name)}  {run['status']}", style="bold")
    title.append(f"  step {state['done']} of {state['planned'] or '?'}", style="not bold")
    if state["step_seconds"]:
        title.append(f", {state['step_seconds']:.3g} s a step", style="not bold")
    if run["status"] == "running" and state["left"]:
        title.append(f", {state['left']:.0f} s left", style="not bold")
    parts: list[Any] = [title]
    parts += [Text(printable(problem), style="red") for problem in (run["error"], *run["damage"]) if problem]
    return Group(*parts, _curves(metrics), _nodes(state), *_alarms(state), _rows(state))


def printable(text: str) -> str:
    """Text on one line without terminal control: control characters are escaped as in Python."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def spark(values: Sequence[float | None]) -> str:
    """A curve in one line of text."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    every = max(1, len(known) / _WIDTH)
    points = [known[int(i * every)] for i in range(min(len(known), _WIDTH))]
    return "".join(_BLOCKS[round(7 * (value - low) / (high - low))] if high > low else _BLOCKS[0] for value in points)


def _curves(metrics: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    columns = {**metrics["training"]["columns"]}
    held = [key for key in metrics["validation"]["columns"] if key.endswith("reward/mean")]
    for key in [*held, *(key for key in _HEADLINES if key in columns)]:
        values = (metrics["validation"]["columns"] if key in held else columns)[key]
        last = next((value for value in reversed(values) if value is not None), None)
        table.add_row(Text(printable(key)), Text(spark(values), style="blue"), Text(_number(last), justify="right"))
    return table


def _nodes(state: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("node", "rows", "seconds", "share", "number"):
        table.add_column(heading, justify="left" if heading in ("node", "number") else "right")
    for name, node in state["nodes"].items():
        style = "bold" if node.get("open") else ""
        share = "" if node.get("share") is None else f"{node['share']:.0%}"
        value = f"{printable(node['key'])} {_number(node['value'])}" if node.get("key") else ""
        cells = (printable(name), str(node.get("rows") or ""), _number(node.get("seconds")), share, value)
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def _alarms(state: dict[str, Any]) -> list[Text]:
    return [
        Text(f"step {alarm.get('step')}  {printable(str(alarm.get('message')))}", style="red")
        for alarm in state["alarms"][:6]
    ]


def _rows(state: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim", title_justify="left")
    table.add_column("score", justify="right")
    table.add_column("prompt", no_wrap=True, max_width=30)
    table.add_column("response", no_wrap=True, overflow="ellipsis")
    for row in state["newest"][:8]:
        table.add_row(_number(row["score"]), Text(printable(row["prompt"])), Text(printable(row["response"])))
    return table


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

"""The page as one HTML file with its data inside, which needs neither a server nor a network."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import random
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from flowrl.errors import FlowrlError
from flowrl.look.page.api import Api
from flowrl.look.page.plain import dumps
from flowrl.look.page.server import STATIC, files
from flowrl.look.page.views.prompts import TRAINING

BUDGET = 20_000_000
"""The most bytes of a file."""
STEPS, ROWS, PROMPTS, TRAINED = 40, 32, 200, 20
"""The most steps of a run with rows and times, rows of a step with their tokens, held-out prompts with their answers,
and prompts of the training."""
MODULE = re.compile(r'(?<=from ")\./(?=[\w/-]+\.js")')
Asked = dict[str, Any]


def export(api: Api, rows: bool = True, budget: int = BUDGET) -> tuple[str, str]:
    """The HTML document, and what it leaves out.

    Args:
        rows: include prompts and responses; otherwise only numbers.
        budget: the most bytes.
    """
    assets = _assets()
    room = budget - sum(map(len, assets)) - 4096
    answers: list[tuple[str, Asked, Any]] = []
    steps, left = dict[str, list[int]](), list[str]()
    size = 0
    for view, asked, answer in _answers(api, rows, steps):
        size += 4 * len(zlib.compress(dumps([view, asked, answer]), 6)) // 3 + 4  # base64; together they are smaller
        if size > room:
            left.append(f"it stops at {budget / 1e6:.0f} MB")
            break
        answers.append((view, asked, answer))
    note = _note(api, answers, steps, rows, left)
    included = {
        name: sorted({a["step"] for v, a, _ in answers if v == "now" and a["run"] == name and "step" in a})
        for name in api.named
    }
    data = dumps({"answers": answers, "steps": included, "note": note})
    return _document(*assets, base64.b64encode(gzip.compress(data, 9, mtime=0)).decode(), ", ".join(api.named)), note


def _answers(api: Api, rows: bool, steps: dict[str, list[int]]) -> Iterator[tuple[str, Asked, Any]]:
    """All answers, the most important first."""
    names = list(api.named)
    yield from _asked(api, [("runs", {})])
    for view, asked, answer in _asked(api, [("compare", {})] if len(names) > 1 else []):
        held_out = answer["held_out"] and {**answer["held_out"], "changed": []}
        yield view, asked, answer if rows else {**answer, "held_out": held_out}
    for name in names:
        views: list[str] = ["graph", "metrics", "run", *(["prompts"] if rows else [])]
        yield from _asked(api, [(view, {"run": name}) for view in views])
        yield from _asked(api, [("now", {"run": name})], rows)
        steps[name] = list(islice(_important(api, name), STEPS))
    for name, step in _in_turn({name: [(name, step) for step in steps[name]] for name in names}):
        at = {"run": name, "step": step}
        yield from _asked(api, [("now", at), ("time", at)], rows)
        for view, asked, table in _asked(api, [("rows", at)]) if rows else ():
            yield view, asked, table
            yield from _asked(api, [("row", {**at, "row": row}) for row in _rows(api, at, table)])
    for name in names if rows else ():
        yield from _prompts(api, name)


def _asked(api: Api, asked: Iterable[tuple[str, Asked]], rows: bool = True) -> Iterator[tuple[str, Asked, Any]]:
    """Answers; a view that has none here is left out, as it is on the live page."""
    for view, parameters in asked:
        try:
            answer = api.answer(view, {name: str(value) for name, value in parameters.items()})
        except (FlowrlError, LookupError, ValueError):
            continue
        if view == "now" and not rows:
            answer = {**answer, "newest": [], "no_rows": "This file has no rows."}
        yield view, parameters, answer


def _important(api: Api, name: str) -> Iterator[int]:
    """The steps of a run: the last, the first, those of alarms, then ever finer parts of the rest."""
    run = api.named[name]
    steps = run.steps
    if not steps:
        return
    seen = dict.fromkeys([steps[-1], steps[0], *(a["step"] for a in run.alarms if a.get("step") in set(steps))])
    yield from seen
    parts = 2
    while len(seen) < len(steps):
        for i in range(1, parts):
            step = steps[min(len(steps) - 1, i * len(steps) // parts)]
            if step not in seen:
                seen[step] = None
                yield step
        parts *= 2


def _in_turn(lists: Mapping[str, Sequence[Any]]) -> Iterator[Any]:
    """The first of each, then the second of each, and so on."""
    for i in range(max(map(len, lists.values()), default=0)):
        yield from (items[i] for items in lists.values() if i < len(items))


def _rows(api: Api, at: Asked, answer: Any) -> list[str]:
    """Rows of a step: those of alarms, the best and the worst, the largest advantages and KL, and some at random."""
    ids: list[str] = answer["data"].get("row_id", [])
    alarmed = [
        row for alarm in api.named[at["run"]].alarms if alarm.get("step") == at["step"] for row in alarm.get("rows", ())
    ]
    orders = [ids[:1], [row for row in alarmed if row in set(ids)]]
    for key, size in (("score", False), ("score", True), ("advantage", True), ("kl", True)):
        values = answer["data"].get(key)
        if values is not None:
            known = [i for i, value in enumerate(values) if value is not None]
            known.sort(key=lambda i: -abs(values[i]) if size else values[i])
            orders.append([ids[i] for i in known[: ROWS // 5]])
    orders.append(random.Random(at["step"]).sample(ids, len(ids)))
    return list(islice(dict.fromkeys(chain.from_iterable(orders)), ROWS))


def _prompts(api: Api, name: str) -> Iterator[tuple[str, Asked, Any]]:
    """Each source of prompts, and the answers to some of them."""
    first = api.answer("prompts", {"run": name})
    for source in first["sources"]:
        at = {"run": name, "of": source}
        for view, asked, answer in _asked(api, [("prompts", at)]):
            yield view, asked, answer
            chosen = [one["prompt"] for one in answer["prompts"][: TRAINED if source == TRAINING else PROMPTS]]
            yield from _asked(api, [("prompt", {**at, "prompt": prompt}) for prompt in chosen])


def _note(
    api: Api,
    answers: Sequence[tuple[str, Asked, Any]],
    steps: Mapping[str, Sequence[int]],
    rows: bool,
    left: Sequence[str],
) -> str:
    """What the file includes, and what it leaves out."""
    parts = []
    for name, run in api.named.items():
        of = [(view, asked) for view, asked, _ in answers if asked.get("run") == name]
        shown, all_rows = len({a["step"] for v, a in of if v == "rows"}), sum(v == "row" for v, _ in of)
        had = (
            f"rows of {shown} of {len(run.steps)} steps, {all_rows} of them in full"
            if rows
            else "no prompts or responses"
        )
        parts.append(f"{name}: {had}")
    limited = f"; {left[0]}" if left else ""
    return f"One file, made from {'; '.join(parts)}{limited}. Curves are complete."


def _assets() -> tuple[str, str, str]:
    """The style, the chart library, and the map from the modules' names to their text."""
    style = "\n".join((STATIC / name).read_text() for name in ("vendor/uPlot.css", "style.css"))
    modules = {name: path for name, path in files().items() if path.suffix == ".js" and name != "vendor/uPlot.js"}
    imports = {
        f"page/{name}": "data:text/javascript;base64," + base64.b64encode(_module(path).encode()).decode()
        for name, path in modules.items()
    }
    return style, (STATIC / "vendor" / "uPlot.js").read_text(), json.dumps({"imports": imports})


def _module(path: Path) -> str:
    """A module that imports others by their names in the map."""
    return MODULE.sub("page/", path.read_text())


def _document(style: str, charts: str, imports: str, data: str, title: str) -> str:
    start = 'import "page/app.js";'
    scripts = " ".join(f"'sha256-{_digest(text)}'" for text in (imports, charts, start))
    policy = f"default-src 'none'; script-src {scripts} data:; style-src 'sha256-{_digest(style)}'; img-src data:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)} · flowrl</title>
<link rel="icon" href="data:,">
<style>{style}</style>
<script type="application/octet-stream" id="data">{data}</script>
<script type="importmap">{imports}</script>
<script>{charts}</script>
<script type="module">{start}</script>
</head>
<body></body>
</html>
"""


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

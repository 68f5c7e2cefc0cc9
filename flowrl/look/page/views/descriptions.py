"""What ran: the facts of a run's ``run.json`` for the page, in sections."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.draw.picture import LONGEST
from flowrl.look.page.watched import WatchedRun

Facts = list[list[Any]]


def description(run: WatchedRun) -> dict[str, Any]:
    """The facts, by the title of their section."""
    found = run.description
    training, git = found.get("training") or {}, found.get("git") or {}
    commit = (
        f"{git['commit'][:12]}{', with uncommitted changes' if git.get('dirty') else ''}" if git.get("commit") else None
    )
    started = [f"step {one['step']}, {_moment(one['time'])}" for one in found.get("starts", ())[1:]]
    sections: list[list[Any]] = [
        [
            "Run",
            _facts(
                folder=run.path,
                status=run.status,
                error=found.get("error"),
                started=_moment(found.get("started")),
                ended=_moment(found.get("ended")),
                resumed="; ".join(started) or None,
                host=found.get("host"),
                command=found.get("command"),
                commit=commit,
                id=found.get("id"),
            ),
        ],
        ["Training", [[name, _text(value)] for name, value in training.items() if value not in (None, (), [], {})]],
        ["Versions", [[name, value] for name, value in found.get("versions", {}).items()]],
        ["Recorded", _recorded(run)],
    ]
    for role, backend in (found.get("graph") or {}).get("bindings", {}).items():
        sections.insert(-2, [f"Engine: {role}", _facts(backend=_name(backend)) + _parameters(backend)])
    return {"sections": [[title, facts] for title, facts in sections if facts]}


def _facts(**facts: Any) -> Facts:
    return [[name, str(value)] for name, value in facts.items() if value is not None]


def _parameters(backend: Mapping[str, Any]) -> Facts:
    return [[name, _text(value)] for name, value in backend.items() if name[0] != "$" and value is not None]


def _name(value: Mapping[str, Any]) -> str:
    return str(value.get("$type", "")).rpartition(":")[2]


def _text(value: Any) -> str:
    """A parameter as it is written in Python."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{k}={_text(v)}" for k, v in value.items() if k[0] != "$" and v not in (None, [], {}))
        found = f"{_name(value)}({inner})" if "$type" in value else inner
    elif isinstance(value, list):
        found = f"[{', '.join(map(_text, value))}]"
    else:
        found = str(value)
    return found if len(found) <= 2 * LONGEST else found[: 2 * LONGEST - 1] + "…"


def _moment(seconds: float | None) -> str | None:
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _recorded(run: WatchedRun) -> Facts:
    """The parts of the folder, with their sizes."""
    parts = {
        "metrics": "metrics.jsonl",
        "spans": "spans.jsonl",
        "alarms": "alarms.jsonl",
        "held-out answers": "predictions.jsonl",
        "rows": "rows",
        "texts": "texts",
        "columns": "columns",
        "checkpoints": "checkpoints",
    }
    found = [[name, _size(run.path / part)] for name, part in parts.items() if (run.path / part).exists()]
    missing = [name for name, part in parts.items() if not (run.path / part).exists()]
    return [*found, ["not recorded", ", ".join(missing)]] if missing else found


def _size(path: Path) -> str:
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    size, unit = float(sum(one.stat().st_size for one in files)), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    many = f" in {len(files)} files" if path.is_dir() else ""
    return f"{size:.3g} {unit}{many}"

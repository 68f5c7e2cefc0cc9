"""What trackers show of a run besides its metrics: its settings, how it ended, and some of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.data.files import parse_json

if TYPE_CHECKING:
    import pyarrow as pa


def settings(folder: Path) -> dict[str, Any]:
    """The settings in ``run.json`` by dotted names, such as ``training.steps``."""
    described = parse_json((folder / "run.json").read_bytes())
    shown = {key: described[key] for key in ("training", "graph", "fingerprint", "versions") if key in described}
    return dict(_flat(shown, ""))


def failed(folder: Path, summary: object) -> bool:
    """Whether a run ended without its last step: by its status or, if it still runs, because it has no summary."""
    status = parse_json((folder / "run.json").read_bytes())["status"]
    return status != "finished" if status != "running" else summary is None


def sample(table: pa.Table, count: int) -> list[dict[str, Any]]:
    """Up to so many rows, of whole groups where they fit."""
    column = next((name for name in ("uid", "row_id") if name in table.column_names), None)
    ordered = table if column is None else table.sort_by(column)
    rows: list[dict[str, Any]] = ordered.slice(0, count).to_pylist()
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    if not rows:
        return ""
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():  # a type has the name of what it is the type of
            yield from _flat(item, name if key.startswith("$") else f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        if value and not any(isinstance(item, Mapping | list) for item in value):
            yield name, str(value)
        else:
            for index, item in enumerate(value):
                yield from _flat(item, f"{name}.{index}")
    elif value is not None:
        yield name, value

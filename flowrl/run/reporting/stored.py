"""What the folder of a run has for reporters besides its metrics: row summaries and alarms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from flowrl.data.files import parse_json
from flowrl.run.reporting.reporter import Alarm

if TYPE_CHECKING:
    import pyarrow as pa

ALARMS = "alarms.jsonl"


def rows(folder: Path) -> Iterator[tuple[int, pa.Table]]:
    """The row summaries of each recorded step; each is in one file, or for a moment in two."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from flowrl.run.recording.files import ROWS, files_of

    seen: set[int] = set()
    for path in files_of(folder / ROWS):
        table = pq.read_table(path)
        for step in sorted({*pc.unique(table["step"]).to_pylist()} - seen):
            seen.add(step)
            yield step, table.filter(pc.equal(table["step"], step))


def alarms(folder: Path) -> Iterator[Alarm]:
    """The alarms that fired; a line that a kill cut off is none."""
    path = folder / ALARMS
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            yield SimpleNamespace(**parse_json(line))
        except (ValueError, TypeError):
            continue

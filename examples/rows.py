"""Data of the examples, sampled by their environments; the same for every seed of a run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_rows(
    folder: Path, row: Callable[[random.Random], dict[str, Any]], train: int = 4000, heldout: int = 400
) -> tuple[Path, Path]:
    """Write training and held-out rows; return the paths of both JSONL files in `folder`.

    Args:
        folder: output folder.
        row: samples a row.
        train, heldout: number of rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, count in (("train", train), ("heldout", heldout)):
        numbers = random.Random(f"{name} 0")
        lines = (json.dumps(row(numbers)) + "\n" for _ in range(count))
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        paths.append(folder / f"{name}.jsonl")
    return paths[0], paths[1]

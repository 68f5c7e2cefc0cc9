"""Benchmarks of learning: their command line, and results kept as JSON, so that nothing is run twice."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Point = Mapping[str, Any]
Result = Mapping[str, Any]


def kept_result(
    path: Path, name: Mapping[str, Any], settings: Mapping[str, Any], steps: int, run: Callable[[Path], Sequence[Point]]
) -> Result:
    """The result in a file, if it is of these settings and as long; else of a new run, which is then kept there.

    Args:
        path: the file.
        name: by which the result is known, a part of it.
        settings: all that decides the run beside its length, as JSON has it.
        steps: how long it is to be. Nothing else depends on that, so of a longer run the beginning is taken.
        run: runs it in a folder that is not there yet, and gives its points, each of a ``step``.
    """
    if path.exists():
        result: Result = json.loads(path.read_text())
        if result["settings"] == settings and result["points"][-1]["step"] >= steps:
            return {**result, "points": [point for point in result["points"] if point["step"] <= steps]}
    folder = path.with_name("running")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
    result = {**name, "settings": settings, "points": run(folder)}
    shutil.rmtree(folder)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def parser_of(doc: str | None, names: Iterable[str], steps: int, every: int, folder: str) -> argparse.ArgumentParser:
    """The command line of a benchmark of learning: which methods, with which seeds, how long, and where it is kept.

    Args:
        doc: what it is.
        names: of the methods.
        steps: of a run, unless it is told otherwise.
        every: steps between two validations.
        folder: unless it is told otherwise.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(names), help="names, with commas (default: %(default)s)")
    add_numbers(parser, "--seeds", (0, 1, 2))
    told = f"steps of each run, a multiple of {every} (default: %(default)s)"
    parser.add_argument("--steps", type=int, default=steps, help=told)
    parser.add_argument("--folder", type=Path, default=Path(folder), help="default: %(default)s")
    return parser


def parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, names: Iterable[str], every: int
) -> argparse.Namespace:
    """What was asked for; ends the program where a method is not among these names, or a run ends between two
    validations."""
    asked, known = parser.parse_args(arguments), list(names)
    asked.methods = asked.methods.split(",")
    if unknown := [name for name in asked.methods if name not in known]:
        parser.error(f"there is no method {unknown[0]!r}; expected some of {', '.join(known)}.")
    if asked.steps < 1 or asked.steps % every:
        parser.error(f"--steps {asked.steps} does not end with a validation; expected a multiple of {every}.")
    return asked


def add_numbers(parser: argparse.ArgumentParser, flag: str, usual: Iterable[int]) -> None:
    """Add an option that takes whole numbers, with commas."""
    shown = ",".join(map(str, usual))
    parser.add_argument(flag, type=_numbers, default=shown, help="whole numbers, with commas (default: %(default)s)")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]

"""Benchmarks of learning: their command line, and stored results, so that no run is repeated."""

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
    """The stored result of these settings, if it is long enough; else the result of a new run, which is then stored.

    Args:
        path: the file.
        name: name of the result, which includes it.
        settings: everything that determines the run except its length, as JSON.
        steps: length of the run. Nothing else depends on it, so the beginning of a longer run serves as well.
        run: runs in a new folder and returns its points, each with a ``step``.
    """
    if path.exists():
        result: Result = json.loads(path.read_text())
        if result["settings"] == settings and result["points"][-1]["step"] >= steps:
            return {**result, "points": [point for point in result["points"] if point["step"] <= steps]}
    folder = path.with_name("running")
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run
    result = {**name, "settings": settings, "points": run(folder)}
    shutil.rmtree(folder)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def parser_of(doc: str | None, names: Iterable[str], steps: int, every: int, folder: str) -> argparse.ArgumentParser:
    """The command line of a benchmark of learning: methods, seeds, steps and output folder.

    Args:
        doc: description.
        names: names of the methods.
        steps: default steps per run.
        every: steps between validations.
        folder: default output folder.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(names), help="comma-separated names (default: %(default)s)")
    add_numbers(parser, "--seeds", (0, 1, 2))
    text = f"steps of each run, a multiple of {every} (default: %(default)s)"
    parser.add_argument("--steps", type=int, default=steps, help=text)
    parser.add_argument("--folder", type=Path, default=Path(folder), help="default: %(default)s")
    return parser


def parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, names: Iterable[str], every: int
) -> argparse.Namespace:
    """Parse the options; exit if a method is unknown, or if a run would not end with a validation."""
    options, known = parser.parse_args(arguments), list(names)
    options.methods = options.methods.split(",")
    if unknown := [name for name in options.methods if name not in known]:
        parser.error(f"there is no method {unknown[0]!r}; expected some of {', '.join(known)}.")
    if options.steps < 1 or options.steps % every:
        parser.error(f"--steps {options.steps} does not end with a validation; expected a multiple of {every}.")
    return options


def add_numbers(parser: argparse.ArgumentParser, flag: str, usual: Iterable[int]) -> None:
    """Add an option with comma-separated integers."""
    shown = ",".join(map(str, usual))
    parser.add_argument(flag, type=_numbers, default=shown, help="comma-separated integers (default: %(default)s)")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]

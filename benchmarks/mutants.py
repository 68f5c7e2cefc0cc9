"""Mutation testing: apply each fault of `mutants.toml` to a copy of the tree, and run the tests that must fail.

    python benchmarks/mutants.py                     # all mutants, in two processes; about 40 minutes on 2 cores
    python benchmarks/mutants.py packed fusing-3     # some, by the name of the group or of the mutant

The mutants are written by hand, because generated ones are mostly equivalent or killed by any import. A mutant survives
if all tests of its group pass. Without a mutant they have to pass, which is tested first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

from harness import table

ROOT = Path(__file__).resolve().parents[1]
PROCESSES = 2
SECONDS = 600
"""A mutant that makes its tests hang is killed after as long."""


class Mutant(NamedTuple):
    """`old` occurs once in `file`, and becomes `new`; one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]


class Result(NamedTuple):
    mutant: Mutant
    killed_by: str | None
    seconds: float


def mutants() -> list[Mutant]:
    """All mutants of `mutants.toml`, as ``group-number``."""
    groups: dict[str, Any] = tomllib.loads((ROOT / "benchmarks" / "mutants.toml").read_text(encoding="utf-8"))
    return [
        Mutant(f"{name}-{number}", group["file"], one["old"], one["new"], group["tests"])
        for name, group in groups.items()
        for number, one in enumerate(group["mutants"], 1)
    ]


def run(mutant: Mutant, tree: Path) -> Result:
    """Run the tests of a mutant in `tree`, which is unchanged afterwards."""
    file, started = tree / mutant.file, time.perf_counter()
    source = file.read_text(encoding="utf-8")
    file.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return Result(mutant, failed_test(mutant.tests, tree), time.perf_counter() - started)
    finally:
        file.write_text(source, encoding="utf-8")


def failed_test(tests: list[str], tree: Path) -> str | None:
    """The first test that fails in `tree`, or that a limit was reached; None if all pass."""
    marks = "not nightly and not engines and not ray"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        "-m",
        marks,
        *tests,
    ]
    environment = os.environ | {"PYTHONPATH": str(tree), "CI": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"{SECONDS} s passed"
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed is None:
        raise SystemExit(
            f"pytest failed without a failed test in {' '.join(tests)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return failed.group(1)


def main(chosen: list[str]) -> None:
    todo = [one for one in mutants() if not chosen or {one.name, one.name.rpartition("-")[0]} & set(chosen)]
    with tempfile.TemporaryDirectory() as folder:
        trees: Queue[Path] = Queue()
        for number in range(PROCESSES):
            tree = Path(folder, str(number))
            hidden = shutil.ignore_patterns(".*", "runs", "build", "__pycache__")
            shutil.copytree(ROOT, tree, symlinks=True, ignore=hidden)
            trees.put(tree)

        for tests in dict.fromkeys(tuple(mutant.tests) for mutant in todo):
            if (failed := failed_test([*tests], Path(folder, "0"))) is not None:
                raise SystemExit(f"{failed} fails without a mutant")

        def one(mutant: Mutant) -> Result:
            tree = trees.get()
            try:
                return run(mutant, tree)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(PROCESSES) as pool:
            results = []
            for result in pool.map(one, todo):
                results.append(result)
                print(result.mutant.name, result.killed_by or "SURVIVED", f"{result.seconds:.0f} s", flush=True)
    survived = [result.mutant.name for result in results if result.killed_by is None]
    groups = sorted({result.mutant.name.rpartition("-")[0] for result in results})
    rows = [[group, *_counts(group, results)] for group in groups]
    table("Mutants", ["group", "mutants", "killed"], rows)
    print(f"{len(results) - len(survived)} of {len(results)} killed; survived: {', '.join(survived) or 'none'}")


def _counts(group: str, results: list[Result]) -> tuple[str, str]:
    own = [result for result in results if result.mutant.name.rpartition("-")[0] == group]
    return str(len(own)), str(sum(result.killed_by is not None for result in own))


if __name__ == "__main__":
    main(sys.argv[1:])

"""The tests that are marked `gpu`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from .parts import Target
from .report import Report

ROOT = Path(__file__).parents[2]


def run_tests(target: Target, report: Report) -> None:
    """Run pytest on all files with such tests; without a GPU, each is skipped with the reason."""
    marked = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8"))
    results = target.folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={results}", *map(str, marked)]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    cases = ElementTree.parse(results).getroot().findall(".//testcase")
    failed = [one for one in cases if one.find("failure") is not None or one.find("error") is not None]
    skipped = [one for one in cases if one.find("skipped") is not None]
    for one in failed:
        report.check(f"{one.get('classname')}.{one.get('name')}", False, "failed; see what pytest printed")
    passed = len(cases) - len(failed) - len(skipped)
    report.check("pytest passes", status == 0, f"{passed} passed, {len(failed)} failed, {len(skipped)} skipped")

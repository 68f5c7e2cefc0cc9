"""What `make` installs again: packages for a changed requirement or pin, flowrl alone for changed entry points."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

PROJECT = """
[build-system]
requires = ["setuptools>=77"]
[project]
name = "flowrl"
dependencies = ["numpy>=1"]
[project.scripts]
flowrl = "flowrl.app.cli:main"
[tool.setuptools.packages.find]
include = ["flowrl"]
[tool.pytest.ini_options]
timeout = 240
"""
PINS = "# Pinned.\nnumpy==2.0\n"


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return runpy.run_path(str(ROOT / ".ci" / "environment.py"))["main"]


def written(main: Any, project: str = PROJECT, pins: str = PINS, package: str = "vllm") -> list[str]:
    """The files that the script writes for these inputs."""
    Path("pyproject.toml").write_text(project)
    Path("constraints.txt").write_text(pins)
    files = [Path("env/.packages"), Path("env/.metadata")]
    for file in files:
        if file.exists():
            os.utime(file, (0, 0))
    main("packages", "env/.packages", "constraints.txt", package)
    main("metadata", "env/.metadata")
    return [file.name for file in files if file.stat().st_mtime]


def test_an_unchanged_environment_is_recorded_once(main: Any) -> None:
    assert written(main) == [".packages", ".metadata"]
    assert written(main) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"project": PROJECT.replace("timeout = 240", "timeout = 300")}, []),
        ({"pins": "numpy==2.0 # of 2024\n"}, []),
        ({"project": PROJECT.replace("flowrl.app.cli:main", "flowrl.app.cli:run")}, [".metadata"]),
        ({"project": PROJECT.replace("numpy>=1", "numpy>=2")}, [".packages"]),
        ({"project": PROJECT.replace(">=77", ">=80")}, [".packages"]),
        ({"pins": PINS.replace("2.0", "2.1")}, [".packages"]),
        ({"package": "sglang"}, [".packages"]),
    ],
)
def test_a_change_reinstalls_only_what_it_affects(main: Any, change: dict[str, str], expected: list[str]) -> None:
    written(main)
    assert written(main, **change) == expected


def test_another_python_version_rebuilds_the_environment(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written(main)
    Path("env/torch").touch()
    monkeypatch.setattr("sys.version_info", (4, 0))
    assert written(main) == [".packages", ".metadata"]
    assert not Path("env/torch").exists()

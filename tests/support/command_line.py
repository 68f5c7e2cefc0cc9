"""A fixture that runs the command line in this process, and the result."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest


class Result(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """The command line in this process, in an empty folder; restores `sys.path` and `sys.modules`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    known = set(sys.modules)

    def run(*arguments: str | Path) -> Result:
        with pytest.raises(SystemExit) as ended:
            from flowrl.app.cli import main

            main([str(argument) for argument in arguments])
        return Result(int(ended.value.code or 0), *capsys.readouterr())

    yield run
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def write(path: Path, source: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return path


def is_paragraph(result: Result) -> bool:
    return not result.out and result.err.startswith("flowrl: ") and result.err.count("\n") == 1

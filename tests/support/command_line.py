"""The command line in this process: a fixture, and what it answers."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Answer]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """The command line in this process, in an empty folder; what it puts on the path, and imports, is taken back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    known = set(sys.modules)

    def run(*arguments: str | Path) -> Answer:
        with pytest.raises(SystemExit) as ended:
            from flowrl.app.cli import main

            main([str(argument) for argument in arguments])
        return Answer(int(ended.value.code or 0), *capsys.readouterr())

    yield run
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def write(path: Path, source: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return path


def is_paragraph(answer: Answer) -> bool:
    return not answer.out and answer.err.startswith("flowrl: ") and answer.err.count("\n") == 1

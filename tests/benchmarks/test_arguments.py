"""`make bench` runs the scripts of `benchmarks/` that need no arguments; the others print their usage without them."""

from __future__ import annotations

import runpy
import sys

import pytest

from tests import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
[LISTED] = [line for line in MAKEFILE.splitlines() if line.startswith("NEED_ARGUMENTS")]
NEED_ARGUMENTS = LISTED.partition("benchmarks/,")[2].rstrip(")").split()


@pytest.mark.parametrize("name", NEED_ARGUMENTS)
def test_a_script_without_its_arguments_prints_its_usage(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / "benchmarks" / name), run_name="__main__")
    assert caught.value.code == 2  # argparse
    assert capsys.readouterr().err.startswith(f"usage: {name}")


def test_every_script_with_an_argument_that_must_be_there_is_listed() -> None:
    for path in (ROOT / "benchmarks").glob("*.py"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if 'add_argument("' in line]
        required = [line for line in lines if 'add_argument("-' not in line and "nargs=" not in line]
        assert (path.name in NEED_ARGUMENTS) == bool(required), (path.name, required)

"""The page of the command line has every command with its options and their help."""

from __future__ import annotations

import runpy

import typer.main

from flowrl.app.cli import app
from tests import ROOT

GENERATOR = runpy.run_path(str(ROOT / "docs" / "commands.py"))
PAGE = (ROOT / "docs/reference/command-line.md").read_text(encoding="utf-8")


def test_the_committed_page_equals_the_generated_one() -> None:
    assert GENERATOR["page"]() == PAGE, "run `make tables`"


def test_every_command_and_option_is_on_the_page_with_its_help() -> None:
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        section = PAGE.partition(f"\n## flowrl {name}\n")[2].partition("\n## ")[0]
        assert section and command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None), (name, parameter.name)
            shown = [*parameter.opts, str(parameter.metavar).strip("{}")]
            assert any(f"`{option}" in section for option in shown), (name, parameter.name)

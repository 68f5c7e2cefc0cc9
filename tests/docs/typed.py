"""Types a page as a reader does: it saves the files, runs the commands, and compares what they print with the page.

A Python block begins with the name of its file. A block ``sh`` is commands; a block ``text`` or ``mermaid`` after it is
what they print, where … stands for omitted lines. Fast settings replace the numbers of `FAST` and keep 32 held-out
rows.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import ROOT

FAST = {
    "steps=270": "steps=2",  # of the warm start
    "steps=10": "steps=1",
    "every=5": "every=1",
    "prompts=32": "prompts=4",  # of 8 rows each
    "prompts=256": "prompts=32",
    "mini_batch=128": "mini_batch=16",
    "demo --quick": "demo --quick --steps 1",
}
HELDOUT = 32  # rows, with fast settings
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
SAMPLED = ("flowrl run", "flowrl demo", "flowrl rows", "flowrl look", "grep ")
"""Commands that print numbers of a trained model: numbers may differ a little, and with fast settings at will."""

REFUSED = r"^(flowrl: |FR\d|reward: )"


class Block(NamedTuple):
    """A block of a page: its language, its text, and the outputs that stand below it."""

    language: str
    text: str
    shown: tuple[str, ...]


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    source = page.read_text(encoding="utf-8")
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", source, re.MULTILINE | re.DOTALL):
        if language in ("text", "mermaid"):
            found[-1] = found[-1]._replace(shown=(*found[-1].shown, text))
        else:
            found.append(Block(language, text, ()))
    return found


class Typist:
    """Types pages into a folder, one after the other.

    Args:
        folder: where the reader starts.
        fast: use the fast settings.
        in_process: how commands begin that run in this process instead of a shell.
    """

    def __init__(self, folder: Path, fast: bool = False, in_process: tuple[str, ...] = ()) -> None:
        self.folder, self.fast, self.in_process = folder, fast, in_process

    def type(self, page: Path, skip: Callable[[str], bool] = lambda line: False) -> None:
        """Save the files of a page and run its commands, except those to `skip`; compare what they print."""
        for block in blocks(page):
            if block.language == "python":
                name = re.match(r"# (\w+\.py)\n", block.text)
                assert name, f"{page.name}: a block of Python names no file: {block.text[:40]}"
                (self.folder / name[1]).write_text(self._settings(block.text), encoding="utf-8")
                continue
            assert block.language == "sh", f"{page.name}: {block.language}"
            lines = [line for line in self._settings(block.text).splitlines() if not skip(line)]
            refused = re.search(REFUSED, "".join(block.shown), re.MULTILINE) is not None
            printed = "".join(self._run(line, refused) for line in lines).replace(str(self.folder.parent), "/home/you")
            if lines and block.shown:
                sampled = any(line.startswith(SAMPLED) for line in lines)
                self._compare(page, self._settings("".join(block.shown)), printed, sampled=sampled)

    def _settings(self, text: str) -> str:
        for number, fewer in FAST.items() if self.fast else ():
            text = text.replace(number, fewer)
        return text

    def _run(self, line: str, refused: bool) -> str:
        """What a command prints, with errors if the page shows that flowrl refuses it; it may change the folder."""
        code, printed, errors = (self._run_here if line.startswith(self.in_process) else self._run_in_shell)(line)
        assert "Traceback" not in errors and (code in (1, 2) if refused else code == 0), f"{line}\n{printed}\n{errors}"
        if self.fast and (rows := self.folder / "heldout.jsonl").exists():
            rows.write_text("".join(rows.read_text(encoding="utf-8").splitlines(keepends=True)[:HELDOUT]))
        return printed + errors if refused else printed

    def _run_in_shell(self, line: str) -> tuple[int, str, str]:
        commands = f'flowrl() {{ "{sys.executable}" -m flowrl "$@"; }}\npython() {{ "{sys.executable}" "$@"; }}\n'
        done = subprocess.run(
            ["bash", "-c", f'{commands}{line}\nstatus=$?\npwd > "$PLACE"\nexit $status'],
            cwd=self.folder,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
            | {"PLACE": str(place := self.folder / ".place")},
            capture_output=True,
            text=True,
            timeout=400,
        )
        self.folder = Path(place.read_text(encoding="utf-8").strip())
        place.unlink()
        return done.returncode, done.stdout, done.stderr

    def _run_here(self, line: str) -> tuple[int, str, str]:
        program, *arguments = line.split()
        out, errors, code, known, path = io.StringIO(), io.StringIO(), 0, set(sys.modules), sys.path[:]
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                if program == "python":
                    sys.path.insert(0, str(self.folder))
                    runpy.run_path(arguments[0], run_name="__main__")
                else:
                    from flowrl.app.cli import main

                    main(arguments)
            except SystemExit as ended:
                code = int(ended.code or 0)
            finally:
                sys.path[:] = path
                for name in set(sys.modules) - known:
                    if str(self.folder) in str(getattr(sys.modules[name], "__file__", None)):
                        del sys.modules[name]
        return code, out.getvalue(), errors.getvalue()

    def _compare(self, page: Path, shown: str, printed: str, *, sampled: bool) -> None:
        """The page shows all that is printed, in this order, except where it shows …."""
        lines, forms, omits = plain(printed), {form(line) for line in plain(printed)}, False
        for expected in plain(shown):
            if (self.fast and sampled and form(expected) in forms) or expected == "…":
                omits = True  # with fast settings there are fewer lines
                continue
            places = range(len(lines)) if omits else range(min(1, len(lines)))
            place = next((i for i in places if same(lines[i], expected, sampled)), None)
            assert place is not None, f"{page.name} shows\n{expected}\nand the commands print\n{printed}"
            lines, omits = lines[place + 1 :], False
        assert omits or not lines, f"{page.name} omits what the commands print:\n" + "\n".join(lines)


def plain(text: str) -> list[str]:
    """The lines, with single spaces; without those that the terminal adds if a step takes long."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return [line for line in lines if line and not re.search(r"^step \d+/\d+ done, now ", line)]


def form(line: str) -> str:
    """A line without its numbers and bars."""
    return NUMBER.sub("#", re.sub("█+ ?", "", line))


def same(printed: str, shown: str, sampled: bool) -> bool:
    """Whether two lines are equal; those of a trained model may differ in bars and a little in decimals."""
    if not sampled:
        return printed == shown
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=False)
    return form(printed) == form(shown) and all(
        one == other or ("." in other and float(one) == pytest.approx(float(other), rel=0.2, abs=0.05))
        for one, other in pairs
    )

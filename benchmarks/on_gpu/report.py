"""What the parts of `gpu.py` find: checks, tables and skips, as lines of JSON that stay if a part ends early."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness import table

Found = dict[str, Any]
Status = Literal["passed", "FAILED", "OVERRAN", "skipped"]


@dataclass(frozen=True)
class Report:
    """Prints what a part finds, and appends it to a file."""

    file: Path

    def check(self, what: str, passed: bool, found: str) -> None:
        """A statement that must hold, and what was found."""
        print(f"  {'ok' if passed else 'NO'}  {what}: {found}", flush=True)
        self._append(kind="check", what=what, passed=bool(passed), found=found)

    def table(self, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Figures; the first column names rows."""
        table(title, heads, rows)
        self._append(kind="table", title=title, heads=list(heads), rows=[list(row) for row in rows])

    def skip(self, what: str, why: str) -> None:
        """What this machine cannot show."""
        print(f"  Skipped: {what}, because {why}.", flush=True)
        self._append(kind="skip", what=what, why=why)

    def read(self) -> list[Found]:
        """All that was found."""
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def _append(self, **found: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(found) + "\n")


@dataclass(frozen=True)
class Outcome:
    """How a part ended, after how many seconds, with what it found; `why` says more of a skip or an error."""

    name: str
    shows: str
    status: Status
    seconds: float
    limit: int
    found: Sequence[Found]
    why: str = ""

    @property
    def fine(self) -> bool:
        """Whether nothing failed."""
        return self.status in ("passed", "skipped")


def page(machine: Sequence[tuple[str, str]], outcomes: Sequence[Outcome], date: str) -> str:
    """The results as Markdown."""
    return "\n".join(_lines(machine, outcomes, date)) + "\n"


def _lines(machine: Sequence[tuple[str, str]], outcomes: Sequence[Outcome], date: str) -> Iterator[str]:
    yield f"Run on {date}, in {sum(one.seconds for one in outcomes) / 60:.1f} minutes."
    yield from _markdown(["", ""], [list(row) for row in machine])
    rows = [[f"`{one.name}`", one.shows, _ended(one), f"{one.seconds:.0f} of {one.limit} s"] for one in outcomes]
    yield from _markdown(["part", "shows", "", "time"], rows)
    for one in outcomes:
        if one.found:
            yield from ("", f"## {one.shows}")
        checks = [found for found in one.found if found["kind"] == "check"]
        if checks:
            rows = [[found["what"], "yes" if found["passed"] else "**NO**", found["found"]] for found in checks]
            yield from _markdown(["", "holds", "found"], rows)
        for found in one.found:
            if found["kind"] == "table":
                yield from ("", f"{found['title']}:")
                yield from _markdown(found["heads"], found["rows"])
            elif found["kind"] == "skip":
                yield from ("", f"Skipped: {found['what']}, because {found['why']}.")


def _ended(one: Outcome) -> str:
    status = one.status if one.fine else f"**{one.status}**"
    return f"{status}: {one.why}" if one.why else status


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield ""
    yield f"| {' | '.join(map(_cell, heads))} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

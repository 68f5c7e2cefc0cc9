"""Each session of `docs/evidence/bugs-elsewhere.md` prints what the page shows, and each entry names one thread."""

from __future__ import annotations

import doctest
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.desk import set_up_desk

PAGE = (ROOT / "docs" / "evidence" / "bugs-elsewhere.md").read_text(encoding="utf-8")
HEAD, *ENTRIES = re.split(r"^### ", PAGE, flags=re.MULTILINE)
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS  # messages are wrapped; numbers that may round are left out


def block(language: str, text: str) -> str:
    [found] = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return set_up_desk(tmp_path_factory.mktemp("desk"))


@pytest.fixture(autouse=True)
def _warnings_are_printed() -> Iterator[None]:
    """The log as a terminal shows it: the text of each warning."""

    class Printer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print(record.getMessage())

    printer, logger = Printer(logging.WARNING), logging.getLogger("flowrl")
    logger.addHandler(printer)
    yield
    logger.removeHandler(printer)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.partition("\n")[0])
def test_each_session_prints_what_the_page_shows(
    entry: str, desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(desk, tmp_path / "desk")
    monkeypatch.chdir(tmp_path / "desk")
    names: dict[str, object] = {"__name__": "page_bugs_elsewhere"}
    exec(compile(block("python", HEAD), "bugs-elsewhere.md", "exec", dont_inherit=True), names)
    title, session = entry.partition("\n")[0], block("pycon", entry)
    test = doctest.DocTestParser().get_doctest(session, names, title, "bugs-elsewhere.md", None)
    assert any(example.want for example in test.examples)
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
    assert not result.failed, "".join(report)


def test_the_page_has_25_entries_of_different_threads() -> None:
    name = r"([\w.-]+/[\w.-]+)"
    link = re.compile(rf".*\n\n\[{name}#(\d+)\]\(https://github.com/{name}/(?:issues|pull)/(\d+)\): ")
    threads = [match.groups() for match in map(link.match, ENTRIES) if match]
    assert all(thread[:2] == thread[2:] for thread in threads)
    assert len(ENTRIES) == len(set(threads)) == 25

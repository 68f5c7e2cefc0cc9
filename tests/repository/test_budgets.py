"""Limits, without exceptions by name: 450 lines per file, 50 lines of code per function, 15 modules per folder."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests import ROOT

FOLDERS = ("flowrl", "operators", "graphs", "backends", "tests", "examples", "benchmarks")
FILE_LINES = 450
FUNCTION_LINES = 50
FOLDER_MODULES = 15
"""Not for the scripts in ``examples`` and ``benchmarks``."""

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources() -> list[Path]:
    """Every Python file of the project, once: not by way of the symlinks in ``flowrl/``."""
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if path.resolve() == path]


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that hold code: neither blank, nor a comment, nor a part of a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
            and ast.get_docstring(node, clean=False) is not None
        ):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def over_budget(name: str, source: str) -> Iterator[str]:
    """What in a file is too long, by name."""
    length = len(source.splitlines())
    if length > FILE_LINES:
        yield f"{name} has {length} lines; at most {FILE_LINES}: it is more than one idea"
    code = code_lines(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, FUNCTIONS):
            count = sum(node.lineno <= line <= (node.end_lineno or 0) for line in code)
            if count > FUNCTION_LINES:
                yield f"{name}:{node.lineno} {node.name} has {count} lines of code; at most {FUNCTION_LINES}"


def crowded(modules: Iterable[Path]) -> Iterator[str]:
    """The folders that hold too many modules."""
    for folder, count in Counter(path.parent.as_posix() for path in modules).items():
        if count > FOLDER_MODULES:
            yield f"{folder} has {count} modules; at most {FOLDER_MODULES}: split it by idea"


def test_every_folder_keeps_within_its_budget() -> None:
    modules = [path.relative_to(ROOT) for path in sources()]
    findings = list(crowded(path for path in modules if path.parts[0] not in ("examples", "benchmarks")))
    assert not findings, "\n".join(findings)


def test_a_folder_of_16_modules_is_found() -> None:
    modules = [Path("a", f"{index}.py") for index in range(16)]
    assert list(crowded([*modules[1:], Path("a/b/c.py")])) == []
    assert list(crowded(modules)) == ["a has 16 modules; at most 15: split it by idea"]


def test_every_file_and_function_keeps_within_its_budget() -> None:
    findings = [
        finding
        for path in sources()
        for finding in over_budget(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert not findings, "\n".join(findings)


def test_a_file_of_451_lines_is_found() -> None:
    assert list(over_budget("a.py", "x = 1\n" * 450)) == []
    assert len(list(over_budget("a.py", "x = 1\n" * 451))) == 1


def test_a_function_of_51_lines_of_code_is_found() -> None:
    head = 'def f():\n    """Says\n\n    much."""\n\n    # why\n'
    assert list(over_budget("a.py", head + "    x = 1\n" * 49)) == []
    assert list(over_budget("a.py", head + "    x = 1\n" * 50)) == ["a.py:1 f has 51 lines of code; at most 50"]


def test_lines_of_a_text_that_is_no_docstring_are_code() -> None:
    assert code_lines('x = """a\n\nb"""\n') == {1, 2, 3}
    assert code_lines('"""a\n\nb"""\n\n# c\nx = 1  # d\n') == {6}

"""The tests mirror the rooms: the name or the docstring of a test file says which modules it tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

import pytest

from tests import ROOT
from tests.repository.test_imports import module_files

SMALL = 100
"""Lines; the tests of modules that use a module of at most so many may cover it."""


def mirrored(module: str) -> str:
    """The path of the tests of a module, such as ``flowrl/edits/edit.py``."""
    room, _, name = module.removeprefix("flowrl/").rpartition("/")
    return f"tests/{room}/test_{name}".replace("//", "/")


def names(test: str, docstring: str, module: str) -> bool:
    """Whether a test file names a module: by its path, or in the mirrored folder by its file name."""
    paths = re.findall(r"[\w/]+\.py\b", docstring)
    path, home = PurePosixPath(module), PurePosixPath(mirrored(module)).parent
    return module in paths or (PurePosixPath(test).parent == home and path.name in paths)


def untested(lengths: Mapping[str, int], docstrings: Mapping[str, str]) -> Iterator[str]:
    """The modules of more than `SMALL` lines whose tests cannot be found.

    Args:
        lengths: of each module, in lines.
        docstrings: of each test file.
    """
    for module, lines in lengths.items():
        found = mirrored(module) in docstrings or any(names(test, text, module) for test, text in docstrings.items())
        if lines > SMALL and not found:
            yield f"{module} has {lines} lines and no {mirrored(module)}; add it, or name the module in a docstring"


def test_every_module_has_a_test_file() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in module_files().values()
        if path.name != "__init__.py"
    }
    docstrings = {
        path.relative_to(ROOT).as_posix(): ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for path in (ROOT / "tests").rglob("*.py")
    }
    findings = list(untested(lengths, docstrings))
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize(
    ("lines", "docstrings", "count"),
    [
        (101, {}, 1),
        (100, {}, 0),
        (101, {"tests/edits/test_edit.py": ""}, 0),
        (101, {"tests/edits/test_diff.py": "Tests of `diff.py` and `edit.py`."}, 0),
        (101, {"tests/edits/test_diff.py": "Tests of `rewiring_edit.py` and `edit.python`."}, 1),
        (101, {"tests/app/test_cli.py": "Tests of `edit.py`."}, 1),
        (101, {"tests/app/test_cli.py": "Tests of `flowrl/edits/edit.py`."}, 0),
        (101, {"tests/app/test_cli.py": "Tests of `tests/flowrl/edits/edit.py`."}, 1),
    ],
)
def test_a_module_without_tests_is_found(lines: int, docstrings: dict[str, str], count: int) -> None:
    assert len(list(untested({"flowrl/edits/edit.py": lines}, docstrings))) == count


@pytest.mark.parametrize(
    ("module", "test"),
    [
        ("flowrl/edits/edit.py", "tests/edits/test_edit.py"),
        ("flowrl/app/cli.py", "tests/app/test_cli.py"),
        ("backends/torch/train/trainer.py", "tests/backends/torch/train/test_trainer.py"),
    ],
)
def test_the_test_file_has_the_path_of_its_module(module: str, test: str) -> None:
    assert mirrored(module) == test

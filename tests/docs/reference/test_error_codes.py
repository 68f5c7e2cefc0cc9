"""Every raise has a code, and every code a cause, an example that raises it and a fix that runs, on one page."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrl import errors
from flowrl.errors import FlowrlError
from tests import ROOT
from tests.repository.test_imports import module_files
from tests.support.desk import set_up_desk
from tests.support.errors import raises
from tests.support.hub import fill
from tests.support.hub import hub as hub  # a fixture

GENERATOR = runpy.run_path(str(ROOT / "docs" / "errors.py"))
CODES = GENERATOR["codes"]()
OURS = {name for name, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, FlowrlError)}
OURS |= {"HostDiedError", "RayDiedError", "Interrupted"}


def raised() -> Iterator[tuple[str, str | None]]:
    """Where each of flowrl's errors is made, and with which code."""
    for path in module_files().values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(getattr(node, "func", None), "id", "")
            if isinstance(node, ast.Call) and name in OURS:
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                code = given.get("code")
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                literal = isinstance(code, ast.Constant)  # otherwise it is that of the error that this one wraps
                yield where, code.value if literal else "from elsewhere" if code else None


def test_every_raise_has_a_code_of_the_page() -> None:
    assert [f"{where}: {code}" for where, code in raised() if code not in ("from elsewhere", *CODES)] == []


def test_every_code_of_the_page_is_raised() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in module_files().values())
    assert [code for code in CODES if f'"{code}"' not in source] == []


def test_the_committed_page_equals_the_generated_one() -> None:
    assert (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8") == GENERATOR["page"]()


@pytest.mark.parametrize("code", CODES)
def test_codes_have_the_form_group_situation_and_cause_example_and_fix(code: str) -> None:
    assert re.fullmatch(r"[a-z]+\.[a-z]+(-[a-z0-9]+)*", code)
    assert CODES[code].keys() == {"cause", "example", "fix"}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return set_up_desk(tmp_path_factory.mktemp("desk"))


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub, uploading without Xet
@pytest.mark.parametrize("code", CODES)
def test_each_example_raises_its_code_and_each_fix_runs(
    code: str, desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if code.startswith("hub."):
        fill(request.getfixturevalue("hub"), desk / "model")
    for name in ("example", "fix"):
        folder = tmp_path / name
        shutil.copytree(desk, folder)
        monkeypatch.chdir(folder)
        source = compile(CODES[code][name], f"{code}.{name}", "exec", dont_inherit=True)
        if name == "fix":
            exec(source, {"__name__": "fix"})
        else:
            with raises(code):
                exec(source, {"__name__": "example"})

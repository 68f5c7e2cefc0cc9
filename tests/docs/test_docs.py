"""The Python examples of every page run in order, and tables are the code's own; Start and the tutorial are typed."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flowrl.graphs
from flowrl import Colocate
from flowrl.backends import TorchScorer, TorchTrainer
from flowrl.backends.vllm.engine import VLLM
from flowrl.graphs import grpo
from flowrl.rules.check import RULES
from tests import ROOT
from tests.support.desk import set_up_desk
from tests.support.hub import fill
from tests.support.hub import hub as hub  # a fixture
from tests.support.kernel import exact

INSTALLED = {"gymnasium": "'flowrl[gymnasium]'", "langchain_openai": "langchain-openai langgraph"}
"""What provides a package that a page imports and flowrl does not depend on."""

PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader would have it: a model, data, and a reward file."""
    return set_up_desk(tmp_path_factory.mktemp("desk"))


@pytest.fixture(autouse=True)
def _no_rule_remains() -> Iterator[None]:
    """What a page enters into the table of rules is for that page."""
    before = list(RULES)
    yield
    RULES[:] = before


def execute(page: Path, desk: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the examples of a page in a copy of the desk; returns the names that they define."""
    shutil.copytree(desk, folder, dirs_exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    source = page.read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": f"page_{page.stem}"}
    for block in re.finditer(r"^```python\n(.*?)^```$", source, re.MULTILINE | re.DOTALL):
        lines_before = source[: block.start(1)].count("\n")
        code = compile("\n" * lines_before + block.group(1), str(page), "exec", dont_inherit=True)
        try:
            exec(code, namespace)
        except ModuleNotFoundError as error:
            if error.name not in INSTALLED:
                raise
            pytest.skip(f"{page.name}:{lines_before + 1} needs pip install {INSTALLED[error.name]}")
    return namespace


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent.name not in ("start", "tutorial")],
    ids=lambda page: str(page.relative_to(ROOT / "docs")),
)
def test_every_example_of_a_page_runs(
    page: Path, desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if page.stem == "hub":
        fill(request.getfixturevalue("hub"), desk / "model")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        execute(page, desk, tmp_path, monkeypatch)
    source = page.read_text(encoding="utf-8")
    if page.parent.name == "concepts":
        shown = re.findall(r"^```text\n(.*?)^```$", source, re.MULTILINE | re.DOTALL)
        assert "".join(shown) == printed.getvalue()
    for block in re.finditer(r"^```json\n(.*?)^```$", source, re.MULTILINE | re.DOTALL):
        json.loads(block.group(1))


def _headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_link_has_a_target(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not heading or heading in _headings(target), link


@pytest.mark.parametrize(
    "name", sorted(page.stem for page in (ROOT / "docs" / "reference" / "api").glob("flowrl*.rst"))
)
def test_every_name_of_the_reference_has_a_docstring(name: str) -> None:
    """Not the one that `dataclass` or `NamedTuple` generates."""
    module = importlib.import_module(name)
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == name and key[0] != "_"]
    values = {key: getattr(module, key) for key in getattr(module, "__all__", own)}
    documented = {
        key: value
        for key, value in values.items()
        if isinstance(value, type) or inspect.isroutine(inspect.unwrap(value))
    }
    assert module.__doc__ and documented
    assert not [key for key, value in documented.items() if (value.__doc__ or f"{key}(").startswith(f"{key}(")]


TABLES = runpy.run_path(str(ROOT / "docs" / "tables.py"))


@pytest.mark.parametrize("file", TABLES["FILES"])
def test_generated_files_are_up_to_date(file: str) -> None:
    committed = (ROOT / file).read_text(encoding="utf-8")
    assert committed == TABLES["generated"](file), "run `make tables`"


def test_the_diff_in_the_page_of_algorithms_is_printed_by_the_code() -> None:
    diff = str(grpo(exact, kl_coef=0.0).diff(flowrl.graphs.dr_grpo(exact)))
    assert f"```\n{diff}\n```" in (ROOT / "docs/reference/algorithms.md").read_text(encoding="utf-8")


def test_the_plan_in_the_docs_is_printed_by_the_code(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    job = grpo("my_reward.py:score").bind(
        actor=TorchTrainer("model", ranks=4),
        ref=TorchScorer("model"),
        rollout=VLLM("model", tensor_parallel=2, ranks=2),
        place=Colocate(gpus=4),
    )
    _, heading, processes = job.plan().partition("processes of")
    assert f"```text\n{heading}{processes}\n```" in (ROOT / "docs" / "how-to" / "distributed.md").read_text(
        encoding="utf-8"
    )

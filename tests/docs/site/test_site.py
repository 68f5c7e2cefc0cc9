"""The parts of the site that ``make docs`` builds: names in docstrings and pages, flowcharts, and its check
(docs/extensions)."""

from __future__ import annotations

import importlib
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.draw.mermaid import draw
from flowrl.draw.picture import picture
from flowrl.graphs import grpo
from tests import ROOT
from tests.support.kernel import exact

EXTENSIONS = ROOT / "docs" / "extensions"
CHECK = runpy.run_path(str(EXTENSIONS / "check.py"))


def _extension(name: str) -> dict[str, Any]:
    pytest.importorskip("sphinx", reason="needs pip install 'flowrl[docs]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXTENSIONS)  # for those that import another one
        return runpy.run_path(str(EXTENSIONS / f"{name}.py"))


@pytest.mark.parametrize("index", sorted((ROOT / "docs").glob("*/index.md")), ids=lambda index: index.parent.name)
def test_every_page_is_in_both_lists_of_its_index(index: Path) -> None:
    text = index.read_text(encoding="utf-8")
    pages = [
        str(page.relative_to(index.parent).with_suffix("")) for page in index.parent.rglob("*.md") if page != index
    ]
    tree = [name for name in re.findall(r"^([\w./-]+)$", text, re.MULTILINE) if name != "api/index"]
    assert sorted(tree) == sorted(pages)
    assert {f"{name}.md" for name in pages} <= set(re.findall(r"\]\(([\w./-]+)\)", text))


QUESTIONS = {  # what new users ask first, with the page that answers it; test_docs.py checks the heading of the link
    "See the rollouts of step 10": "looking",
    "Compare runs": "compare",
    "Send a run to W&B": "trackers",
    "Set a learning rate schedule": "optimizer",
    "Train on two GPUs": "distributed",
    "Train on Slurm": "slurm",
    "Use a data set of the Hub": "data",
    "Save the model and push it": "hub",
    "Train on GSM8K": "recipes",
    "Train on images": "data",
    "Train a 70B model": "precision-and-memory",
    "Stop early": "validate",
    "Resume with another learning rate": "resume",
    "Profile a run": "trace",
    "Write my own reward": "reward-function",
    "Train a LoRA adapter": "lora",
    "Why does it not learn?": "troubleshooting",
    "Use tools in several turns": "tools",
    "Move a training from verl": "from-verl",
    "Move a training from TRL": "from-trl",
    "Move a training from OpenRLHF": "from-openrlhf",
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_start_page_answers_a_first_question(question: str) -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    (answer,) = re.findall(rf"^\| {re.escape(question)} \| (.*) \|$", text, re.MULTILINE)
    (page,) = re.findall(r"\]\(how-to/([\w-]+)\.md(?:#[\w-]+)?\)", answer)
    assert page == QUESTIONS[question]


@pytest.mark.parametrize(
    ("text", "module", "path", "first"),
    [
        ("Job", "flowrl", "Graph.bind", "flowrl.Job"),
        ("Graph.check", "flowrl.errors", "RuleError", "flowrl.Graph.check"),  # a public name of another module
        ("flowrl.run.training.job.Job", "flowrl", "", "flowrl.Job"),  # public, by the path of its definition
        ("torch.Generator", "flowrl", "", "torch.Generator"),
        ("loss", "flowrl.operators", "UpdateActor", None),  # a parameter, not the class of this name elsewhere
        ("uid", "flowrl.operators", "GAE", None),  # a column
        ("flowrl.sync.probe", "flowrl", "", None),  # a module without a page
        ("docs/reference/errors.md", "flowrl.errors", "", None),
        ("flowrl check", "flowrl", "", None),
    ],
)
def test_a_name_in_a_docstring_is_found_where_it_stands(text: str, module: str, path: str, first: str | None) -> None:
    found = _extension("names")["look_up"](text, module, path)
    assert found is not None
    assert found[:1] == ([first] if first else found[:1])
    if first is None:
        assert not [name for name in found if name in ("flowrl.Loss", "flowrl.operators.Uid")]


@pytest.mark.parametrize(
    "text",
    ["nothing", "Job.nothing", "flowrl.nothing", "flowrl.Job.nothing", "docs/nothing.md", "flowrl nothing", "a > b"],
)
def test_a_name_of_nothing_is_not_found(text: str) -> None:
    assert _extension("names")["look_up"](text, "flowrl", "Graph.bind") is None


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("UpdateActor", "UpdateActor"),
        ("Graph.check", "Graph.check"),
        ("Spread(least=0.1)", "Spread"),
        ("grpo(exact, n=4)", "grpo"),
        ("flowrl.operators.kl", "flowrl.operators.kl"),
        ("gae", None),  # a node
        ("update_actor.loss", None),
        ("kl/ref", None),
        ("Graph.check == 1", None),
    ],
)
def test_inline_code_links_by_the_name_in_it(code: str, name: str | None) -> None:
    assert _extension("code_links")["name_of"](code) == name


def test_a_name_has_the_only_object_of_the_reference_with_it() -> None:
    objects = ("flowrl.Graph", "flowrl.Graph.check", "flowrl.operators.Sync", "flowrl.records.Sync")
    env = SimpleNamespace(domains=SimpleNamespace(python_domain=SimpleNamespace(objects=dict.fromkeys(objects))))
    found = _extension("code_links")["public"](env)
    assert found["Graph.check"] == found["flowrl.Graph.check"] == "flowrl.Graph.check"
    assert "Sync" not in found and found["flowrl.records.Sync"] == "flowrl.records.Sync"


def test_a_name_links_once_in_a_section_and_not_in_headings_and_links() -> None:
    linkable = _extension("code_links")["linkable"]
    core = importlib.import_module("docutils.core")
    page = "``GAE`` 1\n=========\n\n``GAE`` and ``GAE(lam=1)`` `x`__\n\n__ y\n\n``Sync`` 2\n----------\n\n``GAE``\n"
    document = core.publish_doctree(page, settings_overrides={"doctitle_xform": False})
    assert [one.astext() for one in linkable(document)] == ["GAE", "GAE"]


def _shown(drawn: Any) -> Iterator[Any]:
    yield from (sorted((box.name, box.lines, box.writes, box.role, box.shape) for box in drawn.boxes), drawn.roles)
    yield [(a.source, a.target, "" if a.whole else a.label, a.kind) for a in drawn.arrows]


def test_a_flowchart_is_the_picture_that_it_was_written_from() -> None:
    graph = grpo(exact)
    assert list(_shown(_extension("flowcharts")["read"](draw(graph)))) == list(_shown(picture(graph)))


def test_a_line_that_is_no_flowchart_is_refused() -> None:
    with pytest.raises(ValueError, match="a->>b: hello"):
        _extension("flowcharts")["read"]("sequenceDiagram\n    a->>b: hello")


@pytest.mark.parametrize(
    "page",
    [
        '<img src="https://img.example/badge.svg">',
        '<script src="//cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="https://fonts.example/css">',
        '<p style="background: url(https://img.example/x.png)">',
        "<style>@import 'https://fonts.example/css';</style>",
    ],
)
def test_a_page_that_loads_from_another_host_fails_the_build(page: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    (found,) = CHECK["requests"](tmp_path)
    assert found.startswith("page.html loads ")


def test_a_link_and_an_own_picture_pass(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text('<a href="https://arxiv.org">a</a><img src="x.svg">', encoding="utf-8")
    (tmp_path / "site.css").write_text("p { background: url(x.png) }", encoding="utf-8")
    assert not list(CHECK["requests"](tmp_path))


def test_links_to_missing_files_and_anchors_fail_the_build(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        '<a href="other.html#here">a</a><a href="other.html#gone">b</a><a href="no.html">c</a>'
    )
    (tmp_path / "other.html").write_text('<h2 id="here">h</h2><a href="page.html">d</a>', encoding="utf-8")
    assert [found.split()[2] for found in CHECK["broken"](tmp_path)] == ["other.html#gone,", "no.html,"]


def test_an_index_without_a_name_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "searchindex.js").write_text(
        'Search.setIndex({"terms":{updateactor:1,"kl":2,ref:3,clip:4}})', encoding="utf-8"
    )
    assert list(CHECK["not_found"](tmp_path)) == ["the search does not find FR011"]

"""The page as one file: what it includes within its budget, and what it says that it leaves out."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html.parser
import json
import random
import string
from pathlib import Path
from typing import Any

import pytest

from flowrl.look.page.export import BUDGET, export
from flowrl.look.page.server import files
from tests.look.page.pages import api_of, asked, written


class Parts(html.parser.HTMLParser):
    """Scripts, styles and policy of a document, as an HTML parser sees them."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.style, self.policy, self.tags, self._open = "", "", list[str](), ""
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self._open = tag
        if tag == "script":
            self.scripts.append((given, ""))
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            given, text = self.scripts.pop()
            self.scripts.append((given, text + data))
        if self._open == "style":
            self.style += data

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    @property
    def data(self) -> Any:
        text = next(text for given, text in self.scripts if given.get("id") == "data")
        return json.loads(gzip.decompress(base64.b64decode(text)))

    @property
    def answers(self) -> dict[str, Any]:
        return {json.dumps([view, sorted(asked.items())]): answer for view, asked, answer in self.data["answers"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("runs") / "run", steps=6)


def test_answers_are_those_of_the_server(run: Path) -> None:
    api = api_of(run)
    document, note = export(api)
    answers = [(view, given, answer) for view, given, answer in Parts(document).data["answers"]]
    assert {view for view, *_ in answers} == {
        *("runs", "graph", "metrics", "run", "now", "time", "rows", "row", "prompts", "prompt"),
    }
    for view, given, answer in answers:
        assert answer == json.loads(json.dumps(asked(api, view, **given)))
    assert "rows of 6 of 6 steps" in note and Parts(document).data["steps"] == {"run": [1, 2, 3, 4, 5, 6]}


def test_nothing_but_its_own_scripts_may_run(run: Path) -> None:
    parts = Parts(export(api_of(run))[0])
    run_ = [text for given, text in parts.scripts if given.get("type") in (None, "module", "importmap")]
    allowed = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (*run_, parts.style)}
    assert len(run_) == 3 and parts.policy.startswith("default-src 'none'")
    assert {word[8:-1] for word in parts.policy.replace(";", " ").split() if word.startswith("'sha256-")} == allowed
    assert "unsafe" not in parts.policy and "connect-src" not in parts.policy
    imports = json.loads(next(text for given, text in parts.scripts if given.get("type") == "importmap"))["imports"]
    assert {f"page/{name}" for name in files() if name.endswith(".js") and name != "vendor/uPlot.js"} == {*imports}
    for text in map(base64.b64decode, (address.partition(",")[2] for address in imports.values())):
        assert b'from "./' not in text


def test_no_text_can_end_the_data(tmp_path: Path) -> None:
    hostile = ["<!--<script>", "</script><img src=x>", "\u2028", "]]>", "\x00"]
    document, _ = export(api_of(written(tmp_path / "</title><script>", steps=1, texts_of=hostile)))
    clean, _ = export(api_of(written(tmp_path / "run", steps=1)))
    assert Parts(document).tags == Parts(clean).tags
    rows = next(answer for view, _, answer in Parts(document).data["answers"] if view == "rows")
    assert set(rows["responses"]) == set(hostile)


def test_a_file_without_rows_has_no_text_of_the_data(tmp_path: Path) -> None:
    run = written(tmp_path / "run", steps=3, texts_of=["a secret"])
    document, note = export(api_of(run), rows=False)
    data = json.dumps(Parts(document).data["answers"])
    assert "secret" not in data and "10+40=" not in data and "row_id" not in data
    assert "no prompts or responses" in note
    assert "reward/mean" in data


def test_the_budget_is_kept_and_the_rest_is_named(tmp_path: Path) -> None:
    letters = random.Random(0)
    texts = ["".join(letters.choices(string.printable, k=20_000)) for _ in range(97)]
    api = api_of(written(tmp_path / "run", steps=30, texts_of=texts))
    whole, _ = export(api)
    assert len(whole) <= BUDGET
    small, note = export(api, budget=1_500_000)
    assert 700_000 < len(small.encode()) <= 1_500_000 and "it stops at 2 MB" in note
    data = Parts(small).data
    assert data["note"] == note and data["steps"]["run"][-1] == 30  # the last step is the most important
    assert "metrics" in {view for view, *_ in data["answers"]}


def test_steps_with_alarms_are_included(tmp_path: Path) -> None:
    run = written(tmp_path / "run", steps=200, prompts=2, size=2, texts=0)
    (run / "alarms.jsonl").write_text(json.dumps({"step": 77, "message": "KL", "rows": []}) + "\n")
    data = Parts(export(api_of(run))[0]).data
    assert {1, 77, 200} <= set(data["steps"]["run"]) and len(data["steps"]["run"]) == 40


def test_several_runs_are_in_one_file(run: Path, tmp_path: Path) -> None:
    document, _ = export(api_of(run, written(tmp_path / "other", steps=2)))
    names = {given["run"] for _, given, _ in Parts(document).data["answers"] if "run" in given}
    assert names == {"run", "other"}

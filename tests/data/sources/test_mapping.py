"""Columns by path, and rows by a function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrl import PromptData
from flowrl.data.sources.mapping import RowMapping
from flowrl.errors import ParameterError
from tests.support.errors import raises
from tests.support.rows.prompt_files import Characters, truths, write_jsonl, write_parquet

ROW = {"a": {"b": [{"c": 1}, {"c": 2}]}, "a.d": 3, "prompt": "p"}


@pytest.mark.parametrize(
    ("path", "value"),
    [("a.b.1.c", 2), ("a.b.-2.c", 1), ("a.d", 3), ("a.b", ROW["a"]["b"]), (None, None)],  # type: ignore[index]
)
def test_a_path_leads_into_nested_columns(path: str | None, value: Any) -> None:
    assert RowMapping({"x": path}, None)("", ROW) == ({**ROW, "x": value}, {"x": path})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a.e", "a; it"),
        ("a.b.2.c", "it has 2 items where the path has 2"),
        ("b", "did you mean 'a'"),
        ("prompt.x", "there is 'p' where the path has 'x'"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, message: str) -> None:
    with raises("prompts.missing-column", where="here", column=path):
        RowMapping({"x": path}, None)("here", ROW)


def test_a_mapping_reads_its_columns_of_parquet(tmp_path: Path) -> None:
    rows = [{"q": {"text": f"{i}"}, "answer": i, "other": "x"} for i in range(3)]
    path = write_parquet(tmp_path / "a.parquet", rows)
    data = PromptData(path, shuffle=False, columns={"prompt": "q.text", "ground_truth": "answer"})
    assert truths(data.load(Characters(), 0).all()) == [0, 1, 2]  # type: ignore[arg-type]
    assert RowMapping(data.columns, None).reads(("prompt", "ground_truth", "extra_info")) == {
        "q.text",
        "q",
        "answer",
        "extra_info",
    }


def test_a_function_of_a_file_maps_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.py").write_text(
        "def row(r):\n    return r['a'] and {'prompt': r['q'], 'ground_truth': r['a']} or None\n"
    )
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "1", "a": 1}, {"q": "2", "a": 0}, {"q": "3", "a": 3}])
    stream = PromptData(path, shuffle=False, map="rows.py:row").load(Characters(), 0)  # type: ignore[arg-type]
    assert truths(stream.all()) == [1, 3] and stream.dropped == 1
    with pytest.raises(ParameterError, match="does not define 'raw'"):
        PromptData(path, map="rows.py:raw")


@pytest.mark.parametrize(
    ("function", "code", "facts"),
    [
        (lambda row: row["b"], "bad-map", {"where": "data row 0", "reason": "KeyError: 'b'"}),
        (lambda row: [row], "bad-map", {"found": "list"}),
        (lambda row: {"prompt": "a"}, "missing-key", {"missing": ("ground_truth",)}),
        (lambda row: None, "no-rows", {}),
    ],
)
def test_a_function_that_does_not_map_is_refused(function: Any, code: str, facts: Any) -> None:
    with raises(f"prompts.{code}", **facts):
        PromptData([{"a": 1}], map=function).load(Characters(), 0)  # type: ignore[arg-type]

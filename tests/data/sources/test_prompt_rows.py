"""Rows of prompt files that are broken in unusual ways."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flowrl import PromptData
from flowrl.data.sources import file_source, readers
from flowrl.data.text.tokenizer import ChatTokenizer
from tests.support.errors import raises
from tests.support.models import tiny_folder
from tests.support.rows.prompt_files import Characters, load, record, truths, write_jsonl, write_parquet


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("line", "code", "detail"),
    [
        (nested(100_000), "broken-file", "nested too deeply"),
        (f'{{"prompt": {nested(900)}}}', "wrong-type", "100 levels"),
        (json.dumps(record(0) | {"extra_info": {"a": json.loads(nested(150))}}), "wrong-type", ""),
        ('{"prompt": [{"role": "user", "content": "\\ud800"}]}', "broken-file", "surrogates not allowed"),
        ('{"prompt": ' + "9" * 5000 + "}", "broken-file", "not JSON"),
        ("NaN", "wrong-type", "a float"),
        ("true", "wrong-type", "a bool"),
    ],
    ids=lambda text: text[:30],
)
def test_malformed_lines_are_refused_with_their_line_number(tmp_path: Path, line: str, code: str, detail: str) -> None:
    path = Path(write_jsonl(tmp_path / "a.jsonl", [record(0)]))
    path.write_text(path.read_text() + line + "\n")
    with raises(f"prompts.{code}") as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:2: ") and detail in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("levels", "accepted"), [(99, True), (100, False)])
def test_rows_nested_beyond_the_limit_are_refused(tmp_path: Path, levels: int, accepted: bool) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [record(0) | {"extra_info": {"a": json.loads(nested(levels))}}])
    if accepted:
        assert len(load(path).next(1)) == 1
    else:
        with raises("prompts.wrong-type", limit=100):
            load(path)


def test_a_surrogate_pair_is_one_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record(0, "\N{GRINNING FACE}")) + "\n")
    assert "\\ud83d" in path.read_text()
    assert load(path).all()["raw_prompt"][0][1]["content"] == "\N{GRINNING FACE}"


@pytest.mark.parametrize("truth", [math.nan, [1.0, math.nan], {"a": [math.nan]}])
def test_a_ground_truth_of_nan_is_refused(tmp_path: Path, truth: Any) -> None:
    odd = record(1) | {"reward_model": {"ground_truth": truth}}
    for path in (write_jsonl(tmp_path / "a.jsonl", [odd]), write_parquet(tmp_path / "a.parquet", [odd])):
        with raises("prompts.no-ground-truth", found=repr(truth)):
            load(path)
    infinite = record(0) | {"reward_model": {"ground_truth": math.inf}}
    assert truths(load(write_jsonl(tmp_path / "b.jsonl", [infinite])).all()) == [math.inf]


@pytest.mark.parametrize("content", ["", " ", "\n\t\u2003"])
def test_an_empty_user_message_is_refused(tmp_path: Path, content: str) -> None:
    odd = record(0) | {"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": content}]}
    with raises("prompts.bad-messages", where=f"{tmp_path}/a.jsonl:1", index=1):
        load(write_jsonl(tmp_path / "a.jsonl", [odd]))
    silent = record(0) | {"prompt": [{"role": "system", "content": ""}, {"role": "user", "content": "a"}]}
    stream = load(write_jsonl(tmp_path / "b.jsonl", [silent]))
    assert len(stream) == 1  # as templates with a default system message need


@pytest.mark.parametrize("role", ["", "x" * 101, 3, None, True])
def test_invalid_roles_are_refused(tmp_path: Path, role: Any) -> None:
    with raises("prompts.bad-messages", index=0):
        load(write_jsonl(tmp_path / "a.jsonl", [record(0) | {"prompt": [{"role": role, "content": "a"}]}]))


def test_parquet_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    rows = pa.Table.from_pylist([record(0), record(1)])
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
    )
    pq.write_table(rows.set_column(1, "data_source", broken), tmp_path / "a.parquet")
    with raises("prompts.broken-file", path=f"{tmp_path}/a.parquet", row=0) as caught:
        load(tmp_path / "a.parquet")
    assert "utf-8" in str(caught.value)


def test_a_duplicate_parquet_column_is_refused(tmp_path: Path) -> None:
    rows = pa.Table.from_pylist([record(0)])
    pq.write_table(rows.append_column("prompt", rows["prompt"]), tmp_path / "a.parquet")
    with raises("prompts.broken-file") as caught:
        load(tmp_path / "a.parquet")
    assert "there are 2 columns 'prompt'" in str(caught.value)


def test_a_file_without_read_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [record(0)])

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, os.strerror(13), path)

    monkeypatch.setattr(Path, "open", refuse)
    for read in (lambda: load(path), PromptData(path).digests):
        with raises("data.unreadable-file", path=path, reason="Permission denied"):
            read()


def test_digests_depend_on_file_content(tmp_path: Path) -> None:
    a, b = (write_jsonl(tmp_path / f"{name}.jsonl", [record(0)]) for name in "ab")
    c = write_jsonl(tmp_path / "c.jsonl", [record(1)])
    assert PromptData(a).digests() == PromptData(b).digests() != PromptData(c).digests()
    assert PromptData((a, c)).digests() == [*PromptData(a).digests(), *PromptData(c).digests()]
    with raises("prompts.missing-file"):
        PromptData(str(tmp_path / "gone.jsonl")).digests()


# ---- overlong text is not tokenized


class Short(Characters):
    """Fails on text that would exhaust memory."""

    def prompt_ids(self, messages: Sequence[dict[str, Any]], template_kwargs: Any = None) -> list[int]:
        assert sum(len(message["content"]) for message in messages) <= 80
        return super().prompt_ids(messages)


def test_prompts_too_long_by_characters_are_not_tokenized(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [record(0), record(1, "x" * 1000), record(2, "y" * 20)])

    def read(**settings: Any) -> Any:
        return PromptData(path, max_prompt_length=8, **settings).load(Short(), 0)  # type: ignore[arg-type]

    facts: dict[str, Any] = {"where": f"{path}:2", "setting": "max_prompt_length", "limit": 8, "count": 2, "rows": 3}
    with raises("prompts.too-long", found=1003, unit="characters", **facts) as caught:
        read()
    assert "Set max_prompt_length=" not in str(caught.value) and "Shorten them, or drop them" in str(caught.value)
    remaining = read(overlong="drop")
    assert (len(remaining), remaining.dropped) == (1, 2)


def test_prompts_at_the_character_limit_are_tokenized(tmp_path: Path) -> None:
    class Words(Characters):
        def prompt_ids(self, *messages: Any) -> list[int]:
            return super().prompt_ids(*messages)[:8]

    path = write_jsonl(tmp_path / "a.jsonl", [record(0, "x" * 77)])  # 80 characters: 8 tokens of 10
    assert len(PromptData(path, max_prompt_length=8).load(Words(), 0)) == 1  # type: ignore[arg-type]


def test_characters_are_limited_without_a_token_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_source, "_CHARACTERS", 80)
    path = write_jsonl(tmp_path / "a.jsonl", [record(0), record(1, "x" * 78)])
    with raises("prompts.too-long", where=f"{path}:2", found=81, unit="characters", limit=None, count=1, rows=2):
        PromptData(path).load(Short(), 0)  # type: ignore[arg-type]
    assert len(PromptData(path, max_prompt_length=100).load(Characters(), 0)) == 2  # type: ignore[arg-type]


def test_an_overlong_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_LINE", 300)
    path = write_jsonl(tmp_path / "a.jsonl", [record(0), record(1, "x" * 300)])
    with raises("prompts.broken-file", path=path, line=2) as caught:
        load(path)
    assert "more than 300 bytes" in str(caught.value)


def test_longest_token_bounds_the_characters_per_token(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(tiny_folder(tmp_path))
    assert tokenizer.longest_token == len("<|assistant|>")
    text = "some words, and numbers: 12345"
    assert len(text) <= len(tokenizer.encode(text)) * tokenizer.longest_token


# ---- numbers of rows


@pytest.mark.parametrize("n", ["a", True, 1.0, None, 0, -1])
def test_invalid_row_counts_are_refused(tmp_path: Path, n: Any) -> None:
    stream = load(write_jsonl(tmp_path / "a.jsonl", [record(0)]))
    with raises("data.not-a-count", call="next", found=n):
        stream.next(n)
    with raises("data.not-a-count", call="batches", found=n):
        stream.batches(n)


def test_the_digest_of_a_stream_covers_its_rows(tmp_path: Path) -> None:
    rows = [record(0), record(1)]
    digest = load(write_jsonl(tmp_path / "a.jsonl", rows)).digest()
    assert load(write_parquet(tmp_path / "a.parquet", rows), seed=3, shuffle=False).digest() == digest
    others = [[record(0)], [record(0), record(2)], [record(1), record(0)], [record(0), record(1, "zz")]]
    others.append([record(0), record(1) | {"extra_info": {"index": 2}}])
    assert digest not in {load(write_jsonl(tmp_path / "b.jsonl", other)).digest() for other in others}

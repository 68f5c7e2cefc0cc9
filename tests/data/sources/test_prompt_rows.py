"""Rows of prompt files that are broken in ways that only files in the wild are."""

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
from flowrl.data.sources import file_source, prompt_rows
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import DataError, ParameterError
from tests.support.models import tiny_folder
from tests.support.prompt_files import Characters, load, record, truths, write_jsonl, write_parquet


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (nested(100_000), "the line is not JSON (it is nested too deeply)"),
        (f'{{"prompt": {nested(900)}}}', "the row nests more than 100 lists and objects"),
        (json.dumps(record(0) | {"extra_info": {"a": json.loads(nested(150))}}), "the row nests more than 100"),
        ('{"prompt": [{"role": "user", "content": "\\ud800"}]}', "surrogates not allowed"),
        ('{"prompt": ' + "9" * 5000 + "}", "the line is not JSON"),
        ("NaN", "the row is a float"),
        ("true", "the row is a bool"),
    ],
    ids=lambda text: text[:30],
)
def test_lines_that_break_a_reader(tmp_path: Path, line: str, said: str) -> None:
    path = Path(write_jsonl(tmp_path / "a.jsonl", [record(0)]))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:2: ") and said in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("levels", "taken"), [(99, True), (100, False)])
def test_how_deeply_a_row_may_nest(tmp_path: Path, levels: int, taken: bool) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [record(0) | {"extra_info": {"a": json.loads(nested(levels))}}])
    if taken:
        assert len(load(path).next(1)) == 1
    else:
        with pytest.raises(DataError, match="nests more than 100"):
            load(path)


def test_a_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record(0, "\N{GRINNING FACE}")) + "\n")
    assert "\\ud83d" in path.read_text()
    assert load(path).all()["raw_prompt"][0][1]["content"] == "\N{GRINNING FACE}"


@pytest.mark.parametrize("truth", [math.nan, [1.0, math.nan], {"a": [math.nan]}])
def test_a_ground_truth_that_is_no_number_is_refused(tmp_path: Path, truth: Any) -> None:
    odd = record(1) | {"reward_model": {"ground_truth": truth}}
    for path in (write_jsonl(tmp_path / "a.jsonl", [odd]), write_parquet(tmp_path / "a.parquet", [odd])):
        with pytest.raises(DataError, match=r"the ground truth is .*nan.*, and NaN equals no answer"):
            load(path)
    infinite = record(0) | {"reward_model": {"ground_truth": math.inf}}
    assert truths(load(write_jsonl(tmp_path / "b.jsonl", [infinite])).all()) == [math.inf]


@pytest.mark.parametrize("content", ["", " ", "\n\t\u2003"])
def test_a_user_who_says_nothing_is_refused(tmp_path: Path, content: str) -> None:
    odd = record(0) | {"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": content}]}
    with pytest.raises(DataError, match=r"a\.jsonl:1: message 1 of prompt is of a user who says nothing"):
        load(write_jsonl(tmp_path / "a.jsonl", [odd]))
    silent = record(0) | {"prompt": [{"role": "system", "content": ""}, {"role": "user", "content": "a"}]}
    assert (
        len(load(write_jsonl(tmp_path / "b.jsonl", [silent]))) == 1
    )  # as templates with a system text of their own want


@pytest.mark.parametrize("role", ["", "x" * 101, 3, None, True])
def test_roles_that_are_none(tmp_path: Path, role: Any) -> None:
    with pytest.raises(DataError, match="message 0 of prompt is"):
        load(write_jsonl(tmp_path / "a.jsonl", [record(0) | {"prompt": [{"role": role, "content": "a"}]}]))


def test_parquet_with_text_that_is_none(tmp_path: Path) -> None:
    rows = pa.Table.from_pylist([record(0), record(1)])
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
    )
    pq.write_table(rows.set_column(1, "data_source", broken), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as parquet after 0 rows \(.*utf-8"):
        load(tmp_path / "a.parquet")


def test_parquet_with_a_column_twice(tmp_path: Path) -> None:
    rows = pa.Table.from_pylist([record(0)])
    pq.write_table(rows.append_column("prompt", rows["prompt"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"there are 2 columns 'prompt'"):
        load(tmp_path / "a.parquet")


def test_a_file_that_must_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [record(0)])

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, os.strerror(13), path)

    monkeypatch.setattr(Path, "open", refuse)
    for read in (lambda: load(path), PromptData(path).digests):
        with pytest.raises(DataError, match=r"a\.jsonl cannot be read \(Permission denied\)"):
            read()


def test_digests_are_of_the_content(tmp_path: Path) -> None:
    a, b = (write_jsonl(tmp_path / f"{name}.jsonl", [record(0)]) for name in "ab")
    c = write_jsonl(tmp_path / "c.jsonl", [record(1)])
    assert PromptData(a).digests() == PromptData(b).digests() != PromptData(c).digests()
    assert PromptData((a, c)).digests() == [*PromptData(a).digests(), *PromptData(c).digests()]
    with pytest.raises(DataError, match="is not a file"):
        PromptData(str(tmp_path / "gone.jsonl")).digests()


# ---- what is too long is not tokenised


class Short(Characters):
    """Fails on a text that a machine could not take."""

    def prompt_ids(self, messages: Sequence[dict[str, Any]], template_kwargs: Any = None) -> list[int]:
        assert sum(len(message["content"]) for message in messages) <= 80
        return super().prompt_ids(messages)


def test_a_prompt_that_no_tokens_could_hold_is_not_tokenised(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [record(0), record(1, "x" * 1000), record(2, "y" * 20)])

    def read(**settings: Any) -> Any:
        return PromptData(path, max_prompt_length=8, **settings).load(Short(), 0)  # type: ignore[arg-type]

    with pytest.raises(DataError) as caught:
        read()
    assert str(caught.value).startswith(f"{path}:2: the prompt has 1003 characters, but max_prompt_length is 8 (2 of 3")
    assert "set max_prompt_length=" not in str(caught.value) and "shorten them, or leave them out" in str(caught.value)
    kept = read(overlong="drop")
    assert (len(kept), kept.dropped) == (1, 2)


def test_a_prompt_that_tokens_could_just_hold_is_tokenised(tmp_path: Path) -> None:
    class Words(Characters):
        def prompt_ids(self, *messages: Any) -> list[int]:
            return super().prompt_ids(*messages)[:8]

    path = write_jsonl(tmp_path / "a.jsonl", [record(0, "x" * 77)])  # 80 characters: 8 tokens of 10
    assert len(PromptData(path, max_prompt_length=8).load(Words(), 0)) == 1  # type: ignore[arg-type]


def test_without_a_limit_there_is_still_what_no_machine_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_source, "_CHARACTERS", 80)
    path = write_jsonl(tmp_path / "a.jsonl", [record(0), record(1, "x" * 78)])
    with pytest.raises(
        DataError, match=r"a\.jsonl:2: the prompt has 81 characters, which no machine tokenises \(1 of 2"
    ):
        PromptData(path).load(Short(), 0)  # type: ignore[arg-type]
    assert len(PromptData(path, max_prompt_length=100).load(Characters(), 0)) == 2  # type: ignore[arg-type]


def test_a_line_that_no_machine_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_rows, "_LINE", 300)
    path = write_jsonl(tmp_path / "a.jsonl", [record(0), record(1, "x" * 300)])
    with pytest.raises(DataError, match=r"a\.jsonl:2: the line has more than 300 bytes"):
        load(path)


def test_the_longest_token_bounds_what_tokens_hold(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(tiny_folder(tmp_path))
    assert tokenizer.longest_token == len("<|assistant|>")
    text = "some words, and numbers: 12345"
    assert len(text) <= len(tokenizer.encode(text)) * tokenizer.longest_token


# ---- numbers of rows


@pytest.mark.parametrize("n", ["a", True, 1.0, None, 0, -1])
def test_what_is_no_number_of_rows(tmp_path: Path, n: Any) -> None:
    stream = load(write_jsonl(tmp_path / "a.jsonl", [record(0)]))
    with pytest.raises(ParameterError, match=r"next\(.*\): expected an int, at least 1 row per batch"):
        stream.next(n)
    with pytest.raises(ParameterError, match=r"batches\(.*\): expected an int, at least 1 row per batch"):
        stream.batches(n)


def test_the_digest_of_a_stream_is_of_what_it_gives(tmp_path: Path) -> None:
    rows = [record(0), record(1)]
    digest = load(write_jsonl(tmp_path / "a.jsonl", rows)).digest()
    assert load(write_parquet(tmp_path / "a.parquet", rows), seed=3, shuffle=False).digest() == digest
    others = [[record(0)], [record(0), record(2)], [record(1), record(0)], [record(0), record(1, "zz")]]
    others.append([record(0), record(1) | {"extra_info": {"index": 2}}])
    assert digest not in {load(write_jsonl(tmp_path / "b.jsonl", other)).digest() for other in others}

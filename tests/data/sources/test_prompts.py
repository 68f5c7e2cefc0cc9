"""Tests of `prompts.py` and `file_source.py`: prompts from JSONL and parquet files, and refused malformed rows."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flowrl.data.sources.prompts import PromptData
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import ParameterError
from tests.support.errors import raises
from tests.support.models import char_tokenizer, tiny_folder
from tests.support.rows.prompt_files import Characters, load, record, truths, write_jsonl, write_parquet


def refused(tmp_path: Path, row: Any, code: str, good: int = 1, **facts: Any) -> None:
    """A file of `good` valid rows and then `row` raises this code."""
    path = write_jsonl(tmp_path / "bad.jsonl", [*map(record, range(good)), row])
    with raises(f"prompts.{code}", where=f"{path}:{good + 1}", **facts) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:{good + 1}: ") and "\n" not in str(caught.value)


# ---- files


def test_parquet_and_jsonl_give_the_same_batches(tmp_path: Path) -> None:
    records = [record(i) for i in range(7)]
    records[3]["prompt"] = [{"role": "user", "content": "one\u2028line"}]  # a line end to str.splitlines, not to JSONL
    a = load(write_jsonl(tmp_path / "a.jsonl", records), seed=3)
    b = load(write_parquet(tmp_path / "a.PARQUET", records), seed=3)
    for n in (3, 7, 9):
        assert a.next(n).equal(b.next(n))
    assert a.all().equal(b.all())


def test_a_null_message_key_equals_a_missing_key(tmp_path: Path) -> None:
    """Parquet gives all messages of a file the same keys, so a key that one message has is null in the others."""
    records = [record(0), record(1)]
    records[1]["prompt"][0]["name"] = "sums"
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    a = load(write_jsonl(tmp_path / "a.jsonl", records)).all()
    b = load(write_parquet(tmp_path / "a.parquet", records)).all()
    assert a.equal(b)
    assert b["raw_prompt"][0][0] == {"role": "system", "content": "add"}
    records[0]["prompt"].insert(1, call)
    calls = PromptData(write_jsonl(tmp_path / "c.jsonl", records)).load(_NoText(), 0).all()  # type: ignore[arg-type]
    assert calls["raw_prompt"][0][1] == {"role": "assistant", "tool_calls": [{"type": "function"}]}


class _NoText(Characters):
    def prompt_ids(self, messages: Sequence[dict[str, Any]], template_kwargs: Any = None) -> list[int]:
        return [1] * len(messages)


def test_several_files_are_concatenated(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", [record(0), record(1)])
    b = write_parquet(tmp_path / "b.parquet", [record(2), record(3)])
    batch = load((b, a), shuffle=False).next(4)
    assert truths(batch) == ["2", "3", "0", "1"]
    assert list(batch["row_id"]) == ["0/0/0", "0/1/0", "0/2/0", "0/3/0"]


def test_a_tilde_expands_to_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "a.jsonl", [record(0)])
    assert len(load(os.path.join("~", "a.jsonl"))) == 1


def test_a_path_may_be_a_path_object(tmp_path: Path) -> None:
    a, b = (Path(write_jsonl(tmp_path / f"{name}.jsonl", [record(i)])) for i, name in enumerate("ab"))
    assert PromptData(a) == PromptData(str(a))
    assert PromptData(a).path == str(a)
    assert PromptData((a, str(b))).path == (str(a), str(b))
    assert truths(load((a, str(b)), shuffle=False).all()) == ["0", "1"]
    with pytest.raises(ParameterError, match="path"):
        PromptData(3)  # type: ignore[arg-type]


def test_missing_files_are_found_without_a_tokenizer(tmp_path: Path) -> None:
    path = Path(write_jsonl(tmp_path / "a.jsonl", [record(0)]))
    PromptData(path).refuse_missing()
    with raises("prompts.missing-file", path=f"{tmp_path}/gone.jsonl", source="PromptData"):
        PromptData((path, path.with_name("gone.jsonl"))).refuse_missing()
    with raises("prompts.missing-file"):
        PromptData(tmp_path / "a.jsonl" / "b.jsonl").refuse_missing()


def test_parquet_files_are_read_in_several_batches(tmp_path: Path) -> None:
    stream = load(write_parquet(tmp_path / "a.parquet", [record(i, "q") for i in range(2500)]), shuffle=False)
    assert truths(stream.all()) == [str(i) for i in range(2500)]


# ---- overlong prompts: record(i) has 4 + i characters


def test_a_prompt_of_exactly_the_limit_is_accepted(tmp_path: Path) -> None:
    stream = load(write_jsonl(tmp_path / "a.jsonl", [record(i) for i in range(4)]), max_prompt_length=7)
    assert (len(stream), stream.dropped) == (4, 0)


def test_overlong_prompts_are_refused(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", [record(0), record(1)])
    b = write_jsonl(tmp_path / "b.jsonl", [record(1), record(2), record(6), record(3)])
    with raises("prompts.too-long", where=f"{b}:2", found=6, limit=5, count=3, rows=6, longest=10) as caught:
        load((a, b), max_prompt_length=5)
    message = str(caught.value)
    assert "Set max_prompt_length=10" in message and 'overlong="drop"' in message


def test_overlong_prompts_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [record(5), record(0), record(1), record(7)]
    stream = load(write_parquet(tmp_path / "a.parquet", rows), max_prompt_length=5, overlong="drop")
    assert (len(stream), stream.dropped) == (2, 2)
    assert truths(stream.all()) == ["0", "1"]
    assert list(stream.all()["uid"]) == ["0/1/0", "0/2/0"]  # indices in the file: they do not depend on the limit
    assert set(stream.next(4)["uid"]) == {"0/1/0", "0/2/0", "1/1/0", "1/2/0"}


def test_dropping_every_prompt_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [record(5), record(6)])
    with raises("prompts.too-long", where=f"{path} row 0", count=2, rows=2, longest=10) as caught:
        load(path, max_prompt_length=3, overlong="drop")
    assert "dropping them would leave no prompt" in str(caught.value)


# ---- parameters and files that are refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": []}, "it has no rows"),
        ({"path": [{"prompt": "a"}, 3]}, "row 1 is an int"),
        ({"path": [{"prompt": {1, 2}}]}, "row 0 has 'prompt', which holds a set"),
        ({"path": "a.jsonl", "split": "train"}, "split is of a folder or a data set on the Hub"),
        ({"path": "a.jsonl", "columns": {"promt": "a"}}, "it maps to 'promt'; .* did you mean 'prompt'"),
        ({"path": "a.jsonl", "columns": {"prompt": "a"}, "map": len}, "map and columns both map rows"),
        ({"path": ()}, "names no file"),
        ({"path": ""}, "names no file"),
        ({"path": "a.jsonl", "max_prompt_length": 0}, "max_prompt_length=0"),
        ({"path": "a.jsonl", "overlong": "cut"}, "overlong='cut'"),
    ],
)
def test_parameters_are_checked_before_anything_is_read(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        PromptData(**settings)


def test_nothing_is_read_at_construction_and_equality_is_by_value() -> None:
    assert PromptData("nowhere.jsonl") == PromptData(path="nowhere.jsonl", shuffle=True)


def test_a_missing_file_is_named_before_others_are_read(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["not a record"])
    with raises("prompts.missing-file", path=f"{tmp_path}/gone.parquet"):
        load((path, str(tmp_path / "gone.parquet")))
    (tmp_path / "folder.jsonl").mkdir()
    with raises("prompts.missing-file"):
        load(str(tmp_path / "folder.jsonl"))


def test_empty_files_are_refused(tmp_path: Path) -> None:
    good, empty = write_jsonl(tmp_path / "a.jsonl", [record(0)]), write_jsonl(tmp_path / "b.jsonl", [])
    with raises("prompts.no-rows", path=empty):
        load((good, empty))
    pq.write_table(pa.Table.from_pylist([record(0)]).slice(0, 0), tmp_path / "c.parquet")
    with raises("prompts.no-rows", path=f"{tmp_path}/c.parquet"):
        load(str(tmp_path / "c.parquet"))


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        (b'{"prompt": [', "not JSON"),
        (b"\n", "blank"),
        (b'{"prompt": "\xff"}\n', "not JSON"),
        (b"{} {}\n", "not JSON"),
        (b'{"prompt": 1, "prompt": 2}\n', "not JSON (duplicate key 'prompt'"),
        (b'{"extra_info": {"a": {"b": 1, "b": 1}}}\n', "not JSON (duplicate key 'b'"),
    ],
)
def test_a_malformed_line_is_reported_with_its_number(tmp_path: Path, line: bytes, detail: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(record(0)).encode() + b"\n" + line)
    with raises("prompts.broken-file", path=str(path), line=2) as caught:
        load(str(path))
    assert f"{path}:2: the line is {detail}" in str(caught.value)


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    path = Path(write_parquet(tmp_path / "a.parquet", [record(i) for i in range(50)]))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with raises("prompts.broken-file", path=str(path)):
        load(str(path))
    path.write_bytes(content[:4] + bytes(200) + content[204:])
    with raises("prompts.broken-file", path=str(path)):
        load(str(path))


# ---- rows that are refused


def test_missing_keys_are_named(tmp_path: Path) -> None:
    row = {"prompt": record(0)["prompt"], "data_source": None}
    refused(tmp_path, row, "missing-key", missing=("ground_truth",))
    refused(tmp_path, {"question": "1+1"}, "missing-key", good=3, missing=("prompt", "ground_truth"))
    refused(tmp_path, [1, 2], "wrong-type", found="list")
    path = write_parquet(tmp_path / "b.parquet", [record(0), record(1), record(2) | {"data_source": None}])
    with raises("prompts.missing-key", where=f"{path} row 2", missing=("data_source",)):
        load(path)
    path = write_parquet(tmp_path / "a.parquet", [{"question": "1+1", "data_source": "x"}])
    with raises("prompts.missing-key", where=f"{path} row 0", missing=("prompt", "ground_truth")):
        load(path)


def test_the_error_of_a_row_without_ground_truth_says_how_to_do_without_one(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1="}])
    with raises("prompts.missing-key", missing=("ground_truth",)) as caught:
        load(path)
    fix = re.search(r"pass columns=(\{.*?\})\.", str(caught.value))
    assert fix is not None
    assert load(path, columns=ast.literal_eval(fix[1])).next(1)["ground_truth"] == [None]


@pytest.mark.parametrize("prompt", [3, {"role": "user", "content": "x"}, []])
def test_prompts_that_are_not_message_lists_are_refused(tmp_path: Path, prompt: Any) -> None:
    refused(tmp_path, record(0) | {"prompt": prompt}, "bad-messages", found=repr(prompt))


@pytest.mark.parametrize(
    "message",
    [
        "hello",
        {"content": "no role"},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "text": "misspelt"},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "b"}]},
        {"role": 1, "content": "x"},
    ],
)
def test_messages_without_role_or_text_are_refused(tmp_path: Path, message: Any) -> None:
    row = record(0) | {"prompt": [{"role": "system", "content": "s"}, message]}
    refused(tmp_path, row, "bad-messages", index=1, found=repr(message))


@pytest.mark.parametrize("reward", [{}, {"style": "rule"}, {"ground_truth": None}, "42", [1]])
def test_a_missing_ground_truth_is_refused(tmp_path: Path, reward: Any) -> None:
    refused(tmp_path, record(0) | {"reward_model": reward}, "no-ground-truth", found=repr(reward))


@pytest.mark.parametrize("truth", ["", 0, False, 1.5, [], {"answer": [1]}])
def test_any_ground_truth_except_null_is_accepted(tmp_path: Path, truth: Any) -> None:
    batch = load(write_jsonl(tmp_path / "a.jsonl", [record(0) | {"reward_model": {"ground_truth": truth}}])).next(1)
    assert truths(batch) == [truth] and type(truths(batch)[0]) is type(truth)


def test_other_columns_of_a_wrong_type_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, record(0) | {"data_source": 7}, "wrong-type", key="data_source", found="7")
    refused(tmp_path, record(0) | {"extra_info": "x"}, "wrong-type", key="extra_info", found="'x'")
    refused(tmp_path, record(0) | {"images": ["a.png"]}, "media", key="images")
    assert len(load(write_jsonl(tmp_path / "a.jsonl", [record(0) | {"images": []}]))) == 1


def test_a_prompt_without_tokens_is_refused(tmp_path: Path) -> None:
    class Silent(Characters):
        def prompt_ids(self, messages: Sequence[dict[str, Any]], template_kwargs: Any = None) -> list[int]:
            return []

    path = write_jsonl(tmp_path / "a.jsonl", [record(0)])
    with raises("tokenizer.empty-prompt", where=f"{path}:1"):
        PromptData(path).load(Silent(), 0)  # type: ignore[arg-type]
    refused(tmp_path, record(0) | {"prompt": [{"role": "system", "content": ""}]}, "bad-messages")


# ---- with a real tokenizer


def test_prompts_are_rendered_by_a_real_chat_template(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(tiny_folder(tmp_path))
    path = write_jsonl(tmp_path / "a.jsonl", [record(0, "1+1="), record(1, "12+30=")])
    batch = PromptData(path, max_prompt_length=64, shuffle=False).load(tokenizer, 0).next(2)
    truth = char_tokenizer()
    texts = [f"<|system|>add<eos><|user|>{q}<eos><|assistant|>" for q in ("1+1=", "12+30=")]
    for row, text in enumerate(texts):
        expected = truth.encode(text, add_special_tokens=False)
        assert batch["prompts"][row][batch["prompt_mask"][row]].tolist() == expected
    assert batch["prompt_mask"].tolist()[0] == [False] * 2 + [True] * (batch["prompts"].shape[1] - 2)


def test_a_row_rejected_by_the_template_is_reported_with_its_line(tmp_path: Path) -> None:
    folder = Path(tmp_path / "tokenizer")
    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('only users may speak') if messages[0]['role'] != 'user' }}x"
    tokenizer.save_pretrained(folder)
    path = write_jsonl(tmp_path / "a.jsonl", [record(0) | {"prompt": [{"role": "user", "content": "q"}]}, record(1)])
    with raises("tokenizer.template-rejects", where=f"{path}:2", reason="only users may speak") as caught:
        PromptData(path).load(ChatTokenizer(str(folder)), 0)
    assert str(caught.value).startswith(f"{path}:2: ") and str(caught.value).count("[tokenizer.") == 1


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_the_template_gets_the_arguments_of_the_job_and_the_row(tmp_path: Path, write: Any) -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = (
        "{{ messages[-1].content }}{{ '!' if think else '' }}{{ day }}{% for t in tools or [] %}{{ t.name }}"
        "{{ '?' if 'why' in t }}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    tools = [{"name": "add", "why": "sums"}, {"name": "sub", "why": None}]
    own: list[Any] = [None, {"think": True, "tools": None}, {"day": "2", "tools": tools}]
    rows = [record(0) | {"chat_template_kwargs": given} for given in own]
    path = write(tmp_path / f"data.{'jsonl' if write is write_jsonl else 'parquet'}", rows)
    data = PromptData(path, chat_template_kwargs={"day": "1"}, shuffle=False)
    loaded = ChatTokenizer(str(tmp_path / "model"))
    batch = data.load(loaded, seed=0).all()
    texts = [loaded.text(ids[mask]) for ids, mask in zip(batch["prompts"], batch["prompt_mask"], strict=True)]
    assert texts == ["x1", "x!1", "x2add?sub"]
    with raises(
        "tokenizer.template-argument", argument="dey", where=f"{path}{':1' if write is write_jsonl else ' row 0'}"
    ):
        PromptData(path, chat_template_kwargs={"dey": "1"}).load(loaded, seed=0)
    bad = write_jsonl(tmp_path / "bad.jsonl", [record(0) | {"chat_template_kwargs": "think"}])
    with raises("prompts.wrong-type", where=f"{bad}:1", key="chat_template_kwargs", found="'think'"):
        PromptData(bad).load(loaded, seed=0)


def test_a_prompt_that_ends_with_the_assistant_is_refused(tmp_path: Path) -> None:
    row = record(1)
    row["prompt"].append({"role": "assistant", "content": "2"})
    refused(tmp_path, row, "ends-with-assistant")


def test_text_that_the_tokenizer_does_not_know_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = ChatTokenizer(tiny_folder(tmp_path / "model"))
    records = [record(0), record(1), record(2)]
    for row in records:
        row["prompt"] = [{"role": "user", "content": "1+1="}]
    PromptData(write_jsonl(tmp_path / "known.jsonl", records)).load(tokenizer, 0)
    assert caplog.text == ""
    records[1]["prompt"] = [{"role": "user", "content": "\u4e00\u4e8c"}]
    path = write_jsonl(tmp_path / "unknown.jsonl", records)
    PromptData(path).load(tokenizer, 0)
    assert "1 of 3 rows" in caplog.text and f"{path}:2" in caplog.text

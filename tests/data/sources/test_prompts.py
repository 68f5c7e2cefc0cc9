"""Reading prompts from JSONL and parquet, and refusing what is not in the format."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flowrl.data.sources.prompts import PromptData
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import DataError, ParameterError
from tests.support.models import char_tokenizer, tiny_folder
from tests.support.prompt_files import Characters, load, record, truths, write_jsonl, write_parquet


def refused(tmp_path: Path, row: Any, good: int = 1) -> str:
    """The message for a file of `good` good rows and then `row`."""
    path = write_jsonl(tmp_path / "bad.jsonl", [*map(record, range(good)), row])
    with pytest.raises(DataError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{good + 1}: ")
    assert "\n" not in message
    return message


# ---- files


def test_parquet_and_jsonl_give_the_same_batches(tmp_path: Path) -> None:
    records = [record(i) for i in range(7)]
    records[3]["prompt"] = [{"role": "user", "content": "one\u2028line"}]  # a line end to str.splitlines, not to JSONL
    a = load(write_jsonl(tmp_path / "a.jsonl", records), seed=3)
    b = load(write_parquet(tmp_path / "a.PARQUET", records), seed=3)
    for n in (3, 7, 9):
        assert a.next(n).equal(b.next(n))
    assert a.all().equal(b.all())


def test_a_null_key_of_a_message_is_a_missing_one(tmp_path: Path) -> None:
    """Parquet gives all messages of a file the same keys, so a key that one message has is null in the others."""
    records = [record(0), record(1)]
    records[1]["prompt"][0]["name"] = "sums"
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    a = load(write_jsonl(tmp_path / "a.jsonl", records)).all()
    b = load(write_parquet(tmp_path / "a.parquet", records)).all()
    assert a.equal(b)
    assert b["raw_prompt"][0][0] == {"role": "system", "content": "add"}
    records[0]["prompt"].append(call)
    calls = PromptData(write_jsonl(tmp_path / "c.jsonl", records)).load(_NoText(), 0).all()  # type: ignore[arg-type]
    assert calls["raw_prompt"][0][2] == {"role": "assistant", "tool_calls": [{"type": "function"}]}


class _NoText(Characters):
    def prompt_ids(self, messages: Sequence[dict[str, Any]], template_kwargs: Any = None) -> list[int]:
        return [1] * len(messages)


def test_several_files_are_concatenated(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", [record(0), record(1)])
    b = write_parquet(tmp_path / "b.parquet", [record(2), record(3)])
    batch = load((b, a), shuffle=False).next(4)
    assert truths(batch) == ["2", "3", "0", "1"]
    assert list(batch["row_id"]) == ["0/0/0", "0/1/0", "0/2/0", "0/3/0"]


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "a.jsonl", [record(0)])
    assert len(load(os.path.join("~", "a.jsonl"))) == 1


def test_a_path_may_be_a_path_object(tmp_path: Path) -> None:
    a, b = (Path(write_jsonl(tmp_path / f"{name}.jsonl", [record(i)])) for i, name in enumerate("ab"))
    assert PromptData(a) == PromptData(str(a))
    assert PromptData(a).path == str(a)
    assert PromptData((a, str(b))).path == (str(a), str(b))
    assert truths(load((a, str(b)), shuffle=False).all()) == ["0", "1"]
    with pytest.raises(ParameterError, match=r"a\.txt' ends in neither"):
        PromptData(a.with_suffix(".txt"))
    with pytest.raises(ParameterError, match="path"):
        PromptData(3)  # type: ignore[arg-type]


def test_missing_files_are_found_without_a_tokeniser(tmp_path: Path) -> None:
    path = Path(write_jsonl(tmp_path / "a.jsonl", [record(0)]))
    PromptData(path).refuse_missing()
    with pytest.raises(DataError, match=r"gone\.jsonl' is not a file on this machine .looked in .*correct PromptData"):
        PromptData((path, path.with_name("gone.jsonl"))).refuse_missing()
    with pytest.raises(DataError, match="is not a file"):
        PromptData(tmp_path / "a.jsonl" / "b.jsonl").refuse_missing()


def test_more_rows_than_one_parquet_read(tmp_path: Path) -> None:
    stream = load(write_parquet(tmp_path / "a.parquet", [record(i, "q") for i in range(2500)]), shuffle=False)
    assert truths(stream.all()) == [str(i) for i in range(2500)]


# ---- over-long prompts: record(i) has 4 + i characters


def test_a_prompt_of_just_the_limit_is_kept(tmp_path: Path) -> None:
    stream = load(write_jsonl(tmp_path / "a.jsonl", [record(i) for i in range(4)]), max_prompt_length=7)
    assert (len(stream), stream.dropped) == (4, 0)


def test_over_long_prompts_are_refused(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", [record(0), record(1)])
    b = write_jsonl(tmp_path / "b.jsonl", [record(1), record(2), record(6), record(3)])
    with pytest.raises(DataError) as caught:
        load((a, b), max_prompt_length=5)
    message = str(caught.value)
    assert message.startswith(f"{b}:2: the prompt has 6 tokens, but max_prompt_length is 5")
    assert "3 of 6 prompts" in message
    assert "set max_prompt_length=10" in message and 'overlong="drop"' in message


def test_over_long_prompts_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [record(5), record(0), record(1), record(7)]
    stream = load(write_parquet(tmp_path / "a.parquet", rows), max_prompt_length=5, overlong="drop")
    assert (len(stream), stream.dropped) == (2, 2)
    assert truths(stream.all()) == ["0", "1"]
    assert list(stream.all()["uid"]) == ["0/1/0", "0/2/0"]  # places in the file, so they do not hang on the limit
    assert set(stream.next(4)["uid"]) == {"0/1/0", "0/2/0", "1/1/0", "1/2/0"}


def test_dropping_every_prompt_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [record(5), record(6)])
    with pytest.raises(DataError, match=r"a\.parquet row 0.*2 of 2 prompts.*max_prompt_length=10; no prompt would be"):
        load(path, max_prompt_length=3, overlong="drop")


# ---- settings and files that are refused


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"path": "data.csv"}, r"'data\.csv' ends in neither \.jsonl .* nor \.parquet"),
        ({"path": ("a.jsonl", "b.json")}, r"'b\.json' ends in neither"),
        ({"path": "data"}, "ends in neither"),
        ({"path": ()}, "names no file"),
        ({"path": ""}, "names no file"),
        ({"path": "a.jsonl", "max_prompt_length": 0}, "max_prompt_length=0"),
        ({"path": "a.jsonl", "overlong": "cut"}, "overlong='cut'"),
    ],
)
def test_settings_are_checked_before_anything_is_read(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        PromptData(**settings)


def test_nothing_is_read_at_construction_and_equality_is_by_value() -> None:
    assert PromptData("nowhere.jsonl") == PromptData(path="nowhere.jsonl", shuffle=True)


def test_a_missing_file_is_named_before_others_are_read(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["not a record"])
    with pytest.raises(DataError, match=r"gone\.parquet' is not a file"):
        load((path, str(tmp_path / "gone.parquet")))
    with pytest.raises(DataError, match="is not a file"):
        (tmp_path / "folder.jsonl").mkdir()
        load(str(tmp_path / "folder.jsonl"))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    good, empty = write_jsonl(tmp_path / "a.jsonl", [record(0)]), write_jsonl(tmp_path / "b.jsonl", [])
    with pytest.raises(DataError, match=r"b\.jsonl has no rows"):
        load((good, empty))
    pq.write_table(pa.Table.from_pylist([record(0)]).slice(0, 0), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c\.parquet has no rows"):
        load(str(tmp_path / "c.parquet"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": [', "not JSON"),
        (b"\n", "blank"),
        (b'{"prompt": "\xff"}\n', "not JSON"),
        (b"{} {}\n", "not JSON"),
        (b'{"prompt": 1, "prompt": 2}\n', r"not JSON \(the key 'prompt' stands twice"),
        (b'{"extra_info": {"a": {"b": 1, "b": 1}}}\n', r"not JSON \(the key 'b' stands twice"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(record(0)).encode() + b"\n" + line)
    with pytest.raises(DataError, match=rf"a\.jsonl:2: the line is {words}"):
        load(str(path))


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    path = Path(write_parquet(tmp_path / "a.parquet", [record(i) for i in range(50)]))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as parquet"):
        load(str(path))
    path.write_bytes(whole[:4] + bytes(200) + whole[204:])
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as parquet"):
        load(str(path))


# ---- rows that are refused


def test_missing_keys_are_named(tmp_path: Path) -> None:
    message = refused(tmp_path, {"prompt": record(0)["prompt"], "data_source": None})
    assert "no data_source and no reward_model" in message
    assert "no prompt and no data_source and no reward_model" in refused(tmp_path, {"question": "1+1"}, good=3)
    assert "the row is a list" in refused(tmp_path, [1, 2])
    path = write_parquet(tmp_path / "b.parquet", [record(0), record(1), record(2) | {"data_source": None}])
    with pytest.raises(DataError, match=r"b\.parquet row 2: the row has no data_source"):
        load(path)
    path = write_parquet(tmp_path / "a.parquet", [{"question": "1+1", "data_source": "x"}])
    with pytest.raises(DataError, match=r"a\.parquet row 0: the row has no prompt and no reward_model"):
        load(path)


@pytest.mark.parametrize("prompt", ["1+1=", {"role": "user", "content": "x"}, []])
def test_a_prompt_is_a_list_of_messages(tmp_path: Path, prompt: Any) -> None:
    message = refused(tmp_path, record(0) | {"prompt": prompt})
    assert f"prompt is {prompt!r}; expected a list of messages" in message


@pytest.mark.parametrize(
    "message",
    [
        "hello",
        {"content": "no role"},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "text": "misspelt"},
        {"role": "user", "content": [{"type": "text", "text": "a part"}]},
        {"role": 1, "content": "x"},
    ],
)
def test_a_message_has_role_and_text(tmp_path: Path, message: Any) -> None:
    found = refused(tmp_path, record(0) | {"prompt": [{"role": "system", "content": "s"}, message]})
    assert f"message 1 of prompt is {message!r}" in found


@pytest.mark.parametrize("reward", [{}, {"style": "rule"}, {"ground_truth": None}, "42", [1]])
def test_the_ground_truth_must_be_there(tmp_path: Path, reward: Any) -> None:
    assert '{"ground_truth": ...}' in refused(tmp_path, record(0) | {"reward_model": reward})


@pytest.mark.parametrize("truth", ["", 0, False, 1.5, [], {"answer": [1]}])
def test_a_ground_truth_may_be_anything_but_null(tmp_path: Path, truth: Any) -> None:
    batch = load(write_jsonl(tmp_path / "a.jsonl", [record(0) | {"reward_model": {"ground_truth": truth}}])).next(1)
    assert truths(batch) == [truth] and type(truths(batch)[0]) is type(truth)


def test_other_columns_of_a_wrong_type(tmp_path: Path) -> None:
    assert "data_source is 7; expected a str" in refused(tmp_path, record(0) | {"data_source": 7})
    assert "extra_info is 'x'; expected an object" in refused(tmp_path, record(0) | {"extra_info": "x"})
    assert "has images" in refused(tmp_path, record(0) | {"images": ["a.png"]})
    assert len(load(write_jsonl(tmp_path / "a.jsonl", [record(0) | {"images": []}]))) == 1


def test_a_prompt_without_tokens_is_refused(tmp_path: Path) -> None:
    class Silent(Characters):
        def prompt_ids(self, messages: Sequence[dict[str, Any]], template_kwargs: Any = None) -> list[int]:
            return []

    path = write_jsonl(tmp_path / "a.jsonl", [record(0)])
    with pytest.raises(DataError, match=r"a\.jsonl:1: the chat template makes no tokens of the prompt"):
        PromptData(path).load(Silent(), 0)  # type: ignore[arg-type]
    assert "says anything" in refused(tmp_path, record(0) | {"prompt": [{"role": "system", "content": ""}]})


# ---- with a real tokeniser


def test_prompts_through_a_real_chat_template(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(tiny_folder(tmp_path))
    path = write_jsonl(tmp_path / "a.jsonl", [record(0, "1+1="), record(1, "12+30=")])
    batch = PromptData(path, max_prompt_length=64, shuffle=False).load(tokenizer, 0).next(2)
    truth = char_tokenizer()
    texts = [f"<|system|>add<eos><|user|>{q}<eos><|assistant|>" for q in ("1+1=", "12+30=")]
    for row, text in enumerate(texts):
        expected = truth.encode(text, add_special_tokens=False)
        assert batch["prompts"][row][batch["prompt_mask"][row]].tolist() == expected
    assert batch["prompt_mask"].tolist()[0] == [False] * 2 + [True] * (batch["prompts"].shape[1] - 2)


def test_what_the_template_refuses_is_named_with_its_line(tmp_path: Path) -> None:
    folder = Path(tmp_path / "tokenizer")
    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('only users may speak') if messages[0]['role'] != 'user' }}x"
    tokenizer.save_pretrained(folder)
    path = write_jsonl(tmp_path / "a.jsonl", [record(0) | {"prompt": [{"role": "user", "content": "q"}]}, record(1)])
    with pytest.raises(DataError, match=r"a\.jsonl:2: .*only users may speak"):
        PromptData(path).load(ChatTokenizer(str(folder)), 0)


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_the_template_gets_arguments_of_the_job_and_of_the_row(tmp_path: Path, write: Any) -> None:
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
    with pytest.raises(DataError, match=r"data\.[a-z]+(:1| row 0): the chat template .* reads no 'dey'"):
        PromptData(path, chat_template_kwargs={"dey": "1"}).load(loaded, seed=0)
    bad = write_jsonl(tmp_path / "bad.jsonl", [record(0) | {"chat_template_kwargs": "think"}])
    with pytest.raises(DataError, match=r"bad\.jsonl:1: chat_template_kwargs is 'think'; expected an object"):
        PromptData(bad).load(loaded, seed=0)

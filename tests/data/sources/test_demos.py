"""Demonstrations and preferences from files: their columns, their ids, and the rows that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from flowrl import DemoBatch, DemoData, PreferenceBatch, PreferenceData
from flowrl.data.sources.demos import AnswerStream
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import DataError, ParameterError
from tests.support.models import tiny_folder
from tests.support.prompt_files import write_jsonl

ASK = [{"role": "user", "content": "1+1="}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(tiny_folder(tmp_path_factory.mktemp("model")))


def load(path: Path, rows: list[Any], tokenizer: ChatTokenizer, kind: Any = DemoData, **settings: Any) -> AnswerStream:
    stream = kind(write_jsonl(path / "rows.jsonl", rows), shuffle=False, **settings).load(tokenizer, 0)
    assert isinstance(stream, AnswerStream)
    return stream


def test_a_demonstration_is_what_the_policy_would_have_sampled(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    rows = [{"prompt": ASK, "response": "2"}, {"prompt": "12+12=", "response": "= 24"}]
    batch = load(tmp_path, rows, tokenizer).next(2)
    demos = batch.to_record(DemoBatch)
    for row, (asked, text) in enumerate([("1+1=", "2"), ("12+12=", "= 24")]):
        prompt = tokenizer.prompt_ids([{"role": "user", "content": asked}])
        response = [*tokenizer.encode(text), tokenizer.turn_end]
        assert demos.input_ids[row][demos.attention_mask[row]].tolist() == prompt + response
        assert demos.responses[row][demos.response_mask[row]].tolist() == response
        assert tokenizer.decode(response) == text == demos.response_text[row]
        assert demos.position_ids[row][demos.attention_mask[row]].tolist() == list(range(len(prompt + response)))
        assert demos.raw_prompt[row] == [{"role": "user", "content": asked}]
    assert torch.equal(demos.input_ids[:, -demos.responses.shape[1] :], demos.responses)
    assert demos.policy_version.tolist() == [-1, -1] and demos.temperature.tolist() == [1.0, 1.0]
    assert demos.uid.tolist() == demos.row_id.tolist() == ["0/0/0", "0/1/0"]


def test_the_end_of_a_turn_is_that_of_the_chat_template(tmp_path: Path) -> None:
    folder = Path(tiny_folder(tmp_path))
    tokenizer = ChatTokenizer(str(folder))
    assert tokenizer.turn_end in tokenizer.ends
    said = tokenizer._tokenizer.apply_chat_template([*ASK, {"role": "assistant", "content": "2"}])
    prompt = tokenizer.prompt_ids(ASK)
    ids = load(tmp_path, [{"prompt": ASK, "response": "2"}], tokenizer).next(1)["responses"][0].tolist()
    assert list(said["input_ids"] if hasattr(said, "keys") else said)[: len(prompt) + len(ids)] == prompt + ids


def test_messages_are_a_prompt_and_the_last_answer(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    turns = [*ASK, {"role": "assistant", "content": "2"}, {"role": "user", "content": "sure?"}]
    whole = [*turns, {"role": "assistant", "content": "yes"}]
    apart, joined = [{"prompt": turns, "response": "yes"}], [{"messages": whole}]
    first, second = (load(tmp_path, rows, tokenizer).next(1) for rows in (apart, joined))
    assert torch.equal(first["input_ids"], second["input_ids"])
    assert second["raw_prompt"][0] == turns
    pq.write_table(pa.Table.from_pylist(joined), tmp_path / "rows.parquet")
    again = DemoData(tmp_path / "rows.parquet").load(tokenizer, 0).next(1)
    assert torch.equal(first["input_ids"], again["input_ids"])


def test_a_pair_is_two_rows_of_one_group(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    rows = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "eleven"},
        {"prompt": ASK, "chosen": [{"role": "assistant", "content": "two"}], "rejected": "3"},
    ]
    batch = load(tmp_path, rows, tokenizer, PreferenceData).next(2)
    pairs = batch.to_record(PreferenceBatch)
    assert pairs.uid.tolist() == ["0/0/0", "0/0/0", "0/1/0", "0/1/0"]
    assert pairs.row_id.tolist() == ["0/0/0#0", "0/0/0#1", "0/1/0#0", "0/1/0#1"]
    assert pairs.response_text.tolist() == ["2", "eleven", "two", "3"]
    assert pairs.token_level_scores.sum(-1).tolist() == [1.0, 0.0, 1.0, 0.0]
    last = pairs.response_mask.sum(-1) - 1
    assert [float(pairs.token_level_scores[row, last[row]]) for row in range(4)] == [1.0, 0.0, 1.0, 0.0]
    assert torch.equal(pairs.prompts[0], pairs.prompts[1])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([1], "the row is a list"),
        ({"response": "2"}, "the row has no prompt"),
        ({"prompt": "a", "response": None}, "the row has no response"),
        ({"prompt": "a"}, "the row has no response"),
        ({"prompt": "a", "response": "  "}, "response is '  '; expected text"),
        ({"prompt": "a", "response": 3}, "response is 3"),
        ({"prompt": "a", "response": [{"role": "user", "content": "b"}]}, "the one message of an assistant"),
        ({"prompt": "a", "response": [{"role": "assistant"}]}, "the one message of an assistant"),
        ({"prompt": "a", "response": [[]]}, "the one message of an assistant"),
        ({"prompt": "", "response": "b"}, "a user who says nothing"),
        ({"prompt": 3, "response": "b"}, "prompt is 3; expected a list of messages"),
        ({"prompt": {"role": "user"}, "response": "b"}, "expected a list of messages"),
        ({"prompt": [*ASK, {"role": "assistant", "content": "2"}], "response": "b"}, "the last message of prompt is"),
        ({"messages": ASK}, "expected a list of at least two"),
        ({"messages": "ab"}, "expected a list of at least two"),
        ({"messages": [*ASK, *ASK]}, "the one message of an assistant"),
        ({"messages": ["a", "b"]}, "message 0 of prompt is 'a'"),
        ({"messages": [*ASK, {"role": "assistant", "content": "2"}], "prompt": "a"}, "the row has messages and prompt"),
        ({"prompt": "a", "response": "b", "chat_template_kwargs": 3}, "chat_template_kwargs is 3"),
    ],
)
def test_rows_that_are_no_demonstrations(row: Any, said: str, tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:2: ") as raised:
        load(tmp_path, [{"prompt": "a", "response": "b"}, row], tokenizer)
    assert said in str(raised.value)


def test_a_row_that_nests_too_deeply(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    deep = "[" * 300 + "]" * 300
    row = json.dumps({"prompt": "a", "response": "b"})
    (tmp_path / "deep.jsonl").write_text(row.replace('"b"', deep))
    with pytest.raises(DataError, match=r"deep\.jsonl:1: .*nests more than"):
        DemoData(tmp_path / "deep.jsonl").load(tokenizer, 0)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, "the row has no rejected"),
        ({"prompt": "a"}, "the row has no chosen and no rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected is ''"),
    ],
)
def test_rows_that_are_no_preferences(row: Any, said: str, tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    with pytest.raises(DataError, match=said):
        load(tmp_path, [row], tokenizer, PreferenceData)


def test_what_is_too_long_is_refused_or_left_out(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    rows = [
        {"prompt": "1", "response": "12345"},  # 6 tokens with the end of the turn
        {"prompt": "1", "response": "123456"},
        {"prompt": "1" * 50, "response": "1"},
    ]
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the response has 7 tokens, but max_response_length is 6.*=7"):
        load(tmp_path, rows, tokenizer, max_response_length=6)
    kept = load(tmp_path, rows, tokenizer, max_response_length=6, max_prompt_length=40, overlong="drop")
    assert (len(kept), kept.dropped) == (1, 2)
    with pytest.raises(DataError, match=r"rows\.jsonl:3: the prompt has \d+ tokens, but max_prompt_length is 40"):
        load(tmp_path, rows, tokenizer, max_prompt_length=40)
    with pytest.raises(DataError, match="no response would be left"):
        load(tmp_path, rows[:2], tokenizer, max_response_length=1, overlong="drop")
    pair = [{"prompt": "1", "chosen": "1", "rejected": "123456"}]
    with pytest.raises(DataError, match="the rejected has 7 tokens"):
        load(tmp_path, pair, tokenizer, PreferenceData, max_response_length=6)


def test_settings_and_folders_that_are_none(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    with pytest.raises(ParameterError, match="max_response_length"):
        DemoData("a.jsonl", max_response_length=0)
    with pytest.raises(DataError, match=r"correct DemoData\(path=...\)"):
        DemoData(tmp_path / "a.jsonl").refuse_missing()
    with pytest.raises(ParameterError, match=r"expected ChatTokenizer\('model'\)"):
        DemoData("a.jsonl").load("model", 0)  # type: ignore[arg-type]


def test_the_digest_is_of_the_ids(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    rows = [{"prompt": "ab", "chosen": "c", "rejected": "d"}, {"prompt": "ab", "chosen": "d", "rejected": "c"}]
    digests = {load(tmp_path, part, tokenizer, PreferenceData).digest() for part in (rows, rows[:1], rows[1:])}
    assert len(digests) == 3
    assert load(tmp_path, rows, tokenizer, PreferenceData).digest() in digests

"""Tests of `demos.py` and `flowrl/records.py`: demonstrations and preferences from files.

They cover columns, ids, and refused rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from flowrl import DemoBatch, DemoData, PreferenceBatch, PreferenceData
from flowrl.data.sources.demos import ResponseStream
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import ParameterError
from tests.support.errors import raises
from tests.support.models import tiny_folder
from tests.support.rows.prompt_files import write_jsonl

ASK = [{"role": "user", "content": "1+1="}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(tiny_folder(tmp_path_factory.mktemp("model")))


def load(
    path: Path, rows: list[Any], tokenizer: ChatTokenizer, kind: Any = DemoData, **settings: Any
) -> ResponseStream:
    stream = kind(write_jsonl(path / "rows.jsonl", rows), shuffle=False, **settings).load(tokenizer, 0)
    assert isinstance(stream, ResponseStream)
    return stream


def test_a_demonstration_has_the_tokens_that_the_policy_would_sample(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    rows = [{"prompt": ASK, "response": "2"}, {"prompt": "12+12=", "response": "= 24"}]
    batch = load(tmp_path, rows, tokenizer).next(2)
    demos = batch.to_record(DemoBatch)
    for row, (question, text) in enumerate([("1+1=", "2"), ("12+12=", "= 24")]):
        prompt = tokenizer.prompt_ids([{"role": "user", "content": question}])
        response = [*tokenizer.encode(text), tokenizer.turn_end]
        assert demos.input_ids[row][demos.attention_mask[row]].tolist() == prompt + response
        assert demos.responses[row][demos.response_mask[row]].tolist() == response
        assert tokenizer.decode(response) == text == demos.response_text[row]
        assert demos.position_ids[row][demos.attention_mask[row]].tolist() == list(range(len(prompt + response)))
        assert demos.raw_prompt[row] == [{"role": "user", "content": question}]
    assert torch.equal(demos.input_ids[:, -demos.responses.shape[1] :], demos.responses)
    assert demos.policy_version.tolist() == [-1, -1] and demos.temperature.tolist() == [1.0, 1.0]
    assert demos.uid.tolist() == demos.row_id.tolist() == ["0/0/0", "0/1/0"]


def test_responses_end_with_the_end_of_turn_token_of_the_chat_template(tmp_path: Path) -> None:
    folder = Path(tiny_folder(tmp_path))
    tokenizer = ChatTokenizer(str(folder))
    assert tokenizer.turn_end in tokenizer.ends
    rendered = tokenizer._tokenizer.apply_chat_template([*ASK, {"role": "assistant", "content": "2"}])
    prompt = tokenizer.prompt_ids(ASK)
    ids = load(tmp_path, [{"prompt": ASK, "response": "2"}], tokenizer).next(1)["responses"][0].tolist()
    assert list(rendered["input_ids"] if hasattr(rendered, "keys") else rendered)[: len(prompt + ids)] == prompt + ids


def test_the_last_message_of_a_conversation_is_the_response(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    turns = [*ASK, {"role": "assistant", "content": "2"}, {"role": "user", "content": "sure?"}]
    conversation = [*turns, {"role": "assistant", "content": "yes"}]
    separate, joined = [{"prompt": turns, "response": "yes"}], [{"messages": conversation}]
    first, second = (load(tmp_path, rows, tokenizer, turns="last").next(1) for rows in (separate, joined))
    assert torch.equal(first["input_ids"], second["input_ids"])
    assert second["raw_prompt"][0] == turns
    pq.write_table(pa.Table.from_pylist(joined), tmp_path / "rows.parquet")
    again = DemoData(tmp_path / "rows.parquet", turns="last").load(tokenizer, 0).next(1)
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
    ("row", "code", "facts"),
    [
        ([1], "wrong-type", {"found": "list"}),
        ({"response": "2"}, "missing-key", {"missing": ("prompt",)}),
        ({"prompt": "a", "response": None}, "missing-key", {"missing": ("response",)}),
        ({"prompt": "a"}, "missing-key", {"missing": ("response",)}),
        ({"prompt": "a", "response": "  "}, "bad-response", {"key": "response", "found": "'  '"}),
        ({"prompt": "a", "response": 3}, "bad-response", {"found": "3"}),
        ({"prompt": "a", "response": [{"role": "user", "content": "b"}]}, "bad-response", {}),
        ({"prompt": "a", "response": [{"role": "assistant"}]}, "bad-response", {}),
        ({"prompt": "a", "response": [[]]}, "bad-response", {}),
        ({"prompt": "", "response": "b"}, "bad-messages", {"index": 0}),
        ({"prompt": 3, "response": "b"}, "bad-messages", {"found": "3"}),
        ({"prompt": {"role": "user"}, "response": "b"}, "bad-messages", {"found": "{'role': 'user'}"}),
        ({"prompt": [*ASK, {"role": "assistant", "content": "2"}], "response": "b"}, "ends-with-assistant", {}),
        ({"messages": ASK}, "bad-messages", {"found": str(ASK)}),
        ({"messages": "ab"}, "bad-messages", {"found": "'ab'"}),
        ({"messages": [*ASK, *ASK]}, "bad-response", {}),
        ({"messages": ["a", "b"]}, "bad-messages", {"index": 0, "found": "'a'"}),
        ({"messages": [*ASK, {"role": "assistant", "content": "2"}], "prompt": "a"}, "bad-messages", {}),
        (
            {"prompt": "a", "response": "b", "chat_template_kwargs": 3},
            "wrong-type",
            {"key": "chat_template_kwargs", "found": "3"},
        ),
    ],
)
def test_malformed_demonstrations_are_refused(
    row: Any, code: str, facts: dict[str, Any], tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    with raises(f"prompts.{code}", where=f"{tmp_path}/rows.jsonl:2", **facts):
        load(tmp_path, [{"prompt": "a", "response": "b"}, row], tokenizer)


def test_a_row_nested_too_deeply_is_refused(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    deep = "[" * 300 + "]" * 300
    row = json.dumps({"prompt": "a", "response": "b"})
    (tmp_path / "deep.jsonl").write_text(row.replace('"b"', deep))
    with raises("prompts.wrong-type", where=f"{tmp_path}/deep.jsonl:1"):
        DemoData(tmp_path / "deep.jsonl").load(tokenizer, 0)


@pytest.mark.parametrize(
    ("row", "code", "facts"),
    [
        ({"prompt": "a", "chosen": "b"}, "missing-key", {"missing": ("rejected",)}),
        ({"prompt": "a"}, "missing-key", {"missing": ("chosen", "rejected")}),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "identical-pair", {}),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "bad-response", {"key": "rejected", "found": "''"}),
    ],
)
def test_malformed_preferences_are_refused(
    row: Any, code: str, facts: dict[str, Any], tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    with raises(f"prompts.{code}", where=f"{tmp_path}/rows.jsonl:1", **facts):
        load(tmp_path, [row], tokenizer, PreferenceData)


def test_overlong_rows_are_refused_or_dropped(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    rows = [
        {"prompt": "1", "response": "12345"},  # 6 tokens with the end of the turn
        {"prompt": "1", "response": "123456"},
        {"prompt": "1" * 50, "response": "1"},
    ]
    where = f"{tmp_path}/rows.jsonl"
    setting = {"setting": "max_response_length", "limit": 6}
    with raises("prompts.too-long", where=f"{where}:2", part="response", found=7, longest=7, unit="tokens", **setting):
        load(tmp_path, rows, tokenizer, max_response_length=6)
    remaining = load(tmp_path, rows, tokenizer, max_response_length=6, max_prompt_length=40, overlong="drop")
    assert (len(remaining), remaining.dropped) == (1, 2)
    with raises("prompts.too-long", where=f"{where}:3", part="prompt", setting="max_prompt_length", limit=40):
        load(tmp_path, rows, tokenizer, max_prompt_length=40)
    with raises("prompts.too-long", part="response", count=2, rows=2) as caught:
        load(tmp_path, rows[:2], tokenizer, max_response_length=1, overlong="drop")
    assert "dropping them would leave no response" in str(caught.value)
    pair = [{"prompt": "1", "chosen": "1", "rejected": "123456"}]
    with raises("prompts.too-long", part="rejected", found=7, **setting):
        load(tmp_path, pair, tokenizer, PreferenceData, max_response_length=6)


def test_bad_parameters_and_missing_files_are_refused(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    with pytest.raises(ParameterError, match="max_response_length"):
        DemoData("a.jsonl", max_response_length=0)
    with raises("prompts.missing-file", path=f"{tmp_path}/a.jsonl", source="DemoData"):
        DemoData(tmp_path / "a.jsonl").refuse_missing()
    with raises("data.wrong-type", path="model"):
        DemoData("a.jsonl").load("model", 0)  # type: ignore[arg-type]


def test_the_digest_covers_prompts_and_responses(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    rows = [{"prompt": "ab", "chosen": "c", "rejected": "d"}, {"prompt": "ab", "chosen": "d", "rejected": "c"}]
    digests = {load(tmp_path, part, tokenizer, PreferenceData).digest() for part in (rows, rows[:1], rows[1:])}
    assert len(digests) == 3
    assert load(tmp_path, rows, tokenizer, PreferenceData).digest() in digests

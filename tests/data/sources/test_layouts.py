"""Published layouts of prompts, demonstrations, preferences and KTO's rows; tests `layouts.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import DemoData, PreferenceData, PromptData, UnpairedData
from flowrl.data.sources.prompts import PromptStream
from flowrl.data.text.tokenizer import ChatTokenizer
from tests.support.errors import raises
from tests.support.models import tiny_folder
from tests.support.rows.prompt_files import record, write_parquet
from tests.support.templates import tokenizer_of

ASK = [{"role": "user", "content": "1+1="}]
TWO, THREE = ({"role": "assistant", "content": text} for text in ("2", "3"))
PARTS = [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(tiny_folder(tmp_path_factory.mktemp("model")))


def batch(kind: Any, row: Any, tokenizer: ChatTokenizer, n: int = 1, **settings: Any) -> Any:
    return kind([row], shuffle=False, **settings).load(tokenizer, 0).next(n)


# ---- prompts


@pytest.mark.parametrize(
    ("row", "settings", "truth"),
    [
        ({"prompt": ASK, "reward_model": {"style": "rule", "ground_truth": "2"}, "data_source": ""}, {}, "2"),
        ({"prompt": ASK, "solution": "2"}, {}, "2"),
        ({"prompt": "1+1=", "ground_truth": 2}, {}, 2),
        ({"prompt": PARTS, "solution": "2"}, {}, "2"),
        ({"question": "1+1=", "answer": "2"}, {"columns": {"prompt": "question", "ground_truth": "answer"}}, "2"),
        ({"prompt": ASK}, {"columns": {"ground_truth": None}}, None),
        ({"prompt": ASK, "reward_model": {"ground_truth": None}}, {"columns": {"ground_truth": None}}, None),
        ({"messages": ASK, "x": {"y": ["3", "2"]}}, {"columns": {"prompt": "messages", "ground_truth": "x.y.-1"}}, "2"),
        ({"q": 1}, {"map": lambda row: {"prompt": f"{row['q']}+1=", "ground_truth": None}}, None),
    ],
)
def test_layouts_of_prompts(row: Any, settings: Any, truth: Any, tokenizer: ChatTokenizer) -> None:
    found = batch(PromptData, row, tokenizer, **settings)
    assert found["raw_prompt"].tolist() == [ASK]
    assert found["ground_truth"].tolist() == [truth] and found["data_source"].tolist() == [""]
    assert found["prompts"][0].tolist() == tokenizer.prompt_ids(ASK)


@pytest.mark.parametrize(
    ("row", "code", "facts", "fix"),
    [
        ({"question": "a", "answer": "b"}, "missing-key", {"missing": ("prompt", "ground_truth")}, None),
        ({"prompt": "a", "ground_truth": None}, "no-ground-truth", {"found": "None"}, {"ground_truth": None}),
        ({"prompt": "a", "solution": None}, "no-ground-truth", {"found": "None"}, {"ground_truth": None}),
        ({"prompt": "a", "answer": "b"}, "missing-key", {"missing": ("ground_truth",)}, {"ground_truth": "answer"}),
    ],
)
def test_a_refusal_names_the_mapping_that_reads_the_row(
    row: Any, code: str, facts: Any, fix: Any, tokenizer: ChatTokenizer
) -> None:
    fix = fix or {"prompt": "question", "ground_truth": "answer"}
    with raises(f"prompts.{code}", where="data row 0", **facts) as caught:
        batch(PromptData, row, tokenizer)
    assert f"columns={fix}" in str(caught.value)
    batch(PromptData, row, tokenizer, columns=fix)


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video"])
def test_parts_that_are_not_text_are_refused_by_name(kind: str, tokenizer: ChatTokenizer) -> None:
    row = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]}], "solution": ""}
    with raises("prompts.media", where="data row 0", key=kind):
        batch(PromptData, row, tokenizer)


# ---- demonstrations


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASK, "response": "2"},
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": ASK, "completion": [TWO]},
        {"prompt": PARTS, "completion": [{"role": "assistant", "content": [{"type": "text", "text": "2"}]}]},
        {"messages": [*ASK, TWO]},
        {"prompt": ASK, "completion": "2", "label": 1},
    ],
)
def test_layouts_of_one_demonstration(row: Any, tokenizer: ChatTokenizer) -> None:
    found, same = batch(DemoData, row, tokenizer), batch(DemoData, {"prompt": ASK, "response": "2"}, tokenizer)
    assert all(torch.equal(found[name], same[name]) for name in ("prompts", "responses", "response_mask", "input_ids"))
    assert found["response_text"].tolist() == ["2"]


def test_every_turn_of_a_conversation_is_trained_or_the_last() -> None:
    tokenizer = tokenizer_of("llama3")
    row = {"messages": [{"role": "system", "content": "and"}, *ASK, TWO, {"role": "user", "content": "12"}, THREE]}
    found = batch(DemoData, row, tokenizer)
    mask, ids = found["response_mask"][0], found["responses"][0]
    assert tokenizer.shown(ids[mask].tolist()) == "2<|eot_id|>3<|eot_id|>"
    whole = tokenizer.conversation_ids(row["messages"])
    assert found["input_ids"][0].tolist() == whole and found["attention_mask"].all()
    assert found["prompts"][0].tolist() == tokenizer.prompt_ids(row["messages"][:2])
    last = batch(DemoData, row, tokenizer, turns="last")
    assert last["input_ids"][0].tolist() == whole and last["response_mask"].all()
    assert tokenizer.shown(last["responses"][0].tolist()) == "3<|eot_id|>"
    every, only = (DemoData([row], turns=turns).load(tokenizer, 0).digest() for turns in ("all", "last"))  # type: ignore[arg-type]
    assert every != only and DemoData([row]).identity().keys() == {*DemoData([row], turns="last").identity()} - {
        "turns"
    }


def test_a_template_that_rewrites_turns_is_refused_with_the_row() -> None:
    row = {"messages": [*ASK, TWO, {"role": "user", "content": "12"}, THREE]}
    with raises("tokenizer.rewritten-turns", where="data row 0"):
        batch(DemoData, row, tokenizer_of("merging"))
    assert batch(DemoData, row, tokenizer_of("merging"), turns="last")["response_text"].tolist() == ["3"]


def test_a_document_trains_all_tokens_but_the_first(tokenizer: ChatTokenizer) -> None:
    found = batch(DemoData, {"text": "abc<eos>"}, tokenizer)
    assert found["input_ids"][0].tolist() == [*map(tokenizer.encode("abc").__getitem__, range(3)), *_spelled(tokenizer)]
    assert found["response_mask"].all() and found["prompts"].shape == (1, 1) and found["raw_prompt"].tolist() == [[]]
    formatted = batch(DemoData, {"text": "abc<eos>"}, tokenizer, split_special_tokens=False)
    assert formatted["input_ids"][0].tolist() == [*tokenizer.encode("abc"), tokenizer.eos_id]
    bos = batch(DemoData, {"text": "12"}, tokenizer_of("llama3"))
    assert bos["input_ids"].shape == (1, 2)  # the token 12, and the end; this tokenizer writes no BOS


def _spelled(tokenizer: ChatTokenizer) -> list[int]:
    """``<eos>`` as text, and the end."""
    return [*(i for c in "<eos>" for i in tokenizer.encode(c)), tokenizer.eos_id]


def test_tools_are_arguments_of_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [{"messages": [*ASK, TWO], "tools": each} for each in (tools, json.dumps(tools))]
    tokenizer = tokenizer_of("qwen2.5")
    first, second = (batch(DemoData, row, tokenizer) for row in rows)
    assert torch.equal(first["input_ids"], second["input_ids"])
    assert first["prompts"][0].tolist() == tokenizer.prompt_ids(ASK, {"tools": tools})
    with raises("prompts.wrong-type", key="tools"):
        batch(DemoData, {"messages": [*ASK, TWO], "tools": "add"}, tokenizer)


def test_labeled_rows_are_not_imitated_unread(tokenizer: ChatTokenizer) -> None:
    row = {"prompt": "1+1=", "completion": "3", "label": False}
    with raises("prompts.labeled", where="data row 0", found=False):
        batch(DemoData, row, tokenizer)
    batch(DemoData, row, tokenizer, columns={"label": None})
    good = DemoData([row, row | {"label": True}], map=lambda one: one | {"label": None} if one["label"] else None)
    stream = good.load(tokenizer, 0)
    assert (len(stream), stream.dropped) == (1, 1) and stream.next(1)["uid"].tolist() == ["0/1/0"]


@pytest.mark.parametrize("both", ["prompt", "completion"])
def test_messages_beside_a_prompt_are_refused_with_the_mapping(both: str, tokenizer: ChatTokenizer) -> None:
    row = {"messages": [*ASK, TWO], both: "1+1="}
    with raises("prompts.bad-messages", key=both) as caught:
        batch(DemoData, row, tokenizer)
    assert f"columns={{'{both}': None}}" in str(caught.value)
    batch(DemoData, row, tokenizer, columns={both: None})


# ---- preferences, and labels


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": ASK, "chosen": [TWO], "rejected": [THREE]},
        {
            "prompt": "1+1=",
            "chosen": [*ASK, TWO],
            "rejected": [*ASK, THREE],
            "messages": [*ASK, TWO],
            "score_chosen": 8.0,
        },
        {"chosen": [*ASK, TWO], "rejected": [*ASK, THREE]},
        {"chosen": [*PARTS, TWO], "rejected": [*ASK, THREE | {"tool_calls": None}]},
    ],
)
def test_layouts_of_a_preference(row: Any, tokenizer: ChatTokenizer) -> None:
    found = batch(PreferenceData, row, tokenizer)
    same = batch(PreferenceData, {"prompt": ASK, "chosen": "2", "rejected": "3"}, tokenizer)
    tensors = ("prompts", "responses", "response_mask", "input_ids", "token_level_scores")
    assert all(torch.equal(found[name], same[name]) for name in tensors)
    assert found["response_text"].tolist() == ["2", "3"] and found["raw_prompt"].tolist() == [ASK, ASK]


def test_the_prompt_of_a_pair_is_all_that_both_begin_with(tokenizer: ChatTokenizer) -> None:
    head = [*ASK, TWO, {"role": "user", "content": "sure?"}]
    longer = [*head, THREE, {"role": "user", "content": "no"}, TWO]
    found = batch(PreferenceData, {"chosen": longer, "rejected": [*head, TWO]}, tokenizer)
    assert found["raw_prompt"].tolist() == [head, head]
    assert found["response_mask"][0].tolist().count(False) > 0  # the user's turn between the two
    assert tokenizer.shown(found["responses"][0][found["response_mask"][0]].tolist()) == "3<eos>2<eos>"
    ends = [one.nonzero().item() for one in found["token_level_scores"][:1]]
    assert ends == [found["response_mask"][0].nonzero().max().item()]


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"chosen": [*ASK, TWO], "rejected": [*ASK, TWO]}, "identical-pair"),
        ({"prompt": ASK, "chosen": [TWO], "rejected": "2"}, "identical-pair"),
        ({"chosen": [*ASK, TWO], "rejected": [{"role": "user", "content": "2+2="}, TWO]}, "bad-messages"),
        ({"prompt": "2+2=", "chosen": [*ASK, TWO], "rejected": [*ASK, THREE]}, "bad-messages"),
        ({"chosen": ASK, "rejected": ASK}, "bad-messages"),
        ({"chosen": "a", "rejected": "b"}, "missing-key"),
    ],
)
def test_pairs_without_a_common_prompt_are_refused(row: Any, code: str, tokenizer: ChatTokenizer) -> None:
    with raises(f"prompts.{code}", where="data row 0"):
        batch(PreferenceData, row, tokenizer)


def test_a_label_is_the_score_of_its_response(tokenizer: ChatTokenizer) -> None:
    rows = [{"prompt": "1+1=", "completion": text, "label": text == "2"} for text in ("2", "11")]
    found = UnpairedData(rows, shuffle=False).load(tokenizer, 0).next(2)
    assert found["token_level_scores"].tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert found["uid"].tolist() == found["row_id"].tolist() == ["0/0/0", "0/1/0"]
    for row, code in (({"label": "yes"}, "wrong-type"), ({"label": None}, "missing-key")):
        with raises(f"prompts.{code}", where="data row 0"):
            batch(UnpairedData, rows[0] | row, tokenizer)


def test_parquet_of_verl_keeps_its_bits(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    """The same rows as file and in memory."""
    rows = [record(i) | {"ability": "math"} for i in range(3)]
    path = write_parquet(tmp_path / "a.parquet", rows)
    streams = [PromptData(data, shuffle=False).load(tokenizer, 0) for data in (path, rows)]
    assert all(isinstance(stream, PromptStream) for stream in streams)
    assert streams[0].all().equal(streams[1].all()) and streams[0].digest() == streams[1].digest()

"""Tests of `answers.py` and `sampled_text.py`: what clients get of answers, at once and token by token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.episodes import ToolCall
from flowrl.episodes.endpoint.answers import AnswerReader, Reading
from flowrl.episodes.endpoint.sampled_text import SampledText
from flowrl.episodes.parsers import PARSERS
from tests.data.text.test_answers import tokenizer_of
from tests.episodes.endpoint.test_session import LOOK

HERMES = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
CALL = ToolCall("look", {"at": "é"})
HARMONY = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>"


def reader_of(
    tokenizer: ChatTokenizer, parser: str = "hermes", tools: bool = False, stop: Sequence[str] = (), prompt: str = ""
) -> AnswerReader:
    return AnswerReader(tokenizer, tokenizer.encode(prompt), PARSERS[parser], [LOOK] if tools else [], stop)


CASES = [
    ("qwen3", "<think>\nHm. \n</think>\n\nIt is é.\n", {}, Reading("Hm.", "It is é.\n")),
    ("qwen3", "Hm.</think>Yes", {"prompt": "<|im_start|>assistant\n<think>\n"}, Reading("Hm.", "Yes")),
    ("qwen3", "\n<think>\nnever ends", {}, Reading("never ends")),
    ("qwen3", "no thought </think> here", {}, Reading("", "no thought </think> here")),
    ("qwen3", "<thin air", {}, Reading("", "<thin air")),
    ("qwen3", f"<think>{HERMES}</think>I look. {HERMES}", {"tools": True}, Reading(HERMES, "I look. ", (CALL,))),
    ("qwen3", f"<think>Hm.</think>\n\n{HERMES}\n", {"tools": True}, Reading("Hm.", "", (CALL,))),
    ("qwen3", "<tool_call>{</tool_call> no", {"tools": True}, Reading("", "<tool_call>{</tool_call> no", (), True)),
    ("qwen3", f"Yes {HERMES}", {}, Reading("", f"Yes {HERMES}")),
    ("qwen3", "one STOP two", {"stop": ["STOP", "two"]}, Reading("", "one ")),
    ("qwen3", "<think>one STOP</think>two", {"stop": ["STOP"]}, Reading("one")),
    ("qwen3", "one STO", {"stop": ["STOP"]}, Reading("", "one STO")),
    ("gptoss", f"{HARMONY}final<|message|>Yes", {}, Reading("Hm.", "Yes")),
    ("gptoss", f"{HARMONY}final<|message|>Yes, no", {"stop": [","]}, Reading("Hm.", "Yes")),
    ("gptoss", "<|channel|>analysis<|message|>never ends", {}, Reading("never ends")),
    ("gptoss", "without a channel", {}, Reading("", "without a channel")),
    (
        "gptoss",
        f'{HARMONY}commentary to=functions.look <|constrain|>json<|message|>{{"at": "é"}}',
        {"tools": True, "parser": "gpt-oss"},
        Reading("Hm.", "", (CALL,)),
    ),
    (
        "gptoss",
        f"{HARMONY}commentary<|message|>I look.<|end|><|start|>assistant to=functions.look<|channel|>commentary json"
        '<|message|>{"at": "é"}',
        {"tools": True, "parser": "gpt-oss"},
        Reading("Hm.", "I look.", (CALL,)),
    ),
    (
        "gptoss",
        f"{HARMONY}commentary to=functions.look<|message|>{{broken",
        {"tools": True, "parser": "gpt-oss"},
        Reading("Hm.", "{broken", (), True),
    ),
    ("gemma4_v5", "<|channel>thought\nHm.\n<channel|>Yes", {}, Reading("Hm.", "Yes")),
    (
        "muse_glimmer",
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes",
        {},
        Reading("Hm.", "Yes"),
    ),
]


@pytest.mark.parametrize(("template", "text", "settings", "expected"), CASES)
def test_thoughts_text_and_calls(template: str, text: str, settings: dict[str, object], expected: Reading) -> None:
    """The whole answer, and the beginnings of it that a client gets token by token."""
    tokenizer = tokenizer_of(template)
    ids = tokenizer.encode(text)
    assert reader_of(tokenizer, **settings).complete(ids) == expected  # type: ignore[arg-type]
    reader, before = reader_of(tokenizer, **settings), Reading()  # type: ignore[arg-type]
    for token in ids:
        now = reader.partial([token])
        assert now.thought.startswith(before.thought) and now.content.startswith(before.content)
        assert not now.calls and (now.thought == before.thought or not before.content)
        before = now
    assert reader.complete(ids) == expected
    assert expected.thought.startswith(before.thought) and expected.content.startswith(before.content)


def test_a_client_gets_text_as_soon_as_it_is_certain() -> None:
    tokenizer = tokenizer_of("qwen3")
    reader = reader_of(tokenizer, tools=True, stop=["STOP"])
    found = [reader.partial([token]).content for token in tokenizer.encode("A é <b ST x")]
    assert found == [
        "A",
        "A",
        "A",
        "A é",
        "A é",
        "A é",
        "A é <b",
        "A é <b",
        "A é <b",
        "A é <b",
        "A é <b ST",
        "A é <b ST x",
    ]


def test_a_message_that_begins_before_the_last_one_has_ended_is_no_text() -> None:
    tokenizer = tokenizer_of("gptoss")
    ids = tokenizer.encode("<|channel|>final<|message|>Yes<|start|>assistant<|channel|>final<|message|>No")
    reader = reader_of(tokenizer)
    found = [reader.partial([token]).content for token in ids]
    assert reader.complete(ids) == Reading("", "Yes\nNo")
    assert all("Yes\nNo".startswith(text) for text in found)


def test_special_tokens_of_calls_end_with_a_stop_string() -> None:
    """A parser that reads special tokens gets the text up to the stop string, too."""
    tokenizer = tokenizer_of("deepseekv3")
    ids = tokenizer.encode("I look. " + PARSERS["deepseek"].write([CALL]))
    assert reader_of(tokenizer, parser="deepseek", tools=True).complete(ids) == Reading("", "I look. ", (CALL,))
    found = reader_of(tokenizer, parser="deepseek", tools=True, stop=["}"]).complete(ids)
    assert found.calls == () and found.invalid and found.content.startswith("I look. function")


@pytest.mark.parametrize("marks", [True, False])
def test_text_token_by_token_is_the_decoded_text(marks: bool) -> None:
    tokenizer = tokenizer_of("qwen3")
    ids = tokenizer.encode("thé 漢字 <think>🙂</think> <|im_start|>x<|im_end|>\n")
    sampled, whole = SampledText(tokenizer, marks), SampledText(tokenizer, marks)
    for token in ids:
        sampled.add([token])
        assert "\ufffd" not in sampled.text
    sampled.add([], last=True)
    whole.add(ids, last=True)
    assert sampled.text == whole.text == (tokenizer.shown(ids) if marks else tokenizer.decode(ids))


def test_a_spelled_control_token_is_no_control_token() -> None:
    tokenizer = tokenizer_of("gptoss")
    ids = tokenizer.response_ids("<|channel|>final<|message|>Yes")
    assert reader_of(tokenizer).complete(ids) == Reading("", "<|channel|>final<|message|>Yes")

"""The tokens of an assistant's turns, against transformers' own masks for templates that mark them."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.data.text.turns import turns_of
from tests.support.errors import raises
from tests.support.templates import TEMPLATES, marked_tokenizer_of, tokenizer_of

CHAT = [
    {"role": "user", "content": "12 and the"},
    {"role": "assistant", "content": "the 12"},
    {"role": "user", "content": "<|im_end|> and <end>"},
    {"role": "assistant", "content": "and</s> the"},
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 12}}}
TOOLS = [
    {"role": "user", "content": "12 and the"},
    {"role": "assistant", "content": "the", "tool_calls": [CALL]},
    {"role": "tool", "content": "12"},
    {"role": "tool", "content": "and"},
    {"role": "assistant", "content": "the 12"},
]


def trained(tokenizer: ChatTokenizer, ids: list[int], mask: list[bool]) -> list[str]:
    """The texts of the stretches under the mask."""
    texts: list[str] = []
    for i, (token, on) in enumerate(zip(ids, mask, strict=True)):
        if on and (i == 0 or not mask[i - 1]):
            texts.append("")
        if on:
            texts[-1] += tokenizer.shown([token])
    return texts


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - {"merging"}))
def test_every_turn_is_trained_from_the_generation_prompt_to_its_end(name: str) -> None:
    tokenizer = tokenizer_of(name)
    end = TEMPLATES[name][1]
    found = turns_of(tokenizer, CHAT[:1], CHAT[1:])
    assert found.prompt == tokenizer.prompt_ids(CHAT[:1])
    assert trained(tokenizer, found.ids, found.mask) == [f"the 12{end}", f"and</s> the{end}"]
    whole = tokenizer.conversation_ids(CHAT)  # encoded at once
    assert found.prompt + found.ids == whole[: len(found.prompt) + len(found.ids)]
    assert not tokenizer.shown(whole[len(found.prompt) + len(found.ids) :]).strip()
    # what the policy reads before each turn, and then samples
    first = found.mask.index(False)
    second = first + found.mask[first:].index(True)
    assert found.prompt + found.ids[:second] == tokenizer.prompt_ids(CHAT[:3])
    assert found.ids[second:] == [*tokenizer.response_ids(CHAT[3]["content"]), tokenizer.turn_end]


@pytest.mark.parametrize(
    ("name", "conversation"),
    [*((name, CHAT) for name in ("llama3", "qwen2.5", "gemma", "mistral", "tools")), ("tools", TOOLS)],
)
def test_masks_are_those_of_transformers(name: str, conversation: list[dict[str, Any]]) -> None:
    """Its ``return_assistant_tokens_mask`` reads marks, by which TRL computes ``assistant_only_loss``."""
    marked, plain = marked_tokenizer_of(name)
    clean = [{**one, "content": one["content"].replace("<", "").replace(">", "")} for one in conversation]
    theirs: Any = marked._tokenizer.apply_chat_template(
        clean, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    for tokenizer in (marked, plain):
        found = turns_of(tokenizer, clean[:1], clean[1:])
        ids, mask = found.prompt + found.ids, [False] * len(found.prompt) + found.mask
        assert ids == list(theirs["input_ids"])[: len(ids)]
        assert mask == list(map(bool, theirs["assistant_masks"]))[: len(ids)]
        assert not any(theirs["assistant_masks"][len(ids) :])


def test_a_prompt_with_turns_of_the_assistant_does_not_train_them() -> None:
    for tokenizer in marked_tokenizer_of("llama3"):
        found = turns_of(tokenizer, CHAT[:3], CHAT[3:])
        assert found.prompt == tokenizer.prompt_ids(CHAT[:3]) and all(found.mask)


def test_a_template_that_rewrites_earlier_turns_is_refused_by_name() -> None:
    tokenizer = tokenizer_of("merging")
    with raises("tokenizer.rewritten-turns", path=tokenizer.folder, index=1):
        turns_of(tokenizer, CHAT[:1], CHAT[1:])
    last = turns_of(tokenizer, CHAT[:3], CHAT[3:])
    assert last.prompt == tokenizer.prompt_ids(CHAT[:3]) and trained(tokenizer, last.ids, last.mask) == [
        "and</s> the<end>"
    ]
    thinking = [*CHAT[:1], {"role": "assistant", "content": "<think>12</think>the"}, *CHAT[2:]]
    with raises("tokenizer.rewritten-turns", index=1):
        turns_of(tokenizer_of("qwen3"), thinking[:1], thinking[1:])


def test_a_generation_prompt_with_a_closed_thinking_block_precedes_a_single_turn() -> None:
    tokenizer, arguments = tokenizer_of("qwen3"), {"enable_thinking": False}
    found = turns_of(tokenizer, CHAT[:1], CHAT[1:2], arguments)
    assert found.prompt == tokenizer.prompt_ids(CHAT[:1], arguments)
    assert found.ids == [*tokenizer.response_ids("the 12"), tokenizer.turn_end]
    with raises("tokenizer.rewritten-turns"):
        turns_of(tokenizer, CHAT[:1], CHAT[1:], arguments)


def test_what_merges_over_the_start_of_a_turn_is_encoded_as_it_is_sampled() -> None:
    """``Ġthe`` is one token, but the policy reads the space of the prompt before it samples."""
    tokenizer = tokenizer_of("mistral")
    prompt, answer = [{"role": "user", "content": "12"}], [{"role": "assistant", "content": " the"}]
    found = turns_of(tokenizer, prompt, answer)
    assert found.prompt == tokenizer.prompt_ids(prompt)
    assert found.ids == [*tokenizer.encode(" the"), tokenizer.turn_end]

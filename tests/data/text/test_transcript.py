"""Conversations as exact tokens, with common chat templates: sampled tokens are never tokenized again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.data.text.transcript import Transcript
from tests.support.errors import raises
from tests.support.templates import TEMPLATES, tokenizer_of

ADDING = sorted(TEMPLATES.keys() - {"merging"})
QUESTION = [{"role": "user", "content": "What is 1 and 2?"}]
WORDS = st.text(alphabet="the and12 ?!<>{}\n", min_size=1, max_size=30).map(str.strip).filter(bool)


def one_by_one(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """`text` as tokens of one byte each, as a policy may sample it but no tokenizer would encode it."""
    return [i for letter in text for i in tokenizer.encode(letter)]


def end_of(name: str) -> int:
    (end,) = tokenizer_of(name).encode(TEMPLATES[name][1])
    return end


@pytest.mark.parametrize("name", ADDING)
@given(answers=st.lists(WORDS, min_size=1, max_size=4), replies=st.lists(WORDS, min_size=4, max_size=4))
def test_a_transcript_equals_the_rendered_template_and_keeps_sampled_ids(
    name: str, answers: list[str], replies: list[str]
) -> None:
    tokenizer = tokenizer_of(name)
    transcript = Transcript(tokenizer, QUESTION, check="strict")
    messages, sampled = list(QUESTION), []
    for text, reply in zip(answers, replies, strict=False):
        ids = [*one_by_one(tokenizer, text), end_of(name)]
        sampled.append((len(transcript.ids), ids))
        transcript.answer(ids, [-0.5] * len(ids))
        transcript.reply([{"role": "user", "content": reply}])
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": reply}]
    assert tokenizer.shown(transcript.ids) == tokenizer.conversation_text(messages, add_generation_prompt=True)
    assert transcript.messages == messages
    for start, ids in sampled:
        assert transcript.ids[start : start + len(ids)] == ids
    places = {transcript.prompt_length + i for i, own in enumerate(transcript.sampled) if own}
    assert places == {start + i for start, ids in sampled for i in range(len(ids))}
    assert transcript.log_probs == [-0.5 if own else 0.0 for own in transcript.sampled]


@pytest.mark.parametrize("name", ADDING)
def test_the_template_ends_a_truncated_turn(name: str) -> None:
    tokenizer = tokenizer_of(name)
    transcript = Transcript(tokenizer, QUESTION)
    cut = one_by_one(tokenizer, "and the")
    transcript.answer(cut, [-1.0] * len(cut))
    delta = transcript.reply([{"role": "user", "content": "go on"}])
    assert delta[0] == end_of(name) and sum(transcript.sampled) == len(cut)
    messages = [*QUESTION, {"role": "assistant", "content": "and the"}, {"role": "user", "content": "go on"}]
    assert tokenizer.shown(transcript.ids) == tokenizer.conversation_text(messages, add_generation_prompt=True)


def test_a_sampled_alternative_end_token_is_kept() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    transcript = Transcript(tokenizer, QUESTION)
    transcript.answer([*tokenizer.encode("3"), tokenizer.eos_id], [-1.0, -1.0])
    transcript.reply([{"role": "user", "content": "sure?"}])
    assert tokenizer.shown(transcript.ids).endswith(
        "3<eos><|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_tool_replies_form_one_turn(name: str) -> None:
    tokenizer = tokenizer_of(name)
    transcript = Transcript(tokenizer, QUESTION, check="strict")
    call = [*tokenizer.encode("<think>the</think>call"), end_of(name)]
    transcript.answer(call, [0.0] * len(call))
    delta = transcript.reply([{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}])
    assert tokenizer.shown(delta) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_reply_that_a_template_omits_is_refused() -> None:
    tokenizer = tokenizer_of("bare")
    transcript = Transcript(tokenizer, QUESTION, check="off")
    transcript.answer([*tokenizer.encode("3"), end_of("bare")], [0.0] * 2)
    with raises("tokenizer.empty-reply", path=tokenizer.folder, roles=("'tool'",)):
        transcript.reply([{"role": "tool", "content": "1"}])


def test_an_assistant_reply_is_refused() -> None:
    tokenizer = tokenizer_of("bare")
    transcript = Transcript(tokenizer, QUESTION, check="off")
    transcript.answer([*tokenizer.encode("3"), end_of("bare")], [0.0] * 2)
    with raises("episode.invalid-reply"):
        transcript.reply([{"role": "assistant", "content": "1"}])


def test_a_response_without_one_log_prob_per_token_is_refused() -> None:
    for ids, log_probs, message in (([], [], "has 0 tokens"), ([1, 2], [0.0], "has 2 tokens but 1 log-probs")):
        with pytest.raises(ValueError, match=message):
            Transcript(tokenizer_of("qwen2.5"), QUESTION).answer(ids, log_probs)


class TestRewriting:
    def answered(self, name: str, text: str, check: str) -> Transcript:
        tokenizer = tokenizer_of(name)
        transcript = Transcript(tokenizer, QUESTION, check=check)  # type: ignore[arg-type]
        ids = [*tokenizer.encode(text), end_of(name)]
        transcript.answer(ids, [0.0] * len(ids))
        return transcript

    @pytest.mark.parametrize("check", ["strict", "loose"])
    @pytest.mark.parametrize(
        ("name", "answer", "expected", "found"),
        [
            ("qwen3", "<think>12</think>3", "<think>12</think>3", "3<|im_end|>"),
            ("merging", "3", "1and2?<end>", "1and2?sure?<end>"),
        ],
    )
    def test_a_template_that_rewrites_earlier_turns_is_refused_with_both_texts(
        self, name: str, answer: str, check: str, expected: str, found: str
    ) -> None:
        with raises("tokenizer.rewritten-turns", path=tokenizer_of(name).folder) as caught:
            self.answered(name, answer, check).reply([{"role": "user", "content": "sure?"}])
        assert expected in "".join(caught.value.facts["expected"].split())
        assert found in "".join(caught.value.facts["found"].split())

    def test_check_off_keeps_the_sampled_tokens(self) -> None:
        transcript = self.answered("qwen3", "<think>12</think>3", "off")
        transcript.reply([{"role": "user", "content": "sure?"}])
        assert "<think>12</think>3<|im_end|>\n<|im_start|>user\nsure?" in tokenizer_of("qwen3").shown(transcript.ids)

    @pytest.mark.parametrize("name", ["llama3", "gemma"])
    def test_only_the_strict_check_compares_whitespace_that_a_template_trims(self, name: str) -> None:
        reply = [{"role": "user", "content": "sure?"}]
        self.answered(name, "3 \n", "loose").reply(reply)
        with raises("tokenizer.rewritten-turns") as caught:
            self.answered(name, "3 \n", "strict").reply(reply)
        assert "3 \n<" in caught.value.facts["expected"]


def test_a_template_rejects_roles_that_it_does_not_support() -> None:
    tokenizer = tokenizer_of("gemma")
    transcript = Transcript(tokenizer, QUESTION)
    transcript.answer([*tokenizer.encode("3"), end_of("gemma")], [0.0, 0.0])
    with raises("tokenizer.template-rejects") as caught:
        transcript.reply([{"role": "tool", "content": "1"}, {"role": "tool", "content": "1"}])
    assert "must alternate" in caught.value.facts["reason"]


def test_answers_and_replies_must_alternate() -> None:
    tokenizer = tokenizer_of("llama3")
    transcript = Transcript(tokenizer, QUESTION)
    with pytest.raises(ValueError, match="expected one before a reply"):
        transcript.reply(QUESTION)
    with pytest.raises(ValueError, match="has 0 tokens"):
        transcript.answer([], [])
    transcript.answer(tokenizer.encode("3"), [0.0])
    with pytest.raises(ValueError, match="expected a reply before the next response"):
        transcript.answer(tokenizer.encode("3"), [0.0])


def test_an_unknown_check_is_refused() -> None:
    with raises("parameter.invalid", found="lose", expected=("strict", "loose", "off")):
        Transcript(tokenizer_of("llama3"), QUESTION, check="lose")  # type: ignore[arg-type]

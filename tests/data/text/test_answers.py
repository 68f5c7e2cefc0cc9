"""Answers under the chat templates of published models, which TRL ships: `docs/chat_templates.py`, and `harmony.py`.

The reference is what transformers renders: whether the next prompt begins with the last one and what the model sampled,
in the form that the model was trained to write. It knows nothing of quoting, tokens or flowrl's transcripts.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from jinja2 import TemplateError

from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.data.text.transcript import Transcript
from flowrl.episodes.chat import Chat, Limits
from flowrl.episodes.environment import Answer, InvalidToolCall, ToolCall
from flowrl.episodes.parsers import PARSERS
from flowrl.episodes.parsers.call_format import Tools
from flowrl.episodes.requests.broker import RequestBroker
from flowrl.episodes.requests.clock import EpisodeClock
from tests import ROOT
from tests.episodes.parsers.test_parsers import marked
from tests.episodes.scripted import KEY, SAMPLING, Scripted, row
from tests.nightly import nightly_except
from tests.support.errors import raises

TABLE = runpy.run_path(str(ROOT / "docs" / "chat_templates.py"))
TEMPLATES: dict[str, str] = TABLE["templates"]()
EVERY_COMMIT = {
    *(
        "cohere2",
        "deepseek_r1_distill",
        "deepseek_r1_distill_training",
        "deepseekv3",
        "gemma",
        "gemma4_v2",
        "gemma4_v5",
    ),
    *("glm4moe", "gptoss", "idefics3", "lfm2_2_5", "llama3_1", "llava_next", "muse_glimmer", "nemotron_3_super"),
    *("qwen2_5", "qwen3", "qwen3_5_think_training", "qwen3_6", "qwen3_8", "qwen3_8_training"),
}
QUESTION = {"role": "user", "content": "What is 17 and 25?"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'
FUNCTION = {"name": "add", "arguments": {"a": 17, "b": 25}}


@cache
def tokenizer_of(name: str) -> ChatTokenizer:
    made: ChatTokenizer = TABLE["tokenizer_of"](TEMPLATES[name])
    return made


def sampled(name: str, prompt: str, thought: str, answer: str) -> str:
    """What the model of a template samples, with the token that ends it if a template replaces that."""
    if name.startswith("gptoss"):
        call = answer == CALL
        before = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
        header = " to=functions.add<|channel|>commentary json" if call else "<|channel|>final"
        return f"{before}{header}<|message|>" + ('{"a": 17, "b": 25}<|call|>' if call else f"{answer}<|return|>")
    if name.startswith(("gemma4", "diffusion_gemma")):
        return f"<|channel>thought\n{thought}\n<channel|>{answer}" if thought else answer
    if name.startswith("muse"):
        before = f" to=self<|message|>{thought}<|eom|><|start|>assistant" if thought else ""
        return f"{before} to=user<|message|>{answer}"
    if prompt.rstrip().endswith("<think>"):
        return f"{thought}\n</think>\n\n{answer}"
    return f"<think>\n{thought}\n</think>\n\n{answer}" if thought else answer


FORMS: dict[str, Callable[[str, str, str], dict[str, Any]]] = {
    "as sampled": lambda text, thought, answer: {"content": text},
    "with the beginning of the thought": lambda text, thought, answer: {"content": text},
    **{
        key: lambda text, thought, answer, key=key: {**({key: thought} if thought else {}), "content": answer}
        for key in ("reasoning_content", "thinking", "reasoning")
    },
    "with calls": lambda text, thought, answer: {
        **({"thinking": thought} if thought else {}),
        **({"tool_calls": [{"function": FUNCTION}]} if answer == CALL else {"content": answer}),
    },
}
"""How a program may hand an answer to a template."""


def expected(name: str, tools: bool, thinks: bool) -> str:
    """The verdict by text alone."""
    template = tokenizer_of(name)._tokenizer
    arguments: dict[str, Any] = {"enable_thinking": thinks} if "enable_thinking" in TEMPLATES[name] else {}
    arguments |= {"tools": TABLE["Toolbox"]([TABLE["add"]], "hermes").schemas} if tools else {}

    def rendered(messages: list[dict[str, Any]]) -> str:
        text = template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
        return "".join(str(text).split())

    def found(form: str) -> Iterator[bool]:
        """By turn, whether the next prompt extends the last one and the answer."""
        messages: list[dict[str, Any]] = [QUESTION]
        for turn in range(2):
            prompt = rendered(messages)
            thought, answer = "I look again." if thinks else "", CALL if tools else "42"
            text = sampled(name, prompt, thought, answer)
            reply = {"role": "tool", "name": "add"} if tools else {"role": "user"}
            begun = "<think>\n" if form == "with the beginning of the thought" and prompt.endswith("<think>") else ""
            content = begun + text.partition("<|return|>")[0]
            message = {"role": "assistant", **FORMS[form](content, thought, answer)}
            messages += [message, {**reply, "content": f"HERE{turn}"}]
            later = rendered(messages)
            if f"HERE{turn}" not in later:
                raise TemplateError("leaves out the reply")
            yield later.startswith(prompt + "".join(text.split()))

    verdicts = set()
    for form in FORMS if name.startswith("gptoss") else [form for form in FORMS if form != "with calls"]:
        try:
            verdicts.add("accepted" if all(found(form)) else "segments")
        except (TemplateError, TypeError, KeyError):
            verdicts.add("refused")
    return min(verdicts, key=["accepted", "segments", "refused"].index)


@pytest.mark.parametrize("name", nightly_except(EVERY_COMMIT, TEMPLATES))
def test_the_table_says_what_transformers_renders(name: str) -> None:
    tokenizer = tokenizer_of(name)
    parser = TABLE["parser_of"](tokenizer) or "hermes"
    for tools in (False, True):
        for thinks in (False, True):
            verdict, why = TABLE["verdict"](tokenizer, parser if tools else None, thinks)
            assert verdict == expected(name, tools, thinks), (tools, thinks, why)
            assert bool(why) == (verdict == "refused")


def test_the_table_has_many_templates() -> None:
    assert len(TEMPLATES) >= 24 and TEMPLATES.keys() >= EVERY_COMMIT


def play(name: str, answers: list[tuple[str, list[dict[str, Any]]]], **arguments: Any) -> Transcript:
    """A conversation with these sampled answers, each with its end, and the replies to them."""
    tokenizer = tokenizer_of(name)
    transcript = Transcript(tokenizer, [QUESTION], "strict", arguments)
    for text, reply in answers:
        ids = tokenizer.encode(text)
        transcript.answer(ids, [0.0] * len(ids))
        transcript.reply(reply)
    return transcript


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize(
    ("name", "end", "message"),
    [
        ("qwen3_8", "<|im_end|>", {"reasoning_content": "I look.", "content": "42"}),
        ("qwen3_8_training", "<|im_end|>", {"reasoning_content": "I look.", "content": "42"}),
        (
            "deepseek_r1_distill_training",
            "<\uff5cend▁of▁sentence\uff5c>",
            {"content": "<think>\nI look.\n</think>\n\n42"},
        ),
        ("qwen3_5_think_training", "<|im_end|>", {"content": "<think>\nI look.\n</think>\n\n42"}),
    ],
)
def test_templates_that_only_add_have_the_ids_of_transformers(
    name: str, end: str, message: dict[str, str], turns: int
) -> None:
    """Also where the thought has another form in the message than the policy sampled it in."""
    reply = {"role": "user", "content": "Are you sure?"}
    transcript = play(name, [(f"I look.\n</think>\n\n42{end}", [reply])] * turns)
    messages = [QUESTION, *[{"role": "assistant", **message}, reply] * turns]
    whole = tokenizer_of(name)._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert transcript.ids == whole
    assert sum(transcript.sampled) == turns * len(tokenizer_of(name).encode(f"I look.\n</think>\n\n42{end}"))
    assert [m["content"] for m in transcript.messages if m["role"] == "assistant"] == [
        "I look.\n</think>\n\n42"
    ] * turns


def test_a_template_ends_a_thought_that_its_length_ended() -> None:
    reply = {"role": "user", "content": "Go on."}
    transcript = play("qwen3_8", [("I look", [reply])])
    message = {"role": "assistant", "reasoning_content": "I look", "content": ""}
    template = tokenizer_of("qwen3_8")._tokenizer
    assert transcript.ids == template.apply_chat_template(
        [QUESTION, message, reply], add_generation_prompt=True, return_dict=False
    )
    with raises("tokenizer.rewritten-turns"):
        play("qwen3_8", [("I look<|im_end|>", [reply])])


HEADERS = {
    "as the template": " to=functions.add<|channel|>commentary json<|message|>",
    "as OpenAI's renderer": " to=functions.add<|channel|>commentary <|constrain|>json<|message|>",
    "as the template, thinking": "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant to=functions.add"
    "<|channel|>commentary json<|message|>",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=[*HEADERS])
def test_calls_of_gpt_oss_continue_the_row(header: str) -> None:
    call = f'{header}{{"a": 17, "b": 25}}<|call|>'
    transcript = play("gptoss", [(call, [{"role": "tool", "name": "add", "content": "42"}])] * 2)
    text = tokenizer_of("gptoss").shown(transcript.ids)
    result = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"42"<|end|><|start|>assistant'
    assert text.endswith(f"<|start|>assistant{call}{result}" + f"{call}{result}")


@pytest.mark.parametrize(
    ("text", "role"),
    [
        ("<|channel|>final<|message|>42<|return|>", "user"),  # history ends it with <|end|>
        (
            "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>",
            "user",
        ),
        (
            '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 17}<|call|>',
            "tool",
        ),  # in this order
    ],
)
def test_what_the_template_of_gpt_oss_writes_otherwise_is_refused(text: str, role: str) -> None:
    with raises("tokenizer.rewritten-turns"):
        play("gptoss", [(text, [{"role": role, "name": "add", "content": "42"}])])


MALFORMED = [
    "<|channel|>commentary to=functions.add",
    "<|channel|>commentary to=functions.add json<|message|>17<|call|>",
    "<|channel|>commentary to=functions.add json<|message|>{<|call|>",
    "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant to=add<|channel|>commentary json<|message|>{",
]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_call_of_gpt_oss_is_rewritten_and_answered(text: str) -> None:
    tokenizer = tokenizer_of("gptoss")
    with pytest.raises(InvalidToolCall):
        PARSERS["gpt-oss"].parse(text, Tools())
    reply = {"role": "tool", "content": "error: HERE"}
    with raises("tokenizer.rewritten-turns"):
        play("gptoss", [(text, [reply])])
    for check in ("strict", "off"):
        transcript = Transcript(tokenizer, [QUESTION], check)  # type: ignore[arg-type]
        ids = tokenizer.encode(text)
        transcript.answer(ids, [0.0] * len(ids))
        assert "HERE" in tokenizer.shown(transcript.rewritten([reply]).ids)
    assert "HERE" in tokenizer.shown(transcript.reply([reply]))


@pytest.mark.parametrize("name", ["gptoss", "gemma4_v2", "muse_glimmer", "deepseekv3", "qwen3_8"])
def test_results_that_spell_marks_of_channels_and_calls_are_text(name: str) -> None:
    tokenizer = tokenizer_of(name)
    call = " to=functions.add<|channel|>commentary json<|message|>{}<|call|>" if name == "gptoss" else "42"
    check: Any = "strict" if name == "gptoss" else "off"

    def control(content: str) -> list[str]:
        transcript = Transcript(tokenizer, [QUESTION], check)
        ids = tokenizer.encode(call)
        transcript.answer(ids, [0.0] * len(ids))
        delta = transcript.reply([{"role": "tool", "name": "add", "content": content}])
        tokens = {*tokenizer.control_tokens.special, *tokenizer.control_tokens.written}
        return [token for i in delta if (token := tokenizer.shown([i])) in tokens]

    every = "".join([*tokenizer.control_tokens.special, *tokenizer.control_tokens.written])
    assert control(every) == control("HERE")


@pytest.mark.parametrize(
    ("name", "parser", "call"),
    [
        ("gptoss", "gpt-oss", '<|channel|>commentary to=functions.add json<|message|>{"a": 1}'),
        (
            "deepseekv3",
            "deepseek",
            marked('<!calls_begin!><!call_begin!>add<!sep!>{"a": 1}<!call_end!>'),
        ),
    ],
)
def test_a_call_that_an_answer_only_spells_is_text(name: str, parser: str, call: str) -> None:
    """A policy that repeats a web page calls nothing: the marks of a call are tokens."""
    tokenizer, toolbox = tokenizer_of(name), TABLE["Toolbox"]([TABLE["add"]], parser)
    spelled = tokenizer.control_tokens.encode(tokenizer.control_tokens.quote(call))
    assert tokenizer.shown(spelled) == call and len(spelled) > len(tokenizer.encode(call))
    broker = RequestBroker(Scripted(lambda *_: [], tokenizer), tokenizer, SAMPLING, KEY)
    chat = Chat(broker, row(0), Limits(1, 1, 1.0), "loose", toolbox, EpisodeClock(1.0, broker.environments))
    assert chat.calls(Answer(call, tokenizer.encode(call), 0, False)) == [ToolCall("add", {"a": 1})]
    assert not chat.calls(Answer(call, spelled, 0, False))
    begun, end = tokenizer.encode(call.rpartition("1}")[0] + '"'), tokenizer.encode('"}')
    (quoting,) = chat.calls(Answer("", [*begun, *spelled_without(tokenizer, call), *end], 0, False))
    assert quoting.arguments == {"a": call.replace('"', "'")}


def spelled_without(tokenizer: ChatTokenizer, call: str) -> list[int]:
    """A call spelled in plain tokens, without the quotes that end a string of JSON."""
    return tokenizer.control_tokens.encode(tokenizer.control_tokens.quote(call.replace('"', "'")))


def test_a_new_segment_begins_with_what_the_template_of_gpt_oss_writes() -> None:
    text = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>"
    transcript, reply = play("gptoss", []), {"role": "user", "content": "Are you sure?"}
    ids = tokenizer_of("gptoss").encode(text)
    transcript.answer(ids, [0.0] * len(ids))
    made = transcript.rewritten([reply])
    messages = [QUESTION, {"role": "assistant", "thinking": "I add.", "content": "42"}, reply]
    assert made.ids == tokenizer_of("gptoss")._tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert made.messages == [QUESTION, {"role": "assistant", "content": text.removesuffix("<|return|>")}, reply]
    assert not any(made.sampled)


def test_the_parser_of_a_template_is_the_one_of_its_calls() -> None:
    found = {
        name: TABLE["parser_of"](tokenizer_of(name)) for name in ("qwen3", "qwen3_8", "glm4moe", "gptoss", "gemma")
    }
    assert found == {"qwen3": "hermes", "qwen3_8": "qwen3_coder", "glm4moe": "glm", "gptoss": "gpt-oss", "gemma": None}
    assert TABLE["CALL"] == ToolCall("add", {"a": 17, "b": 25})

"""How an answer of the policy becomes a message of the chat template, and how a model writes one.

Most templates write the content of a message as it is, so an answer is a message as sampled. Other templates write the
thought themselves: they get it without its marks, and so does a template whose generation prompt begins the thought,
since the mark was not sampled. Models whose answers have *channels* (gpt-oss, Gemma 4, Muse) mark their thoughts, calls
and text by special tokens, which templates expect only from themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from flowrl.data.text import harmony
from flowrl.data.text.tokenizer import ChatTokenizer

MARK = "flowrl-marks-an-answer"  # without whitespace, which templates trim

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The keys of a message by which templates read a thought."""


class Form(NamedTuple):
    """An answer as a message.

    Args:
        message: as the template gets it.
        marked: the same with `MARK` in place of its last text.
        closing: what the template writes after that text as part of the answer.
        ends: the token that the template writes after it, if the policy must have sampled this one.
    """

    message: Mapping[str, Any]
    marked: Mapping[str, Any]
    closing: str = ""
    ends: str | None = None


@dataclass(frozen=True)
class Style:
    """How models write a thought and the text after it.

    Args:
        begin, end: around the thought.
        text: before the text.
        channels: whether these are special tokens.
    """

    begin: str
    end: str
    text: str = ""
    channels: bool = False

    def written(self, prompt: str, thought: str, answer: str, own_channel: bool = False) -> str:
        """An answer as a model writes it after a prompt, which may have begun the thought.

        Args:
            answer: a text or a call.
            own_channel: whether it has the marks before it.
        """
        begun = self.begun(prompt)
        text = answer if own_channel else f"{self.text}{answer}"
        return f"{'' if begun else self.begin}{thought}{self.end}{text}" if thought or begun else text

    def split(self, prompt: str, text: str) -> tuple[str | None, str] | None:
        """The thought of an answer, None if it has none, and its text; None if it has no marks of this style."""
        found = self._pattern.fullmatch(self.begun(prompt) + text)
        return None if found is None else (found["thought"], found["text"])

    def begun(self, prompt: str) -> str:
        """The end of a prompt that begins a thought; empty if it does not."""
        found = re.search(rf"{re.escape(self.begin.strip())}\s*\Z", prompt)
        return "" if found is None else found.group()

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        begin, end, text = (re.escape(mark.strip()) for mark in (self.begin, self.end, self.text))
        thought = rf"(?:\s*{begin}(?P<thought>.*?){end}){'?' if text else ''}"
        return re.compile(rf"{thought}\s*{text}(?P<text>.*)", re.DOTALL)


THINK = Style("<think>\n", "\n</think>\n\n")
HARMONY = Style(
    "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>", channels=True
)
_STYLES = {
    "<|channel|>analysis": HARMONY,  # gpt-oss
    "<|channel>": Style("<|channel>thought\n", "\n<channel|>", channels=True),  # Gemma 4
    " to=self<|message|>": Style(
        " to=self<|message|>", "<|eom|><|start|>assistant", " to=user<|message|>", True
    ),  # Muse
}
"""Styles other than `THINK`, by a text that only the templates of their models have."""


def style_of(tokenizer: ChatTokenizer) -> Style:
    """The style of the model that a chat template is for; that of most models if it names none."""
    return next((style for mark, style in _STYLES.items() if mark in tokenizer.template_text), THINK)


def reads_thoughts(tokenizer: ChatTokenizer) -> bool:
    """Whether a chat template is of a model that thinks: it writes thoughts, or removes those of earlier turns."""
    template, style = tokenizer.template_text, style_of(tokenizer)
    return style.channels or style.end.strip() in template or _reasoning_key(template) is not None


def with_thought(tokenizer: ChatTokenizer, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with ``reasoning_content`` as the chat template reads it: by its key, or else within the content."""
    if not (thought := message.get("reasoning_content")):
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    if (key := _reasoning_key(tokenizer.template_text)) is not None:
        return {**rest, key: thought}
    if not reads_thoughts(tokenizer):
        return rest
    return {**rest, "content": style_of(tokenizer).written("", thought, rest.get("content") or "")}


def forms(tokenizer: ChatTokenizer, prompt: str, text: str, cut: bool) -> Iterator[Form]:
    """The messages that an answer can be, of which a template may render one as the policy wrote it.

    Args:
        prompt: the text that the policy read.
        text: the answer, without the token that ended it.
        cut: whether no token ended it.
    """
    style = style_of(tokenizer)
    split, begun = style.split(prompt, text), style.begun(prompt)
    key = _reasoning_key(tokenizer.template_text)
    if style is HARMONY and (call := harmony.call(text)) is not None:
        yield _call(call)
    elif split is None or not style.channels:
        yield _plain(text)
    if begun:
        yield _plain(begun + text)
    if split is not None and (key is not None or style.channels):
        thought = {} if split[0] is None or key is None else {key: split[0].strip()}
        message = {"role": "assistant", **thought, "content": split[1]}
        yield Form(message, {**message, "content": MARK}, ends="<|end|>" if style is HARMONY else None)
    elif begun and cut and key is not None:  # the template ends the thought
        message = {"role": "assistant", key: text.strip(), "content": ""}
        yield Form(message, {**message, key: MARK})


@cache
def _reasoning_key(template: str) -> str | None:
    """The key of a message by which a template reads a thought."""
    words = {*re.findall(r"\w+", re.sub(r"{#.*?#}", "", template, flags=re.DOTALL))}
    return next((key for key in _REASONING if key in words), None)


def _plain(text: str) -> Form:
    return Form({"role": "assistant", "content": text}, {"role": "assistant", "content": MARK})


def _call(call: harmony.Call) -> Form:
    """A call of gpt-oss, whose template writes the arguments as JSON."""

    def message(arguments: Any) -> Mapping[str, Any]:
        function = {"name": call.name, "content_type": call.content_type, "arguments": arguments}
        thought = {} if call.thought is None else {"thinking": call.thought}
        return {"role": "assistant", **thought, "tool_calls": [{"type": "function", "function": function}]}

    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    return Form(message(arguments), message(MARK), closing='"', ends="<|call|>")

"""`AnswerReader`: what a client gets of an answer: its thought, its text and its calls, also before it is complete.

What a client gets of an incomplete answer is always the beginning of what it gets of the complete one: the beginning of
a mark or a stop string is held back, and so is white space that a call may follow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flowrl.data.text import harmony
from flowrl.data.text.answers import HARMONY, reads_thoughts, style_of
from flowrl.data.text.control_tokens import as_text
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.episodes.endpoint.sampled_text import SampledText
from flowrl.episodes.environment import InvalidToolCall, ToolCall
from flowrl.episodes.parsers.call_format import CallFormat, Tools

_END_OF_PROMPT = 64
"""Tokens at the end of a prompt among which is the mark of a thought that the prompt begins."""


class Reading(NamedTuple):
    """What a client gets of an answer.

    Args:
        thought: without white space around it.
        content: the text, without that of valid calls.
        invalid: whether a call is malformed, which is then text.
    """

    thought: str = ""
    content: str = ""
    calls: Sequence[ToolCall] = ()
    invalid: bool = False


class _Parts(NamedTuple):
    """The parts of an answer so far, with special tokens where `SampledText` keeps them.

    Args:
        ended: whether the thought is complete.
        body: the text in which calls are.
    """

    thought: str
    ended: bool
    body: str


class AnswerReader:
    """Reads one answer.

    Args:
        prompt: the tokens before the answer.
        calls: the format of calls.
        tools: schemas; without any, calls are text.
        stop: strings before which the text ends.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        prompt: Sequence[int],
        calls: CallFormat,
        tools: Sequence[Mapping[str, Any]],
        stop: Sequence[str],
    ) -> None:
        self._tokenizer, self._calls, self._tools, self._stop = tokenizer, calls, Tools(tools, tokenizer), tuple(stop)
        self._style, self._thinks = style_of(tokenizer), reads_thoughts(tokenizer)
        self._begun = self._thinks and bool(self._style.begun(tokenizer.shown(prompt[-_END_OF_PROMPT:])))
        self._sampled = SampledText(tokenizer, self._style.channels or bool(tools and calls.special), stop)
        self._count = 0

    def partial(self, ids: Sequence[int]) -> Reading:
        """What the client gets once these further tokens are sampled."""
        self._count += len(ids)
        self._sampled.add(ids)
        parts = self._parts(self._sampled.text, complete=False)
        if not parts.ended:
            return Reading(_before_partial(self._visible(parts.thought), self._stop).strip())
        content = _before_partial(self._content(parts.body), self._stop)
        return Reading(self._visible(parts.thought).strip(), content.rstrip() if self._tools.schemas else content)

    def complete(self, ids: Sequence[int]) -> Reading:
        """What the client gets of the whole answer; `ids` are its tokens without the one that ended it."""
        self._sampled.add(ids[self._count :], last=True)
        parts = self._parts(self._sampled.text, complete=True)
        thought, invalid = self._visible(parts.thought).strip(), False
        calls: tuple[ToolCall, ...] = ()
        if self._tools.schemas:
            try:
                calls = tuple(self._calls.parsed(self._callable(parts.body), self._tools))
            except InvalidToolCall:
                invalid = True
        content = self._content(parts.body) if calls else self._whole_content(parts.body, bool(thought))
        return Reading(thought, content if content.strip() or not calls else "", calls, invalid)

    def _parts(self, text: str, complete: bool) -> _Parts:
        style = self._style
        if style is HARMONY:
            text = text if complete else _before_partial(text, [harmony.START])
            messages = harmony.messages(text)
            first = next((i for i, one in enumerate(messages) if one.channel != "analysis" and one.content), None)
            thoughts = [(one.content or "").strip() for one in messages[:first] if one.channel == "analysis"]
            return _Parts("\n".join(filter(None, thoughts)), first is not None, text)
        if not self._thinks:
            return _Parts("", True, text)
        begin, end, mark = style.begin.strip(), style.end.strip(), style.text.strip()
        start = text.lstrip()
        if not self._begun and not start.startswith(begin):
            if not complete and begin.startswith(start):
                return _Parts("", False, "")
            return _Parts("", True, _without(mark, text, complete))
        thought, ended, rest = (text if self._begun else start.removeprefix(begin)).partition(end)
        if not ended:
            return _Parts(thought if complete else _before_partial(thought, [end]), False, "")
        return _Parts(thought, True, _without(mark, rest.lstrip(), complete))

    def _content(self, body: str) -> str:
        """The text before calls, without the beginning of one."""
        if self._style is HARMONY:
            return _said(body, to_tools=False)
        if not self._tools.schemas:
            return self._visible(body)
        body, begins = self._callable(body), self._calls.begins
        starts = [body.index(begin) for begin in begins if begin in body]
        if starts:
            return self._visible(body[: min(starts)])
        return _before_partial(self._visible(body), begins) if begins else ""

    def _whole_content(self, body: str, thinks: bool) -> str:
        """The text of an answer without valid calls."""
        if self._style is not HARMONY:
            return self._visible(body)
        return (_said(body, to_tools=False) + _said(body, to_tools=True)) or ("" if thinks else self._visible(body))

    def _callable(self, body: str) -> str:
        """The text as the parser of calls gets it."""
        return body if self._calls.special else self._visible(body)

    def _visible(self, text: str) -> str:
        """A text without special tokens."""
        if not text or not self._sampled.marks:
            return text
        return as_text(re.sub("|".join(map(re.escape, self._tokenizer.control_tokens.special)), "", text))


def _said(text: str, to_tools: bool) -> str:
    """The contents of gpt-oss's messages to the user, or to tools."""
    messages = (one for one in harmony.messages(text) if one.channel != "analysis" or to_tools)
    return as_text("\n".join(one.content for one in messages if one.content and (one.recipient is None) != to_tools))


def _without(mark: str, text: str, complete: bool) -> str:
    """The text after a mark, if it begins with one."""
    start = text.lstrip()
    if mark and not complete and mark.startswith(start):
        return ""
    return start.removeprefix(mark) if mark and start.startswith(mark) else text


def _before_partial(text: str, marks: Sequence[str]) -> str:
    """A text without the beginning of a mark at its end."""
    held = [n for mark in marks for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n])]
    return text[: len(text) - max(held)] if held else text

"""`SampledText`: the text of an answer while its tokens are sampled, with its special tokens or without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flowrl.data.text.tokenizer import ChatTokenizer


class _Part(NamedTuple):
    """Text of neighboring tokens: a control token, or others."""

    text: str
    control: bool = False


class SampledText:
    """The text of tokens that arrive one after another; a character of several tokens is there with the last of them.

    Args:
        marks: whether to keep special tokens, and to quote control tokens that others only spell; see
            `flowrl.data.text.control_tokens`.
        stop: strings before which the text ends.
    """

    def __init__(self, tokenizer: ChatTokenizer, marks: bool, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self.marks, self._stop = tokenizer, marks, tuple(stop)
        self._parts: list[_Part] = []
        self._window: list[int] = []  # the tokens of the last text, and those whose text is not complete
        self._read = 0  # tokens of the window whose text is there

    def add(self, ids: Sequence[int], last: bool = False) -> None:
        """Append tokens; with `last`, no others follow."""
        tokenizer = self._tokenizer
        for token in ids:
            if self.marks and token in tokenizer.control_tokens.ids:
                self._decode(complete=True)
                self._window, self._read = [], 0
                self._parts.append(_Part(tokenizer.shown([token]), control=True))
            elif self.marks or token != tokenizer.pad_id:
                self._window.append(token)
        self._decode(complete=last)

    @property
    def text(self) -> str:
        """The text so far, up to a stop string."""
        parts = self._parts
        if self._stop:
            visible = "".join(self._visible(part) for part in parts)
            ends = [visible.index(stop) for stop in self._stop if stop in visible]
            parts = self._until(min(ends)) if ends else parts
        if not self.marks:
            return "".join(part.text for part in parts)
        quote = self._tokenizer.control_tokens.quote
        return "".join(part.text if part.control else quote(part.text) for part in parts)

    def _until(self, end: int) -> list[_Part]:
        """The parts of the first characters, those of special tokens not counted."""
        kept = list[_Part]()
        for part in self._parts:
            if end <= 0:
                break
            length = len(self._visible(part))
            kept.append(part._replace(text=part.text[:end]) if length > end else part)
            end -= length
        return kept

    def _visible(self, part: _Part) -> str:
        return "" if part.control and part.text in self._tokenizer.control_tokens.special else part.text

    def _decode(self, complete: bool) -> None:
        """Append the text of the window's new tokens, unless it ends within a character."""
        decode = self._tokenizer.shown if self.marks else self._tokenizer.text
        before, text = decode(self._window[: self._read]), decode(self._window)
        if len(text) == len(before) or (text.endswith("\ufffd") and not complete):
            return
        added = text[len(before) :]
        if self._parts and not self._parts[-1].control:
            added = self._parts.pop().text + added
        self._parts.append(_Part(added))
        self._window, self._read = self._window[self._read :], len(self._window) - self._read

"""Control tokens: text of prompts, replies and responses that spells one is encoded as text, and not as the token.

A row, a tool or a web page that contains ``<|im_end|>`` must not end a turn. Control tokens are the special tokens of a
tokenizer, and the other added tokens that its chat template writes, such as ``<tool_call>``; but not thinking marks,
which only models write. In what an assistant says, added tokens that are not special stay tokens, since models sample
them.

Data is *quoted* before the template renders it: a spelled control token becomes one private character, and so does the
beginning of one at the end of a text, which the next text might complete. In the rendered text, what still spells a
control token was written by the template. The text is then encoded by a copy of the tokenizer in which control tokens
have random names, so neither their spelling nor anything else in the data has a meaning there.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from flowrl.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_QUOTE, _ESCAPE = 0x10_0000, "\U0010fffd"
"""The first of the private characters, one a token, in the last plane of Unicode; and the escape of data there."""
_PRIVATE = f"[{chr(_QUOTE)}-{_ESCAPE}]"
_QUOTED = re.compile(f"{_ESCAPE}(.)|{_PRIVATE}", re.DOTALL)

_THINKING = re.compile(r"</?(think|thinking|thought|reasoning)>|<[|](begin|end)_of_thought[|]>", re.IGNORECASE)

_SPELLED: dict[str, str] = {}
"""By private character, the control token; the same in all tokenizers of this process."""
_CHARACTERS: dict[str, str] = {}
"""By control token, the private character."""


def is_quoted(text: str) -> bool:
    """Whether a text has quoted control tokens."""
    return bool(text) and not text.isascii() and max(text) >= chr(_QUOTE)


def as_text(text: str) -> str:
    """A text with quoted control tokens as the data spells them."""
    if not is_quoted(text):
        return text
    return _QUOTED.sub(lambda found: found.group(1) or _SPELLED.get(found.group(), found.group()), text)


def unquoted(value: Any) -> Any:
    """JSON-like data with its quoted control tokens as the data spells them."""
    if isinstance(value, str):
        return as_text(value)
    if isinstance(value, Mapping):
        return {unquoted(key): unquoted(item) for key, item in value.items()}
    return [unquoted(item) for item in value] if isinstance(value, list) else value


def _quoted(text: str) -> str:
    """The private character of a control token, or of the beginning of one; a character of that plane escaped."""
    if len(text) == 1 and is_quoted(text):
        return _ESCAPE + text
    if text not in _CHARACTERS:
        character = chr(_QUOTE + len(_SPELLED))
        if character == _ESCAPE:
            raise DataError(
                f"This process has used {len(_SPELLED)} control tokens, which is the limit. Use fewer tokenizers.",
                code="tokenizer.cannot-load",
            )
        _CHARACTERS[text], _SPELLED[character] = character, text
    return _CHARACTERS[text]


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of a tokenizer.

    Args:
        special: tokens that are text wherever data spells them.
        written: added tokens that are text except where an assistant writes them.
    """

    tokenizer: PreTrainedTokenizerBase
    special: tuple[str, ...]
    written: tuple[str, ...]

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase, template: str) -> ControlTokens:
        """Those of a tokenizer and its chat template."""
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | {*tokenizer.all_special_tokens}
        special = {token for token in special if not _THINKING.fullmatch(token)}
        others = {
            token.content for token in added if token.content in template and not _THINKING.fullmatch(token.content)
        }
        return ControlTokens(tokenizer, tuple(sorted(special)), tuple(sorted(others - special)))

    def quote(self, value: Any, written: bool = False) -> Any:
        """JSON-like data with its control tokens quoted, in keys too; the data itself if it has none.

        Args:
            written: whether an assistant has written it.
        """
        if isinstance(value, str):
            pattern = self._in_answers if written else self._in_data
            return self._closed(pattern.sub(lambda found: _quoted(found.group()), value), written)
        if isinstance(value, Mapping):
            made = {self.quote(k, written): self.quote(v, written) for k, v in value.items()}
            same = all(a is b and made[a] is c for a, (b, c) in zip(made, value.items(), strict=False))
            return value if same else made
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            items = [self.quote(item, written) for item in value]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else items
        return value

    def sampled(self, ids: Sequence[int]) -> str:
        """The text of sampled tokens, in which control tokens that others only spell are quoted."""
        decode = self.tokenizer.decode
        groups = itertools.groupby(ids, key=self.ids.__contains__)
        texts = ((control, str(decode(list(group), skip_special_tokens=False))) for control, group in groups)
        return "".join(text if control else self.quote(text) for control, text in texts)

    def encode(self, rendered: str) -> list[int]:
        """The ids of a text that a template has rendered from quoted data."""
        names = self._names
        marked = self._in_data.sub(lambda found: names.get(found.group(), found.group()), rendered)
        return list(self._copy.encode(as_text(marked), add_special_tokens=False).ids)

    @cached_property
    def normalizes(self) -> bool:
        """Whether other characters can spell a control token, because the tokenizer searches the normalized text."""
        if getattr(self.tokenizer, "backend_tokenizer", None) is None:
            return False  # those in Python search the text itself
        added = self.tokenizer.added_tokens_decoder.values()
        return any(token.normalized and token.content in self._names for token in added)

    def _closed(self, text: str, written: bool) -> str:
        """A text with the beginning of a control token at its end quoted, such as ``<|im_``."""
        end = len(text.rstrip())
        if not text.endswith(self._beginnings[written], 0, end):
            return text
        start = min(end - len(each) for each in self._beginnings[written] if text.endswith(each, 0, end))
        return f"{text[:start]}{_quoted(text[start:end])}{text[end:]}"

    @cached_property
    def _beginnings(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The beginnings of all control tokens, and of the special ones."""
        every = ((*self.special, *self.written), self.special)
        both = ({token[:i] for token in tokens for i in range(1, len(token))} for tokens in every)
        data, answers = (tuple(sorted(each)) for each in both)
        return data, answers

    @cached_property
    def _in_answers(self) -> re.Pattern[str]:
        return _any_of(self.special)

    @cached_property
    def _in_data(self) -> re.Pattern[str]:
        return _any_of((*self.special, *self.written))

    @cached_property
    def _names(self) -> dict[str, str]:
        """The name of each control token in the copy, which no data can spell."""
        return {token: secrets.token_hex(16) for token in (*self.special, *self.written)}

    @cached_property
    def ids(self) -> frozenset[int]:
        """The ids of all control tokens."""
        return frozenset(cast("list[int]", self.tokenizer.convert_tokens_to_ids([*self._names])))

    @cached_property
    def _copy(self) -> Tokenizer:
        """The tokenizer with other names for the control tokens, and the same ids."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise DataError(
                f"The tokenizer in {self.tokenizer.name_or_path!r} is not one of the library tokenizers, so control "
                f"tokens that data spells cannot be encoded as text. Remove them from the data, or pass "
                f"split_special_tokens=False to the source.",
                code="tokenizer.cannot-split",
                path=self.tokenizer.name_or_path,
            )
        from tokenizers import Tokenizer  # it takes tenths of a second

        data, names = json.loads(backend.to_str()), self._names
        for added in data["added_tokens"]:
            added["content"] = names.get(added["content"], added["content"])
        model, vocabulary = data["model"], data["model"]["vocab"]
        if (unknown := model.get("unk_token")) is not None:
            model["unk_token"] = names.get(unknown, unknown)
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(token, token): i for token, i in vocabulary.items()}
        else:  # of a unigram model
            model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
        made = Tokenizer.from_str(json.dumps(data))
        assert all(made.token_to_id(name) == backend.token_to_id(token) for token, name in names.items())
        return made


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Matches any of these, the longest first, and private characters."""
    texts = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join([*map(re.escape, texts), _PRIVATE]))

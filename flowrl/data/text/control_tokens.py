"""Control tokens: text of prompts, replies and responses that spells one is encoded as text, and not as the token.

A row, a tool or a web page that contains ``<|im_end|>`` must not end a turn. Control tokens are the special tokens of a
tokenizer, and the other added tokens that its chat template writes, such as ``<tool_call>``; but not thinking marks,
which only models write. In what an assistant says, added tokens that are not special stay tokens, since models sample
them.

Data is *quoted* before the template renders it: a spelled control token becomes one private character. In the rendered
text, what still spells a control token was written by the template. The text is then encoded by a copy of the tokenizer
in which control tokens have other names, so the spelling of the data has no meaning there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flowrl.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_QUOTE = 0x10_0000
"""The first of the private characters, one a token; the last plane of Unicode is rarely used in text."""

_NAME = 0x10_8000
"""The first of the names that control tokens have in the copy of the tokenizer."""

_THINKING = re.compile(r"</?(think|thinking|thought|reasoning)>|<[|](begin|end)_of_thought[|]>", re.IGNORECASE)


def is_quoted(text: str) -> bool:
    """Whether a text has quoted control tokens."""
    return bool(text) and not text.isascii() and max(text) >= chr(_QUOTE)


def as_text(text: str) -> str:
    """A text with quoted control tokens as the data spells them."""
    if not is_quoted(text):
        return text
    return "".join(_SPELLED.get(character, character) for character in text)


_SPELLED: dict[str, str] = {}
"""By private character, the control token; the same in all tokenizers of this process."""


def _character(token: str) -> str:
    """The private character of a control token."""
    for character, known in _SPELLED.items():
        if known == token:
            return character
    if len(_SPELLED) == _NAME - _QUOTE:
        raise DataError(
            "This process has used more than 32768 control tokens. Use fewer tokenizers.", code="tokenizer.cannot-load"
        )
    character = chr(_QUOTE + len(_SPELLED))
    _SPELLED[character] = token
    return character


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
        pattern = self._special if written else self._all
        if isinstance(value, str):
            return pattern.sub(lambda found: _character(found.group()), value) if pattern is not None else value
        if isinstance(value, Mapping):
            made = {self.quote(k, written): self.quote(v, written) for k, v in value.items()}
            same = all(a is b and made[a] is c for a, (b, c) in zip(made, value.items(), strict=False))
            return value if same else made
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            items = [self.quote(item, written) for item in value]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else items
        return value

    def encode(self, rendered: str) -> list[int]:
        """The ids of a text that a template has rendered from quoted data."""
        names = self._names
        marked = self._all.sub(lambda found: names[found.group()], rendered) if self._all is not None else rendered
        return list(self._copy.encode(as_text(marked), add_special_tokens=False).ids)

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        return _any_of(self.special)

    @cached_property
    def _all(self) -> re.Pattern[str] | None:
        return _any_of((*self.special, *self.written))

    @cached_property
    def _names(self) -> dict[str, str]:
        """The name of each control token in the copy."""
        return {token: chr(_NAME + i) for i, token in enumerate((*self.special, *self.written))}

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
        vocabulary = data["model"]["vocab"]
        if isinstance(vocabulary, dict):
            data["model"]["vocab"] = {names.get(token, token): i for token, i in vocabulary.items()}
        else:  # of a unigram model
            data["model"]["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
        made = Tokenizer.from_str(json.dumps(data))
        assert all(made.token_to_id(name) == backend.token_to_id(token) for token, name in names.items())
        return made


def _any_of(tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Matches any of these, the longest first."""
    texts = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None

"""Text and tokens: the only code that tokenizes, applies chat templates, pads, and joins sequences.

Only prompts are tokenized: a response keeps the ids that the engine sampled, since decoding and encoding need not give
the same ids. Control tokens that data spells are text; see `flowrl.data.text.control_tokens`.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from jinja2 import TemplateSyntaxError
from torch import Tensor

from flowrl.data.text.control_tokens import ControlTokens, as_text, is_quoted
from flowrl.data.text.messages import check_messages, refuse_surrogates
from flowrl.data.text.time_limit import time_limit
from flowrl.data.text.vocabulary import stated
from flowrl.errors import DataError, short, why_not_loaded
from flowrl.hub.models import METADATA
from flowrl.hub.repositories import download, is_repository, refuse_revision, resolve
from flowrl.padding import assemble as assemble
from flowrl.padding import positions as positions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TOKENIZERS = "transformers.models.auto.tokenization_auto"
"""The module that loads tokenizers; its import takes seconds."""


RENDERING_SECONDS = 10.0
"""How long a chat template may render a conversation."""
RENDERED_CHARACTERS = 1 << 26
"""How long the text of a conversation may be."""


class ChatTokenizer:
    """The tokenizer and chat template of a Hugging Face folder, or of a repository of the Hub.

    Args:
        folder: with a tokenizer, or the name of a repository, such as ``"Qwen/Qwen3-0.6B"``.
        revision: a branch, tag or commit of the repository; None is the default branch.

    Raises:
        HubError: the repository cannot be resolved or downloaded.
        DataError: `folder` has no tokenizer, the tokenizer has no EOS token (a response could not end), or a
            configuration in the folder cannot be read.
    """

    def __init__(self, folder: str, revision: str | None = None) -> None:
        if is_repository(folder):
            folder = str(download(folder, resolve(folder, revision), METADATA))
        else:
            refuse_revision(folder, revision)
        if not Path(folder).is_dir():
            raise DataError(
                f"{folder!r} is not a folder on this machine. Expected a Hugging Face folder with a tokenizer, as "
                f"tokenizer.save_pretrained(folder) writes it.",
                code="model.not-found",
                path=folder,
            )
        ends = {name: _config_ends(Path(folder, name)) for name in ("config.json", "generation_config.json")}
        from transformers import AutoTokenizer  # here: the import takes seconds, and graphs need no tokenizer

        try:
            loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises many types for broken files
            raise DataError(
                f"Cannot load a tokenizer from {folder!r} ({why_not_loaded(error)}). Check its config.json, "
                f"which selects the class, or write a tokenizer with tokenizer.save_pretrained({folder!r}).",
                code="tokenizer.cannot-load",
                path=folder,
            ) from error
        self.folder, self.split_special_tokens = folder, True
        self._tokenizer = cast("PreTrainedTokenizerBase", loaded)
        self._read: set[str] = set()  # arguments that the chat template is known to read
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                f"The tokenizer in {folder!r} has no EOS token, so no response could end. Set tokenizer.eos_token and "
                f"call tokenizer.save_pretrained({folder!r}).",
                code="tokenizer.no-eos",
                path=folder,
            )
        ends = {"tokenizer": [self.eos_id], **ends, "chat template": self._template_ends()}
        found = {i for ids in ends.values() for i in ids if 0 <= i < self.vocab_size}  # -1 means none
        self.ends = {i: tuple(where for where, ids in ends.items() if i in ids) for i in sorted(found)}
        """The ids that end a turn of the assistant, and so a response, each with its sources: the tokenizer (its EOS),
        ``config.json``, ``generation_config.json`` (`eos_token_id`) or the chat template (the special token that
        follows an assistant message)."""

    def parsing_special_tokens(self) -> ChatTokenizer:
        """A copy for which control tokens that messages and texts spell are these tokens, and not text."""
        parsing = copy.copy(self)
        parsing.split_special_tokens = False
        return parsing

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The tokens that structure a conversation, and how text that spells them is encoded."""
        return ControlTokens.of(self._tokenizer, self.template_text)

    @property
    def _searches_normalized_text(self) -> bool:
        """Whether text is encoded by other names of control tokens even if it spells none."""
        return self.split_special_tokens and self.control_tokens.normalizes

    @property
    def eos_id(self) -> int:
        """The tokenizer's EOS, one of `ends`."""
        return cast(int, self._tokenizer.eos_token_id)

    @property
    def turn_end(self) -> int:
        """The id that ends a turn of the assistant: that of the chat template, or else the EOS."""
        return next((i for i, by in self.ends.items() if "chat template" in by), self.eos_id)

    @property
    def ends_text(self) -> str:
        """`ends` as text: ``"<eos> (1: tokenizer, config.json)"``."""
        texts = (f"{self._tokenizer.convert_ids_to_tokens(i)} ({i}: {', '.join(by)})" for i, by in self.ends.items())
        return ", ".join(texts)

    @property
    def pad_id(self) -> int:
        """The id of padding: the tokenizer's pad token, or else its EOS.

        Masks mark padding, ids never do, so using the EOS is harmless.
        """
        pad = self._tokenizer.pad_token_id
        return self.eos_id if pad is None else cast(int, pad)

    @property
    def unknown_id(self) -> int | None:
        """The id of text that the vocabulary lacks; None if it can encode any text."""
        return cast("int | None", self._tokenizer.unk_token_id)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones (a model may have more embeddings, never fewer)."""
        return len(self._tokenizer)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, which have no text."""
        return frozenset(self._tokenizer.all_special_ids)

    @cached_property
    def longest_token(self) -> int:
        """Maximum characters of a token."""
        return max(map(len, self._tokenizer.get_vocab()))

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The ids of a conversation in the chat template, up to where the assistant's next turn begins.

        Args:
            template_kwargs: arguments of the template, such as ``{"enable_thinking": False, "tools": [...]}``.

        Raises:
            DataError: there is no chat template, or it rejects these messages or arguments.
        """
        return self._templated_ids(messages, template_kwargs, add_generation_prompt=True)

    def conversation_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a complete conversation in the chat template, including the last message of the assistant.

        Raises:
            DataError: as `prompt_ids`.
        """
        return self._templated_ids(messages, None, add_generation_prompt=False)

    def conversation_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation in the chat template, including special tokens.

        Args:
            add_generation_prompt: whether to end where the assistant's next turn begins.

        Raises:
            DataError: as `prompt_ids`.
        """
        return as_text(self.rendered(messages, template_kwargs, add_generation_prompt))

    def rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """`conversation_text`, in which control tokens that the messages spell are quoted, for `encode`."""
        messages, template_kwargs = self._quoted(messages, template_kwargs)
        return self._templated(messages, template_kwargs, add_generation_prompt)

    def _templated_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None,
        add_generation_prompt: bool,
    ) -> list[int]:
        return self.encode(self.rendered(messages, template_kwargs, add_generation_prompt))

    def _quoted(
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any] | None
    ) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any] | None]:
        """Messages and arguments with the control tokens that they spell quoted."""
        if not self.split_special_tokens or isinstance(messages, str | Mapping):
            return messages, template_kwargs
        quote = self.control_tokens.quote
        made = [quote(one, isinstance(one, Mapping) and one.get("role") == "assistant") for one in messages]
        same = all(a is b for a, b in zip(made, messages, strict=True))
        return messages if same else made, quote(template_kwargs)

    def _templated(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None,
        add_generation_prompt: bool,
    ) -> str:
        if not self._tokenizer.chat_template:
            raise DataError(
                f"The tokenizer in {self.folder!r} has no chat template, so messages cannot become tokens. Set "
                f"tokenizer.chat_template and call tokenizer.save_pretrained({self.folder!r}).",
                code="tokenizer.no-chat-template",
                path=self.folder,
            )
        check_messages(messages, self._template_words, self.folder)
        arguments = dict(template_kwargs or {})
        self._refuse_unread(arguments)
        try:
            return self._rendered(
                [dict(message) for message in messages], add_generation_prompt=add_generation_prompt, **arguments
            )
        except DataError:
            raise
        except TemplateSyntaxError as error:
            raise DataError(
                f"The chat template in {self.folder!r} has a syntax error in line {error.lineno} ({error.message}). "
                f"Fix it, or set tokenizer.chat_template and call tokenizer.save_pretrained({self.folder!r}).",
                code="tokenizer.template-syntax",
                path=self.folder,
                line=error.lineno,
            ) from error
        except Exception as error:  # a template may divide, index and call functions
            given = f" with the arguments {short(arguments)}" if arguments else ""
            raise DataError(
                f"The chat template in {self.folder!r} rejects the messages {short(messages)}{given}: {error}. Use the "
                f"roles, order and arguments that the template supports.",
                code="tokenizer.template-rejects",
                path=self.folder,
                reason=str(error),
            ) from error

    def _rendered(self, messages: list[dict[str, Any]], **arguments: Any) -> str:
        """What the chat template writes, within the limits of time and length."""
        try:
            with time_limit(RENDERING_SECONDS):
                text = self._tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
            if len(text) > RENDERED_CHARACTERS:
                raise TimeoutError(f"it writes {len(text)} characters")
        except TimeoutError as error:
            raise DataError(
                f"The chat template in {self.folder!r} exceeds its limits of {RENDERING_SECONDS:g} s and "
                f"{RENDERED_CHARACTERS} characters ({error}). Remove its loops over large ranges, or shorten the "
                f"messages.",
                code="tokenizer.template-limit",
                path=self.folder,
                reason=str(error),
            ) from error
        return cast(str, text)

    def template_reads(self, name: str) -> bool:
        """Whether the chat template mentions this argument."""
        return name in self._template_words

    @cached_property
    def _template_words(self) -> frozenset[str]:
        """All words of the tokenizer's chat templates."""
        return frozenset(re.findall(r"\w+", self.template_text))

    @property
    def template_text(self) -> str:
        """The text of the tokenizer's chat templates."""
        template: Any = self._tokenizer.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, Mapping) else template

    def _refuse_unread(self, arguments: Mapping[str, Any]) -> None:
        """Refuse arguments that the template ignores: a misspelled argument would have no effect."""
        new = [name for name in arguments if name not in self._read]  # thousands of prompts pass the same arguments
        if not new:
            return
        own = set(inspect.signature(self._tokenizer.apply_chat_template).parameters) - {"tools", "documents"}
        for name in new:
            if name in own:
                raise DataError(
                    f"chat_template_kwargs has {name!r}, which flowrl sets itself. Remove {name}; pass only arguments "
                    f"of the template, such as enable_thinking or tools.",
                    code="tokenizer.template-argument",
                    argument=name,
                )
            if not self.template_reads(name):
                raise DataError(
                    f"chat_template_kwargs has {name!r}, but the chat template in {self.folder!r} does not read it, so "
                    f"it would have no effect. Correct or remove {name}.",
                    code="tokenizer.template-argument",
                    argument=name,
                    path=self.folder,
                )
        self._read.update(new)

    def _template_ends(self) -> list[int]:
        """The special token that follows an assistant message in the template, if any."""
        if not self._tokenizer.chat_template:
            return []
        marker = "flowrl asks where a turn ends"
        turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": marker}]
        try:
            text = self._rendered(turns)
        except DataError:
            raise
        except Exception:
            return []  # the template rejects this conversation; `prompt_ids` raises for the user's own
        _, found, rest = text.rpartition(marker)
        ids = self.encode(rest.lstrip()) if found else []
        return [i for i in ids[:1] if i in self._tokenizer.added_tokens_decoder]

    def encode(self, text: str) -> list[int]:
        """The ids of `text` without BOS or EOS, in which control tokens that are not quoted are these tokens."""
        try:
            if is_quoted(text) or self._searches_normalized_text:
                return self.control_tokens.encode(text)
            return cast("list[int]", self._tokenizer.encode(text, add_special_tokens=False))
        except (TypeError, UnicodeEncodeError):
            refuse_surrogates(text)
            raise

    def response_ids(self, text: str) -> list[int]:
        """The ids of a demonstrated response; control tokens in it are text, except those that models write."""
        return self.encode(self.control_tokens.quote(text, written=True) if self.split_special_tokens else text)

    def document_ids(self, text: str) -> list[int]:
        """The ids of a document without turns: BOS, if the tokenizer writes one, its text, and EOS."""
        begin = [i for i in self._tokenizer.encode("") if i == self._tokenizer.bos_token_id]
        ids = [*begin, *self.encode(self.control_tokens.quote(text) if self.split_special_tokens else text)]
        return ids if ids[-1:] == [self.eos_id] else [*ids, self.eos_id]

    def decode(self, ids: Sequence[int], stop_token_ids: Collection[int] = ()) -> str:
        """The text of a response, as a reward function reads it.

        It skips padding, special tokens, and the last token if it is in `ends` or `stop_token_ids`. It keeps added
        tokens that are not special, such as ``<think>``.
        """
        tokens = [int(i) for i in ids if i != self.pad_id]
        if tokens and (tokens[-1] in self.ends or tokens[-1] in stop_token_ids):
            tokens.pop()
        return self.text(tokens)

    def text(self, ids: Iterable[int]) -> str:
        """The text of `ids` without special tokens."""
        tokens = [int(i) for i in ids]
        return cast(str, self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def shown(self, ids: Iterable[int]) -> str:
        """The text of `ids` with special tokens, as a chat template writes them."""
        tokens = [int(i) for i in ids]
        return cast(str, self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def pad_left(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Ids (int64 ``[batch prompt]``) and mask (bool) of prompts padded on the left.

        Raises:
            DataError: a row has no tokens.
        """
        width = max((len(row) for row in rows), default=0)
        ids = torch.full((len(rows), width), self.pad_id, dtype=torch.int64)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, row in enumerate(rows):
            if not row:
                raise DataError(
                    f"Prompt {i} of {len(rows)} has no tokens. Pass prompts of at least one token.",
                    code="tokenizer.empty-prompt",
                    row=i,
                )
            ids[i, width - len(row) :] = torch.tensor(row, dtype=torch.int64)
            mask[i, width - len(row) :] = True
        return ids, mask


def _config_ends(path: Path) -> list[int]:
    """The `eos_token_id` of a Hugging Face configuration; none if there is no file."""
    if not path.is_file():
        return []
    try:
        named = stated(json.loads(path.read_text(encoding="utf-8")), "eos_token_id")
    except (ValueError, AttributeError, OSError) as error:
        raise DataError(
            f"Cannot read {path} ({type(error).__name__}: {error}). Expected a JSON object; write it again with "
            f"model.save_pretrained(folder).",
            code="tokenizer.broken-config",
            path=path,
        ) from error
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if odd := [i for i in ids if type(i) is not int]:
        raise DataError(
            f"{path} has eos_token_id={named!r}, but {odd[0]!r} is not a token id. Expected an int or a list of ints.",
            code="tokenizer.broken-config",
            path=path,
            found=repr(odd[0]),
        )
    return ids

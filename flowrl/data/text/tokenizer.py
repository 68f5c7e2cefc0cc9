"""Text and tokens: the only code that tokenises, applies chat templates, pads, and joins sequences.

Prompts, rollouts and recomputation all pass through here, and text becomes token ids exactly once, at the prompt. A
response is never tokenised again: its ids are those that the engine sampled, since decoding and encoding again need not
give the same ids.
"""

from __future__ import annotations

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

from flowrl.data.text.vocabulary import stated
from flowrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TOKENIZERS = "transformers.models.auto.tokenization_auto"
"""The module that loads tokenizers, which takes seconds to import."""


class ChatTokenizer:
    """The tokeniser and chat template of a local Hugging Face folder.

    Args:
        folder: a folder that holds a tokeniser; nothing is ever downloaded.

    Raises:
        DataError: there is no tokeniser in `folder`, it names no EOS token (a response could not end), or a
            configuration beside it cannot be read.
    """

    def __init__(self, folder: str) -> None:
        if not Path(folder).is_dir():
            raise DataError(
                f"{folder!r} is not a folder on this machine; expected a Hugging Face folder with a tokeniser, as "
                f"tokenizer.save_pretrained(folder) writes it."
            )
        said = {name: _stated_ends(Path(folder, name)) for name in ("config.json", "generation_config.json")}
        from transformers import AutoTokenizer  # here, since it takes seconds, and graphs need no tokeniser

        try:
            loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever is wrong in the folder's files
            first, *_ = [*str(error).splitlines(), ""]
            raise DataError(
                f"no tokeniser can be loaded from {folder!r} ({type(error).__name__}: {first}); look at its "
                f"config.json, by which the class is chosen, or write one there by "
                f"tokenizer.save_pretrained({folder!r})."
            ) from error
        self.folder = folder
        self._tokenizer = cast("PreTrainedTokenizerBase", loaded)
        self._read: set[str] = set()  # arguments that the chat template is known to read
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                f"the tokeniser in {folder!r} has no EOS token, so no response could end; set tokenizer.eos_token and "
                f"call tokenizer.save_pretrained({folder!r})."
            )
        said = {"tokeniser": [self.eos_id], **said, "chat template": self._template_ends()}
        found = {i for ids in said.values() for i in ids if 0 <= i < self.vocab_size}  # -1 stands for none
        self.ends = {i: tuple(where for where, ids in said.items() if i in ids) for i in sorted(found)}
        """The ids that end a turn of the assistant, and so a response, each with what says so: the tokeniser (its EOS),
        ``config.json``, ``generation_config.json`` (`eos_token_id`) or the chat template (the special token that it
        puts behind what the assistant said)."""

    @property
    def eos_id(self) -> int:
        """The id of the tokeniser's own EOS, one of `ends`."""
        return cast(int, self._tokenizer.eos_token_id)

    @property
    def turn_end(self) -> int:
        """The id that ends a turn of the assistant: that of the chat template, or the EOS where it puts none."""
        return next((i for i, by in self.ends.items() if "chat template" in by), self.eos_id)

    @property
    def said_ends(self) -> str:
        """`ends` in words: ``"<eos> (1: tokeniser, config.json)"``."""
        texts = (f"{self._tokenizer.convert_ids_to_tokens(i)} ({i}: {', '.join(by)})" for i, by in self.ends.items())
        return ", ".join(texts)

    @property
    def pad_id(self) -> int:
        """The id that fills padding: the tokeniser's own, or its EOS where it names none.

        Masks say what is padding, ids never do, so a pad id that is also the EOS is harmless.
        """
        pad = self._tokenizer.pad_token_id
        return self.eos_id if pad is None else cast(int, pad)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included (a model may have more embeddings than that, never fewer)."""
        return len(self._tokenizer)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of the tokens that have no text."""
        return frozenset(self._tokenizer.all_special_ids)

    @cached_property
    def longest_token(self) -> int:
        """The most characters that a token stands for."""
        return max(map(len, self._tokenizer.get_vocab()))

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The ids of a conversation by the chat template, up to where the assistant is to go on.

        Args:
            messages: ``{"role": ..., "content": ...}`` each, in order.
            template_kwargs: arguments of the template, such as ``{"enable_thinking": False, "tools": [...]}``.

        Raises:
            DataError: the tokeniser has no chat template, or it does not take these messages or arguments.
        """
        return cast("list[int]", self._templated(messages, template_kwargs, go_on=True))

    def conversation_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a whole conversation by the chat template, what the assistant said last included.

        Raises:
            DataError: as `prompt_ids`.
        """
        return cast("list[int]", self._templated(messages, None, go_on=False))

    def conversation_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
        go_on: bool = False,
    ) -> str:
        """The text of a conversation by the chat template, special tokens included.

        Args:
            messages, template_kwargs: as of `prompt_ids`.
            go_on: whether the assistant is to go on.

        Raises:
            DataError: as `prompt_ids`.
        """
        return cast(str, self._templated(messages, template_kwargs, go_on, tokenize=False))

    def _templated(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None,
        go_on: bool,
        tokenize: bool = True,
    ) -> Any:
        if not self._tokenizer.chat_template:
            raise DataError(
                f"the tokeniser in {self.folder!r} has no chat template, so messages cannot become tokens; set "
                f"tokenizer.chat_template and call tokenizer.save_pretrained({self.folder!r})."
            )
        _check_messages(messages)
        arguments = dict(template_kwargs or {})
        self._refuse_unread(arguments)
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=go_on,
                tokenize=tokenize,
                return_dict=False,
                **arguments,
            )
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template in {self.folder!r} is broken in line {error.lineno} ({error.message}); mend it, or "
                f"set tokenizer.chat_template and call tokenizer.save_pretrained({self.folder!r})."
            ) from error
        except Exception as error:  # a template divides, indexes and calls as it likes
            given = f" with the arguments {arguments!r}" if arguments else ""
            raise DataError(
                f"the chat template in {self.folder!r} does not take the messages {messages!r}{given}: {error}; give "
                f"it the roles, order and arguments that it was written for."
            ) from error

    def template_reads(self, name: str) -> bool:
        """Whether the chat template has a use for an argument of this name."""
        return name in self._template_words

    @cached_property
    def _template_words(self) -> frozenset[str]:
        """All words of the chat template, or of all that the tokeniser has."""
        template: Any = self._tokenizer.chat_template or ""
        texts = template.values() if isinstance(template, Mapping) else [template]
        return frozenset(word for text in texts for word in re.findall(r"\w+", text))

    def _refuse_unread(self, arguments: Mapping[str, Any]) -> None:
        """A template renders what it does not know as nothing, so a misspelt argument would change nothing."""
        new = [name for name in arguments if name not in self._read]  # thousands of prompts have the same
        if not new:
            return
        own = set(inspect.signature(self._tokenizer.apply_chat_template).parameters) - {"tools", "documents"}
        for name in new:
            if name in own:
                raise DataError(
                    f"chat_template_kwargs holds {name!r}, which says how prompts are made; expected arguments of the "
                    f"template itself, such as enable_thinking or tools: leave {name} out."
                )
            if not self.template_reads(name):
                raise DataError(
                    f"the chat template in {self.folder!r} reads no {name!r}, so chat_template_kwargs would be without "
                    f"effect; expected arguments that the template names: correct {name}, or leave it out."
                )
        self._read.update(new)

    def _template_ends(self) -> list[int]:
        """The special token that the template puts right behind what an assistant said; none where it puts text."""
        if not self._tokenizer.chat_template:
            return []
        said = "flowrl asks where a turn ends"
        turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": said}]
        try:
            text = cast(str, self._tokenizer.apply_chat_template(turns, tokenize=False))
        except Exception:
            return []  # a template that takes no such conversation says nothing here; `prompt_ids` refuses it
        _, found, rest = text.rpartition(said)
        ids = self.encode(rest.lstrip()) if found else []
        return [i for i in ids[:1] if i in self._tokenizer.added_tokens_decoder]

    def encode(self, text: str) -> list[int]:
        """The ids of `text` and nothing else: no BOS or EOS is added."""
        return cast("list[int]", self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int], stop_token_ids: Collection[int] = ()) -> str:
        """The text of a response as a reward function should see it.

        Padding is skipped, and so is the token that ended the response: a last one out of `ends` or `stop_token_ids`.
        Tokens that the tokeniser marks as special are skipped; added tokens that are ordinary words to it, such as
        ``<think>``, are kept.
        """
        kept = [int(i) for i in ids if i != self.pad_id]
        if kept and (kept[-1] in self.ends or kept[-1] in stop_token_ids):
            kept.pop()
        return self.text(kept)

    def text(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without that of special tokens."""
        kept = [int(i) for i in ids]
        return cast(str, self._tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def shown(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens included, as a chat template writes them."""
        kept = [int(i) for i in ids]
        return cast(str, self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def pad_left(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Prompts of unequal length as one tensor: ids (int64 ``[batch prompt]``) and mask (bool), padded on the left.

        Raises:
            DataError: a row has no tokens.
        """
        width = max((len(row) for row in rows), default=0)
        ids = torch.full((len(rows), width), self.pad_id, dtype=torch.int64)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, row in enumerate(rows):
            if not row:
                raise DataError(f"prompt {i} of {len(rows)} has no tokens; a prompt needs at least one to sample from.")
            ids[i, width - len(row) :] = torch.tensor(row, dtype=torch.int64)
            mask[i, width - len(row) :] = True
        return ids, mask


def positions(mask: Tensor) -> Tensor:
    """Positions of the tokens under `mask`, counted from 0 along each row; padding repeats the last, or 0.

    Args:
        mask: bool ``[batch sequence]``.

    Returns:
        int64 ``[batch sequence]``, ``cumsum(mask) - 1`` clamped at 0.
    """
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def assemble(
    prompts: Tensor, prompt_mask: Tensor, responses: Tensor, response_present: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Join prompts (padded on the left) and their responses (padded on the right) into whole sequences.

    Args:
        prompts: int64 ``[batch prompt]``.
        prompt_mask: bool ``[batch prompt]``.
        responses: int64 ``[batch response]``.
        response_present: bool ``[batch response]``, True at every token of the response (whoever wrote it).

    Returns:
        `input_ids` (int64), `attention_mask` (bool) and `position_ids` (int64), each ``[batch sequence]`` with
        ``sequence = prompt + response``.
    """
    mask = torch.cat([prompt_mask, response_present], dim=1)
    return torch.cat([prompts, responses], dim=1), mask, positions(mask)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse missing keys: a template renders them as nothing, so a misspelt one would leave a hole in the prompt."""
    if isinstance(messages, str | Mapping) or not messages:
        raise DataError(
            f"a prompt of messages was given as {messages!r}; expected a list such as "
            f'[{{"role": "user", "content": "..."}}] with at least one message.'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(f'message {i} is {message!r}; expected a dict, {{"role": "user", "content": "..."}}.')
        if not isinstance(message.get("role"), str) or not ({"content", "tool_calls"} & message.keys()):
            raise DataError(
                f"message {i} has the keys {sorted(map(str, message))} and the role {message.get('role')!r}; expected "
                f'"role" (text) and "content", such as {{"role": "user", "content": "..."}}.'
            )


def _stated_ends(path: Path) -> list[int]:
    """What a configuration of Hugging Face names as `eos_token_id`; nothing where there is none."""
    if not path.is_file():
        return []
    try:
        named = stated(json.loads(path.read_text(encoding="utf-8")), "eos_token_id")
    except (ValueError, AttributeError, OSError) as error:
        raise DataError(
            f"{path} is no configuration that can be read ({type(error).__name__}: {error}); expected a JSON object, "
            f"as model.save_pretrained(folder) writes it: write the file again."
        ) from error
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if odd := [i for i in ids if type(i) is not int]:
        raise DataError(
            f"{path} says eos_token_id={named!r}, and {odd[0]!r} is no token id; expected an int, or a list of them."
        )
    return ids

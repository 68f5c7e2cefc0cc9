"""Text and tokens: the only code that tokenises, applies chat templates, pads, and joins sequences.

Prompts, rollouts and recomputation all pass through here, and text becomes token ids exactly once, at the prompt. A
response is never tokenised again: its ids are those that the engine sampled, since decoding and encoding again need not
give the same ids.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from jinja2 import TemplateError, TemplateSyntaxError
from torch import Tensor

from flowrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatTokenizer:
    """The tokeniser and chat template of a local Hugging Face folder.

    Args:
        folder: a folder that holds a tokeniser; nothing is ever downloaded.

    Raises:
        DataError: there is no tokeniser in `folder`, its ``config.json`` is not JSON, or the tokeniser names no EOS
            token (a response could not end).
    """

    def __init__(self, folder: str) -> None:
        if not Path(folder).is_dir():
            raise DataError(
                f"{folder!r} is not a folder on this machine; expected a Hugging Face folder with a tokeniser, as "
                f"tokenizer.save_pretrained(folder) writes it."
            )
        _refuse_broken_config(Path(folder) / "config.json")
        from transformers import AutoTokenizer  # here, since it takes seconds, and graphs need no tokeniser

        try:
            loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise DataError(
                f"no tokeniser can be loaded from {folder!r} ({str(error).splitlines()[0]}); write one there by "
                f"tokenizer.save_pretrained({folder!r})."
            ) from error
        self.folder = folder
        self._tokenizer = cast("PreTrainedTokenizerBase", loaded)
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                f"the tokeniser in {folder!r} has no EOS token, so no response could end; set tokenizer.eos_token and "
                f"call tokenizer.save_pretrained({folder!r})."
            )

    @property
    def eos_id(self) -> int:
        """The id of the token that ends a response."""
        return cast(int, self._tokenizer.eos_token_id)

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

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a conversation by the chat template, up to where the assistant is to go on.

        Args:
            messages: ``{"role": ..., "content": ...}`` each, in order.

        Raises:
            DataError: the tokeniser has no chat template, or it does not take these messages.
        """
        if not self._tokenizer.chat_template:
            raise DataError(
                f"the tokeniser in {self.folder!r} has no chat template, so messages cannot become a prompt; set "
                f"tokenizer.chat_template and call tokenizer.save_pretrained({self.folder!r})."
            )
        _check_messages(messages)
        try:
            ids = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template in {self.folder!r} is broken at its line {error.lineno} ({error.message}); mend it "
                f"in chat_template.jinja, or where there is none in tokenizer_config.json."
            ) from error
        except (TemplateError, TypeError) as error:
            raise DataError(
                f"the chat template in {self.folder!r} does not take the messages {messages!r}: {error}; give it the "
                f"roles and order that it was written for."
            ) from error
        return cast("list[int]", ids)

    def encode(self, text: str) -> list[int]:
        """The ids of `text` and nothing else: no BOS or EOS is added."""
        return cast("list[int]", self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int], stop_token_ids: Collection[int] = ()) -> str:
        """The text of a response as a reward function should see it.

        Padding is skipped, and so is the token that ended the response: EOS, or a last token out of `stop_token_ids`.
        Tokens that the tokeniser marks as special are skipped; added tokens that are ordinary words to it, such as
        ``<think>``, are kept.
        """
        kept = [int(i) for i in ids if i != self.pad_id]
        if kept and (kept[-1] == self.eos_id or kept[-1] in stop_token_ids):
            kept.pop()
        return self.text(kept)

    def text(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without that of special tokens."""
        kept = [int(i) for i in ids]
        return cast(str, self._tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False))

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


def _refuse_broken_config(config: Path) -> None:
    """Refuse a model's settings that are not JSON; transformers reads them first, and then finds no tokeniser."""
    if not config.exists():
        return
    try:
        json.loads(config.read_bytes())
    except ValueError as error:
        raise DataError(f"{config} is not JSON ({error}); write it again by model.save_pretrained(folder).") from error


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

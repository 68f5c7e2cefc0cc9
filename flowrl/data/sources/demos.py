"""Demonstrations and preferences from files: prompts with the responses that are to be learned from.

A row has a ``prompt``, which is a list of messages or the text of a user. A demonstration has beside it a ``response``,
a preference has ``chosen`` and ``rejected``: each is text, or the one message of an assistant. A demonstration may be
given as ``messages`` instead, the last of which is the assistant's: that is the response, and all before it is the
prompt. A row may have ``chat_template_kwargs``, as those of prompts.

The ids of a response are those of its text, and the id that ends a turn by the chat template: what the policy would
have to sample to say it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import xxhash
from pydantic import Field
from torch import Tensor

from flowrl.data.proto.column_math import objects, short
from flowrl.data.proto.dataproto import DataProto
from flowrl.data.sources.file_source import FileSource
from flowrl.data.sources.prompt_rows import Row, copied, messages_of, refuse_nested, template_arguments
from flowrl.data.sources.samplers import Drawn, Order
from flowrl.data.sources.source import RowStream
from flowrl.data.text.tokenizer import assemble
from flowrl.errors import DataError
from flowrl.records import DemoBatch, PreferenceBatch

if TYPE_CHECKING:
    from flowrl.data.text.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt that was read, and its responses by name: text, and ids once they are tokenised."""

    prompt: Row
    texts: dict[str, str]
    ids: dict[str, list[int]]

    @property
    def index(self) -> int:
        """Its place in the files."""
        return self.prompt.index

    @property
    def characters(self) -> dict[str, int]:
        """Of the prompt, and of each response."""
        return {**self.prompt.characters, **{name: len(text) for name, text in self.texts.items()}}

    @property
    def tokens(self) -> dict[str, int]:
        """Of the prompt, and of each response."""
        return {**self.prompt.tokens, **{name: len(ids) for name, ids in self.ids.items()}}

    def tokenised(self, where: str, tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any]) -> Demonstration:
        """With the ids of all parts.

        Raises:
            DataError: the chat template does not take the prompt.
        """
        prompt = self.prompt.tokenised(where, tokenizer, template_kwargs)
        ids = {name: [*tokenizer.encode(text), tokenizer.turn_end] for name, text in self.texts.items()}
        return replace(self, prompt=prompt, ids=ids)


class _Responses(FileSource):
    """What demonstrations and preferences share; see `FileSource`.

    Args:
        max_response_length: the most tokens a response may have, its end included; None is no limit.
    """

    parts: ClassVar[tuple[str, ...]]
    max_response_length: int | None = Field(None, ge=1)

    def load(self, tokenizer: ChatTokenizer, seed: int) -> AnswerStream:
        """Read and tokenise all rows.

        Args:
            tokenizer: gives the ids of prompts, by its chat template, and of responses.
            seed: of the order in which the rows are drawn.

        Raises:
            ParameterError: a folder in place of its tokeniser, or a seed that is no int.
            DataError: a file that is missing, empty or damaged, a row that is not in the format or too long (with
                ``overlong="error"``), or only rows that are too long.
        """
        rows, dropped = self._read(tokenizer, self._checked)
        return AnswerStream(rows, dropped, self._order(rows, seed), tokenizer, self.record)

    def _limits(self) -> Mapping[str, tuple[str, int | None]]:
        response = ("max_response_length", self.max_response_length)
        return {"prompt": ("max_prompt_length", self.max_prompt_length), **dict.fromkeys(self.parts, response)}

    def _checked(self, index: int, where: str, record: Any) -> Demonstration:
        """A record of the format, still without ids.

        Raises:
            DataError: it is none.
        """
        if not isinstance(record, dict):
            raise DataError(
                f"{where}: the row is a {type(record).__name__}; expected an object with the keys prompt, "
                f"{', '.join(self.parts)}."
            )
        refuse_nested(where, record, self.columns)
        record = self._apart(where, record)
        if missing := [key for key in ("prompt", *self.parts) if record.get(key) is None]:
            raise DataError(
                f"{where}: the row has no {' and no '.join(missing)}, or null there; expected prompt (a list of "
                f"messages, or text), {' and '.join(self.parts)} (text), so add what is missing."
            )
        prompt = record["prompt"]
        messages = messages_of(where, [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        if messages[-1]["role"] == "assistant":
            raise DataError(
                f"{where}: the last message of prompt is the assistant's, so nothing would be left to answer; expected "
                f"a prompt that ends before the response."
            )
        row = Row(index, [], "", None, {}, messages, template_arguments(where, record))
        return Demonstration(row, {name: _text(where, name, record[name]) for name in self.parts}, {})

    def _apart(self, where: str, record: dict[str, Any]) -> dict[str, Any]:
        """The record with its prompt and responses apart."""
        return record


class DemoData(_Responses):
    """Demonstrations to imitate, from files: a prompt and a response a row; see the module and `FileSource`.

    Args:
        max_response_length: the most tokens a response may have, its end included; None is no limit.
    """

    record: ClassVar[type] = DemoBatch
    columns: ClassVar[Sequence[str]] = ("prompt", "response", "messages", "chat_template_kwargs")
    parts: ClassVar[tuple[str, ...]] = ("response",)

    def _apart(self, where: str, record: dict[str, Any]) -> dict[str, Any]:
        """``messages`` as what they are: a prompt, and the assistant's last."""
        messages = record.get("messages")
        if messages is None:
            return record
        if both := [key for key in ("prompt", "response") if record.get(key) is not None]:
            raise DataError(f"{where}: the row has messages and {both[0]}; expected messages, or prompt and response.")
        if not isinstance(messages, list) or len(messages) < 2:
            raise DataError(
                f"{where}: messages is {short(messages, 200)}; expected a list of at least two, the last of which is "
                f"the assistant's."
            )
        return {**record, "prompt": messages[:-1], "response": messages[-1:]}


class PreferenceData(_Responses):
    """Pairs of responses, of which one is preferred, from files: ``prompt``, ``chosen``, ``rejected``; see the module.

    A draw is a pair: two rows of one `uid`, the chosen one first. ``Training(prompts=8)`` takes 8 pairs a step.

    Args:
        max_response_length: the most tokens a response may have, its end included; None is no limit.
    """

    record: ClassVar[type] = PreferenceBatch
    columns: ClassVar[Sequence[str]] = ("prompt", "chosen", "rejected", "chat_template_kwargs")
    parts: ClassVar[tuple[str, ...]] = ("chosen", "rejected")

    def _checked(self, index: int, where: str, record: Any) -> Demonstration:
        row = super()._checked(index, where, record)
        if row.texts["chosen"] == row.texts["rejected"]:
            raise DataError(
                f"{where}: chosen and rejected are the same, {short(row.texts['chosen'], 80)}, so neither is "
                f"preferred; leave the row out."
            )
        return row


class AnswerStream(RowStream[Demonstration]):
    """Prompts with responses, and the position up to which they were drawn.

    ``uid`` is ``"{epoch}/{index}/{draw}"``, as that of prompts; so is ``row_id``, with ``#0`` and ``#1`` behind it
    where a draw is two rows. Scores, where the record has them, are 1 and 0 on the last token of the response.
    """

    def __init__(
        self, rows: Sequence[Demonstration], dropped: int, order: Order, tokenizer: ChatTokenizer, record: type
    ) -> None:
        super().__init__(rows, dropped, order)
        self._tokenizer, self._record = tokenizer, record

    def digest(self) -> str:
        """The xxh3-128 of all rows: their token ids."""
        hasher = xxhash.xxh3_128()
        for row in self._rows:
            parts = [row.prompt.ids, *row.ids.values()]
            hasher.update(json.dumps([row.index, *map(len, parts)]).encode())
            for ids in parts:
                hasher.update(array("q", ids))
        return hasher.hexdigest()

    def _batch(self, drawn: Sequence[tuple[Drawn, Demonstration]]) -> DataProto:
        rows = [(one, row, name) for one, row in drawn for name in row.texts]
        prompts, prompt_mask = self._tokenizer.pad_left([row.prompt.ids for _, row, _ in rows])
        responses, mask = _pad_right([row.ids[name] for _, row, name in rows], self._tokenizer.pad_id)
        input_ids, attention_mask, position_ids = assemble(prompts, prompt_mask, responses, mask)
        uid = [f"{one.epoch}/{row.index}/{one.draw}" for one, row, _ in rows]
        several = len(rows) > len(drawn)
        columns: dict[str, Any] = {
            "prompts": prompts,
            "responses": responses,
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "response_mask": mask,
            "response_text": objects(row.texts[name] for _, row, name in rows),
            "raw_prompt": objects(copied(row.prompt.raw_prompt) for _, row, _ in rows),
            "temperature": torch.ones(len(rows)),
            "policy_version": torch.full((len(rows),), -1),
            "uid": objects(uid),
            "row_id": objects(f"{id}#{i % 2}" if several else id for i, id in enumerate(uid)),
        }
        if "token_level_scores" in cast(Any, self._record)._fields:
            scores = torch.zeros(mask.shape)
            chosen = torch.tensor([name == "chosen" for _, _, name in rows])
            scores[chosen, mask.sum(-1)[chosen] - 1] = 1.0
            columns["token_level_scores"] = scores
        return DataProto(columns)


def _text(where: str, name: str, response: Any) -> str:
    """The text of a response, which may be given as the one message of an assistant.

    Raises:
        DataError: it is neither, or says nothing.
    """
    text = response
    if isinstance(response, list) and len(response) == 1 and isinstance(response[0], dict):
        text = response[0].get("content") if response[0].get("role") == "assistant" else None
    if not isinstance(text, str) or not text.strip():
        raise DataError(
            f"{where}: {name} is {short(response, 200)}; expected text that says something, or the one message of an "
            f'assistant: [{{"role": "assistant", "content": "..."}}].'
        )
    return text


def _pad_right(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Responses of unequal length as one tensor: ids (int64 ``[batch response]``) and mask (bool)."""
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.full(mask.shape, pad)
    ids[mask] = torch.tensor([id for row in rows for id in row])
    return ids, mask

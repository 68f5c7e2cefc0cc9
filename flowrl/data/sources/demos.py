"""Demonstrations and preferences from files: prompts with the responses to learn from.

A row has a ``prompt``: a list of messages, or the text of one user message. A demonstration also has a ``response``, a
preference has ``chosen`` and ``rejected``; each is text, or a list with one assistant message. A demonstration may have
``messages`` instead: the last message is the response (role ``assistant``), all earlier ones are the prompt. A row may
have ``chat_template_kwargs``, as prompts do.

The ids of a response are those of its text plus the id that ends a turn in the chat template, which is what the policy
would have to sample.
"""

from __future__ import annotations

import itertools
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
from flowrl.data.sources.prompt_rows import Row, copied, messages_of, refuse_answered, refuse_nested, template_arguments
from flowrl.data.sources.samplers import Order, SampledRow
from flowrl.data.sources.source import RowStream
from flowrl.data.text.tokenizer import assemble
from flowrl.errors import DataError, type_of
from flowrl.records import DemoBatch, PreferenceBatch

if TYPE_CHECKING:
    from flowrl.data.text.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt with its responses by name: text, and ids once they are tokenized."""

    prompt: Row
    texts: dict[str, str]
    ids: dict[str, list[int]]

    @property
    def index(self) -> int:
        """Index of the row in the files."""
        return self.prompt.index

    @property
    def characters(self) -> dict[str, int]:
        """Number of characters of the prompt and of each response."""
        return {**self.prompt.characters, **{name: len(text) for name, text in self.texts.items()}}

    @property
    def tokens(self) -> dict[str, int]:
        """Number of tokens of the prompt and of each response."""
        return {**self.prompt.tokens, **{name: len(ids) for name, ids in self.ids.items()}}

    @property
    def every_id(self) -> Sequence[int]:
        """The ids of the prompt and of each response."""
        return [*self.prompt.ids, *itertools.chain.from_iterable(self.ids.values())]

    def tokenized(self, where: str, tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any]) -> Demonstration:
        """A copy with the ids of prompt and responses."""
        prompt = self.prompt.tokenized(where, tokenizer, template_kwargs)
        ids = {name: [*tokenizer.response_ids(text), tokenizer.turn_end] for name, text in self.texts.items()}
        return replace(self, prompt=prompt, ids=ids)


class _Responses(FileSource):
    """Base of `DemoData` and `PreferenceData`."""

    parts: ClassVar[tuple[str, ...]]
    max_response_length: int | None = Field(None, ge=1)

    def load(self, tokenizer: ChatTokenizer, seed: int) -> ResponseStream:
        """Read and tokenize all rows."""
        rows, dropped = self._read(tokenizer, self._validate)
        return ResponseStream(rows, dropped, self._order(rows, seed), tokenizer, self.record)

    def _limits(self) -> Mapping[str, tuple[str, int | None]]:
        response = ("max_response_length", self.max_response_length)
        return {"prompt": ("max_prompt_length", self.max_prompt_length), **dict.fromkeys(self.parts, response)}

    def _validate(self, index: int, where: str, record: Any) -> Demonstration:
        """The record as a row without ids."""
        if not isinstance(record, dict):
            raise DataError(
                f"{where}: the row is {type_of(record)}. Expected an object with the keys prompt, "
                f"{', '.join(self.parts)}.",
                code="prompts.wrong-type",
                where=where,
                found=type(record).__name__,
            )
        refuse_nested(where, record, self.columns)
        record = self._split(where, record)
        if missing := [key for key in ("prompt", *self.parts) if record.get(key) is None]:
            raise DataError(
                f"{where}: the row has no {' and no '.join(missing)} (missing or null). Expected prompt (a list of "
                f"messages, or text) and {', '.join(self.parts)} (text).",
                code="prompts.missing-key",
                where=where,
                missing=missing,
            )
        prompt = record["prompt"]
        messages = messages_of(where, [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        refuse_answered(where, messages)
        row = Row(index, [], "", None, {}, messages, template_arguments(where, record))
        return Demonstration(row, {name: _text(where, name, record[name]) for name in self.parts}, {})

    def _split(self, where: str, record: dict[str, Any]) -> dict[str, Any]:
        """The record with separate prompt and responses."""
        return record


class DemoData(_Responses):
    """Demonstrations to imitate, from files: a prompt and a response per row; see the module and `FileSource`.

    Args:
        max_response_length: maximum tokens of a response, including its end token; None is no limit.
    """

    record: ClassVar[type] = DemoBatch
    columns: ClassVar[Sequence[str]] = ("prompt", "response", "messages", "chat_template_kwargs")
    parts: ClassVar[tuple[str, ...]] = ("response",)

    def _split(self, where: str, record: dict[str, Any]) -> dict[str, Any]:
        """``messages`` as a prompt and the last message."""
        messages = record.get("messages")
        if messages is None:
            return record
        if both := [key for key in ("prompt", "response") if record.get(key) is not None]:
            raise DataError(
                f"{where}: the row has both messages and {both[0]}. Keep either messages, or prompt and response.",
                code="prompts.bad-messages",
                where=where,
                key=both[0],
            )
        if not isinstance(messages, list) or len(messages) < 2:
            raise DataError(
                f"{where}: messages is {short(messages, 200)}. Expected a list of at least two messages, the last one "
                f"of the assistant.",
                code="prompts.bad-messages",
                where=where,
                found=short(messages, 200),
            )
        return {**record, "prompt": messages[:-1], "response": messages[-1:]}


class PreferenceData(_Responses):
    """Preference pairs from files: ``prompt``, ``chosen``, ``rejected`` per row; see the module and `FileSource`.

    A batch has two rows per pair, with the same `uid`, the chosen one first. ``Training(prompts=8)`` samples 8 pairs
    per step.

    Args:
        max_response_length: maximum tokens of a response, including its end token; None is no limit.
    """

    record: ClassVar[type] = PreferenceBatch
    columns: ClassVar[Sequence[str]] = ("prompt", "chosen", "rejected", "chat_template_kwargs")
    parts: ClassVar[tuple[str, ...]] = ("chosen", "rejected")

    def _validate(self, index: int, where: str, record: Any) -> Demonstration:
        row = super()._validate(index, where, record)
        if row.texts["chosen"] == row.texts["rejected"]:
            raise DataError(
                f"{where}: chosen and rejected are the same text, {short(row.texts['chosen'], 80)}, so neither is "
                f"preferred. Remove the row.",
                code="prompts.identical-pair",
                where=where,
            )
        return row


class ResponseStream(RowStream[Demonstration]):
    """Prompts with responses, and the position in their order.

    ``uid`` is ``"{epoch}/{index}/{draw}"``, as for prompts. ``row_id`` is the same; for preferences it ends with ``#0``
    (chosen) or ``#1`` (rejected). Scores, if the record has them, are 1 and 0 on the last token of the response.
    """

    def __init__(
        self, rows: Sequence[Demonstration], dropped: int, order: Order, tokenizer: ChatTokenizer, record: type
    ) -> None:
        super().__init__(rows, dropped, order)
        self._tokenizer, self._record = tokenizer, record

    def digest(self) -> str:
        """xxh3-128 of the token ids of all rows."""
        hasher = xxhash.xxh3_128()
        for row in self._rows:
            parts = [row.prompt.ids, *row.ids.values()]
            hasher.update(json.dumps([row.index, *map(len, parts)]).encode())
            for ids in parts:
                hasher.update(array("q", ids))
        return hasher.hexdigest()

    def _batch(self, sampled: Sequence[tuple[SampledRow, Demonstration]]) -> DataProto:
        rows = [(one, row, name) for one, row in sampled for name in row.texts]
        prompts, prompt_mask = self._tokenizer.pad_left([row.prompt.ids for _, row, _ in rows])
        responses, mask = _pad_right([row.ids[name] for _, row, name in rows], self._tokenizer.pad_id)
        input_ids, attention_mask, position_ids = assemble(prompts, prompt_mask, responses, mask)
        uid = [f"{one.epoch}/{row.index}/{one.draw}" for one, row, _ in rows]
        several = len(rows) > len(sampled)
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
    """The text of a response, which may be a list with one assistant message."""
    text = response
    if isinstance(response, list) and len(response) == 1 and isinstance(response[0], dict):
        text = response[0].get("content") if response[0].get("role") == "assistant" else None
    if not isinstance(text, str) or not text.strip():
        raise DataError(
            f"{where}: {name} is {short(response, 200)}. Expected non-empty text, or a list with one message of the "
            f'assistant: [{{"role": "assistant", "content": "..."}}].',
            code="prompts.bad-response",
            where=where,
            key=name,
            found=short(response, 200),
        )
    return text


def _pad_right(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids (int64 ``[batch response]``) and mask (bool) of responses padded on the right."""
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.full(mask.shape, pad)
    ids[mask] = torch.tensor([id for row in rows for id in row])
    return ids, mask

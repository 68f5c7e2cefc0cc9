"""Demonstrations and preferences: prompts with the responses to learn from, in the layouts of `layouts.py`.

The ids of a text response are those of its text plus the id that ends a turn in the chat template, which is what the
policy would have to sample. A response in messages is rendered by the template; every turn of the assistant in it is
trained, and the messages of others between them are not (`flowrl.data.text.turns`). A row may have
``chat_template_kwargs``, as prompts do, and ``tools``, a list of JSON schemas, which is one of these.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
import xxhash
from pydantic import Field

from flowrl.data.proto.column_math import objects
from flowrl.data.proto.dataproto import DataProto
from flowrl.data.sources.file_source import FileSource
from flowrl.data.sources.layouts import (
    Response,
    characters_of,
    conversation,
    label_of,
    margin_of,
    pair,
    refuse_same,
    response_of,
    text_of,
    tools_of,
)
from flowrl.data.sources.prompt_rows import (
    Provenance,
    Row,
    as_messages,
    copied,
    messages_of,
    refuse_answered,
    refuse_nested,
    template_arguments,
)
from flowrl.data.sources.samplers import Order, SampledRow
from flowrl.data.sources.source import RowStream
from flowrl.data.text.turns import Turns, turns_of
from flowrl.errors import DataError, type_of
from flowrl.padding import assemble, pad_right
from flowrl.records import DemoBatch, PreferenceBatch, UnpairedBatch

if TYPE_CHECKING:
    from flowrl.data.text.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt with its responses by name, each with a score, and tokens once they are tokenized.

    A document without turns has no messages as its prompt.
    """

    prompt: Row
    responses: dict[str, Response]
    scores: dict[str, float]
    turns: dict[str, Turns]
    margin: float = 0.0

    @property
    def index(self) -> int:
        """Index of the row in the files."""
        return self.prompt.index

    @property
    def characters(self) -> dict[str, int]:
        """Number of characters of the prompt and of each response."""
        return {**self.prompt.characters, **{name: characters_of(one) for name, one in self.responses.items()}}

    @property
    def tokens(self) -> dict[str, int]:
        """Number of tokens of the prompt and of each response."""
        return {**self.prompt.tokens, **{name: len(turns.ids) for name, turns in self.turns.items()}}

    @property
    def every_id(self) -> Sequence[int]:
        """The ids of the prompt and of each response."""
        return [*self.prompt.ids, *itertools.chain.from_iterable(turns.ids for turns in self.turns.values())]

    def tokenized(self, where: str, tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any]) -> Demonstration:
        """A copy with the ids of prompt and responses."""
        if not self.prompt.raw_prompt:
            return self._document(tokenizer)
        prompt = self.prompt.tokenized(where, tokenizer, template_kwargs)
        arguments = {**template_kwargs, **prompt.template_kwargs}
        turns = {}
        for name, response in self.responses.items():
            if isinstance(response, str):
                ids = [*tokenizer.response_ids(response), tokenizer.turn_end]
                turns[name] = Turns(prompt.ids, ids, [True] * len(ids))
                continue
            try:
                turns[name] = turns_of(tokenizer, prompt.raw_prompt, response, arguments)
            except DataError as error:
                facts = {**error.facts, "where": where}
                raise DataError(f"{where}: {error.message}", code=error.code, **facts) from error
        return replace(self, prompt=replace(prompt, ids=next(iter(turns.values())).prompt), turns=turns)

    def _document(self, tokenizer: ChatTokenizer) -> Demonstration:
        """A copy of a document: its first token is the prompt, since none predicts it."""
        [(name, text)] = self.responses.items()
        first, *rest = tokenizer.document_ids(text_of(text))
        return replace(
            self,
            prompt=replace(self.prompt, ids=[first]),
            turns={name: Turns([first], rest, [True] * len(rest))},
        )


class _Responses(FileSource):
    """Base of `DemoData`, `PreferenceData` and `UnpairedData`."""

    required: ClassVar[tuple[str, ...]]
    """The columns that a row has, once it is split."""
    parts: ClassVar[tuple[str, ...]]
    """Those of them that are responses."""
    max_response_length: int | None = Field(None, ge=1)

    def load(self, tokenizer: ChatTokenizer, seed: int) -> ResponseStream:
        """Read and tokenize all rows."""
        rows, dropped = self._read(tokenizer, self._validate)
        return ResponseStream(rows, dropped, self._order(rows, seed), tokenizer, self.record)

    def _limits(self) -> Mapping[str, tuple[str, int | None]]:
        response = ("max_response_length", self.max_response_length)
        return {"prompt": ("max_prompt_length", self.max_prompt_length), **dict.fromkeys(self.parts, response)}

    def _validate(
        self, index: int, where: str, record: Any, mapped: Collection[str], source: Provenance
    ) -> Demonstration:
        """The record as a row without ids."""
        if not isinstance(record, dict):
            raise DataError(
                f"{where}: the row is {type_of(record)}. Expected an object with the keys {', '.join(self.required)}.",
                code="prompts.wrong-type",
                where=where,
                found=type(record).__name__,
            )
        refuse_nested(where, record, self.reads)
        arguments, given = self._arguments(where, record), self._split(where, record)
        if missing := [key for key in self.required if given.get(key) is None]:
            raise DataError(
                f"{where}: the row has no {' and no '.join(missing)} (missing or null). {source.how_to_map(missing)}.",
                code="prompts.missing-key",
                where=where,
                missing=missing,
            )
        messages = [] if given["prompt"] is _DOCUMENT else messages_of(where, as_messages(given["prompt"]))
        if messages:
            refuse_answered(where, messages)
        responses = {name: response_of(where, name, given[name]) for name in self.parts}
        row = Row(index, [], "", None, {}, messages, arguments)
        return Demonstration(row, responses, self._scores(where, given), {}, self._margin(where, given))

    def _arguments(self, where: str, record: Mapping[str, Any]) -> dict[str, Any]:
        """The record's own arguments of the chat template, with its tools."""
        if not record.get("tools"):
            return template_arguments(where, record)
        own = record.get("chat_template_kwargs")
        tools = tools_of(where, record["tools"])
        return template_arguments(where, {"chat_template_kwargs": {"tools": tools, **(own or {})}})

    def _split(self, where: str, record: dict[str, Any]) -> dict[str, Any]:
        """The record with separate prompt and responses."""
        return record

    def _scores(self, where: str, record: Mapping[str, Any]) -> dict[str, float]:
        """The score of each response."""
        return dict.fromkeys(self.parts, 0.0)

    def _margin(self, where: str, record: Mapping[str, Any]) -> float:
        """The margin of a pair."""
        return 0.0


_DOCUMENT: list[Any] = []
"""The prompt of a document."""


class DemoData(_Responses):
    """Demonstrations to imitate: a prompt and a response per row, or a conversation; see the module and `FileSource`.

    Args:
        max_response_length: maximum tokens of a response, including its end token; None is no limit. In a conversation
            it begins with the first turn of the assistant.
        turns: which turns of the assistant in ``messages`` to train: all, or the last. Templates that rewrite earlier
            turns allow only the last.
    """

    record: ClassVar[type] = DemoBatch
    reads: ClassVar[Sequence[str]] = (
        *("prompt", "response", "completion", "messages", "text"),
        *("label", "tools", "chat_template_kwargs"),
    )
    required: ClassVar[tuple[str, ...]] = ("prompt", "response")
    parts: ClassVar[tuple[str, ...]] = ("response",)
    turns: Literal["all", "last"] = "all"

    def identity(self) -> dict[str, Any]:
        """Those of `FileSource`, and `turns` if it is not the default."""
        return {name: value for name, value in super().identity().items() if (name, value) != ("turns", "all")}

    def _split(self, where: str, record: dict[str, Any]) -> dict[str, Any]:
        """The record with a prompt and a response."""
        if record.get("messages") is not None:
            return conversation(where, record, self.turns == "last")
        if record.get("prompt") is None and record.get("response") is None and isinstance(record.get("text"), str):
            return {**record, "prompt": _DOCUMENT, "response": record["text"]}
        if record.get("response") is not None or record.get("completion") is None:
            return record
        if isinstance(record.get("label"), bool):
            raise DataError(
                f"{where}: the row has a label, {record['label']}, that rates its completion, and DemoData imitates "
                f"every one. Read it with UnpairedData, leave the others out with map='file.py:function', or pass "
                f"columns={{'label': None}}.",
                code="prompts.labeled",
                where=where,
                found=record["label"],
            )
        return {**record, "response": record["completion"]}


class PreferenceData(_Responses):
    """Preference pairs: ``prompt``, ``chosen``, ``rejected`` per row; see the module and `FileSource`.

    A batch has two rows per pair, with the same `uid`, the chosen one first. ``Training(prompts=8)`` samples 8 pairs
    per step.

    A row may have a ``margin``, a number that `BradleyTerry` subtracts from the lead of the chosen response; by default
    it is 0.

    Args:
        max_response_length: maximum tokens of a response, including its end token; None is no limit.
    """

    record: ClassVar[type] = PreferenceBatch
    reads: ClassVar[Sequence[str]] = ("prompt", "chosen", "rejected", "margin", "tools", "chat_template_kwargs")
    required: ClassVar[tuple[str, ...]] = ("prompt", "chosen", "rejected")
    parts: ClassVar[tuple[str, ...]] = ("chosen", "rejected")

    def _split(self, where: str, record: dict[str, Any]) -> dict[str, Any]:
        """The record with the common prompt of its conversations."""
        found = pair(where, record)
        if found.get("chosen") is not None and found.get("rejected") is not None:
            refuse_same(where, *(response_of(where, name, found[name]) for name in self.parts))
        return found

    def _scores(self, where: str, record: Mapping[str, Any]) -> dict[str, float]:
        return {"chosen": 1.0, "rejected": 0.0}

    def _margin(self, where: str, record: Mapping[str, Any]) -> float:
        return margin_of(where, record.get("margin"))


class UnpairedData(_Responses):
    """Responses with a label each (KTO's rows): ``prompt``, ``completion``, ``label``; see the module and `FileSource`.

    The score of a row, on the last token of its response, is 1 if its label is true (desirable), else 0.

    Args:
        max_response_length: maximum tokens of a response, including its end token; None is no limit.
    """

    record: ClassVar[type] = UnpairedBatch
    reads: ClassVar[Sequence[str]] = ("prompt", "completion", "label", "tools", "chat_template_kwargs")
    required: ClassVar[tuple[str, ...]] = ("prompt", "completion", "label")
    parts: ClassVar[tuple[str, ...]] = ("completion",)

    def _scores(self, where: str, record: Mapping[str, Any]) -> dict[str, float]:
        return {"completion": float(label_of(where, record["label"]))}


class ResponseStream(RowStream[Demonstration]):
    """Prompts with responses, and the position in their order.

    ``uid`` is ``"{epoch}/{index}/{draw}"``, as for prompts. ``row_id`` is the same; for preferences it ends with ``#0``
    (chosen) or ``#1`` (rejected). Scores, if the record has them, are on the last token of the response.
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
            parts = [row.prompt.ids, *(turns.ids for turns in row.turns.values())]
            hasher.update(json.dumps([row.index, *map(len, parts)]).encode())
            for ids in parts:
                hasher.update(array("q", ids))
            if row.margin:
                hasher.update(json.dumps(row.margin).encode())
            for turns in row.turns.values():
                if not all(turns.mask):
                    hasher.update(bytes(turns.mask))
        return hasher.hexdigest()

    def _batch(self, sampled: Sequence[tuple[SampledRow, Demonstration]]) -> DataProto:
        rows = [(one, row, name) for one, row in sampled for name in row.turns]
        turns = [row.turns[name] for _, row, name in rows]
        prompts, prompt_mask = self._tokenizer.pad_left([one.prompt for one in turns])
        responses, present = pad_right([one.ids for one in turns], self._tokenizer.pad_id)
        mask = present.clone()
        mask[present] = torch.tensor([trained for one in turns for trained in one.mask])
        input_ids, attention_mask, position_ids = assemble(prompts, prompt_mask, responses, present)
        uid = [f"{one.epoch}/{row.index}/{one.draw}" for one, row, _ in rows]
        several = len(rows) > len(sampled)
        columns: dict[str, Any] = {
            "prompts": prompts,
            "responses": responses,
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "response_mask": mask,
            "response_text": objects(text_of(row.responses[name]) for _, row, name in rows),
            "raw_prompt": objects(copied(row.prompt.raw_prompt) for _, row, _ in rows),
            "temperature": torch.ones(len(rows)),
            "policy_version": torch.full((len(rows),), -1),
            "uid": objects(uid),
            "row_id": objects(f"{id}#{i % 2}" if several else id for i, id in enumerate(uid)),
        }
        if "token_level_scores" in cast(Any, self._record)._fields:
            scores = torch.zeros(mask.shape)
            scores[torch.arange(len(rows)), present.sum(-1) - 1] = torch.tensor([row.scores[n] for _, row, n in rows])
            columns["token_level_scores"] = scores
        if "margin" in cast(Any, self._record)._fields:
            columns["margin"] = torch.tensor([row.margin for _, row, _ in rows])
        return DataProto(columns)

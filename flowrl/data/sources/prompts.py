"""Prompts from files, the Hub or memory, tokenized once and sampled in a resumable order.

`flowrl.data.sources.prompt_rows` defines the columns of a row.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import xxhash

from flowrl.data.proto.column_math import objects
from flowrl.data.proto.dataproto import DataProto
from flowrl.data.sources.file_source import FileSource
from flowrl.data.sources.prompt_rows import READ, Row, checked, copied
from flowrl.data.sources.samplers import Order, SampledRow
from flowrl.data.sources.source import RowStream
from flowrl.records import PromptBatch

if TYPE_CHECKING:
    from flowrl.data.text.tokenizer import ChatTokenizer


class PromptData(FileSource):
    """Prompts in verl's format or TRL's; see `flowrl.data.sources.prompt_rows`, and `FileSource` for the parameters."""

    record: ClassVar[type] = PromptBatch
    reads: ClassVar[Sequence[str]] = READ

    def load(self, tokenizer: ChatTokenizer, seed: int) -> PromptStream:
        """Read and tokenize all prompts.

        Args:
            seed: of the order in which rows are sampled.

        Raises:
            ParameterError: `tokenizer` is a path, or the seed is not an int.
            DataError: a file is missing, empty or damaged; a row is malformed; a prompt is longer than
                `max_prompt_length` (with ``overlong="error"``); or all prompts are.
        """
        rows, dropped = self._read(tokenizer, checked)
        return PromptStream(rows, dropped, self._order(rows, seed), tokenizer)

    def _limits(self) -> Mapping[str, tuple[str, int | None]]:
        return {"prompt": ("max_prompt_length", self.max_prompt_length)}


class PromptStream(RowStream[Row]):
    """Tokenized prompts and the position in their order; made by `PromptData.load`.

    By default, epoch ``e`` samples every row once, in the order of ``torch.randperm`` under the key (seed, "data", e).
    A batch may cross the end of an epoch, so no row is skipped, every batch is full, and a batch larger than the data
    has rows of several epochs.

    A batch has the columns of `flowrl.records.PromptBatch`; ``prompts`` is padded on the left to the longest of the
    batch. ``uid`` and ``row_id`` are both ``"{epoch}/{index}/{draw}"``: `index` is the row's index in the files (over
    all files, dropped rows included), and `draw` counts earlier draws of the row in the epoch. They are unique over all
    batches of `next`.
    """

    def __init__(self, rows: Sequence[Row], dropped: int, order: Order, tokenizer: ChatTokenizer) -> None:
        super().__init__(rows, dropped, order)
        self._tokenizer = tokenizer

    def digest(self) -> str:
        """xxh3-128 of all rows: token ids, and the columns that rewards read."""
        hasher = xxhash.xxh3_128()
        for row in self._rows:
            head = json.dumps([row.index, len(row.ids), row.data_source, row.ground_truth, row.extra_info], default=str)
            hasher.update(head.encode())
            hasher.update(array("q", row.ids))
        return hasher.hexdigest()

    def lengths(self) -> Iterator[tuple[int, int]]:
        """The index in the files and the number of tokens of each row."""
        return ((row.index, len(row.ids)) for row in self._rows)

    def shared_rows(self, other: PromptStream) -> int:
        """How many of its prompts `other` has, too."""
        theirs = {tuple(row.ids) for row in other._rows}
        return sum(tuple(row.ids) in theirs for row in self._rows)

    def template_arguments(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """The template arguments of rows that have their own, each with the row's index in the files."""
        return ((row.index, row.template_kwargs) for row in self._rows if row.template_kwargs)

    def _batch(self, sampled: Sequence[tuple[SampledRow, Row]]) -> DataProto:
        prompts, mask = self._tokenizer.pad_left([row.ids for _, row in sampled])
        ids = objects(f"{one.epoch}/{row.index}/{one.draw}" for one, row in sampled)
        return DataProto(
            {
                "prompts": prompts,
                "prompt_mask": mask,
                "uid": ids,
                "row_id": ids,
                "data_source": objects(row.data_source for _, row in sampled),
                "ground_truth": objects(copied(row.ground_truth) for _, row in sampled),
                "extra_info": objects(copied(row.extra_info) for _, row in sampled),
                "raw_prompt": objects(copied(row.raw_prompt) for _, row in sampled),
            }
        )

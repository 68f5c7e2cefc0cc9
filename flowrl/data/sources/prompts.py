"""Prompts from files: JSONL and parquet in verl's format, tokenised once and drawn in an order that can be resumed.

`flowrl.data.sources.prompt_rows` says what a row is.
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
from flowrl.data.sources.samplers import Drawn, Order
from flowrl.data.sources.source import RowStream
from flowrl.records import PromptBatch

if TYPE_CHECKING:
    from flowrl.data.text.tokenizer import ChatTokenizer


class PromptData(FileSource):
    """Prompts, from files in verl's format; `FileSource` says what its parameters are."""

    record: ClassVar[type] = PromptBatch
    columns: ClassVar[Sequence[str]] = READ

    def load(self, tokenizer: ChatTokenizer, seed: int) -> PromptStream:
        """Read and tokenise all prompts.

        Args:
            tokenizer: gives the token ids of a prompt, by its chat template.
            seed: of the order in which the rows are drawn.

        Raises:
            ParameterError: a folder in place of its tokeniser, or a seed that is no int.
            DataError: a file that is missing, empty or damaged, a row that is not in the format, a prompt longer than
                `max_prompt_length` (with ``overlong="error"``), or only such rows.
        """
        rows, dropped = self._read(tokenizer, checked)
        return PromptStream(rows, dropped, self._order(rows, seed), tokenizer)

    def _limits(self) -> Mapping[str, tuple[str, int | None]]:
        return {"prompt": ("max_prompt_length", self.max_prompt_length)}


class PromptStream(RowStream[Row]):
    """Tokenised prompts and the position up to which they were drawn; made by `PromptData.load`.

    By default, epoch ``e`` draws every row once, in the order of ``torch.randperm`` under the key (seed, "data", e).
    Epochs follow each other without a seam: a batch may take its first rows from the end of one and its last from the
    next, so no row is left out, every batch is full, and a batch larger than the data holds rows of several epochs.

    A batch has the columns of `flowrl.records.PromptBatch`; ``prompts`` is padded on the left to the longest of the
    batch. ``uid`` and ``row_id`` are both ``"{epoch}/{index}/{draw}"``: `index` is the row's place in the files (over
    all of them, dropped rows counted), and `draw` counts how often the epoch had drawn it before. No two rows that
    `next` ever gives share one.
    """

    def __init__(self, rows: Sequence[Row], dropped: int, order: Order, tokenizer: ChatTokenizer) -> None:
        super().__init__(rows, dropped, order)
        self._tokenizer = tokenizer

    def digest(self) -> str:
        """The xxh3-128 of all rows: token ids, and what rewards are given."""
        hasher = xxhash.xxh3_128()
        for row in self._rows:
            told = json.dumps([row.index, len(row.ids), row.data_source, row.ground_truth, row.extra_info], default=str)
            hasher.update(told.encode())
            hasher.update(array("q", row.ids))
        return hasher.hexdigest()

    def template_arguments(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """The arguments of the chat template that rows have of their own, each with the row's place in the files."""
        return ((row.index, row.template_kwargs) for row in self._rows if row.template_kwargs)

    def _batch(self, drawn: Sequence[tuple[Drawn, Row]]) -> DataProto:
        prompts, mask = self._tokenizer.pad_left([row.ids for _, row in drawn])
        ids = objects(f"{one.epoch}/{row.index}/{one.draw}" for one, row in drawn)
        return DataProto(
            {
                "prompts": prompts,
                "prompt_mask": mask,
                "uid": ids,
                "row_id": ids,
                "data_source": objects(row.data_source for _, row in drawn),
                "ground_truth": objects(copied(row.ground_truth) for _, row in drawn),
                "extra_info": objects(copied(row.extra_info) for _, row in drawn),
                "raw_prompt": objects(copied(row.raw_prompt) for _, row in drawn),
            }
        )

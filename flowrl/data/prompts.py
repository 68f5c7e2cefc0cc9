"""Prompts from files: JSONL and parquet in verl's format, tokenised once and drawn in an order that can be resumed.

`flowrl.data.prompt_rows` says what a row is. No row is ever skipped except over-long ones, on request and counted.
"""

from __future__ import annotations

import itertools
import json
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import torch
import xxhash
from pydantic import AfterValidator, Field, field_validator

from flowrl.data.column_math import objects
from flowrl.data.dataproto import DataProto
from flowrl.data.files import file_digest, reading
from flowrl.data.keys import Key
from flowrl.data.prompt_rows import READERS, Length, Row, checked, read
from flowrl.data.rows import refuse_no_count
from flowrl.errors import DataError, ParameterError
from flowrl.spec import Spec

if TYPE_CHECKING:
    from flowrl.data.tokenizer import ChatTokenizer

_Paths = str | tuple[str, ...]

_CHARACTERS = 1 << 22
"""The most characters of a prompt where no limit says more; a tokeniser takes some 400 bytes for each."""

FilePath = Annotated[str | os.PathLike[str], AfterValidator(os.fspath)]
"""A path that is kept as text."""


class PromptData(Spec):
    """Where prompts come from. Nothing is read before `load`.

    Args:
        path: a ``.jsonl`` or ``.parquet`` file, or several that are read one after the other; ``~`` is the home folder.
        max_prompt_length: the most tokens a prompt may have, chat template included; None is no limit, up to the 4
            million characters that a machine can tokenise. A prompt of more characters than so many tokens could hold
            is too long without being tokenised.
        overlong: what to do with longer prompts: ``"error"``, or ``"drop"`` and count them (`PromptStream.dropped`).
        shuffle: draw every epoch in a new order; otherwise in that of the files.
        chat_template_kwargs: arguments of the chat template, such as ``{"enable_thinking": False}``; a row may have
            others of its own, which take precedence.

    Raises:
        ParameterError: no path, one that ends in neither ``.jsonl`` nor ``.parquet``, a limit below 1.
    """

    timeless = True

    path: FilePath | tuple[FilePath, ...]
    max_prompt_length: int | None = Field(None, ge=1)
    overlong: Literal["error", "drop"] = "error"
    shuffle: bool = True
    chat_template_kwargs: Mapping[str, Any] = Field(default_factory=dict)

    @field_validator("path")
    @classmethod
    def _refuse_unreadable(cls, path: _Paths) -> _Paths:
        if not path:
            raise ValueError("it names no file; give at least one .jsonl or .parquet")
        if odd := [str(p) for p in _paths(path) if p.suffix.lower() not in READERS]:
            raise ValueError(
                f"{odd[0]!r} ends in neither .jsonl (one JSON object a line) nor .parquet; convert or rename the file"
            )
        return path

    def refuse_missing(self) -> None:
        """Check that the files are there, before any tokeniser is loaded.

        Raises:
            DataError: one is missing.
        """
        if missing := [str(path) for path in _paths(self.path) if not path.is_file()]:
            raise DataError(
                f"{missing[0]!r} is not a file on this machine (looked in {Path.cwd()}); correct PromptData(path=...)."
            )

    def digests(self) -> list[str]:
        """The xxh3-128 of each file, in their order.

        Raises:
            DataError: a file is missing, or cannot be read.
        """
        self.refuse_missing()
        found = []
        for path in _paths(self.path):
            with reading(path):
                found.append(file_digest(path))
        return found

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
        if isinstance(tokenizer, str | Path):
            raise ParameterError(f"load({str(tokenizer)!r}, ...): expected ChatTokenizer({str(tokenizer)!r}).")
        self.refuse_missing()
        rows: list[Row] = []
        long: list[tuple[Length, str]] = []
        limit = self.max_prompt_length
        most = _CHARACTERS if limit is None else limit * tokenizer.longest_token
        for index, (where, record) in enumerate(itertools.chain.from_iterable(map(read, _paths(self.path)))):
            row = checked(index, where, record)
            length = Length(row.characters, "characters")
            if length.number <= most:
                row = row.tokenised(where, tokenizer, self.chat_template_kwargs)
                length = Length(len(row.ids), "tokens")
            if length.unit == "tokens" and (limit is None or length.number <= limit):
                rows.append(row)
            else:
                long.append((length, where))
        if long and (self.overlong == "error" or not rows):
            self._refuse_long(long, len(rows))
        return PromptStream(rows, len(long), tokenizer, seed, self.shuffle)

    def _refuse_long(self, long: Sequence[tuple[Length, str]], rest: int) -> NoReturn:
        length, where = long[0]
        drop = ', or leave them out by PromptData(..., overlong="drop")' if rest else "; no prompt would be left"
        if self.max_prompt_length is None:
            raise DataError(
                f"{where}: the prompt has {length}, which no machine tokenises ({len(long)} of {rest + len(long)} "
                f"prompts have more than {_CHARACTERS}); shorten it, or say how many tokens it may have by "
                f"PromptData(..., max_prompt_length=...){drop}."
            )
        longest = max((length for length, _ in long), key=lambda length: (length.unit == "characters", length.number))
        mend = f"set max_prompt_length={longest.number}" if longest.unit == "tokens" else "shorten them"
        raise DataError(
            f"{where}: the prompt has {length}, but max_prompt_length is {self.max_prompt_length} "
            f"({len(long)} of {rest + len(long)} prompts are longer, the longest has {longest.number} {longest.unit}); "
            f"{mend}{drop}."
        )


class PromptStream:
    """Tokenised prompts and the position up to which they were drawn; made by `PromptData.load`.

    Epoch ``e`` draws every row once, in the order of ``torch.randperm`` under the key (seed, "data", e). Epochs follow
    each other without a seam: a batch may take its first rows from the end of one and its last from the next, so no row
    is left out, every batch is full, and a batch larger than the data holds rows of several epochs.

    A batch has the columns of `flowrl.records.PromptBatch`; ``prompts`` is padded on the left to the longest of the
    batch. ``uid`` and ``row_id`` are both ``"{epoch}/{index}/{draw}"``: `index` is the row's place in the files (over
    all of them, dropped rows counted), and `draw` counts how often the epoch had drawn it before, which is 0 here. No
    two rows that `next` ever gives share one.

    Attributes:
        dropped: how many over-long prompts were left out.
    """

    def __init__(self, rows: Sequence[Row], dropped: int, tokenizer: ChatTokenizer, seed: int, shuffle: bool) -> None:
        self.dropped = dropped
        self._rows = rows
        self._tokenizer = tokenizer
        self._seed = seed
        self._shuffle = shuffle
        self._start_epoch(0)

    def __len__(self) -> int:
        """The number of rows of an epoch; dropped ones are not among them."""
        return len(self._rows)

    def next(self, n: int) -> DataProto:
        """The next `n` rows.

        Raises:
            ParameterError: `n` is not at least 1.
        """
        refuse_no_count("next", n, "row per batch", ParameterError)
        drawn: list[tuple[int, Row]] = []
        while len(drawn) < n:
            picked = self._order[self._offset : self._offset + n - len(drawn)]
            drawn += [(self._epoch, self._rows[i]) for i in picked]
            self._offset += len(picked)
            if self._offset == len(self):
                self._start_epoch(self._epoch + 1)
        return self._batch(drawn)

    def batches(self, n: int) -> Iterator[DataProto]:
        """Every row once, in the order of the files, `n` at a time (the last batch may be smaller); for validation.

        The position stays where it is. Rows carry the ids of epoch 0, so they are the same at every validation.

        Raises:
            ParameterError: `n` is not at least 1 (at the call, not at the first batch).
        """
        refuse_no_count("batches", n, "row per batch", ParameterError)
        starts = range(0, len(self), n)
        return (self._batch([(0, row) for row in self._rows[start : start + n]]) for start in starts)

    def all(self) -> DataProto:
        """Every row once, in the order of the files, as one batch; see `batches`."""
        return self._batch([(0, row) for row in self._rows])

    def digest(self) -> str:
        """The xxh3-128 of all rows: token ids, and what rewards are given."""
        hasher = xxhash.xxh3_128()
        for row in self._rows:
            told = json.dumps([row.index, len(row.ids), row.data_source, row.ground_truth, row.extra_info], default=str)
            hasher.update(told.encode())
            hasher.update(array("q", row.ids))
        return hasher.hexdigest()

    @property
    def position(self) -> dict[str, int]:
        """Where the next row comes from (see `seek`): ``{"epoch": ..., "offset": ..., "rows": ...}``."""
        return {"epoch": self._epoch, "offset": self._offset, "rows": len(self)}

    def seek(self, position: Mapping[str, int]) -> None:
        """Go on from `position`: with the same data and seed, the batches are those that an uninterrupted stream gives.

        Raises:
            DataError: not a position, or one in other data.
        """
        found = dict(position) if isinstance(position, Mapping) else {}
        whole = found.keys() == self.position.keys() and all(type(v) is int and v >= 0 for v in found.values())
        if not whole or found["rows"] != len(self) or found["offset"] >= len(self):
            raise DataError(
                f"seek({position!r}) is no position in a stream of {len(self)} rows; expected epoch, offset (below the "
                f"rows) and rows as `position` gave them for the same files and max_prompt_length."
            )
        self._start_epoch(found["epoch"])
        self._offset = found["offset"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._offset = epoch, 0
        self._order: Sequence[int] = range(len(self))
        if self._shuffle:
            generator = Key.of(self._seed).derive("data", epoch).generator()
            self._order = torch.randperm(len(self), generator=generator).tolist()

    def _batch(self, drawn: Sequence[tuple[int, Row]]) -> DataProto:
        prompts, mask = self._tokenizer.pad_left([row.ids for _, row in drawn])
        ids = objects(f"{epoch}/{row.index}/0" for epoch, row in drawn)
        return DataProto(
            {
                "prompts": prompts,
                "prompt_mask": mask,
                "uid": ids,
                "row_id": ids,
                "data_source": objects(row.data_source for _, row in drawn),
                "ground_truth": objects(_copied(row.ground_truth) for _, row in drawn),
                "extra_info": objects(_copied(row.extra_info) for _, row in drawn),
                "raw_prompt": objects(_copied(row.raw_prompt) for _, row in drawn),
            }
        )


def _copied(value: Any) -> Any:
    """A record with containers of its own, so that what a reward function writes into its extra_info is not there in
    later epochs. JSON and parquet give no other containers, which spares half of what `copy.deepcopy` costs.
    """
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return tuple(map(_copied, value)) if isinstance(value, tuple) else value


def _paths(path: FilePath | tuple[FilePath, ...]) -> list[Path]:
    return [Path(p).expanduser() for p in (path if isinstance(path, tuple) else (path,))]

"""Prompts from files: JSONL and parquet in verl's format, tokenised once and drawn in an order that can be resumed.

A row has these columns; others (such as verl's ``ability``) are not read:

- ``prompt``: a list of messages, ``{"role": str, "content": str}`` each;
- ``data_source``: str, by which a reward function may choose its rule;
- ``reward_model``: a dict with ``ground_truth``, not null (``style`` is not read: the graph says how to score);
- ``extra_info``: a dict, optional (``{}`` where it is missing or null).

No row is ever skipped except over-long ones, on request and counted. Whatever cannot be read is an error that names the
file and the line (counted from 1, as in an editor) or the row (parquet, counted from 0).
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import torch
from pydantic import AfterValidator, Field, field_validator

from flowrl.data.column_math import objects
from flowrl.data.dataproto import DataProto
from flowrl.data.keys import Key
from flowrl.errors import DataError, ParameterError
from flowrl.spec import Spec

if TYPE_CHECKING:
    from flowrl.data.tokenizer import ChatTokenizer

_Paths = str | tuple[str, ...]

_REQUIRED = ("prompt", "data_source", "reward_model")
_MEDIA = ("images", "videos")  # verl's names; a prompt without them would be trained on with the picture missing
_READ = (*_REQUIRED, "extra_info", *_MEDIA)
_EXPECTED_MESSAGES = 'expected a list of messages, [{"role": "user", "content": "..."}]'

FilePath = Annotated[str | os.PathLike[str], AfterValidator(os.fspath)]
"""A path that is kept as text."""


class PromptData(Spec):
    """Where prompts come from. Nothing is read before `load`.

    Args:
        path: a ``.jsonl`` or ``.parquet`` file, or several that are read one after the other; ``~`` is the home folder.
        max_prompt_length: the most tokens a prompt may have, chat template included; None is no limit.
        overlong: what to do with longer prompts: ``"error"``, or ``"drop"`` and count them (`PromptStream.dropped`).
        shuffle: draw every epoch in a new order; otherwise in that of the files.

    Raises:
        ParameterError: no path, one that ends in neither ``.jsonl`` nor ``.parquet``, a limit below 1.
    """

    path: FilePath | tuple[FilePath, ...]
    max_prompt_length: int | None = Field(None, ge=1)
    overlong: Literal["error", "drop"] = "error"
    shuffle: bool = True

    @field_validator("path")
    @classmethod
    def _refuse_unreadable(cls, path: _Paths) -> _Paths:
        if not path:
            raise ValueError("it names no file; give at least one .jsonl or .parquet")
        if odd := [str(p) for p in _paths(path) if p.suffix.lower() not in _READERS]:
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

    def load(self, tokenizer: ChatTokenizer, seed: int) -> PromptStream:
        """Read and tokenise all prompts.

        Args:
            tokenizer: gives the token ids of a prompt, by its chat template.
            seed: of the order in which the rows are drawn.

        Raises:
            DataError: a file that is missing, empty or damaged, a row that is not in the format, a prompt longer than
                `max_prompt_length` (with ``overlong="error"``), or only such rows.
        """
        self.refuse_missing()
        rows: list[_Row] = []
        long: list[tuple[int, str]] = []
        for index, (where, record) in enumerate(itertools.chain.from_iterable(map(_read, _paths(self.path)))):
            row = _row(index, where, record, tokenizer)
            if self.max_prompt_length is None or len(row.ids) <= self.max_prompt_length:
                rows.append(row)
            else:
                long.append((len(row.ids), where))
        if long and (self.overlong == "error" or not rows):
            length, where = long[0]
            longest = max(tokens for tokens, _ in long)
            drop = ', or leave them out by PromptData(..., overlong="drop")' if rows else "; no prompt would be left"
            raise DataError(
                f"{where}: the prompt has {length} tokens, but max_prompt_length is {self.max_prompt_length} "
                f"({len(long)} of {len(rows) + len(long)} prompts are longer, the longest has {longest}); "
                f"set max_prompt_length={longest}{drop}."
            )
        return PromptStream(rows, len(long), tokenizer, seed, self.shuffle)


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

    def __init__(self, rows: Sequence[_Row], dropped: int, tokenizer: ChatTokenizer, seed: int, shuffle: bool) -> None:
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
        _refuse_empty("next", n)
        drawn: list[tuple[int, _Row]] = []
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
        _refuse_empty("batches", n)
        starts = range(0, len(self), n)
        return (self._batch([(0, row) for row in self._rows[start : start + n]]) for start in starts)

    def all(self) -> DataProto:
        """Every row once, in the order of the files, as one batch; see `batches`."""
        return self._batch([(0, row) for row in self._rows])

    @property
    def position(self) -> dict[str, int]:
        """Where the next row comes from (see `seek`): ``{"epoch": ..., "offset": ..., "rows": ...}``."""
        return {"epoch": self._epoch, "offset": self._offset, "rows": len(self)}

    def seek(self, position: Mapping[str, int]) -> None:
        """Go on from `position`: with the same data and seed, the batches are those that an uninterrupted stream gives.

        Raises:
            DataError: not a position, or one in other data.
        """
        found = dict(position)
        whole = found.keys() == self.position.keys() and all(type(v) is int and v >= 0 for v in found.values())
        if not whole or found["rows"] != len(self) or found["offset"] >= len(self):
            raise DataError(
                f"seek({found}) is no position in a stream of {len(self)} rows; expected epoch, offset (below the "
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

    def _batch(self, drawn: Sequence[tuple[int, _Row]]) -> DataProto:
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


@dataclass(frozen=True, slots=True)
class _Row:
    """A prompt that was read: its place in the files, its token ids, and the records that travel with it."""

    index: int
    ids: list[int]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    raw_prompt: list[dict[str, Any]]


def _copied(value: Any) -> Any:
    """A record with containers of its own, so that what a reward function writes into its extra_info is not there in
    later epochs. JSON and parquet give no other containers, which spares half of what `copy.deepcopy` costs.
    """
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return tuple(map(_copied, value)) if isinstance(value, tuple) else value


def _refuse_empty(method: str, n: int) -> None:
    if n < 1:
        raise ParameterError(f"{method}({n}): expected at least 1 row per batch.")


def _paths(path: FilePath | tuple[FilePath, ...]) -> list[Path]:
    return [Path(p).expanduser() for p in (path if isinstance(path, tuple) else (path,))]


# ---- files: (where, record) pairs; `where` is how an error names the row


def _read(path: Path) -> Iterator[tuple[str, Any]]:
    empty = True
    for pair in _READERS[path.suffix.lower()](path):
        empty = False
        yield pair
    if empty:
        raise DataError(
            f"{path} has no rows; expected at least one prompt, so leave the file out of PromptData(path=...)."
        )


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:  # as bytes, so that U+2028 in a text ends no line
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            try:
                yield where, json.loads(line)
            except ValueError as error:  # broken JSON, or bytes that are not UTF-8
                what = "the line is blank" if not line.strip() else f"the line is not JSON ({error})"
                raise DataError(f"{where}: {what}; expected one JSON object, so fix or delete the line.") from error


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    row = 0
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in _READ if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for record in batch.to_pylist():
                    yield f"{path} row {row}", record
                    row += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} cannot be read as parquet after {row} rows ({error}); write the file again."
        ) from error


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


# ---- rows


def _row(index: int, where: str, record: Any, tokenizer: ChatTokenizer) -> _Row:
    """A record of verl's format, checked and tokenised."""
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: the row is a {type(record).__name__}; expected an object with the keys {', '.join(_REQUIRED)}."
        )
    if missing := [key for key in _REQUIRED if record.get(key) is None]:
        raise DataError(
            f"{where}: the row has no {' and no '.join(missing)}, or null there; expected prompt (a list of messages), "
            f'data_source (a str) and reward_model ({{"ground_truth": ...}}), so add what is missing.'
        )
    if media := [key for key in _MEDIA if record.get(key)]:
        raise DataError(
            f"{where}: the row has {media[0]}, which flowrl cannot feed to a model; give it prompts of text only."
        )
    source, reward, extra = record["data_source"], record["reward_model"], record.get("extra_info")
    if not isinstance(source, str):
        raise DataError(f"{where}: data_source is {source!r}; expected a str, such as a name of the data set.")
    if not isinstance(reward, dict) or reward.get("ground_truth") is None:
        raise DataError(
            f"{where}: reward_model is {reward!r}, which holds no ground truth; expected "
            f'{{"ground_truth": ...}}, and "" in it where the reward needs none.'
        )
    if not isinstance(extra, dict | None):
        raise DataError(f"{where}: extra_info is {extra!r}; expected an object, or leave it out.")
    messages = _messages(where, record["prompt"])
    try:
        ids = tokenizer.prompt_ids(messages)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    if not ids:
        raise DataError(
            f"{where}: the chat template makes no tokens of the prompt; expected at least one to sample from."
        )
    return _Row(index, ids, source, reward["ground_truth"], extra or {}, messages)


def _messages(where: str, prompt: Any) -> list[dict[str, Any]]:
    """The messages of a prompt. A key with null counts as missing, since parquet does not distinguish the two."""
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: prompt is {prompt!r}; {_EXPECTED_MESSAGES}.")
    messages = []
    for i, message in enumerate(prompt):
        kept = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
        # A template would print any other content, such as a list of parts, as Python shows it.
        text = isinstance(kept.get("content"), str) or ("content" not in kept and "tool_calls" in kept)
        if not isinstance(kept.get("role"), str) or not text:
            raise DataError(f"{where}: message {i} of prompt is {message!r}; {_EXPECTED_MESSAGES}, with text in both.")
        messages.append(kept)
    return messages

"""`FileSource`: rows from files, folders, the Hub or memory, tokenized once.

No row is skipped, except those that ``map=`` leaves out and overlong ones with ``overlong="drop"``, which are counted.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn, Protocol, Self, TypeVar, cast

from pydantic import AfterValidator, Field, field_validator

from flowrl import references as functions
from flowrl.data.keys import Key
from flowrl.data.sources.held_rows import HeldRows, held
from flowrl.data.sources.hub_dataset import HubDataset
from flowrl.data.sources.mapping import Mapped, RowMapping
from flowrl.data.sources.origin import Origin
from flowrl.data.sources.origins import RowsInMemory, origin_of
from flowrl.data.sources.prompt_rows import Length, Provenance
from flowrl.data.sources.readers import READERS
from flowrl.data.sources.samplers import InOrder, Order, Sampler, Shuffled
from flowrl.data.sources.source import Source
from flowrl.errors import DataError, ParameterError, offer
from flowrl.hub.repositories import Commits

if TYPE_CHECKING:
    from flowrl.data.text.tokenizer import ChatTokenizer

logger = logging.getLogger(__name__)

_CHARACTERS = 1 << 22
"""Maximum characters of a text without a token limit; a tokenizer needs some 400 bytes for each."""

FilePath = Annotated[str | os.PathLike[str], AfterValidator(os.fspath)]
"""A path, stored as text."""

Paths = FilePath | tuple[FilePath, ...]


class FileRow(Protocol):
    """A row of a file: a prompt, possibly with responses."""

    @property
    def characters(self) -> Mapping[str, int]:
        """Number of characters by part."""
        ...

    @property
    def tokens(self) -> Mapping[str, int]:
        """Number of tokens by part, once the row is tokenized."""
        ...

    @property
    def every_id(self) -> Sequence[int]:
        """The ids of all parts, once the row is tokenized."""
        ...

    def tokenized(self, where: str, tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any]) -> Self:
        """A copy with ids."""
        ...


RowT = TypeVar("RowT", bound=FileRow)
CheckedT = TypeVar("CheckedT", bound=FileRow, covariant=True)


class Check(Protocol[CheckedT]):
    """Makes a row, without ids, of a record."""

    def __call__(
        self, index: int, where: str, record: Any, mapped: Collection[str], source: Provenance, /
    ) -> CheckedT: ...


class _TooLong(NamedTuple):
    part: str
    length: Length
    where: str


class FileSource(Source):
    """Rows from files. Nothing is read before `load`.

    Args:
        path: a ``.jsonl`` or ``.parquet`` file; a folder or another file that the package `datasets` reads; the name
            of a data set on the Hub, such as ``"openai/gsm8k"``; or several of these, which are concatenated. ``~`` is
            the home folder. Or rows in memory: a list of dicts, or a `datasets.Dataset`.
        max_prompt_length: maximum tokens of a prompt, including the chat template; None is no limit, up to 4 million
            characters (longer text exhausts memory). A prompt with more characters than this many tokens could hold is
            too long and is not tokenized.
        overlong: what to do with longer rows: ``"error"``, or ``"drop"`` and count them (`Stream.dropped`).
        shuffle: sample every epoch in a new order; otherwise in file order.
        chat_template_kwargs: arguments of the chat template, such as ``{"enable_thinking": False}``; those of a row
            take precedence.
        sampler: another order, such as `ByDifficulty`; None follows `shuffle`.
        split_special_tokens: whether control tokens that rows spell, such as ``<|im_end|>``, are encoded as text; see
            `flowrl.data.text.control_tokens`. False is for rows that are formatted with them already.
        name: configuration of a folder or data set, such as ``"main"``; None is the only one.
        split: split of a folder or data set, or part of it, such as ``"train[:100]"``; None is the only one.
        revision: branch, tag or commit of a data set on the Hub; None is its main branch.
        columns: by column of flowrl, the column of the file, or its path in nested columns, such as ``{"prompt":
            "question", "ground_truth": "meta.answer"}``; None is no value. Other columns keep their names.
        map: instead of `columns`, a function that makes a row of flowrl of a row of the file, or None to leave it out
            (counted in `Stream.dropped`); or a reference to one, ``"path/to/file.py:name"``.

    Raises:
        ParameterError: there is no path, a limit is below 1, `sampler` is combined with ``shuffle=False``, `map` with
            `columns`, or `columns` names an unknown column.
    """

    references: ClassVar[frozenset[str]] = frozenset({"map"})
    reads: ClassVar[Sequence[str]]
    """The columns of flowrl."""

    path: Paths | HeldRows
    max_prompt_length: int | None = Field(None, ge=1)
    overlong: Literal["error", "drop"] = "error"
    shuffle: bool = True
    chat_template_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    sampler: Sampler | None = None
    split_special_tokens: bool = True
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    columns: Mapping[str, str | None] = Field(default_factory=dict)
    map: Callable[..., Any] | str | None = None

    @field_validator("path", mode="before")
    @classmethod
    def _hold_rows(cls, path: Any) -> Any:
        return held(path)

    @field_validator("path")
    @classmethod
    def _refuse_no_path(cls, path: Any) -> Any:
        if not path:
            raise ValueError("it names no file; pass at least one file, folder or data set")
        return path

    @field_validator("columns")
    @classmethod
    def _refuse_unknown_columns(cls, columns: Mapping[str, str | None]) -> Mapping[str, str | None]:
        if unknown := [name for name in columns if name not in cls.reads]:
            raise ValueError(f"it maps to {unknown[0]!r}; {offer(unknown[0], cls.reads, f'{cls.__name__} reads')}")
        return columns

    def __post_init__(self) -> None:
        if self.sampler is not None and not self.shuffle:
            raise ValueError(
                f"shuffle=False and sampler={self.sampler!r} both set the order of rows; pass only one of them"
            )
        if self.map is not None and self.columns:
            raise ValueError("map and columns both map rows; pass only one of them")
        if isinstance(self.map, str):
            functions.check(self.map)
        plain = isinstance(self.path, HeldRows) or all(path.suffix.lower() in READERS for path in _paths(self.path))
        given = {"name": self.name, "split": self.split, "revision": self.revision}
        if plain and (odd := [key for key, value in given.items() if value is not None]):
            raise ValueError(f"{odd[0]} is of a folder or a data set on the Hub, which {self.path!r} is not; remove it")

    @property
    def learns(self) -> bool:
        """Whether its sampler learns from scores."""
        return self.sampler is not None and self.sampler.learns

    def identity(self) -> dict[str, Any]:
        """Its parameters, except those that `digests` covers, and those of later versions at their defaults."""
        same = {name: value for name, value in super().identity().items() if name not in ("path", "revision")}
        if self.split_special_tokens:
            del same["split_special_tokens"]
        unset = ("sampler", "name", "split", "map")
        return {k: v for k, v in same.items() if (v is not None or k not in unset) and (v or k != "columns")}

    def refuse_missing(self) -> None:
        """Check that the data exists, before any tokenizer is loaded."""
        for origin in self.origins:
            origin.refuse_missing(type(self).__name__)

    def digests(self) -> list[str]:
        """xxh3-128 of each file, in order; for a data set on the Hub, its name, commit and file.

        Raises:
            DataError: data is missing or unreadable.
        """
        self.refuse_missing()
        return [digest for origin in self.origins for digest in origin.digests()]

    def pinned(self, commits: Commits) -> Self:
        """A copy whose data sets on the Hub are those of one commit."""
        if isinstance(self.path, HeldRows):
            return self
        paths = []
        for path, origin in zip(_texts(self.path), self.origins, strict=True):
            if isinstance(origin, HubDataset):
                path = f"{origin.repo}@{origin.pinned(commits)}"
            paths.append(path)
        if paths == _texts(self.path):
            return self
        whole = paths[0] if len(paths) == 1 else tuple(paths)
        return cast(Self, dataclasses.replace(cast(Any, self), path=whole, revision=None))

    def missing_here(self) -> list[str]:
        """The data sets on the Hub that would be downloaded."""
        return [origin.repo for origin in self.origins if isinstance(origin, HubDataset) and not origin.is_here()]

    @property
    def origins(self) -> list[Origin]:
        """Where its rows come from, in order."""
        if isinstance(self.path, HeldRows):
            return [RowsInMemory(self.path)]
        return [origin_of(path, self.name, self.split, self.revision) for path in _texts(self.path)]

    def _order(self, rows: Sequence[Any], seed: int) -> Order:
        """The order in which these rows are sampled."""
        sampler = self.sampler or (Shuffled() if self.shuffle else InOrder())
        return sampler.start(rows, Key.of(seed))

    def _limits(self) -> Mapping[str, tuple[str, int | None]]:
        """The parameter that limits the tokens of each part, and the limit."""
        raise NotImplementedError

    def _read(self, tokenizer: ChatTokenizer, check: Check[RowT]) -> tuple[list[RowT], int]:
        """All rows, tokenized, and the number of dropped ones."""
        if isinstance(tokenizer, str | Path):
            raise ParameterError(
                f"{type(self).__name__}.load({str(tokenizer)!r}, ...) got a path; expected a tokenizer. Pass "
                f"ChatTokenizer({str(tokenizer)!r}).",
                code="data.wrong-type",
                path=tokenizer,
            )
        tokenizer = tokenizer if self.split_special_tokens else tokenizer.parsing_special_tokens()
        rows: list[RowT] = []
        long: list[_TooLong] = []
        unknown: list[str] = []
        left_out = 0
        for index, (where, mapped, provenance) in enumerate(self._records()):
            if mapped is None:
                left_out += 1
                continue
            row = check(index, where, *mapped, provenance)
            found = self._too_long(where, row.characters, "characters", tokenizer.longest_token)
            if found is None:
                row = row.tokenized(where, tokenizer, self.chat_template_kwargs)
                found = self._too_long(where, row.tokens, "tokens", 1)
            if found is None:
                rows.append(row)
                unknown += [where] if tokenizer.unknown_id in row.every_id else []
            else:
                long.append(found)
        if long and (self.overlong == "error" or not rows):
            self._refuse_long(long, len(rows))
        if unknown:
            logger.warning(
                "%d of %d rows have text that the tokenizer in %r does not know, the first in %s, so the model does "
                "not read it. Use a model with a vocabulary of these texts, or remove the rows.",
                len(unknown),
                len(rows),
                tokenizer.folder,
                unknown[0],
            )
        if not rows:
            raise DataError(
                f"map left out all {left_out} rows of {self.path!r}. Return rows from it.",
                code="prompts.no-rows",
                path=self.path,
            )
        return rows, len(long) + left_out

    def _records(self) -> Iterator[tuple[str, Mapped | None, Provenance]]:
        """Each row: its place, its record with the mapped columns (None if left out), and its provenance."""
        self.refuse_missing()
        mapping = RowMapping(self.columns, functions.resolve(self.map) if isinstance(self.map, str) else self.map)
        for origin in self.origins:
            provenance = Provenance(type(self).__name__, origin.data_source, origin.example)
            for where, record in origin.rows(mapping.reads(self.reads)):
                yield where, mapping(where, record), provenance

    def _too_long(self, where: str, lengths: Mapping[str, int], unit: str, each: int) -> _TooLong | None:
        """The first part that is too long; `each` is the maximum of units per token."""
        for part, number in lengths.items():
            _, limit = self._limits()[part]
            most = limit * each if limit is not None else _CHARACTERS if unit == "characters" else number
            if number > most:
                return _TooLong(part, Length(number, unit), where)
        return None

    def _refuse_long(self, long: Sequence[_TooLong], rest: int) -> NoReturn:
        part, length, where = long[0]
        alike = [one.length for one in long if one.part == part]
        setting, limit = self._limits()[part]
        source = type(self).__name__
        drop = f', or drop them: {source}(..., overlong="drop")' if rest else f"; dropping them would leave no {part}"
        facts: dict[str, Any] = {"where": where, "part": part, "found": length.number, "unit": length.unit}
        facts |= {"setting": setting, "limit": limit, "count": len(alike), "rows": rest + len(long)}
        if limit is None:
            raise DataError(
                f"{where}: the {part} has {length}, too long to tokenize ({len(alike)} of {rest + len(long)} {part}s "
                f"have more than {_CHARACTERS}). Shorten it, or set a limit: {source}(..., {setting}=...){drop}.",
                code="prompts.too-long",
                **facts,
            )
        longest = max(alike, key=lambda length: (length.unit == "characters", length.number))
        fix = f"Set {setting}={longest.number}" if longest.unit == "tokens" else "Shorten them"
        raise DataError(
            f"{where}: the {part} has {length}, but {setting} is {limit} ({len(alike)} of {rest + len(long)} {part}s "
            f"are longer; the longest has {longest.number} {longest.unit}). {fix}{drop}.",
            code="prompts.too-long",
            **facts,
            longest=longest.number,
        )


def _paths(path: str | os.PathLike[str] | tuple[str | os.PathLike[str], ...]) -> list[Path]:
    return [Path(p).expanduser() for p in _texts(path)]


def _texts(path: Any) -> list[str]:
    return [os.fspath(p) for p in (path if isinstance(path, tuple) else (path,))]

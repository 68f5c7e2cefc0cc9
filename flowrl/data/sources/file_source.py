"""`FileSource`: rows from JSONL and parquet files, and what to do with those that are too long.

No row is ever skipped except over-long ones, on request and counted.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn, Protocol, Self, TypeVar

from pydantic import AfterValidator, Field, field_validator

from flowrl.data.files import file_digest, reading
from flowrl.data.keys import Key
from flowrl.data.sources.prompt_rows import READERS, Length, read
from flowrl.data.sources.samplers import InOrder, Order, Sampler, Shuffled
from flowrl.data.sources.source import Source
from flowrl.errors import DataError, ParameterError

if TYPE_CHECKING:
    from flowrl.data.text.tokenizer import ChatTokenizer

_CHARACTERS = 1 << 22
"""The most characters of a text where no limit says more; a tokeniser takes some 400 bytes for each."""

FilePath = Annotated[str | os.PathLike[str], AfterValidator(os.fspath)]
"""A path that is kept as text."""

Paths = FilePath | tuple[FilePath, ...]


class FileRow(Protocol):
    """A row of a file, which is a prompt and perhaps more."""

    @property
    def characters(self) -> Mapping[str, int]:
        """Of each of its parts, by name."""
        ...

    @property
    def tokens(self) -> Mapping[str, int]:
        """Of each of its parts, by name, once it is tokenised."""
        ...

    def tokenised(self, where: str, tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any]) -> Self:
        """With its ids."""
        ...


RowT = TypeVar("RowT", bound=FileRow)


class _TooLong(NamedTuple):
    part: str
    length: Length
    where: str


class FileSource(Source):
    """Rows from files. Nothing is read before `load`.

    Args:
        path: a ``.jsonl`` or ``.parquet`` file, or several that are read one after the other; ``~`` is the home folder.
        max_prompt_length: the most tokens a prompt may have, chat template included; None is no limit, up to the 4
            million characters that a machine can tokenise. A prompt of more characters than so many tokens could hold
            is too long without being tokenised.
        overlong: what to do with longer rows: ``"error"``, or ``"drop"`` and count them (`Stream.dropped`).
        shuffle: draw every epoch in a new order; otherwise in that of the files.
        chat_template_kwargs: arguments of the chat template, such as ``{"enable_thinking": False}``; a row may have
            others of its own, which take precedence.
        sampler: another order, such as `ByDifficulty`; None is by `shuffle`.

    Raises:
        ParameterError: no path, one that ends in neither ``.jsonl`` nor ``.parquet``, a limit below 1, or a sampler
            beside ``shuffle=False``.
    """

    columns: ClassVar[Sequence[str]]
    """The columns that are read of parquet."""

    path: Paths
    max_prompt_length: int | None = Field(None, ge=1)
    overlong: Literal["error", "drop"] = "error"
    shuffle: bool = True
    chat_template_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    sampler: Sampler | None = None

    @field_validator("path")
    @classmethod
    def _refuse_unreadable(cls, path: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not path:
            raise ValueError("it names no file; give at least one .jsonl or .parquet")
        if odd := [str(p) for p in _paths(path) if p.suffix.lower() not in READERS]:
            raise ValueError(
                f"{odd[0]!r} ends in neither .jsonl (one JSON object a line) nor .parquet; convert or rename the file"
            )
        return path

    def __post_init__(self) -> None:
        if self.sampler is not None and not self.shuffle:
            raise ValueError(
                f"shuffle=False and sampler={self.sampler!r} both say in which order rows come; leave one of them out"
            )

    @property
    def learns(self) -> bool:
        """Whether its sampler does."""
        return self.sampler is not None and self.sampler.learns

    def identity(self) -> dict[str, Any]:
        """Its parameters, except where the files lie."""
        same = {name: value for name, value in super().identity().items() if name != "path"}
        return same if self.sampler is not None else {k: v for k, v in same.items() if k != "sampler"}

    def refuse_missing(self) -> None:
        """Check that the files are there, before any tokeniser is loaded.

        Raises:
            DataError: one is missing.
        """
        if missing := [str(path) for path in _paths(self.path) if not path.is_file()]:
            raise DataError(
                f"{missing[0]!r} is not a file on this machine (looked in {Path.cwd()}); correct "
                f"{type(self).__name__}(path=...)."
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

    def _order(self, rows: Sequence[Any], seed: int) -> Order:
        """The order in which these are drawn."""
        sampler = self.sampler or (Shuffled() if self.shuffle else InOrder())
        return sampler.start(rows, Key.of(seed))

    def _limits(self) -> Mapping[str, tuple[str, int | None]]:
        """By part of a row, the setting that limits its tokens, and the limit."""
        raise NotImplementedError

    def _read(self, tokenizer: ChatTokenizer, check: Callable[[int, str, Any], RowT]) -> tuple[list[RowT], int]:
        """All rows, tokenised; and how many were left out.

        Args:
            tokenizer: of the model.
            check: makes a row of its number, how an error names it, and the record that was read.

        Raises:
            ParameterError: a folder in place of its tokeniser.
            DataError: a file that is missing, empty or damaged, a row that is not in the format or too long, or only
                rows that are too long.
        """
        if isinstance(tokenizer, str | Path):
            raise ParameterError(f"load({str(tokenizer)!r}, ...): expected ChatTokenizer({str(tokenizer)!r}).")
        self.refuse_missing()
        rows: list[RowT] = []
        long: list[_TooLong] = []
        records = itertools.chain.from_iterable(read(path, self.columns) for path in _paths(self.path))
        for index, (where, record) in enumerate(records):
            row = check(index, where, record)
            found = self._too_long(where, row.characters, "characters", tokenizer.longest_token)
            if found is None:
                row = row.tokenised(where, tokenizer, self.chat_template_kwargs)
                found = self._too_long(where, row.tokens, "tokens", 1)
            if found is None:
                rows.append(row)
            else:
                long.append(found)
        if long and (self.overlong == "error" or not rows):
            self._refuse_long(long, len(rows))
        return rows, len(long)

    def _too_long(self, where: str, lengths: Mapping[str, int], unit: str, each: int) -> _TooLong | None:
        """The first part that is too long: in tokens, or in characters where so many tokens could not hold them."""
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
        whose = type(self).__name__
        drop = f', or leave them out by {whose}(..., overlong="drop")' if rest else f"; no {part} would be left"
        if limit is None:
            raise DataError(
                f"{where}: the {part} has {length}, which no machine tokenises ({len(alike)} of {rest + len(long)} "
                f"{part}s have more than {_CHARACTERS}); shorten it, or say how many tokens it may have by "
                f"{whose}(..., {setting}=...){drop}."
            )
        longest = max(alike, key=lambda length: (length.unit == "characters", length.number))
        fix = f"set {setting}={longest.number}" if longest.unit == "tokens" else "shorten them"
        raise DataError(
            f"{where}: the {part} has {length}, but {setting} is {limit} "
            f"({len(alike)} of {rest + len(long)} {part}s are longer, the longest has {longest.number} "
            f"{longest.unit}); {fix}{drop}."
        )


def _paths(path: str | os.PathLike[str] | tuple[str | os.PathLike[str], ...]) -> list[Path]:
    return [Path(p).expanduser() for p in (path if isinstance(path, tuple) else (path,))]

"""`FileSource`: rows from JSONL and parquet files.

No row is skipped, except overlong ones with ``overlong="drop"``, which are counted.
"""

from __future__ import annotations

import itertools
import logging
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


class _TooLong(NamedTuple):
    part: str
    length: Length
    where: str


class FileSource(Source):
    """Rows from files. Nothing is read before `load`.

    Args:
        path: a ``.jsonl`` or ``.parquet`` file, or several, which are concatenated; ``~`` is the home folder.
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

    Raises:
        ParameterError: there is no path, a path ends in neither ``.jsonl`` nor ``.parquet``, a limit is below 1, or
            `sampler` is combined with ``shuffle=False``.
    """

    columns: ClassVar[Sequence[str]]
    """The columns to read from parquet."""

    path: Paths
    max_prompt_length: int | None = Field(None, ge=1)
    overlong: Literal["error", "drop"] = "error"
    shuffle: bool = True
    chat_template_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    sampler: Sampler | None = None
    split_special_tokens: bool = True

    @field_validator("path")
    @classmethod
    def _refuse_unreadable(cls, path: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not path:
            raise ValueError("it names no file; pass at least one .jsonl or .parquet file")
        if odd := [str(p) for p in _paths(path) if p.suffix.lower() not in READERS]:
            raise ValueError(
                f"{odd[0]!r} ends in neither .jsonl (one JSON object a line) nor .parquet; convert or rename the file"
            )
        return path

    def __post_init__(self) -> None:
        if self.sampler is not None and not self.shuffle:
            raise ValueError(
                f"shuffle=False and sampler={self.sampler!r} both set the order of rows; pass only one of them"
            )

    @property
    def learns(self) -> bool:
        """Whether its sampler learns from scores."""
        return self.sampler is not None and self.sampler.learns

    def identity(self) -> dict[str, Any]:
        """Its parameters, except the paths."""
        same = {name: value for name, value in super().identity().items() if name != "path"}
        if self.split_special_tokens:
            del same["split_special_tokens"]
        return same if self.sampler is not None else {k: v for k, v in same.items() if k != "sampler"}

    def refuse_missing(self) -> None:
        """Check that the files exist, before any tokenizer is loaded."""
        if missing := [str(path) for path in _paths(self.path) if not path.is_file()]:
            raise DataError(
                f"{missing[0]!r} is not a file on this machine (working directory: {Path.cwd()}). Correct "
                f"{type(self).__name__}(path=...).",
                code="prompts.missing-file",
                path=missing[0],
                source=type(self).__name__,
            )

    def digests(self) -> list[str]:
        """xxh3-128 of each file, in order.

        Raises:
            DataError: a file is missing or unreadable.
        """
        self.refuse_missing()
        found = []
        for path in _paths(self.path):
            with reading(path):
                found.append(file_digest(path))
        return found

    def _order(self, rows: Sequence[Any], seed: int) -> Order:
        """The order in which these rows are sampled."""
        sampler = self.sampler or (Shuffled() if self.shuffle else InOrder())
        return sampler.start(rows, Key.of(seed))

    def _limits(self) -> Mapping[str, tuple[str, int | None]]:
        """The parameter that limits the tokens of each part, and the limit."""
        raise NotImplementedError

    def _read(self, tokenizer: ChatTokenizer, check: Callable[[int, str, Any], RowT]) -> tuple[list[RowT], int]:
        """All rows, tokenized, and the number of dropped ones; `check` makes a row of index, place and record."""
        if isinstance(tokenizer, str | Path):
            raise ParameterError(
                f"{type(self).__name__}.load({str(tokenizer)!r}, ...) got a path; expected a tokenizer. Pass "
                f"ChatTokenizer({str(tokenizer)!r}).",
                code="data.wrong-type",
                path=tokenizer,
            )
        self.refuse_missing()
        tokenizer = tokenizer if self.split_special_tokens else tokenizer.parsing_special_tokens()
        rows: list[RowT] = []
        long: list[_TooLong] = []
        unknown: list[str] = []
        records = itertools.chain.from_iterable(read(path, self.columns) for path in _paths(self.path))
        for index, (where, record) in enumerate(records):
            row = check(index, where, record)
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
        return rows, len(long)

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
    return [Path(p).expanduser() for p in (path if isinstance(path, tuple) else (path,))]

"""Raw rows as rows of flowrl: by the names of their columns, or by a function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.data.proto.column_math import short
from flowrl.errors import DataError, offer, type_of

_USUAL = {
    "prompt": ("question", "problem", "instruction", "query", "input", "prompts"),
    "ground_truth": ("answer", "solution", "final_answer", "label", "target", "output"),
    "response": ("answer", "output", "completion", "solution", "response", "text"),
    "completion": ("answer", "output", "response"),
    "chosen": ("better", "preferred", "response_chosen", "accepted"),
    "rejected": ("worse", "dispreferred", "response_rejected"),
    "label": ("desirable", "is_good", "thumbs_up"),
}
"""Names that published data sets use for columns of flowrl."""


Mapped = tuple[Any, Collection[str]]
"""A row, and which of its columns a mapping has set."""


@dataclass(frozen=True)
class RowMapping:
    """Maps raw rows.

    Args:
        columns: by column of flowrl, the path of the value in the raw row, such as ``"reward_model.ground_truth"``;
            None is no value.
        function: maps a whole raw row; None leaves the row out.
    """

    columns: Mapping[str, str | None]
    function: Callable[[dict[str, Any]], Any] | None

    def reads(self, columns: Iterable[str]) -> set[str] | None:
        """The raw columns to read for these of flowrl; None is all."""
        if self.function is not None:
            return None
        paths = [self.columns.get(name, name) for name in columns]
        return {name for path in paths if path is not None for name in (path, path.partition(".")[0])}

    def __call__(self, where: str, record: Any) -> Mapped | None:
        """The row; None leaves it out."""
        if self.function is None:
            return _picked(where, record, self.columns), self.columns
        try:
            made = self.function(record)
        except Exception as error:
            raise DataError(
                f"{where}: map raised {type(error).__name__}: {str(error).rstrip('.')}. The row is "
                f"{short(record, 200)}; correct the function.",
                code="prompts.bad-map",
                where=where,
                reason=f"{type(error).__name__}: {error}",
            ) from error
        if made is None:
            return None
        if not isinstance(made, Mapping) or not all(isinstance(key, str) for key in made):
            raise DataError(
                f"{where}: map returned {type_of(made)}. Expected a dict with the columns of flowrl, such as "
                f'{{"prompt": ..., "ground_truth": ...}}, or None to leave the row out.',
                code="prompts.bad-map",
                where=where,
                found=type(made).__name__,
            )
        return dict(made), made.keys()


def _picked(where: str, record: Any, columns: Mapping[str, str | None]) -> Any:
    """The record with the mapped columns."""
    if not columns or not isinstance(record, Mapping):
        return record
    values = {name: None if path is None else _at(where, record, path) for name, path in columns.items()}
    return {**record, **values}


def _at(where: str, record: Mapping[str, Any], path: str) -> Any:
    """The value at a path: keys, and indices of lists."""
    if path in record:
        return record[path]
    value: Any = record
    for part in path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, Sequence) and not isinstance(value, str) and part.lstrip("-").isdecimal():
            if not -len(value) <= int(part) < len(value):
                _refuse_path(where, path, f"it has {len(value)} items where the path has {part}.")
            value = value[int(part)]
        else:
            keys = list(map(str, value)) if isinstance(value, Mapping) else []
            found = offer(part, keys) if keys else f"there is {short(value, 80)} where the path has {part!r}."
            _refuse_path(where, path, found)
    return value


def _refuse_path(where: str, path: str, found: str) -> None:
    raise DataError(
        f"{where}: the row has no {path!r}, which columns= names; {found}",
        code="prompts.missing-column",
        where=where,
        column=path,
    )


def how_to_map(source: str, record: Mapping[str, Any], missing: Sequence[str]) -> str:
    """What to pass for columns that a row lacks; it names the row's own columns where these have usual names."""
    pairs: dict[str, str] = {}
    for name in missing:
        usual = [column for column in _USUAL.get(name, ()) if column in record and column not in pairs.values()]
        pairs[name] = next(iter(usual), "...")
    return (
        f"Its columns are {', '.join(map(str, record)) or 'none'}: name those to read, {source}(..., columns={pairs}), "
        f"or pass map='file.py:function'"
    )

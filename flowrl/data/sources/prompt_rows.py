"""The rows of prompt files: JSONL and parquet in verl's format.

A row has these columns; others (such as verl's ``ability``) are not read:

- ``prompt``: a list of messages, ``{"role": str, "content": str}`` each; a user's message has text;
- ``data_source``: str, by which a reward function may choose its rule;
- ``reward_model``: a dict with ``ground_truth``, neither null nor NaN (``style`` is not read: the graph says how to
  score);
- ``extra_info``: a dict, optional (``{}`` where it is missing or null);
- ``chat_template_kwargs``: a dict, optional: arguments of the chat template for this row, such as its ``tools``.

Whatever cannot be read is an error that names the file and the line (counted from 1, as in an editor) or the row
(parquet, counted from 0).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flowrl.data.files import parse_json, reading
from flowrl.data.proto.column_math import short
from flowrl.errors import DataError, type_of

if TYPE_CHECKING:
    from flowrl.data.text.tokenizer import ChatTokenizer

_REQUIRED = ("prompt", "data_source", "reward_model")
_MEDIA = ("images", "videos")  # verl's names; a prompt without them would be trained on with the picture missing
READ = (*_REQUIRED, "extra_info", "chat_template_kwargs", *_MEDIA)
"""The columns that are read."""
_LINE = 1 << 28
"""The most bytes of a line of JSONL."""
_ROLE = 100
"""The most characters of a role."""
_DEPTH = 100
"""How deeply a row may nest."""
_EXPECTED_MESSAGES = 'expected a list of messages, [{"role": "user", "content": "..."}]'


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt that was read: its place in the files, its token ids, and the records that travel with it."""

    index: int
    ids: list[int]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    raw_prompt: list[dict[str, Any]]
    template_kwargs: dict[str, Any]

    @property
    def characters(self) -> dict[str, int]:
        """Of what a chat template writes out."""
        written = (message.get(key, "") for message in self.raw_prompt for key in ("content", "tool_calls"))
        return {"prompt": sum(len(str(text)) for text in (*written, *self.template_kwargs.values()))}

    @property
    def tokens(self) -> dict[str, int]:
        """How many ids it has."""
        return {"prompt": len(self.ids)}

    def tokenised(self, where: str, tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any]) -> Row:
        """With its ids.

        Args:
            where: how an error names the row.
            tokenizer: whose chat template makes the ids.
            template_kwargs: arguments of the template that the row does not have of its own.

        Raises:
            DataError: the chat template does not take it, or makes nothing of it.
        """
        try:
            ids = tokenizer.prompt_ids(self.raw_prompt, {**template_kwargs, **self.template_kwargs})
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        if not ids:
            raise DataError(
                f"{where}: the chat template makes no tokens of the prompt; expected at least one to sample from."
            )
        return replace(self, ids=ids)


class Length(NamedTuple):
    """How long a prompt is, in ``"tokens"``, or in ``"characters"`` where these are too many to be tokenised."""

    number: int
    unit: str

    def __str__(self) -> str:
        return f"{self.number} {self.unit}"


def read(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The records of a file, each with how an error names it.

    Args:
        path: of the file.
        columns: those that are read of parquet.

    Raises:
        DataError: the file cannot be read, or has none.
    """
    empty = True
    with reading(path):
        for pair in READERS[path.suffix.lower()](path, columns):
            empty = False
            yield pair
    if empty:
        raise DataError(f"{path} has no rows; expected at least one, so leave the file out of path=.")


def _read_jsonl(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:  # as bytes, so that U+2028 in a text ends no line
        for number in itertools.count(1):
            where = f"{path}:{number}"
            if not (line := lines.readline(_LINE + 1)):
                return
            if len(line) > _LINE:
                raise DataError(
                    f"{where}: the line has more than {_LINE} bytes; expected one JSON object, of a prompt."
                )
            try:
                record = parse_json(line)
                if b"\\ud" in line.lower():  # half a surrogate pair is JSON, but no text
                    json.dumps(record, ensure_ascii=False).encode()
                yield where, record
            except ValueError as error:  # broken JSON, or bytes that are not UTF-8
                what = "the line is blank" if not line.strip() else f"the line is not JSON ({error})"
                raise DataError(f"{where}: {what}; expected one JSON object, so fix or delete the line.") from error


def _read_parquet(path: Path, wanted: Sequence[str]) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa  # type: ignore[import-untyped]  # here, since graphs and files of JSONL need none of it
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    row = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [name for name in wanted if name in names]
            if twice := [name for name in columns if names.count(name) > 1]:
                raise ValueError(f"there are {names.count(twice[0])} columns {twice[0]!r}")
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for record in batch.to_pylist():
                    yield f"{path} row {row}", record
                    row += 1
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # such as text that is not UTF-8
        raise DataError(
            f"{path} cannot be read as parquet after {row} rows ({error}); write the file again."
        ) from error


READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


def checked(index: int, where: str, record: Any) -> Row:
    """A record of verl's format, still without ids.

    Raises:
        DataError: it is none.
    """
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: the row is {type_of(record)}; expected an object with the keys {', '.join(_REQUIRED)}."
        )
    refuse_nested(where, record, READ)
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
        raise DataError(
            f"{where}: data_source is {short(source, 200)}; expected a str, such as a name of the data set."
        )
    if not isinstance(reward, dict) or reward.get("ground_truth") is None:
        raise DataError(
            f"{where}: reward_model is {short(reward, 200)}, which holds no ground truth; expected "
            f'{{"ground_truth": ...}}, and "" in it where the reward needs none.'
        )
    if _holds_nan(reward["ground_truth"]):
        raise DataError(
            f"{where}: the ground truth is {short(reward['ground_truth'], 80)}, and NaN equals no answer; expected a "
            f'value, and "" where the reward needs none.'
        )
    if not isinstance(extra, dict | None):
        raise DataError(f"{where}: extra_info is {short(extra, 200)}; expected an object, or leave it out.")
    arguments, messages = template_arguments(where, record), messages_of(where, record["prompt"])
    return Row(index, [], source, reward["ground_truth"], extra or {}, messages, arguments)


def template_arguments(where: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the chat template that a record has of its own.

    Raises:
        DataError: they are no object.
    """
    own = record.get("chat_template_kwargs")
    if not isinstance(own, dict | None):
        raise DataError(f"{where}: chat_template_kwargs is {short(own, 200)}; expected an object, or leave it out.")
    arguments: dict[str, Any] = _without_nulls(own or {})
    return arguments


def _without_nulls(value: Any) -> Any:
    """A key with null counts as missing, since parquet does not distinguish the two."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def refuse_nested(where: str, record: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Refuse a record in which lists and objects are in each other more deeply than any template would go.

    Raises:
        DataError: it is one.
    """
    if any(_nests(record.get(key), _DEPTH) for key in columns):
        raise DataError(f"{where}: the row nests more than {_DEPTH} lists and objects; expected a flatter one.")


def _nests(value: Any, levels: int) -> bool:
    """Whether lists and objects are in each other more deeply than that."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    return items is not None and (levels == 0 or any(_nests(item, levels - 1) for item in items))


def _holds_nan(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_nan, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_nan, value))
    return isinstance(value, float) and math.isnan(value)


def messages_of(where: str, prompt: Any) -> list[dict[str, Any]]:
    """The messages of a prompt. A key with null counts as missing, since parquet does not distinguish the two.

    Raises:
        DataError: they are none.
    """
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: prompt is {short(prompt, 200)}; {_EXPECTED_MESSAGES}.")
    messages = []
    for i, message in enumerate(prompt):
        kept = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
        # A template would print any other content, such as a list of parts, as Python shows it.
        text = isinstance(kept.get("content"), str) or ("content" not in kept and "tool_calls" in kept)
        role = kept.get("role")
        if not isinstance(role, str) or not 0 < len(role) <= _ROLE or not text:
            raise DataError(
                f"{where}: message {i} of prompt is {short(message, 200)}; {_EXPECTED_MESSAGES}, with text in both."
            )
        if role == "user" and not kept.get("content", "").strip():
            raise DataError(f"{where}: message {i} of prompt is of a user who says nothing; {_EXPECTED_MESSAGES}.")
        messages.append(kept)
    if not any(message.get("content", "").strip() or "tool_calls" in message for message in messages):
        raise DataError(f"{where}: no message of prompt says anything; {_EXPECTED_MESSAGES}.")
    return messages


def copied(value: Any) -> Any:
    """A record with containers of its own, so that what a reward function writes into its extra_info is not there in
    later epochs. JSON and parquet give no other containers, which spares half of what `copy.deepcopy` costs.
    """
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copied(item) for item in value]
    return tuple(map(copied, value)) if isinstance(value, tuple) else value

"""The rows of prompt files: JSONL and parquet in verl's format.

A row has these columns; others (such as verl's ``ability``) are ignored:

- ``prompt``: a list of messages, each ``{"role": str, "content": str}``; a user message must not be empty;
- ``data_source``: str, by which a reward function may choose its rule;
- ``reward_model``: a dict with ``ground_truth``, neither null nor NaN (``style`` is ignored: the graph defines the
  reward);
- ``extra_info``: a dict, optional (``{}`` if missing or null);
- ``chat_template_kwargs``: a dict, optional: arguments of the chat template for this row, such as its ``tools``.

Errors name the file and the line (JSONL, counted from 1) or the row (parquet, counted from 0).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from flowrl.data.files import parse_json, reading
from flowrl.data.proto.column_math import short
from flowrl.errors import DataError, type_of

if TYPE_CHECKING:
    from flowrl.data.text.tokenizer import ChatTokenizer

_REQUIRED = ("prompt", "data_source", "reward_model")
_MEDIA = ("images", "videos")  # verl's names; ignoring them would train on a prompt whose image is missing
READ = (*_REQUIRED, "extra_info", "chat_template_kwargs", *_MEDIA)
"""The columns to read."""
_LINE = 1 << 28
"""Maximum bytes of a line of JSONL."""
_ROLE = 100
"""Maximum characters of a role."""
_DEPTH = 100
"""Maximum nesting of a row."""
_EXPECTED_MESSAGES = 'Expected a list of messages, [{"role": "user", "content": "..."}]'


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt: its index in the files, its token ids, and its other columns."""

    index: int
    ids: list[int]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    raw_prompt: list[dict[str, Any]]
    template_kwargs: dict[str, Any]

    @property
    def characters(self) -> dict[str, int]:
        """Number of characters that a chat template renders."""
        written = (message.get(key, "") for message in self.raw_prompt for key in ("content", "tool_calls"))
        return {"prompt": sum(len(str(text)) for text in (*written, *self.template_kwargs.values()))}

    @property
    def tokens(self) -> dict[str, int]:
        """Number of ids."""
        return {"prompt": len(self.ids)}

    @property
    def every_id(self) -> Sequence[int]:
        """Its ids."""
        return self.ids

    def tokenized(self, where: str, tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any]) -> Row:
        """A copy with ids.

        `where` names the row in errors; the row's own template arguments take precedence.
        """
        try:
            ids = tokenizer.prompt_ids(self.raw_prompt, {**template_kwargs, **self.template_kwargs})
        except DataError as error:
            code, facts = error.code, {**error.facts, "where": where}
            raise DataError(f"{where}: {error.message}", code=code, **facts) from error
        if not ids:
            raise DataError(
                f"{where}: the chat template renders the prompt as no tokens. Expected at least one; correct the "
                f"prompt or the template.",
                code="tokenizer.empty-prompt",
                where=where,
            )
        return replace(self, ids=ids)


class Length(NamedTuple):
    """Length of a text in ``"tokens"``, or in ``"characters"`` if it is too long to tokenize."""

    number: int
    unit: str

    def __str__(self) -> str:
        return f"{self.number} {self.unit}"


def read(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The records of a file, each with its place for errors; `columns` are read from parquet."""
    empty = True
    with reading(path):
        for pair in READERS[path.suffix.lower()](path, columns):
            empty = False
            yield pair
    if empty:
        raise DataError(
            f"{path} has no rows. Expected at least one; remove the file from path=.", code="prompts.no-rows", path=path
        )


def _read_jsonl(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:  # bytes: U+2028 in a text must not end a line
        for number in itertools.count(1):
            where = f"{path}:{number}"
            if not (line := lines.readline(_LINE + 1)):
                return
            if len(line) > _LINE:
                raise DataError(
                    f"{where}: the line has more than {_LINE} bytes. Expected one JSON object per line; split or "
                    f"delete it.",
                    code="prompts.broken-file",
                    path=path,
                    line=number,
                )
            try:
                record = parse_json(line)
                if b"\\ud" in line.lower():  # half a surrogate pair is valid JSON but not valid text
                    json.dumps(record, ensure_ascii=False).encode()
                yield where, record
            except ValueError as error:  # broken JSON, or bytes that are not UTF-8
                what = "the line is blank" if not line.strip() else f"the line is not JSON ({error})"
                raise DataError(
                    f"{where}: {what}. Expected one JSON object per line; fix or delete it.",
                    code="prompts.broken-file",
                    path=path,
                    line=number,
                ) from error


def _read_parquet(path: Path, selected: Sequence[str]) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa  # here: slow to import, and only parquet needs it
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [name for name in selected if name in names]
            if twice := [name for name in columns if names.count(name) > 1]:
                raise ValueError(f"there are {names.count(twice[0])} columns {twice[0]!r}")
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for record in batch.to_pylist():
                    yield f"{path} row {row}", record
                    row += 1
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # such as text that is not UTF-8
        raise DataError(
            f"Cannot read {path} as parquet after {row} rows ({error}). Write the file again.",
            code="prompts.broken-file",
            path=path,
            row=row,
        ) from error


READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


def checked(index: int, where: str, record: Any) -> Row:
    """A record in verl's format as a row without ids."""
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: the row is {type_of(record)}. Expected an object with the keys {', '.join(_REQUIRED)}.",
            code="prompts.wrong-type",
            where=where,
            found=type(record).__name__,
        )
    refuse_nested(where, record, READ)
    if missing := [key for key in _REQUIRED if record.get(key) is None]:
        raise DataError(
            f"{where}: the row has no {' and no '.join(missing)} (missing or null). Expected prompt (a list of "
            f'messages), data_source (a str) and reward_model ({{"ground_truth": ...}}).',
            code="prompts.missing-key",
            where=where,
            missing=missing,
        )
    if media := [key for key in _MEDIA if record.get(key)]:
        raise DataError(
            f"{where}: the row has {media[0]}, but flowrl supports text only. Remove rows with images or videos.",
            code="prompts.media",
            where=where,
            key=media[0],
        )
    source, reward, extra = record["data_source"], record["reward_model"], record.get("extra_info")
    if not isinstance(source, str):
        _refuse_type(where, "data_source", source, "a str, such as the name of the dataset")
    _check_reward(where, reward)
    if not isinstance(extra, dict | None):
        _refuse_type(where, "extra_info", extra, "an object; correct or remove it")
    arguments, messages = template_arguments(where, record), messages_of(where, record["prompt"])
    refuse_answered(where, messages)
    return Row(index, [], source, reward["ground_truth"], extra or {}, messages, arguments)


def _check_reward(where: str, reward: Any) -> None:
    """Refuse a ``reward_model`` without a ground truth."""
    if not isinstance(reward, dict) or reward.get("ground_truth") is None:
        raise DataError(
            f"{where}: reward_model is {short(reward, 200)}, which has no ground truth. Expected "
            f'{{"ground_truth": ...}}; use "" if the reward needs none.',
            code="prompts.no-ground-truth",
            where=where,
            found=short(reward, 200),
        )
    if _holds_nan(reward["ground_truth"]):
        raise DataError(
            f"{where}: the ground truth is {short(reward['ground_truth'], 80)}, but NaN equals no response. Expected a "
            f'value; use "" if the reward needs none.',
            code="prompts.no-ground-truth",
            where=where,
            found=short(reward["ground_truth"], 80),
        )


def _refuse_type(where: str, key: str, found: Any, expected: str) -> NoReturn:
    raise DataError(
        f"{where}: {key} is {short(found, 200)}. Expected {expected}.",
        code="prompts.wrong-type",
        where=where,
        key=key,
        found=short(found, 200),
    )


def template_arguments(where: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """The record's own arguments of the chat template."""
    own = record.get("chat_template_kwargs")
    if not isinstance(own, dict | None):
        _refuse_type(where, "chat_template_kwargs", own, "an object; correct or remove it")
    arguments: dict[str, Any] = _without_nulls(own or {})
    return arguments


def _without_nulls(value: Any) -> Any:
    """Drop keys with null, since parquet does not distinguish null from missing."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def refuse_nested(where: str, record: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Refuse a record that nests too deeply."""
    if any(_nests(record.get(key), _DEPTH) for key in columns):
        raise DataError(
            f"{where}: the row nests lists and objects more than {_DEPTH} levels deep. Flatten it.",
            code="prompts.wrong-type",
            where=where,
            limit=_DEPTH,
        )


def _nests(value: Any, levels: int) -> bool:
    """Whether lists and objects nest more than `levels` deep."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    return items is not None and (levels == 0 or any(_nests(item, levels - 1) for item in items))


def _holds_nan(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_nan, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_nan, value))
    return isinstance(value, float) and math.isnan(value)


def messages_of(where: str, prompt: Any) -> list[dict[str, Any]]:
    """The messages of a prompt; keys with null are dropped, since parquet does not distinguish null from missing."""

    def refuse(what: str, more: str = "", **facts: Any) -> NoReturn:
        raise DataError(
            f"{where}: {what}. {_EXPECTED_MESSAGES}{more}.", code="prompts.bad-messages", where=where, **facts
        )

    if not isinstance(prompt, list) or not prompt:
        refuse(f"prompt is {short(prompt, 200)}", found=short(prompt, 200))
    messages = []
    for i, message in enumerate(prompt):
        given = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
        # A template would print any other content, such as a list of parts, as its Python repr.
        text = isinstance(given.get("content"), str) or ("content" not in given and "tool_calls" in given)
        role = given.get("role")
        if not isinstance(role, str) or not 0 < len(role) <= _ROLE or not text:
            found = short(message, 200)
            refuse(f"message {i} of prompt is {found}", ", both values text", index=i, found=found)
        if role == "user" and not given.get("content", "").strip():
            refuse(f"message {i} of prompt is an empty user message", index=i)
        messages.append(given)
    if not any(message.get("content", "").strip() or "tool_calls" in message for message in messages):
        refuse("all messages of prompt are empty")
    return messages


def refuse_answered(where: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a prompt that ends with a response."""
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the prompt ends with a message of the assistant, so there is nothing to respond to. Remove "
            f"that message; a demonstration may give the whole conversation as messages.",
            code="prompts.ends-with-assistant",
            where=where,
        )


def copied(value: Any) -> Any:
    """A copy of all containers, so that a reward function cannot change `extra_info` in later epochs."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copied(item) for item in value]
    return tuple(map(copied, value)) if isinstance(value, tuple) else value

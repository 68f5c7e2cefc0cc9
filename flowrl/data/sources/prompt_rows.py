"""The rows of prompts, in verl's format and in TRL's.

A row has these columns; others (such as verl's ``ability``) are ignored:

- ``prompt``: a list of messages, each ``{"role": str, "content": str}``, or the text of one user message; a user
  message must not be empty; a content may be a list of text parts, ``[{"type": "text", "text": str}]``;
- ``reward_model``: a dict with ``ground_truth``, neither null nor NaN (``style`` is ignored: the graph defines the
  reward); or, in its place, a column ``ground_truth`` or ``solution`` with the same;
- ``data_source``: str, by which a reward function may choose its rule; a row without ``reward_model`` may lack it, and
  then has the name of its data set on the Hub, or ``""``;
- ``extra_info``: a dict, optional (``{}`` if missing or null);
- ``chat_template_kwargs``: a dict, optional: arguments of the chat template for this row, such as its ``tools``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from flowrl.data.proto.column_math import short
from flowrl.data.sources.mapping import how_to_map
from flowrl.errors import DataError, type_of

if TYPE_CHECKING:
    from flowrl.data.text.tokenizer import ChatTokenizer

_REQUIRED = ("prompt", "data_source", "reward_model")
_TRUTHS = ("ground_truth", "solution")
"""Columns that have the ground truth of a row without ``reward_model``."""
_MEDIA = ("images", "videos")  # verl's names; ignoring them would train on a prompt whose image is missing
READ = (*_REQUIRED, *_TRUTHS, "extra_info", "chat_template_kwargs", *_MEDIA)
"""The columns to read."""
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


class Provenance(NamedTuple):
    """Where rows come from.

    Args:
        kind: the class of the source.
        data_source: of rows that have none.
        example: returns the first row with all its columns.
    """

    kind: str
    data_source: str
    example: Callable[[], Any]

    def how_to_map(self, missing: Sequence[str]) -> str:
        """What to pass for columns that a row lacks."""
        row = self.example()
        return how_to_map(self.kind, row if isinstance(row, Mapping) else {}, missing)


class Length(NamedTuple):
    """Length of a text in ``"tokens"``, or in ``"characters"`` if it is too long to tokenize."""

    number: int
    unit: str

    def __str__(self) -> str:
        return f"{self.number} {self.unit}"


def checked(index: int, where: str, record: Any, mapped: Collection[str], source: Provenance) -> Row:
    """A record as a row without ids.

    Args:
        mapped: the columns that the user's mapping has set; among them, a ``ground_truth`` may be null.
        source: of the row.
    """
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: the row is {type_of(record)}. Expected an object with the keys {', '.join(_REQUIRED)}.",
            code="prompts.wrong-type",
            where=where,
            found=type(record).__name__,
        )
    refuse_nested(where, record, READ)
    _refuse_missing(where, record, mapped, source)
    if media := [key for key in _MEDIA if record.get(key)]:
        refuse_media(where, media[0])
    data_source, extra = record.get("data_source"), record.get("extra_info")
    data_source = source.data_source if data_source is None else data_source
    if not isinstance(data_source, str):
        _refuse_type(where, "data_source", data_source, "a str, such as the name of the dataset")
    truth = _ground_truth(where, record, mapped)
    if not isinstance(extra, dict | None):
        _refuse_type(where, "extra_info", extra, "an object; correct or remove it")
    arguments, messages = template_arguments(where, record), messages_of(where, as_messages(record["prompt"]))
    refuse_answered(where, messages)
    return Row(index, [], data_source, truth, extra or {}, messages, arguments)


def _refuse_missing(where: str, record: Mapping[str, Any], mapped: Collection[str], source: Provenance) -> None:
    """Refuse a record without a prompt or a ground truth; with ``reward_model`` also one without ``data_source``."""
    verl = record.get("reward_model") is not None and "ground_truth" not in mapped
    missing = [key for key in (_REQUIRED if verl else ("prompt",)) if record.get(key) is None]
    if not verl and not any(key in record for key in _TRUTHS):
        missing.append("ground_truth")
    if missing:
        truth = " If the reward reads no ground truth, pass columns={'ground_truth': None}."
        raise DataError(
            f"{where}: the row has no {' and no '.join(missing)} (missing or null). "
            f"{source.how_to_map(missing)}.{truth if 'ground_truth' in missing else ''}",
            code="prompts.missing-key",
            where=where,
            missing=missing,
        )


def _ground_truth(where: str, record: Mapping[str, Any], mapped: Collection[str]) -> Any:
    """The ground truth of a record, which is null only if the user's mapping says so."""
    reward = record.get("reward_model")
    if reward is None or "ground_truth" in mapped:
        key = next(key for key in _TRUTHS if key in record)
        truth, what = record[key], f"{key} is {short(record[key], 200)}"
    else:
        key, truth = "reward_model", reward.get("ground_truth") if isinstance(reward, dict) else None
        what = f"reward_model is {short(reward, 200)}, which has no ground truth"
    if truth is None and "ground_truth" not in mapped:
        raise DataError(
            f"{where}: {what}. Expected a value; pass columns={{'ground_truth': None}} if the reward needs none.",
            code="prompts.no-ground-truth",
            where=where,
            found=short(record[key], 200),
        )
    if _holds_nan(truth):
        raise DataError(
            f"{where}: the ground truth is {short(truth, 80)}, but NaN equals no response. Expected a value; pass "
            f"columns={{'ground_truth': None}} if the reward needs none.",
            code="prompts.no-ground-truth",
            where=where,
            found=short(truth, 80),
        )
    return truth


def refuse_media(where: str, key: str) -> NoReturn:
    raise DataError(
        f"{where}: the row has {key}, but flowrl supports text only. Remove rows with images, videos or audio, or "
        f"leave them out: map='file.py:function', which returns None for them.",
        code="prompts.media",
        where=where,
        key=key,
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


def as_messages(prompt: Any) -> Any:
    """A prompt that is text as one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def messages_of(where: str, prompt: Any, part: str = "prompt") -> list[dict[str, Any]]:
    """The messages of a prompt or another part; keys with null are dropped, since parquet does not distinguish null
    from missing."""

    def refuse(what: str, more: str = "", **facts: Any) -> NoReturn:
        raise DataError(
            f"{where}: {what}. {_EXPECTED_MESSAGES}{more}.", code="prompts.bad-messages", where=where, **facts
        )

    if not isinstance(prompt, list) or not prompt:
        refuse(f"{part} is {short(prompt, 200)}", found=short(prompt, 200))
    messages = []
    for i, message in enumerate(prompt):
        given = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
        if "content" in given:
            given["content"] = _text_of(where, given["content"])
        if "tool_calls" in given:
            given["tool_calls"] = _without_nulls(given["tool_calls"])
        # A template would print any other content as its Python repr.
        text = isinstance(given.get("content"), str) or ("content" not in given and "tool_calls" in given)
        role = given.get("role")
        if not isinstance(role, str) or not 0 < len(role) <= _ROLE or not text:
            found = short(message, 200)
            refuse(f"message {i} of {part} is {found}", ", both values text", index=i, found=found)
        if role == "user" and not given.get("content", "").strip():
            refuse(f"message {i} of {part} is an empty user message", index=i)
        messages.append(given)
    if not any(message.get("content", "").strip() or "tool_calls" in message for message in messages):
        refuse(f"all messages of {part} are empty")
    return messages


def _text_of(where: str, content: Any) -> Any:
    """The text of a content that is a list of text parts, joined as chat templates join them; another as it is."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    kinds = [str(part.get("type")) for part in content]
    if media := [kind for kind in kinds if kind.removeprefix("input_").startswith(("image", "video", "audio"))]:
        refuse_media(where, media[0])
    texts = [part.get("text") for part in content]
    whole = set(kinds) == {"text"} and all(isinstance(text, str) for text in texts)
    return "".join(map(str, texts)) if whole else content


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

"""Checks of the messages of a conversation, before a chat template renders them, and of the text that it writes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flowrl.errors import DataError, offer, short

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment", "observation")
"""The roles that chat models are trained on; templates may have others, which they name."""

_ROLE = re.compile(r"[\w .-]*")


def check_messages(messages: Sequence[Mapping[str, Any]], words: Collection[str], folder: str) -> None:
    """Refuse missing keys, which a template would render as nothing, and roles that no model knows.

    Args:
        words: those of the chat template in `folder`, which may name further roles.
    """
    if isinstance(messages, str | Mapping) or not messages:
        raise DataError(
            f"The messages are {short(messages)}. Expected a list with at least one message, such as "
            f'[{{"role": "user", "content": "..."}}].',
            code="tokenizer.bad-messages",
            found=short(messages),
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(
                f'Message {i} is {short(message)}. Expected a dict, {{"role": "user", "content": "..."}}.',
                code="tokenizer.bad-messages",
                index=i,
                found=short(message),
            )
        if isinstance(role := message.get("role"), str) and not _ROLE.fullmatch(role):
            raise DataError(
                f"Message {i} has the role {short(role)}. Expected a name of letters, digits, spaces or `_.-`, such as "
                f'"user", because templates write it into their control tokens.',
                code="tokenizer.bad-messages",
                index=i,
                found=short(role),
            )
        if not isinstance(message.get("role"), str) or not ({"content", "tool_calls"} & message.keys()):
            raise DataError(
                f"Message {i} has the keys {short(sorted(map(str, message)))} and the role "
                f"{short(message.get('role'))}. Expected "
                f'"role" (text) and "content", such as {{"role": "user", "content": "..."}}.',
                code="tokenizer.bad-messages",
                index=i,
                found=sorted(map(str, message)),
            )
        if (role := message["role"]) not in ROLES and role not in words:
            raise DataError(
                f"Message {i} has the role {short(role)}, which the chat template in {folder!r} does not name, so the "
                f"model has not seen it; {offer(role, ROLES, 'usual roles are')}",
                code="tokenizer.bad-messages",
                index=i,
                found=short(role),
                expected=ROLES,
            )


def refuse_surrogates(text: str) -> None:
    """Refuse a text with half of a surrogate pair, which no tokenizer encodes."""
    found = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
    if found is None:
        return
    near = short(text[max(0, found - 20) : found + 20])
    raise DataError(
        f"A text has half of a surrogate pair at character {found}, in {near}, which no tokenizer encodes; expected "
        f"text that UTF-8 can represent. Replace it: text.encode('utf-8', 'replace').decode().",
        code="tokenizer.not-encodable",
        position=found,
        found=near,
    )

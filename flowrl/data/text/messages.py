"""Checks of the messages of a conversation, before a chat template renders them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flowrl.errors import DataError, offer

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
            f"The messages are {messages!r}. Expected a list with at least one message, such as "
            f'[{{"role": "user", "content": "..."}}].',
            code="tokenizer.bad-messages",
            found=repr(messages),
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(
                f'Message {i} is {message!r}. Expected a dict, {{"role": "user", "content": "..."}}.',
                code="tokenizer.bad-messages",
                index=i,
                found=repr(message),
            )
        if isinstance(role := message.get("role"), str) and not _ROLE.fullmatch(role):
            raise DataError(
                f"Message {i} has the role {role!r}. Expected a name of letters, digits, spaces or `_.-`, such as "
                f'"user", because templates write it into their control tokens.',
                code="tokenizer.bad-messages",
                index=i,
                found=repr(role),
            )
        if not isinstance(message.get("role"), str) or not ({"content", "tool_calls"} & message.keys()):
            raise DataError(
                f"Message {i} has the keys {sorted(map(str, message))} and the role {message.get('role')!r}. Expected "
                f'"role" (text) and "content", such as {{"role": "user", "content": "..."}}.',
                code="tokenizer.bad-messages",
                index=i,
                found=sorted(map(str, message)),
            )
        if (role := message["role"]) not in ROLES and role not in words:
            raise DataError(
                f"Message {i} has the role {role!r}, which the chat template in {folder!r} does not name, so the model "
                f"has not seen it; {offer(role, ROLES, 'usual roles are')}",
                code="tokenizer.bad-messages",
                index=i,
                found=repr(role),
                expected=ROLES,
            )

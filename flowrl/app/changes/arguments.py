"""Arguments of a target that is a function: ``flowrl run FILE.py:make --n=2``."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from flowrl.errors import ParameterError, offer

EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings of a command that takes arguments of its target."""


def parsed(words: Sequence[str]) -> dict[str, str]:
    """The words that no option of the command took, as arguments: ``--n=2``, or ``--n 2``.

    Raises:
        ParameterError: a word without a name.
    """
    found: dict[str, str] = {}
    left: Iterator[str] = iter(words)
    for word in left:
        name, equals, text = word.partition("=")
        value = text if equals else next(left, None)
        if not name.startswith("--") or value is None:
            raise ParameterError(
                f"{word!r} is neither an option nor an argument of the target. Pass arguments of its function as "
                f"--name=value.",
                code="cli.bad-option",
                option=word,
            )
        found[name.removeprefix("--").replace("-", "_")] = value
    return found


def bound(
    function: Callable[..., Any], given: Mapping[str, str], target: str, options: Iterable[str]
) -> dict[str, Any]:
    """The arguments of a function, typed by its signature.

    Args:
        options: those of the command, which a misspelled name may have meant.

    Raises:
        ParameterError: a name that the function does not have, or a value of another type.
    """
    from pydantic import TypeAdapter, ValidationError

    from flowrl.run.settings.typed import typed

    known = inspect.signature(function).parameters
    hints = typing.get_type_hints(function, include_extras=True)
    found = {}
    for name, text in given.items():
        if name not in known:
            raise unknown(name, text, target, known, options)
        annotation = hints.get(name, _of_default(known[name].default))
        try:
            found[name] = TypeAdapter(annotation).validate_python(typed(text, annotation))
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ParameterError(
                f"--{name}={text} does not fit {target}: {reason[0].lower()}{reason[1:]}. Its parameter is "
                f"{known[name]}.",
                code="cli.bad-option",
                option=f"--{name}",
                found=text,
            ) from error
    return found


def unknown(name: str, text: str, target: str, known: Iterable[str], options: Iterable[str]) -> ParameterError:
    """The error for an option that neither the command nor the target's function has."""
    names = [*known, *(option.removeprefix("--") for option in options)]
    return ParameterError(
        f"--{name}={text} is neither an option of this command nor an argument of {target}; "
        f"{offer(name, names, 'expected one of')}",
        code="cli.bad-option",
        option=f"--{name}",
        found=text,
    )


def _of_default(default: Any) -> Any:
    """The type of a parameter without an annotation."""
    return type(default) if isinstance(default, bool | int | float | str) else Any

"""Reward functions as worker processes import them: a reference, the digest of its source file, and parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flowrl import references as functions
from flowrl.operators.reward.worker import SOURCE, digest
from flowrl.rewards.reward_function import RewardFunction
from flowrl.spec import Spec, parameters


class FunctionSource(NamedTuple):
    """An importable function: its reference (files by absolute path), and the digest of its source file, if any.

    With `parameters`, as JSON, the reference names a class, and the function is the instance with these parameters.
    """

    reference: str
    digest: str | None
    parameters: str | None = None


def source_of(fn: Callable[..., Any] | str) -> FunctionSource | None:
    """The source of a function; None if it can only run in this process."""
    if isinstance(fn, RewardFunction):
        return _of_spec(fn)
    ref = fn if isinstance(fn, str) else functions.reference(fn)
    if ref is None:
        return None
    file = functions.source_file(ref)
    if file is None:
        return FunctionSource(ref, None)
    if functions.runs_again(ref):
        return None
    with open(file, "rb") as stream:
        content = stream.read()
    module, name = functions.parse_reference(ref)
    return FunctionSource(f"{file if module.endswith('.py') else module}:{name}", digest(content))


class _NotImportable(Exception):
    """A parameter is a function without a reference."""


def _of_spec(spec: Spec) -> FunctionSource | None:
    own = source_of(type(spec))
    if own is None:
        return None
    try:
        given = {name: _plain(value, name in spec.references) for name, value in parameters(spec).items()}
    except _NotImportable:
        return None
    return own._replace(parameters=json.dumps(given))


def _plain(value: Any, reference: bool) -> Any:
    """A parameter as JSON; a function, or a string that is a `reference`, is the parts of its source."""
    if value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and not reference):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(item, reference) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item, reference) for item in value]
    source = _of_spec(value) if isinstance(value, Spec) else source_of(value)
    if source is None:
        raise _NotImportable
    return {SOURCE: [*functions.parse_reference(source.reference), source.digest, source.parameters]}

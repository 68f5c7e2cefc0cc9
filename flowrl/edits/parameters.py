"""Parameters by path: ``loss.clip_high`` of an operator, ``optimizer.lr`` of a backend.

A path goes through specs, mappings (by key) and tuples (by position, or by the `name` of an item).
"""

from __future__ import annotations

import dataclasses
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast, get_args, get_origin

from flowrl.errors import GraphError, offer, refuse_staleness
from flowrl.spec import Spec, parameters

T = TypeVar("T")
Read = Callable[[Any, Any, str], Any]
"""Makes the value of a parameter from what was given, the parameter's annotation, and its whole path."""


def as_given(value: Any, annotation: Any, path: str) -> Any:
    """The value itself; see `Read`."""
    return value


def with_parameters(
    owner: T, where: str, given: Mapping[str, Any], call: Callable[[str], str], read: Read = as_given, of: Any = Any
) -> T:
    """`owner` with other parameters, also of what its parameters contain; those of one spec change at once.

    Args:
        where: the path of `owner`.
        given: values by the path below `owner`, such as ``{"loss.clip_high": 0.3}``.
        call: the call that sets a whole path, for messages.
        of: the annotation of `owner`.

    Raises:
        GraphError: a path that names no parameter.
    """
    known = members(owner, of)
    changed: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for path, value in given.items():
        name, dot, inner = path.partition(".")
        if name not in known or (dot and not inner):
            refuse_staleness(where, {name: value}, known)
            raise GraphError(
                f"{call(f'{where}.{path}' if path else where)} does not name a parameter; "
                f"{offer(path, known, f'{where} has')}",
                code="parameter.unknown",
                node=where,
                parameter=path,
            )
        if inner:
            below.setdefault(name, {})[inner] = value
        else:
            changed[name] = read(value, known[name][1], f"{where}.{name}")
    for name, values in below.items():
        inside, annotation = changed.get(name, known[name][0]), known[name][1]
        if not isinstance(inside, Spec | Mapping | tuple):
            raise GraphError(
                f"{call(f'{where}.{name}.{next(iter(values))}')} names a parameter of {where}.{name}, which is "
                f"{inside!r} and has none. Set {name} itself: "
                f"{call(f'{where}.{name}').replace('...', _spec_with(values, annotation))}.",
                code="parameter.unknown",
                node=where,
                parameter=f"{name}.{next(iter(values))}",
            )
        changed[name] = with_parameters(inside, f"{where}.{name}", values, call, read, annotation)
    return cast("T", _replaced(owner, changed))


def _spec_with(values: Mapping[str, Any], annotation: Any) -> str:
    """The call of the spec that an annotation allows, with these parameters; ``...`` if it is not exactly one spec."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and issubclass(kind, Spec)]
    if len(kinds) != 1 or not values.keys() <= cast(Any, kinds[0]).__pydantic_fields__.keys():
        return "..."
    return f"{kinds[0].__name__}({', '.join(f'{name}={value}' for name, value in values.items())})"


def members(owner: Any, of: Any = Any) -> dict[str, tuple[Any, Any]]:
    """The value and the annotation of each parameter of a spec, each item of a mapping or tuple."""
    if isinstance(owner, Spec):
        fields = cast(Any, type(owner)).__pydantic_fields__
        return {name: (value, fields[name].annotation) for name, value in parameters(owner).items()}
    if isinstance(owner, Mapping):
        return {key: (value, _item_of(of, abc.Mapping)) for key, value in owner.items()}
    if isinstance(owner, tuple):
        return {_name(value, i): (value, _item_of(of, tuple)) for i, value in enumerate(owner)}
    return {}


def annotation_at(owner: Any, path: str, of: Any = Any) -> Any:
    """The annotation of the parameter at a path below `owner`, whose own is `of`; an empty path is `owner` itself."""
    for name in path.split(".") if path else ():
        owner, of = members(owner, of)[name]
    return of


def _item_of(annotation: Any, kind: type) -> Any:
    """The annotation of the values of a mapping, or of the items of a tuple of any length; else `Any`."""
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is kind:
            arguments = [argument for argument in get_args(part) if argument is not Ellipsis]
            return arguments[-1]
    return Any


def paths(owner: Any) -> Iterator[str]:
    """The paths of all parameters below `owner`."""
    for name, (value, _) in members(owner).items():
        yield name
        yield from (f"{name}.{path}" for path in paths(value))


def _name(item: Any, position: int) -> str:
    """The name of an item of a tuple."""
    return str(getattr(item, "name", position)) if isinstance(item, Spec) else str(position)


def _replaced(owner: Any, changed: Mapping[str, Any]) -> Any:
    if isinstance(owner, tuple):
        return tuple(changed.get(_name(item, i), item) for i, item in enumerate(owner))
    return {**owner, **changed} if isinstance(owner, Mapping) else dataclasses.replace(owner, **changed)

"""Values from text, by the annotation of what they are for: ``1e-6``, ``none``, ``Linear(0.3, 0.2, steps=100)``."""

from __future__ import annotations

import ast
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from flowrl.errors import FlowrlError
from flowrl.files.names import UNKNOWN, named
from flowrl.spec import Spec

_BOOLS = {"true": True, "false": False}


def typed(text: str, annotation: Any) -> Any:
    """The value that a text stands for; text that fits no type in the annotation remains text, for it to refuse.

    Raises:
        GraphError, ParameterError: a call of a class that does not exist, or that refuses its arguments.
    """
    kinds = kinds_of(annotation)
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if text in choices:
        return text
    is_any = Any in kinds or object in kinds
    if (is_any or type(None) in kinds) and text.lower() in ("none", "null"):
        return None
    if (is_any or bool in (*kinds, *map(type, choices))) and text.lower() in _BOOLS:
        return _BOOLS[text.lower()]
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except FlowrlError as error:
        if error.code == UNKNOWN and (is_any or str in kinds):
            return text
        raise
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return text
    return value if str not in kinds or _is_other(value, kinds) else text


def _is_other(value: Any, kinds: list[Any]) -> bool:
    """Whether a literal is meant as such where text is allowed, too: ``'quoted'``, or of another allowed type."""
    if isinstance(value, tuple | list | Mapping):
        return any(get_origin(kind) in (tuple, list, dict, Mapping) for kind in kinds)
    is_number = isinstance(value, int | float) and bool({int, float} & {*kinds})
    return isinstance(value, str | Spec) or is_number


def kinds_of(annotation: Any) -> list[Any]:
    """The types that an annotation allows."""
    if get_origin(annotation) is Annotated:
        return kinds_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in kinds_of(part)]
    return [annotation]


def _value(node: ast.expr) -> Any:
    """A Python literal, or a call of a class that files may name with such arguments; raises ValueError for others."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=given, keywords=keywords):
            spec = named(name)
            if not isinstance(spec, type) or not issubclass(spec, Spec) or any(one.arg is None for one in keywords):
                raise ValueError(name)
            return spec(*map(_value, given), **{one.arg: _value(one.value) for one in keywords if one.arg is not None})
        case ast.Tuple(elts=items):
            return tuple(map(_value, items))
        case ast.List(elts=items):
            return list(map(_value, items))
        case _:
            return ast.literal_eval(node)

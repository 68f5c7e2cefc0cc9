"""Values of expressions in a script, from its syntax tree: nothing runs. What only a run would tell is `Unknown`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowrl.importers.settings import Setting


@dataclass(frozen=True)
class Unknown:
    """A value that only a run of the script would tell, and why: ``"line 3: `date()` was not run"``."""

    why: str


@dataclass(frozen=True)
class Named:
    """What an import gives, such as ``torch.bfloat16``; in a string it is its last part."""

    name: str
    statement: str = ""
    """The import statement."""

    def __str__(self) -> str:
        return self.name


@dataclass(eq=False)
class Local:
    """A function of the script, with the names that it reads."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
    scope: Scope

    @property
    def name(self) -> str:
        return "" if isinstance(self.node, ast.Lambda) else self.node.name


@dataclass(eq=False)
class Made:
    """What a call of an imported name returns, such as a ``LoraConfig``."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    line: int

    @property
    def kind(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Data:
    """A data set: what ``load_dataset`` gets, and the calls after it."""

    name: Any
    config: Any = None
    split: Any = None
    steps: tuple[tuple[str, list[Any], dict[str, Any], int], ...] = ()
    """Methods with their arguments and lines."""


@dataclass(eq=False)
class Flags:
    """The objects that a parser of flags returns: one name space, as flags have distinct names."""

    given: dict[str, Setting]
    defaults: Mapping[str, Any]
    own: dict[str, Any] = field(default_factory=dict)
    """Defaults of flags that the script defines."""

    def get(self, name: str) -> Any:
        """The value of a flag, or its default."""
        setting = self.given.get(name)
        if setting is None:
            return self.own[name] if name in self.own else self.defaults.get(name)
        return Unknown("; ".join(setting.unknown)) if setting.unknown else setting.value


@dataclass(eq=False)
class Scope:
    """Names with their values, and the statements that assigned them."""

    values: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, ast.expr] = field(default_factory=dict)
    outer: Scope | None = None

    def get(self, name: str) -> Any:
        """The value of a name; an `Unknown` for one that the script does not set."""
        if name in self.values:
            return self.values[name]
        return Unknown(f"`{name}` is not set") if self.outer is None else self.outer.get(name)

    def node(self, name: str) -> ast.expr | None:
        """The expression that was assigned to a name."""
        if name in self.values or self.outer is None:
            return self.nodes.get(name)
        return self.outer.node(name)


_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARE: Mapping[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
}
_PLAIN: Mapping[str, Callable[..., Any]] = {
    "bool": bool, "dict": dict, "float": float, "int": int, "len": len, "list": list, "max": max, "min": min,
    "range": range, "str": str, "tuple": tuple,
}  # fmt: skip
_OF_TEXT = frozenset({"lower", "lstrip", "removeprefix", "removesuffix", "rstrip", "split", "strip", "upper"})
_WRONG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What an operation on values of a wrong type raises; a run of the script would raise it, too."""
_LARGEST = 1 << 20
"""Limit on numbers and sizes that are computed, so that no script costs time."""


def unknown(node: ast.AST, why: str) -> Unknown:
    """An expression that is not computed."""
    text = " ".join(ast.unparse(node).split())
    return Unknown(f"line {getattr(node, 'lineno', 0)}: `{text if len(text) < 60 else text[:57] + '...'}` {why}")


def is_plain(value: Any) -> bool:
    """Whether a value is made of literals only."""
    if isinstance(value, dict):
        return all(map(is_plain, [*value, *value.values()]))
    return all(map(is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, int | float | str | None)


def first_unknown(value: Any) -> Unknown | None:
    """The first unknown value among the parts of a value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((found for part in value if (found := first_unknown(part))), None)
    return value if isinstance(value, Unknown) else None


def computed(node: ast.expr, value: Callable[[ast.expr], Any]) -> Any:
    """The value of an expression without calls and names; `value` gives those of its parts."""
    try:
        return _computed(node, value)
    except _WRONG as error:
        return unknown(node, f"raises {type(error).__name__}")


def _computed(node: ast.expr, value: Callable[[ast.expr], Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.List() | ast.Tuple():
            items = [value(item) for item in node.elts]
            return items if isinstance(node, ast.List) else tuple(items)
        case ast.Dict():
            if None in node.keys:
                return unknown(node, "is not read")
            return {value(key): value(item) for key, item in zip(node.keys, node.values, strict=True) if key}
        case ast.JoinedStr():
            formatted = [part for part in node.values if isinstance(part, ast.FormattedValue)]
            if any(part.format_spec or part.conversion != -1 for part in formatted):
                return unknown(node, "is not read")
            parts = [value(part.value if isinstance(part, ast.FormattedValue) else part) for part in node.values]
            return first_unknown(parts) or "".join(map(str, parts))
        case ast.UnaryOp():
            one = value(node.operand)
            if isinstance(one, Unknown):
                return one
            return -one if isinstance(node.op, ast.USub) else not one if isinstance(node.op, ast.Not) else one
        case ast.BinOp():
            return _binary(node, value(node.left), value(node.right))
        case ast.BoolOp():
            return _boolean(node, value)
        case ast.IfExp():
            test = value(node.test)
            return test if isinstance(test, Unknown) else value(node.body if test else node.orelse)
        case ast.Compare(ops=[op], comparators=[right]):
            one, other = value(node.left), value(right)
            if isinstance(op, ast.Lt | ast.Gt | ast.LtE | ast.GtE) and not is_plain([one, other]):
                return unknown(node, "was not run")
            return first_unknown([one, other]) or _COMPARE[type(op)](one, other)
        case ast.Starred():
            return value(node.value)
    return unknown(node, "is not read")


def _binary(node: ast.BinOp, one: Any, other: Any) -> Any:
    if found := first_unknown([one, other]):
        return found
    if isinstance(node.op, ast.Pow | ast.Mult) and _size(one) * _size(other) > _LARGEST:
        return unknown(node, "is too large")
    if isinstance(node.op, ast.Mod) and isinstance(one, str):
        return unknown(node, "is not read")
    return _BINARY[type(node.op)](one, other)


def _size(value: Any) -> float:
    return abs(value) + 1 if isinstance(value, int | float) else len(value) + 1


def _boolean(node: ast.BoolOp, value: Callable[[ast.expr], Any]) -> Any:
    found: Any = None
    for part in node.values:
        found = value(part)
        if isinstance(found, Unknown) or bool(found) == isinstance(node.op, ast.Or):
            return found
    return found


def plain_call(node: ast.Call, function: ast.expr, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a builtin such as ``int``, of values that are known."""
    name = function.id if isinstance(function, ast.Name) else ""
    if name not in _PLAIN or (found := first_unknown([*args, *kwargs.values()])):
        return found if name in _PLAIN else unknown(node, "was not run")
    try:
        if any(isinstance(arg, range) and len(arg) > _LARGEST for arg in args):
            return unknown(node, "is too large")
        return _PLAIN[name](*args, **kwargs)
    except _WRONG as error:
        return unknown(node, f"raises {type(error).__name__}")


def text_call(node: ast.Call, text: str, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a method of text, such as ``split``."""
    if method not in _OF_TEXT or (found := first_unknown([*args, *kwargs.values()])):
        return found if method in _OF_TEXT else unknown(node, "was not run")
    try:
        return getattr(text, method)(*args, **kwargs)
    except _WRONG as error:
        return unknown(node, f"raises {type(error).__name__}")

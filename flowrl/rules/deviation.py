"""Whether an operator divides by a standard deviation, by its source code; nothing is run."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple, cast

from flowrl.core.operators.function import OfFunction, function_of

DEVIATIONS = frozenset({"std", "std_mean", "nanstd", "stdev", "pstdev", "norm", "vector_norm"})
SQUARES = frozenset({"var", "var_mean", "nanvar", "square", "variance", "pvariance"})
DIVISIONS = frozenset({"div", "div_", "divide", "true_divide"})
POWERS = frozenset({"pow", "power", "float_power"})
NORMS = frozenset({"layer_norm", "normalize", "zscore", "whiten"})
"""Functions that divide by a deviation, wherever they come from."""


@cache
def divides_by_deviation(operator: type) -> bool:
    """Whether the `__call__` of an operator, or a function that it calls by name, divides by a standard deviation.

    False if the source code cannot be read, or divides in another way than the code that this module knows.
    """
    call = function_of(cast(Any, operator)) if issubclass(operator, OfFunction) else vars(operator).get("__call__")
    found = None if call is None else inspect.unwrap(call)
    return isinstance(found, FunctionType) and _of(found, operator, ()).divides


class _Found(NamedTuple):
    """Whether a function divides by a deviation, and whether it returns one."""

    divides: bool
    returns: bool


def _of(function: FunctionType, owner: type | None, callers: tuple[Any, ...]) -> _Found:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    except (OSError, TypeError, ValueError, SyntaxError):
        return _Found(False, False)
    reader = _Reader(names, owner, (*callers, function))
    reader.visit(tree)
    return _Found(reader.divides, reader.returns)


class _Reader(ast.NodeVisitor):
    """Follows deviations through the names of one function, statement by statement."""

    def __init__(self, names: Mapping[str, Any], owner: type | None, callers: tuple[Any, ...]) -> None:
        self.divides = self.returns = False
        self._names, self._owner, self._callers = names, owner, callers
        self._squares: set[str] = set()
        self._deviations: set[str] = set()

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        names = {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        self._squares |= names if self._is_square(node.value) else set()
        self._deviations |= names if self._is_deviation(node.value) else set()

    def visit_Return(self, node: ast.Return) -> None:
        self.generic_visit(node)
        self.returns |= node.value is not None and self._is_deviation(node.value)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        self.divides |= isinstance(node.op, ast.Div) and self._is_deviation(node.right)
        self.divides |= isinstance(node.op, ast.Pow) and _is(-0.5, node.right) and self._is_square(node.left)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.generic_visit(node)
        self.divides |= isinstance(node.op, ast.Div) and self._is_deviation(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = _called(node)
        by = name in DIVISIONS and any(map(self._is_deviation, node.args))
        inverse = name == "reciprocal" and any(map(self._is_deviation, _operands(node)))
        power = name == "rsqrt" or (name in POWERS and any(_is(-0.5, argument) for argument in node.args))
        inverse |= power and any(map(self._is_square, _operands(node)))
        self.divides |= by or inverse or name in NORMS or self._helper(node).divides

    def _is_deviation(self, value: ast.expr) -> bool:
        """Whether an expression is a standard deviation, or one that is clamped, shifted or masked."""
        if isinstance(value, ast.Name):
            return value.id in self._deviations
        if isinstance(value, ast.Call):
            if _called(value) in DEVIATIONS or self._helper(value).returns:
                return True
            if _called(value) == "sqrt":
                return any(map(self._is_square, _operands(value)))
            return any(map(self._is_deviation, _operands(value)))
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Pow):
            return _is(0.5, value.right) and self._is_square(value.left)
        if isinstance(value, ast.BinOp):
            return isinstance(value.op, ast.Add) and any(map(self._is_deviation, (value.left, value.right)))
        if isinstance(value, ast.Tuple):
            return any(map(self._is_deviation, value.elts))
        return isinstance(value, ast.Subscript) and self._is_deviation(value.value)

    def _is_square(self, value: ast.expr) -> bool:
        """Whether squares of numbers are in an expression."""
        for node in ast.walk(value):
            two = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and _is(2, node.right)
            two |= isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and _same(node.left, node.right)
            call = isinstance(node, ast.Call) and (
                _called(node) in SQUARES or (_called(node) in POWERS and any(_is(2, each) for each in node.args))
            )
            if two or call or (isinstance(node, ast.Name) and node.id in self._squares):
                return True
        return False

    def _helper(self, node: ast.Call) -> _Found:
        """What a function of the same program does that is called by its name, or as a method."""
        found: Any = None
        if isinstance(node.func, ast.Name):
            found = self._names.get(node.func.id)
        elif isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "self" and self._owner:
            found = inspect.getattr_static(self._owner, node.func.attr, None)
        found = inspect.unwrap(found) if callable(found) and not isinstance(found, type) else None
        if not isinstance(found, FunctionType) or found in self._callers or len(self._callers) > 4:
            return _Found(False, False)
        return _of(found, self._owner, self._callers)


def _called(node: ast.Call) -> str:
    """The last name of a call: ``std`` of ``torch.std(x)`` and of ``x.std()``."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _operands(node: ast.Call) -> list[ast.expr]:
    """The arguments of a call, and the object whose method it is."""
    return [*([node.func.value] if isinstance(node.func, ast.Attribute) else []), *node.args]


def _is(number: float, value: ast.expr) -> bool:
    """Whether an expression is this number, which may have a sign."""
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub):
        return _is(-number, value.operand)
    return isinstance(value, ast.Constant) and value.value == number


def _same(first: ast.expr, second: ast.expr) -> bool:
    return ast.dump(first) == ast.dump(second)

"""The value of an arithmetic expression."""

from __future__ import annotations

import ast
import operator
from fractions import Fraction

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_LONGEST = 200  # characters


def value_of(expression: str) -> tuple[Fraction, list[int]]:
    """The value of an expression of integers, ``+ - * /`` and parentheses, and its integers.

    Raises:
        ValueError: it is no such expression, too long, or divides by zero.
    """
    numbers: list[int] = []

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(number)) if type(number) is int:
                numbers.append(number)
                return Fraction(number)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                return Fraction(_OPERATIONS[type(op)](value(left), value(right)))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
        raise ValueError(f"{ast.unparse(node)} is neither a whole number nor + - * / of such")

    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has more than {_LONGEST} characters")
    try:
        return value(ast.parse(expression.strip(), mode="eval").body), numbers
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression.strip()!r} has no value: {error}") from error

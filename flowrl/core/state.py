"""`State`: what an operator changes over steps, and the `Cell` that holds it during one call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast, overload

from flowrl.errors import DefinitionError
from flowrl.spec import where_defined

T = TypeVar("T")


class Cell(Generic[T]):
    """The value of a state field during one call; what it holds at the end is kept for the next step."""

    def __init__(self, value: T) -> None:
        self.value = value


class State(Generic[T]):
    """A field that changes over steps, such as an adaptive coefficient: ``beta = State(lambda self: self.coef)``.

    Inside `__call__` it is a `Cell`: read and assign ``self.beta.value``. Whoever runs the operator owns the cell: it
    is handed in, stored when the call succeeded, and goes into checkpoints; the operator itself stays frozen.

    Args:
        initial: the first value, given the operator. Values must be JSON-able.

    Raises:
        DefinitionError: `initial` is not a function.
    """

    def __init__(self, initial: Callable[[Any], T]) -> None:
        if not callable(initial):
            raise DefinitionError(
                f"{where_defined(sys._getframe(1))}: State({initial!r}) wants a function of the operator that gives "
                f"the first value; write State(lambda self: {initial!r})."
            )
        self.initial = initial

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> State[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Cell[T]: ...
    def __get__(self, instance: Any, owner: type) -> State[T] | Cell[T]:
        if instance is None:
            return self
        # Outside a session the operator's own instance keeps the cell (this descriptor does not shadow __dict__).
        return cast(Cell[T], instance.__dict__.setdefault(self.name, Cell(self.initial(instance))))

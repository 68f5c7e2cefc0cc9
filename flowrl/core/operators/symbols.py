"""Symbols: placeholders for the outputs of nodes while a graph is recorded, and their types.

A symbol represents one output of one node. Its type is a column type plus an *identity* for every axis: the node that
created the axis. So columns of equal shape whose rows were created by different nodes do not mix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

from flowrl.errors import GraphError
from flowrl.record_types import FieldType

_prefix: ContextVar[str] = ContextVar("flowrl_prefix", default="")


def prefix() -> str:
    """The prefix of the names of operators that are called now; see `Algorithm.under`."""
    return _prefix.get()


@contextmanager
def prefixed(prefix: str) -> Iterator[None]:
    """Prefix the names of operators that are called in the block."""
    token = _prefix.set(prefix)
    try:
        yield
    finally:
        _prefix.reset(token)


class Edge(NamedTuple):
    """One output of one node."""

    node: str
    output: str

    def __str__(self) -> str:
        return f"{self.node}.{self.output}"

    @classmethod
    def parse(cls, text: str) -> Edge:
        """``"gae.advantages"`` as an edge."""
        node, dot, output = text.partition(".")
        if not dot or not node or not output:
            raise GraphError(
                f"{text!r} does not name an output. Write 'node.column', such as 'gae.advantages'.",
                code="reference.output",
                given=text,
            )
        return cls(node, output)


@dataclass(frozen=True)
class EdgeType:
    """A field's type with the identity of each axis (``"batch@repeat"``); a batchless value has no axes."""

    type: FieldType
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(self.type)


class Recorder(Protocol):
    """Recorder of the nodes of one graph."""

    def record(self, operator: Any, inputs: Mapping[Any, Any]) -> Any:
        """Add a node for a call of `operator`; returns its symbol, or the record of its symbols."""
        ...


class Symbol:
    """An output that is not computed yet; it can only be passed to operators."""

    def __init__(self, tracer: Recorder, edge: Edge, typed: EdgeType) -> None:
        self._tracer, self._edge, self._typed = tracer, edge, typed

    def __repr__(self) -> str:
        return f"<{self._edge}: {self._typed}>"

    def _refuse(self, what: str) -> NoReturn:
        raise GraphError(
            f"{self._edge} is a symbol ({self._typed}) while the graph is recorded, so it has no {what}. Pass it to "
            f"operators only: move this computation into an operator's __call__, or run the algorithm on tensors with "
            f"algorithm.step(...).",
            code="symbol.used-as-value",
            node=self._edge.node,
            column=self._edge.output,
            missing=what,
        )

    def __bool__(self) -> bool:
        self._refuse("truth value (`if`, `and`, `not`)")

    def __iter__(self) -> Any:
        self._refuse("elements to iterate over")

    def __len__(self) -> int:
        self._refuse("length")

    def __getitem__(self, *_: Any) -> Any:
        self._refuse("elements to index")

    __setitem__ = __getitem__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocol look-ups (copy, numpy, pickle) expect AttributeError
            raise AttributeError(name)
        self._refuse(f"attribute {name!r}")

    def _arithmetic(self, *_: Any) -> Any:
        self._refuse("arithmetic or comparison")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _arithmetic
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _arithmetic
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __neg__ = __pos__ = __abs__ = __invert__ = _arithmetic
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _arithmetic
    __hash__ = object.__hash__

    def __format__(self, form: str) -> str:
        if form:
            self._refuse(f"text of the form {form!r}")
        return repr(self)

    def _copy(self, *_: Any) -> Any:
        self._refuse("copy")

    __copy__ = __deepcopy__ = __reduce_ex__ = _copy

    def _number(self) -> Any:
        self._refuse("number in it")

    __float__ = __int__ = __index__ = _number

    def __array__(self, *_: Any, **__: Any) -> Any:
        self._refuse("array in it")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [
            a for arg in (*args, *(kwargs or {}).values()) for a in (arg if isinstance(arg, list | tuple) else [arg])
        ]
        symbol = next(a for a in flat if isinstance(a, Symbol))
        symbol._refuse(f"tensor for torch's {getattr(func, '__name__', func)}()")

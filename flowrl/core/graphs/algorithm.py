"""`Algorithm`: an ordinary function of a batch that is also a graph."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

from flowrl.core.graphs.graph import Graph, Input, Node
from flowrl.core.graphs.inference import infer
from flowrl.core.operators import session as sessions
from flowrl.core.operators.function import OfFunction
from flowrl.core.operators.operator import Operator, is_column
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge, EdgeType, Symbol, prefixed
from flowrl.core.operators.symbols import prefix as before
from flowrl.errors import DefinitionError, GraphError, ParameterError, type_of
from flowrl.record_types import hints_of, record_columns, with_clear_attribute_errors

P = ParamSpec("P")
R = TypeVar("R")
GraphT = TypeVar("GraphT", bound=Graph)
_nested: ContextVar[str] = ContextVar("flowrl_nested", default="")
"""The algorithm through whose lines another one goes now."""


class Tracer:
    """Records the nodes of one graph."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.types: dict[Edge, EdgeType] = {}

    def input(self, name: str, record: type) -> Any:
        """A node for an input of the algorithm; returns the record of its symbols."""
        return self._add(Node(name, Input(record), {}))

    def record(self, operator: Operator, inputs: Mapping[PortField, Any]) -> Any:
        """A node for a call of `operator`; returns its symbol, or the record of its symbols."""
        edges: dict[PortField, Edge] = {}
        for field, value in inputs.items():
            if not isinstance(value, Symbol):
                raise GraphError(
                    f"{operator.name}.{field} was given {type_of(value)} while the graph is recorded; expected "
                    f"an output of another operator: constants belong in the parameters of "
                    f"{type(operator).__name__}(...)."
                )
            if value._tracer is not self:
                raise GraphError(
                    f"{operator.name}.{field} was given {value!r}, which belongs to another graph; expected an output "
                    f"of an operator that this algorithm itself calls."
                )
            edges[field] = value._edge
        return self._add(Node(operator.name, operator, edges))

    def _add(self, node: Node) -> Any:
        if node.name in self.nodes:
            operator, nested = node.operator, _nested.get()
            made = repr(operator) if isinstance(operator, OfFunction) else f"{type(operator).__name__}(...)"
            all_of = f', or all nodes of {nested} a prefix: {nested}.under("second")(...)' if nested else ""
            raise GraphError(
                f"two nodes are named {node.name!r}; names must differ, so give one a name of its own: "
                f'{made}.named("{node.name}_2nd"){all_of}.'
            )
        types = infer(node.name, node.operator, {f: (e, self.types[e]) for f, e in node.inputs.items()}, self.types)
        self.nodes[node.name] = node
        symbols = {}
        for output, typed in types.items():
            edge = Edge(node.name, output)
            self.types[edge] = typed
            symbols[output] = Symbol(self, edge, typed)
        record = node.signature.output_record
        if record is not None:
            return with_clear_attribute_errors(record)(**symbols)
        return next(iter(symbols.values()), None)  # what writes nothing is a sink by itself


class Algorithm(Generic[P, R, GraphT]):
    """A function of one or more batches, as an algorithm: called, it is traced into a `Graph`; `step` runs it as it is.

    The leading parameters that are annotated with a record (``batch: PromptBatch``) are the graph's inputs and are left
    out of the call: ``ppo(exact_match, n=1)`` is a graph, ``ppo.step(batch, exact_match, n=1)`` computes.
    """

    def __init__(self, function: Callable[P, R], localns: Mapping[str, Any], kind: type[GraphT]) -> None:
        self.function, self.kind, self._prefix = function, kind, ""
        if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
            what = "an async function" if inspect.isfunction(function) else type_of(function)
            raise DefinitionError(
                f"an algorithm is a plain function of a batch that returns outputs of operators, and {function!r} is "
                f"{what}; write `@algorithm` above a `def`."
            )
        functools.update_wrapper(self, function)
        where = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}: the algorithm {function.__name__}"
        try:
            hints = hints_of(function, localns)
        except DefinitionError as error:
            raise DefinitionError(f"{where}: {error}") from error
        parameters = list(inspect.signature(function).parameters.values())
        self.inputs: dict[str, type] = {}
        for p in parameters:
            hint = hints.get(p.name)
            if not (isinstance(hint, type) and record_columns(hint)):
                break
            self.inputs[p.name] = hint
        if not self.inputs:
            raise DefinitionError(
                f"{where} has no input; annotate its first parameter with a record, such as `batch: PromptBatch`."
            )
        self.parameters = inspect.Signature([p for p in parameters if p.name not in self.inputs])

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> GraphT: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Trace the function into a graph; or, in the lines of another algorithm, go through its lines there.

        Given its inputs, as symbols or as tensors, it is part of the algorithm that calls it: nodes are recorded in
        that one's graph, and it returns what its own lines return.

        Raises:
            PortError, GraphError: what was connected does not fit, named with both ends.
        """
        name = self.function.__name__
        if any(map(is_column, (*args, *kwargs.values()))):
            return self._lines(*args, **kwargs)
        if self._prefix:
            raise GraphError(
                f"{name}.under(...) was given none of its inputs ({', '.join(self.inputs)}), so it would be a graph of "
                f"its own, whose nodes need no prefix; leave under(...) out, or call it in another algorithm."
            )
        try:
            bound = self.parameters.bind(*args, **kwargs)
        except TypeError as error:
            raise GraphError(
                f"{name}(...) cannot be traced: {error}. It takes {name}{self.parameters}; its inputs "
                f"({', '.join(self.inputs)}) are left out here."
            ) from None
        tracer = Tracer()
        inputs = {input: tracer.input(input, record) for input, record in self.inputs.items()}
        result = self.function(*inputs.values(), *bound.args, **bound.kwargs)
        returned = [symbol._edge.node for symbol in _symbols(result, name)]
        silent = [node.name for node in tracer.nodes.values() if not node.signature.outputs]
        sinks = tuple(dict.fromkeys([*returned, *silent]))
        if not sinks:
            raise GraphError(
                f"{name} returns no output of an operator, so its graph is empty; return what it should compute."
            )
        graph = self.kind.build(name, tracer.nodes, sinks)
        for node in tracer.nodes.values():
            if node.name not in graph and node.writes:
                raise GraphError(
                    f"{name} calls {node.name}, which writes weights, but neither returns what it gives nor passes it "
                    f"on, so it would never run; return it too: `return ..., {node.name}`, or take the call out."
                )
        return graph

    def step(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the lines now, on tensors; inside ``with job.eager():`` roles are the job's engines.

        Every call is one step: afterwards the session's step has grown by one, and `session.metrics` holds what this
        one reported.
        """
        session = sessions.current()
        if session is not None:
            session.begin_step(session.step)
        result: R = self._lines(*args, **kwargs)
        if session is not None:
            session.step += 1
        return result

    def under(self, prefix: str) -> Self:
        """The same algorithm for a second call within another: its nodes are named ``<prefix>_<name>``.

        Raises:
            ParameterError: `prefix` is no identifier.
        """
        if not isinstance(prefix, str) or not prefix.isidentifier():
            raise ParameterError(f"{prefix!r} is no prefix of node names; expected an identifier such as 'second'.")
        made = copy.copy(self)
        made._prefix = f"{prefix}_"
        return made

    def _lines(self, *args: Any, **kwargs: Any) -> Any:
        """Go through the lines of the function, on symbols or on tensors."""
        name = self.function.__name__
        try:
            inspect.signature(self.function).bind(*args, **kwargs)
        except TypeError as error:
            raise GraphError(
                f"{name}(...) cannot be called on columns like this: {error}. It takes "
                f"{name}{inspect.signature(self.function)}."
            ) from None
        token = _nested.set(name)
        try:
            with prefixed(f"{before()}{self._prefix}"):
                return self.function(*args, **kwargs)
        finally:
            _nested.reset(token)

    def __repr__(self) -> str:
        return f"<algorithm {self.function.__name__}{self.parameters}>"


def _symbols(result: Any, name: str) -> list[Symbol]:
    if isinstance(result, Symbol):
        return [result]
    if isinstance(result, tuple | list):
        return [symbol for item in result for symbol in _symbols(item, name)]
    if result is None:
        return []
    raise GraphError(f"{name} returns {type_of(result)}; expected outputs of operators only.")

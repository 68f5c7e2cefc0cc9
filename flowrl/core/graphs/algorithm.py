"""`Algorithm`: an ordinary function of a batch that is also a graph."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from flowrl.errors import DefinitionError, GraphError, ParameterError, refuse_staleness, type_of
from flowrl.peer_names import translated
from flowrl.record_types import hints_of, record_columns, with_clear_attribute_errors

P = ParamSpec("P")
R = TypeVar("R")
GraphT = TypeVar("GraphT", bound=Graph)
_nested: ContextVar[str] = ContextVar("flowrl_nested", default="")
"""The algorithm that is being traced inside another one."""


class Tracer:
    """Records the nodes of one graph."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.types: dict[Edge, EdgeType] = {}

    def input(self, name: str, record: type) -> Any:
        """Add a node for an input of the algorithm; returns the record of its symbols."""
        return self._add(Node(name, Input(record), {}))

    def record(self, operator: Operator, inputs: Mapping[PortField, Any]) -> Any:
        """Add a node for a call of `operator`; returns its symbol, or the record of its symbols."""
        edges: dict[PortField, Edge] = {}
        for field, value in inputs.items():
            if not isinstance(value, Symbol):
                raise GraphError(
                    f"{operator.name}.{field} got {type_of(value)} while the graph is traced; expected an output of "
                    f"another operator. Pass constants as parameters of {type(operator).__name__}(...).",
                    code="algorithm.constant-input",
                    node=operator.name,
                    port=str(field),
                    found=type(value).__name__,
                )
            if value._tracer is not self:
                raise GraphError(
                    f"{operator.name}.{field} got {value!r}, which belongs to another graph. Pass an output of an "
                    f"operator that this algorithm calls.",
                    code="algorithm.foreign-input",
                    node=operator.name,
                    port=str(field),
                    found=str(value._edge),
                )
            edges[field] = value._edge
        return self._add(Node(operator.name, operator, edges))

    def _add(self, node: Node) -> Any:
        if node.name in self.nodes:
            operator, nested = node.operator, _nested.get()
            made = repr(operator) if isinstance(operator, OfFunction) else f"{type(operator).__name__}(...)"
            prefix = f', or give all nodes of {nested} a prefix: {nested}.under("second")(...)' if nested else ""
            raise GraphError(
                f'Two nodes are named {node.name!r}. Rename one: {made}.named("{node.name}_2nd"){prefix}.',
                code="graph.duplicate-name",
                node=node.name,
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
        return next(iter(symbols.values()), None)  # None: a node without outputs is a sink


class Algorithm(Generic[P, R, GraphT]):
    """A function of one or more batches as an algorithm: a call traces it into a `Graph`, and `step` runs it.

    The leading parameters that are annotated with a record (``batch: PromptBatch``) are the inputs of the graph, and
    are left out of the call: ``ppo(exact_match, n=1)`` is a graph, ``ppo.step(batch, exact_match, n=1)`` computes.
    """

    def __init__(self, function: Callable[P, R], localns: Mapping[str, Any], kind: type[GraphT]) -> None:
        self.function, self.kind, self._prefix = function, kind, ""
        if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
            what = "an async function" if inspect.isfunction(function) else type_of(function)
            raise DefinitionError(
                f"{function!r} is {what}; expected a plain function of a batch that returns outputs of operators. "
                f"Write `@algorithm` above a `def`.",
                code="algorithm.not-a-function",
                found=type(function).__name__,
            )
        functools.update_wrapper(self, function)
        where = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}: the algorithm {function.__name__}"
        try:
            hints = hints_of(function, localns)
        except DefinitionError as error:
            raise DefinitionError(f"{where}: {error.message}", code=error.code, **error.facts) from error
        parameters = list(inspect.signature(function).parameters.values())
        self.inputs: dict[str, type] = {}
        for p in parameters:
            hint = hints.get(p.name)
            if not (isinstance(hint, type) and record_columns(hint)):
                break
            self.inputs[p.name] = hint
        if not self.inputs:
            raise DefinitionError(
                f"{where} has no input. Annotate its first parameter with a record, such as `batch: PromptBatch`.",
                code="algorithm.no-input",
                algorithm=function.__name__,
            )
        self.parameters = inspect.Signature([p for p in parameters if p.name not in self.inputs])

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> GraphT: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Trace the function into a graph.

        Called with symbols or tensors inside another algorithm, it joins that algorithm's graph and returns what the
        function returns.
        """
        name = self.function.__name__
        if any(map(is_column, (*args, *kwargs.values()))):
            return self._call(*args, **kwargs)
        if self._prefix:
            raise GraphError(
                f"{name}.under(...) got none of its inputs ({', '.join(self.inputs)}). Call it with its inputs inside "
                f"another algorithm, or leave under(...) out.",
                code="algorithm.bad-call",
                algorithm=name,
            )
        try:
            bound = self.parameters.bind(*args, **kwargs)
        except TypeError as error:
            refuse_staleness(f"{name}(...)", kwargs, self.parameters.parameters)
            ours = translated(kwargs, self.parameters.parameters)
            raise GraphError(
                f"{name}(...) cannot be traced: {error}{ours}. Call it as {name}{self.parameters}, without its inputs "
                f"({', '.join(self.inputs)}).",
                code="algorithm.bad-call",
                algorithm=name,
                reason=str(error),
            ) from None
        tracer = Tracer()
        inputs = {input: tracer.input(input, record) for input, record in self.inputs.items()}
        result = self.function(*inputs.values(), *bound.args, **bound.kwargs)
        returned = [symbol._edge.node for symbol in _symbols(result, name, tracer)]
        without_outputs = [node.name for node in tracer.nodes.values() if not node.signature.outputs]
        sinks = tuple(dict.fromkeys([*returned, *without_outputs]))
        if not sinks:
            raise GraphError(
                f"{name} returns no output of an operator, so its graph is empty. Return what it should compute.",
                code="graph.no-sink",
                algorithm=name,
            )
        graph = self.kind.build(name, tracer.nodes, sinks)
        for node in tracer.nodes.values():
            if node.name not in graph and node.writes:
                raise GraphError(
                    f"{name} calls {node.name}, which writes weights, but neither returns its output nor passes it on, "
                    f"so it would never run. Return it, too (`return ..., {node.name}`), or remove the call.",
                    code="algorithm.unused-update",
                    algorithm=name,
                    node=node.name,
                )
        return graph

    def step(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function now, on tensors; inside ``with job.eager():`` roles are the job's engines.

        Each call is one step: it increments the session's step, and `session.metrics` has its metrics.
        """
        result: R = eager_step(lambda: self._call(*args, **kwargs))
        return result

    def under(self, prefix: str) -> Self:
        """The same algorithm for a second call inside another algorithm: its nodes are named ``<prefix>_<name>``."""
        refuse_bad_prefix(prefix)
        prefixed = copy.copy(self)
        prefixed._prefix = f"{prefix}_"
        return prefixed

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function on symbols or tensors."""
        name = self.function.__name__
        try:
            inspect.signature(self.function).bind(*args, **kwargs)
        except TypeError as error:
            parameters = inspect.signature(self.function)
            ours = translated(kwargs, parameters.parameters)
            raise GraphError(
                f"{name}(...) cannot be called on columns: {error}{ours}. Call it as {name}{parameters}.",
                code="algorithm.bad-call",
                algorithm=name,
                reason=str(error),
            ) from None
        with nested(name, self._prefix):
            return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<algorithm {self.function.__name__}{self.parameters}>"


@contextmanager
def nested(name: str, prefix: str) -> Iterator[None]:
    """Call the algorithm `name` in the block, with a further prefix of the names of its nodes."""
    token = _nested.set(name)
    try:
        with prefixed(f"{before()}{prefix}"):
            yield
    finally:
        _nested.reset(token)


def eager_step(call: Callable[[], Any]) -> Any:
    """What `call` returns, which is one step of the active session, if there is one."""
    session = sessions.current()
    if session is not None:
        session.begin_step(session.step)
    result = call()
    if session is not None:
        session.step += 1
    return result


def refuse_bad_prefix(prefix: object) -> None:
    """Refuse a prefix of node names that is no identifier."""
    if not isinstance(prefix, str) or not prefix.isidentifier():
        raise ParameterError(
            f"Invalid prefix {prefix!r} of node names; expected an identifier such as 'second'.",
            code="algorithm.bad-call",
            given=prefix,
        )


def _symbols(result: Any, name: str, tracer: Tracer) -> list[Symbol]:
    if isinstance(result, Symbol):
        if result._tracer is not tracer:
            raise GraphError(
                f"{name} returns {result!r}, which belongs to another graph. Return an output of an operator "
                f"that {name} calls.",
                code="algorithm.foreign-input",
                algorithm=name,
                found=str(result._edge),
            )
        return [result]
    if isinstance(result, tuple | list):
        return [symbol for item in result for symbol in _symbols(item, name, tracer)]
    if result is None:
        return []
    raise GraphError(
        f"{name} returns {type_of(result)}; expected outputs of operators only.",
        code="algorithm.wrong-return",
        algorithm=name,
        found=type(result).__name__,
    )

"""Graphs as data: JSON-able dictionaries, files, and the canonical form behind fingerprints.

A spec is written as its class and its parameters, a callable as its import path and the hash of its source, a role as
its name. Nothing is pickled. Reading with ``imports=True`` imports the classes and functions that the data names, which
runs their files as any Python import would; with ``imports=False`` it imports what flowrl itself and the installed
operators bring, and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import xxhash
import yaml

from flowrl.core.graphs.after import After
from flowrl.core.graphs.graph import Graph, Node, refuse_no_graph
from flowrl.core.graphs.lag import Lag
from flowrl.core.operators import entry_points
from flowrl.core.operators.function import OfFunction, function_of, plain_of
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.references import named_source_hash, parse_reference, reference, resolve, source_hash
from flowrl.core.operators.roles import RoleRef
from flowrl.core.operators.symbols import Edge
from flowrl.core.operators.when import ALWAYS
from flowrl.data.files import write
from flowrl.errors import GraphError, ParameterError, offer, type_of
from flowrl.files import plain
from flowrl.rules.check import refuse_no_rules
from flowrl.spec import Spec, parameters

FORMAT = 2
KEYS = ("flowrl", "name", "nodes", "sinks", "lag", "bindings", "allow")
"""What a graph is written under."""

GraphT = TypeVar("GraphT", bound=Graph)


@dataclass(frozen=True)
class NotImported:
    """A function that data names and that was not imported: it can be shown and compared, and not called.

    Args:
        path: how the data names it.
        source: the hash of its source, as the data gives it.
        key: ``"$function"``, or ``"$named"`` where it is a string in Python.
    """

    path: str
    source: str | None
    key: Literal["$function", "$named"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise GraphError(
            f"{self.path} was not imported when its graph was read, so it cannot be called; read the graph with what "
            f"it names: flowrl.load(..., imports=True)."
        )

    @property
    def __name__(self) -> str:
        """As a picture shows it: the name of a function, and all of a string."""
        return self.path.rpartition(":")[2] if self.key == "$function" else self.path

    def __repr__(self) -> str:
        return self.path


def encode(value: Any, where: str, portable: bool = True) -> Any:
    """A parameter as JSON-able data.

    Args:
        value: what to write.
        where: ``node.field`` for messages.
        portable: False also takes what cannot be read back (a lambda), for fingerprints and diffs.

    Raises:
        GraphError: the value cannot be written.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [encode(item, f"{where}[{i}]", portable) for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(k, str) and not k.startswith("$") for k in value):
        return {k: encode(v, f"{where}[{k!r}]", portable) for k, v in value.items()}
    if isinstance(value, RoleRef):
        return {"$role": value.name}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, After):
        return {"after": value.node, "operator": encode(value.operator, where, portable)}
    if isinstance(value, Spec):
        fields = {
            k: _reference(v) if isinstance(v, str) and k in value.references else encode(v, f"{where}.{k}", portable)
            for k, v in parameters(value).items()
        }
        return {**_type(value, where, portable), **fields}
    if isinstance(value, NotImported):
        return {value.key: value.path, "source": value.source}
    if isinstance(value, type):
        return {"$class": _path(value, where, portable)}
    if callable(value):
        return {"$function": _path(value, where, portable), "source": source_hash(value)}
    raise GraphError(
        f"{where} is {value!r}, {type_of(value)}, which cannot be written to a file; use plain values or specs."
    )


def _type(spec: Spec, where: str, portable: bool) -> dict[str, str]:
    """What says of which class a spec is: its path; of an operator that is a function, also the hash of its source."""
    if isinstance(spec, OfFunction):
        return {"$type": _path(plain_of(spec), where, portable), "$source": source_hash(function_of(spec))}
    return {"$type": _path(type(spec), where, portable)}


def _reference(ref: str) -> dict[str, str]:
    """A function that is named by a string; it is a string again when it is read."""
    source, name = parse_reference(ref)
    if source.endswith(".py"):
        relative = os.path.relpath(source)
        source = os.path.abspath(source) if relative.startswith(os.pardir) else relative
    return {"$named": f"{source}:{name}", "source": named_source_hash(ref)}


def decode(data: Any, where: str, imports: bool) -> Any:
    """What `encode` wrote.

    Args:
        data: plain data.
        where: ``node.field`` for messages.
        imports: import what the data names. False leaves functions as `NotImported`.

    Raises:
        GraphError: data of no form that `encode` writes; a class or function that is not there, whose source has
            changed since, or that would have to be imported.
    """
    if isinstance(data, list | tuple):
        return tuple(decode(item, where, imports) for item in data)
    if not isinstance(data, Mapping):
        return data
    form = next((key for key in ("$type", *data) if key in data and key.startswith("$")), None)
    if form is None:
        return {k: decode(v, f"{where}[{k!r}]", imports) for k, v in data.items()}
    if not isinstance(data[form], str):
        raise GraphError(f"{where} has {type_of(data[form])} under {form!r}; expected a name.")
    if form == "$type":
        return _spec(data, where, imports)
    allowed = {"$role": (), "$class": (), "$function": ("source",), "$named": ("source",)}
    if form not in allowed:
        raise GraphError(f"{where} has {form!r}; {offer(form, ('$type', *allowed), 'what may stand there is')}")
    _refuse_other_keys(data, (form, *allowed[form]), where)
    if form == "$role":
        try:
            return RoleRef(data[form])
        except ParameterError as error:
            raise GraphError(f"{where}: {error}") from error
    if form != "$class":
        return _function(data, form, where, imports)
    if not isinstance(found := _class(data[form], where, imports), type):
        raise GraphError(f"{where} names {data[form]}, which is not a class; expected a record.")
    return found


def _spec(data: Mapping[str, Any], where: str, imports: bool) -> Spec:
    """The spec of this class and these parameters."""
    name = data["$type"]
    cls = entry_points.load(name) if name.isidentifier() else _class(name, where, imports)
    if isinstance(cls, OfFunction):
        _refuse_changed(function_of(cls), data.get("$source"), name, where)
        data, cls = {k: v for k, v in data.items() if k != "$source"}, type(cls)
    if not isinstance(cls, type) or not issubclass(cls, Spec):
        raise GraphError(f"{where} names {name}, which is not a Spec; expected an operator, loss or backend.")
    given = {k: decode(v, f"{where}.{k}", imports) for k, v in data.items() if k != "$type"}
    if not imports:  # to look at a function that a string names may import its package
        given |= {k: NotImported(v, None, "$named") for k, v in given.items() if k in cls.references and type(v) is str}
    try:
        return cls(**given)
    except ParameterError as error:
        raise GraphError(f"{where} cannot be made from what is written: {error}") from error


def _function(data: Mapping[str, Any], form: Literal["$function", "$named"], where: str, imports: bool) -> Any:
    """The function of this path, held to its source; or the path, where it is a string in Python."""
    path, source = data[form], data.get("source")
    if not imports and not _comes_with_flowrl(path):
        return NotImported(path, source, form)
    found = _import(path, where)
    _refuse_changed(found, source, path, where)
    if form == "$function":
        return found
    return path if imports else NotImported(path, source, form)


def _refuse_changed(function: Callable[..., Any], source: Any, path: str, where: str) -> None:
    """Refuse a function whose source is not that of which the data holds the hash."""
    if source_hash(function) != source:
        raise GraphError(
            f"{where} names {path}, whose source has changed since the graph was written, so it would not be the "
            f"same graph; write the graph again from its Python file, or restore the function."
        )


def _class(path: str, where: str, imports: bool) -> Any:
    """What this path names, which should be a class, or an operator that is a function."""
    if not imports and not _comes_with_flowrl(path):
        raise GraphError(
            f"{where} is of the class {path}, which has to be imported to know what it is, and importing runs its "
            f"file; if you trust that, say so: --import on the command line, imports=True in Python."
        )
    return _import(path, where)


def _comes_with_flowrl(path: str) -> bool:
    """Whether what is named is flowrl's own, or an operator that an installed package brings."""
    module, _, name = path.rpartition(":")
    if module.startswith("flowrl.") and not module.endswith(".py") and name.isidentifier():
        return True
    return any(path == point.value for point in entry_points.names().values())


def _refuse_other_keys(data: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse keys that mean nothing: they may be misspelled."""
    if other := [key for key in data if key not in known]:
        raise GraphError(f"{where} has {other[0]!r}, which means nothing there; {offer(other[0], known, 'expected')}")


def graph_to_dict(graph: Graph, portable: bool = True) -> dict[str, Any]:
    """A graph as JSON-able data.

    Raises:
        GraphError: a parameter cannot be written, such as a lambda, and `portable` asks for what can be read back.
    """
    allow = {"allow": dict(graph.allow)} if graph.allow else {}
    return {
        "flowrl": FORMAT,
        "name": graph.name,
        "nodes": {
            node.name: {
                "operator": encode(node.operator, node.name, portable),
                "inputs": compact_inputs(node),
                **({} if node.when == ALWAYS else {"when": parameters(node.when)}),
            }
            for node in graph.nodes.values()
        },
        "sinks": list(graph.sinks),
        "lag": parameters(graph.lag) if graph.lag.spans else graph.lag.versions,
        "bindings": {
            role: encode(backend, f"bindings.{role}", portable) for role, backend in sorted(graph.bindings.items())
        },
        **allow,
    }


def fingerprint(graph: Graph) -> str:
    """xxh3-128 (hex) of the canonical form: equal for graphs that compute the same, whatever their name."""
    canonical = graph_to_dict(graph, portable=False)
    canonical |= {"name": "", "sinks": sorted(graph.sinks)}
    canonical.pop("allow", None)
    return xxhash.xxh3_128_hexdigest(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode())


def graph_from_dict(kind: type[GraphT], data: Mapping[str, Any], imports: bool) -> GraphT:
    """The graph, of this class, that `graph_to_dict` wrote; see `decode` for `imports`.

    Raises:
        GraphError: not a graph, of another format, naming what is not there, or what would have to be imported.
    """
    if not isinstance(data, Mapping):
        raise GraphError(f"{type_of(data)} is not a graph as data; expected what graph.to_dict() gives.")
    plain.check(data, "the data")
    if _part(data, "flowrl", int, "the data") != FORMAT:
        raise GraphError(
            f"the graph is written in format {data['flowrl']!r}, and this flowrl reads {FORMAT}; write it again from "
            f"its Python file."
        )
    _refuse_other_keys(data, KEYS, "the data")
    nodes = {}
    written: Mapping[str, Any] = _part(data, "nodes", Mapping, "the data")
    for name in written:
        entry = _part(written, name, Mapping, "nodes")
        _refuse_other_keys(entry, ("operator", "inputs", "when"), name)
        operator = decode(_part(entry, "operator", Mapping, name), name, imports)
        if not isinstance(operator, Operator):
            found = repr(operator) if isinstance(operator, Spec) else type_of(operator)
            raise GraphError(f"the node {name} is {found}; expected an operator.")
        inputs = _expand_inputs(name, operator, _part(entry, "inputs", Mapping, name))
        nodes[name] = Node(name, _timed(operator.named(name), entry), inputs)
    sinks, lag = _part(data, "sinks", list, "the data"), _lag(data)
    if odd := [sink for sink in sinks if not isinstance(sink, str)]:
        raise GraphError(f"the sinks of the data hold {type_of(odd[0])}; expected names of nodes.")
    allow: Mapping[str, str] = _part(data, "allow", Mapping, "the data") if "allow" in data else {}
    refuse_no_rules(allow, "the data, under 'allow',")
    graph = kind.build(_part(data, "name", str, "the data"), nodes, sinks, lag, allow=allow)
    bindings: Mapping[str, Any] = _part(data, "bindings", Mapping, "the data")
    return graph.bound({role: decode(backend, f"bindings.{role}", imports) for role, backend in bindings.items()})


def _lag(data: Mapping[str, Any]) -> int | Lag:
    """The lag of the data: a number, or with spans all parameters of a `Lag`."""
    if not isinstance(data.get("lag"), Mapping):
        number: int = _part(data, "lag", int, "the data")
        return number
    _refuse_other_keys(data["lag"], ("versions", "spans", "caches"), "the data, under 'lag',")
    try:
        return Lag(**data["lag"])
    except ParameterError as error:
        raise GraphError(f"the lag of the data cannot be made from what is written: {error}") from error


def _timed(operator: Operator, entry: Mapping[str, Any]) -> Operator:
    """The operator, in the steps that its entry says."""
    if "when" not in entry:
        return operator
    when = _part(entry, "when", Mapping, operator.name)
    _refuse_other_keys(when, ("every", "start"), f"{operator.name}.when")
    try:
        return operator.when(**when)
    except ParameterError as error:
        raise GraphError(f"{operator.name}.when cannot be made from what is written: {error}") from error


def _part(data: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """A part of the data that is read, refused unless it is of `kind`."""
    if key not in data or not isinstance(data[key], kind) or (kind is int and isinstance(data[key], bool)):
        found = f"has {type_of(data[key])} under {key!r}" if key in data else f"lacks {key!r}"
        raise GraphError(
            f"{where} {found}, so this is not a flowrl graph, or a damaged one; expected a {kind.__name__.lower()} "
            f"there, as graph.to_dict() writes it."
        )
    return data[key]


def save(graph: Graph, path: str | Path) -> None:
    """Write a graph to ``.yaml``/``.yml`` or ``.json``, whole or not at all.

    Raises:
        GraphError: it is no graph, or has a parameter that cannot be written.
        StorageError: the file cannot be written.
    """
    refuse_no_graph(graph)
    path = Path(path)
    is_json, data = plain.is_json(path), graph_to_dict(graph)
    text = json.dumps(data, indent=2) + "\n" if is_json else yaml.safe_dump(data, sort_keys=False, width=120)
    write(path, text.encode())


def load(kind: type[GraphT], path: str | Path, imports: bool) -> GraphT:
    """The graph, of this class, in a ``.yaml``/``.yml`` or ``.json`` file; see `decode` for `imports`.

    Raises:
        GraphError: the file is missing, broken, no graph, or names what would have to be imported.
    """
    data = plain.read(Path(path))
    if not isinstance(data, Mapping):
        raise GraphError(f"{path} holds {type_of(data)}; expected a graph as flowrl.save(...) writes it.")
    return graph_from_dict(kind, data, imports)


def not_imported(graph: Graph) -> list[str]:
    """The functions that `graph` names and that were not imported when it was read."""
    found: dict[str, None] = {}
    specs: list[Spec] = [node.operator for node in graph.nodes.values()]
    while specs:
        for value in parameters(specs.pop()).values():
            if isinstance(value, NotImported):
                found[value.path] = None
            elif isinstance(value, Spec):
                specs.append(value)
    return list(found)


def compact_inputs(node: Node) -> dict[str, str]:
    """The inputs of a node by port: a record that comes whole from one node is written as that node's name."""
    inputs: dict[str, str] = {}
    for port in node.signature.ports.values():
        wired = {field: node.inputs[field] for field in port.fields if field in node.inputs}
        sources = {edge.node for edge in wired.values()}
        same_names = all(field.name == edge.output for field, edge in wired.items())
        if port.record is not None and len(sources) == 1 and same_names:
            inputs[port.name] = sources.pop()
        else:
            inputs |= {str(field): str(edge) for field, edge in wired.items()}
    return inputs


def _expand_inputs(name: str, operator: Operator, inputs: Mapping[str, str]) -> dict[PortField, Edge]:
    edges: dict[PortField, Edge] = {}
    signature = operator.signature
    for written in inputs:
        source, port = _part(inputs, written, str, f"the inputs of {name}"), signature.ports.get(written)
        if port is not None and port.record is not None and "." not in source:
            edges |= {field: Edge(source, field.name) for field in port.fields}
        elif (field := PortField.parse(written)) in signature.fields:
            edges[field] = Edge.parse(source)
        else:
            raise GraphError(f"{name} has no port {written!r}; it has {', '.join(map(str, signature.fields))}.")
    return edges


def _path(value: Callable[..., Any], where: str, portable: bool) -> str:
    """The reference of a class or function."""
    if (path := reference(value)) is not None:
        return path
    if portable:
        raise GraphError(
            f"{where} is {value!r}, which has no import path, so the graph can run but not be written to a file; move "
            f"it to the top level of a module or of a file, where it can be named as 'package.module:name' or "
            "'path/to/file.py:name'."
        )
    return f"{value.__module__}:{getattr(value, '__qualname__', type(value).__qualname__)}"


def _import(path: str, where: str) -> Any:
    try:
        return resolve(path)
    except ParameterError as error:
        raise GraphError(f"{where} cannot be read: {error}") from error

"""Graphs as data: JSON-able dictionaries, files, and the canonical form behind fingerprints.

A spec is written as its class and its parameters, a callable as its import path and the hash of its source, a role as
its name. Nothing is pickled; reading imports the classes and functions that the data names, as any Python import would.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import xxhash
import yaml

from flowrl.core import entry_points
from flowrl.core.graph import Graph, Node
from flowrl.core.operator import Operator
from flowrl.core.ports import PortField
from flowrl.core.references import named_source_hash, parse_reference, reference, resolve, source_hash
from flowrl.core.roles import RoleRef
from flowrl.core.symbols import Edge
from flowrl.errors import GraphError, ParameterError
from flowrl.spec import Spec, parameters

FORMAT = 1
GraphT = TypeVar("GraphT", bound=Graph)


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
    if isinstance(value, Spec):
        fields = {
            k: _reference(v) if isinstance(v, str) and k in value.references else encode(v, f"{where}.{k}", portable)
            for k, v in parameters(value).items()
        }
        return {"$type": _path(type(value), where, portable), **fields}
    if isinstance(value, type):
        return {"$class": _path(value, where, portable)}
    if callable(value):
        return {"$function": _path(value, where, portable), "source": source_hash(value)}
    raise GraphError(
        f"{where} is {value!r}, a {type(value).__name__}, which cannot be written to a file; use plain values or specs."
    )


def _reference(ref: str) -> dict[str, str]:
    """A function that is named by a string; it is a string again when it is read."""
    source, name = parse_reference(ref)
    if source.endswith(".py"):
        relative = os.path.relpath(source)
        source = os.path.abspath(source) if relative.startswith(os.pardir) else relative
    return {"$named": f"{source}:{name}", "source": named_source_hash(ref)}


def decode(data: Any, where: str) -> Any:
    """What `encode` wrote.

    Raises:
        GraphError: a class or function that is not there, or whose source has changed since.
    """
    if isinstance(data, list):
        return tuple(decode(item, where) for item in data)
    if not isinstance(data, Mapping):
        return data
    if "$role" in data:
        return RoleRef(data["$role"])
    if "$class" in data:
        return _import(data["$class"], where)
    if "$function" in data or "$named" in data:
        path = data.get("$function", data.get("$named"))
        found = _import(path, where)
        if source_hash(found) != data.get("source"):
            raise GraphError(
                f"{where} names {path}, whose source has changed since the graph was written, so it would not be the "
                f"same graph; write the graph again from its Python file, or restore the function."
            )
        return found if "$function" in data else path
    if "$type" in data:
        name = data["$type"]
        bare = isinstance(name, str) and name.isidentifier()
        cls = entry_points.load(name) if bare else _import(name, where)
        if not isinstance(cls, type) or not issubclass(cls, Spec):
            raise GraphError(
                f"{where} names {data['$type']}, which is not a Spec; expected an operator, loss or backend."
            )
        try:
            return cls(**{k: decode(v, f"{where}.{k}") for k, v in data.items() if k != "$type"})
        except ParameterError as error:
            raise GraphError(f"{where} cannot be made from what is written: {error}") from error
    return {k: decode(v, f"{where}[{k!r}]") for k, v in data.items()}


def graph_to_dict(graph: Graph, portable: bool = True) -> dict[str, Any]:
    """A graph as JSON-able data.

    Raises:
        GraphError: a parameter cannot be written, such as a lambda, and `portable` asks for what can be read back.
    """
    return {
        "flowrl": FORMAT,
        "name": graph.name,
        "nodes": {
            node.name: {
                "operator": encode(node.operator, node.name, portable),
                "inputs": compact_inputs(node),
            }
            for node in graph.nodes.values()
        },
        "sinks": list(graph.sinks),
        "lag": graph.lag,
        "bindings": {
            role: encode(backend, f"bindings.{role}", portable) for role, backend in sorted(graph.bindings.items())
        },
    }


def fingerprint(graph: Graph) -> str:
    """xxh3-128 (hex) of the canonical form: equal for graphs that compute the same, whatever their name."""
    canonical = graph_to_dict(graph, portable=False)
    canonical |= {"name": "", "sinks": sorted(graph.sinks)}
    return xxhash.xxh3_128_hexdigest(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode())


def graph_from_dict(kind: type[GraphT], data: Mapping[str, Any]) -> GraphT:
    """The graph, of this class, that `graph_to_dict` wrote.

    Raises:
        GraphError: not a graph, of another format, or naming what is not there.
    """
    if _part(data, "flowrl", int, "the data") != FORMAT:
        raise GraphError(
            f"the graph is written in format {data['flowrl']!r}, and this flowrl reads {FORMAT}; write it again from "
            f"its Python file."
        )
    nodes = {}
    written: Mapping[str, Any] = _part(data, "nodes", Mapping, "the data")
    for name in written:
        entry = _part(written, name, Mapping, "nodes")
        operator = decode(_part(entry, "operator", Mapping, name), name)
        if not isinstance(operator, Operator):
            raise GraphError(f"the node {name} is {operator!r}; expected an operator.")
        nodes[name] = Node(
            name, operator.named(name), _expand_inputs(name, operator, _part(entry, "inputs", Mapping, name))
        )
    sinks, lag = _part(data, "sinks", list, "the data"), _part(data, "lag", int, "the data")
    graph = kind.build(_part(data, "name", str, "the data"), nodes, sinks, lag)
    bindings: Mapping[str, Any] = _part(data, "bindings", Mapping, "the data")
    return graph.bound({role: decode(backend, f"bindings.{role}") for role, backend in bindings.items()})


def _part(data: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """A part of the data that is read, refused unless it is of `kind`."""
    if key not in data or not isinstance(data[key], kind):
        found = f"has a {type(data[key]).__name__} under {key!r}" if key in data else f"lacks {key!r}"
        raise GraphError(
            f"{where} {found}, so this is not a flowrl graph, or a damaged one; expected a {kind.__name__.lower()} "
            f"there, as graph.to_dict() writes it."
        )
    return data[key]


def save(graph: Graph, path: str | Path) -> None:
    """Write a graph to ``.yaml``/``.yml`` or ``.json``."""
    path, data = Path(path), graph_to_dict(graph)
    text = json.dumps(data, indent=2) + "\n" if _is_json(path) else yaml.safe_dump(data, sort_keys=False, width=120)
    path.write_text(text, encoding="utf-8")


def load(kind: type[GraphT], path: str | Path) -> GraphT:
    """The graph, of this class, in a ``.yaml``/``.yml`` or ``.json`` file.

    Raises:
        GraphError: the file is missing, broken, or no graph.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if _is_json(path) else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise GraphError(
            f"{path} cannot be read as a graph: {error}; expected a file that flowrl.save(...) wrote."
        ) from error
    if not isinstance(data, Mapping):
        raise GraphError(f"{path} holds a {type(data).__name__}; expected a graph as flowrl.save(...) writes it.")
    return graph_from_dict(kind, data)


def _is_json(path: Path) -> bool:
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise GraphError(f"{path} has the ending {path.suffix!r}; expected .json, .yaml or .yml.")
    return path.suffix == ".json"


def compact_inputs(node: Node) -> dict[str, str]:
    """The inputs of a node by port: a record that comes whole from one node is written as that node's name."""
    inputs: dict[str, str] = {}
    for port in node.operator.signature.ports.values():
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


def _import(path: Any, where: str) -> Any:
    try:
        return resolve(str(path))
    except ParameterError as error:
        raise GraphError(f"{where} cannot be read: {error}") from error

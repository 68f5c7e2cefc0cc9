"""Graphs as data: JSON-able dictionaries, files, and the canonical form behind fingerprints.

A spec is written as its class and its parameters, a callable as its import path and the hash of its source, a role as
its name. Nothing is pickled; reading imports the classes and functions that the data names, as any Python import would.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from flowrl.errors import GraphError
from flowrl.functions import reference, resolve, source_hash
from flowrl.graph import Graph, Node
from flowrl.operator import Operator
from flowrl.roles import RoleRef
from flowrl.spec import Spec
from flowrl.symbols import Edge

FORMAT = 1


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
        fields = {f.name: encode(getattr(value, f.name), f"{where}.{f.name}", portable) for f in parameters(value)}
        return {"$type": _path(type(value), where, portable), **fields}
    if isinstance(value, type):
        return {"$class": _path(value, where, portable)}
    if callable(value):
        path = reference(value)
        if path is None and portable:
            raise GraphError(
                f"{where} is {value!r}, which has no import path, so it can run but not be written to a file; move it to the "
                f"top level of a module, or name it as 'path/to/file.py:name'."
            )
        return {"$function": path or "<not importable>", "source": source_hash(value)}
    raise GraphError(
        f"{where} is {value!r}, a {type(value).__name__}, which cannot be written to a file; use plain values or specs."
    )


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
    if "$function" in data:
        function: Callable[..., Any] = resolve(data["$function"])
        if source_hash(function) != data["source"]:
            raise GraphError(
                f"{where} names {data['$function']}, whose source has changed since the graph was written, so it would not be "
                f"the same graph; write the graph again from its Python file, or restore the function."
            )
        return function
    if "$type" in data:
        cls = _import(data["$type"], where)
        if not issubclass(cls, Spec):
            raise GraphError(
                f"{where} names the class {data['$type']}, which is no Spec; expected an operator, loss or backend."
            )
        return cls(**{k: decode(v, f"{where}.{k}") for k, v in data.items() if k != "$type"})
    return {k: decode(v, f"{where}[{k!r}]") for k, v in data.items()}


def parameters(spec: Spec) -> list[dataclasses.Field[Any]]:
    """The fields that a spec is constructed from."""
    return [f for f in dataclasses.fields(spec) if f.init]  # type: ignore[arg-type]


def graph_to_dict(graph: Graph, portable: bool = True) -> dict[str, Any]:
    """See `Graph.to_dict`."""
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


def graph_from_dict(data: Mapping[str, Any]) -> Graph:
    """See `Graph.from_dict`.

    Raises:
        GraphError: not a graph, of another format, or naming what is not there.
    """
    missing = [key for key in ("flowrl", "name", "nodes", "sinks") if key not in data]
    if missing:
        raise GraphError(
            f"the data is no flowrl graph: it lacks {', '.join(missing)}; expected what graph.to_dict() writes."
        )
    if data["flowrl"] != FORMAT:
        raise GraphError(
            f"the graph is written in format {data['flowrl']!r}, and this flowrl reads {FORMAT}; write it again."
        )
    nodes = {}
    for name, entry in data["nodes"].items():
        operator = decode(entry["operator"], name)
        if not isinstance(operator, Operator):
            raise GraphError(f"the node {name} is {operator!r}; expected an operator.")
        nodes[name] = Node(name, operator.named(name), _expand_inputs(name, operator, entry.get("inputs", {})))
    graph = Graph.build(data["name"], nodes, data["sinks"], data.get("lag", 0))
    return graph.bound({role: decode(b, f"bindings.{role}") for role, b in data.get("bindings", {}).items()})


def save(graph: Graph, path: str | Path) -> None:
    """Write a graph to ``.yaml``/``.yml`` or ``.json``."""
    path, data = Path(path), graph_to_dict(graph)
    text = json.dumps(data, indent=2) + "\n" if _is_json(path) else yaml.safe_dump(data, sort_keys=False, width=120)
    path.write_text(text, encoding="utf-8")


def load(path: str | Path) -> Graph:
    """The graph in a ``.yaml``/``.yml`` or ``.json`` file.

    Raises:
        GraphError: the file is missing, broken, or no graph.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if _is_json(path) else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise GraphError(
            f"{path} cannot be read as a graph: {error}; expected a file that graph.save(...) wrote."
        ) from error
    if not isinstance(data, Mapping):
        raise GraphError(f"{path} holds a {type(data).__name__}; expected a graph as graph.save(...) writes it.")
    return graph_from_dict(data)


def _is_json(path: Path) -> bool:
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise GraphError(f"{path} has the ending {path.suffix!r}; expected .json, .yaml or .yml.")
    return path.suffix == ".json"


def compact_inputs(node: Node) -> dict[str, str]:
    """The inputs of a node by port: a record that comes whole from one node is written as that node's name."""
    inputs: dict[str, str] = {}
    for port in node.operator.signature.ports.values():
        wired = {slot: node.inputs[slot] for slot in port.slots if slot in node.inputs}
        sources = {edge.node for edge in wired.values()}
        same_names = all(slot.partition(".")[2] == edge.output for slot, edge in wired.items())
        if port.record is not None and len(sources) == 1 and same_names:
            inputs[port.name] = sources.pop()
        else:
            inputs |= {slot: str(edge) for slot, edge in wired.items()}
    return inputs


def _expand_inputs(name: str, operator: Operator, inputs: Mapping[str, str]) -> dict[str, Edge]:
    edges = {}
    for port, source in inputs.items():
        record = operator.signature.ports.get(port)
        if record is not None and record.record is not None and "." not in source:
            edges |= {slot: Edge(source, slot.partition(".")[2]) for slot in record.slots}
        elif port in operator.signature.slots:
            edges[port] = Edge.parse(source)
        else:
            raise GraphError(f"{name} has no port {port!r}; it has {', '.join(operator.signature.slots)}.")
    return edges


def _path(cls: type, where: str, portable: bool) -> str:
    if portable and ("<locals>" in cls.__qualname__ or cls.__module__ == "__main__"):
        raise GraphError(
            f"{where} is a {cls.__qualname__} of {cls.__module__}, which cannot be imported from elsewhere, so the graph can run "
            f"but not be written to a file; move the class to the top level of a module."
        )
    return f"{cls.__module__}:{cls.__qualname__}"


def _import(path: str, where: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise GraphError(
            f"{where} names {path!r}, which cannot be imported: {error}; install or put it on the path."
        ) from error
    return found

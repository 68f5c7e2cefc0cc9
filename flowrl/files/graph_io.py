"""Graphs as data: JSON-able dictionaries, files, and the canonical form behind fingerprints."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import xxhash
import yaml

from flowrl.core.graphs.graph import Graph, Node, refuse_non_graph
from flowrl.core.graphs.lag import Lag
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge
from flowrl.core.operators.when import ALWAYS
from flowrl.data.files import write
from flowrl.errors import GraphError, ParameterError, article, offer, type_of
from flowrl.files import plain
from flowrl.files.values import NotImported, at_place, decode, encode, malformed, refuse_foreign, refuse_other_keys
from flowrl.rules.check import refuse_unknown_rules
from flowrl.spec import Spec, parameters

FORMAT = 2
KEYS = ("flowrl", "name", "nodes", "sinks", "lag", "bindings", "allow")
"""The keys of a written graph."""

GraphT = TypeVar("GraphT", bound=Graph)


def graph_to_dict(graph: Graph, portable: bool = True) -> dict[str, Any]:
    """A graph as JSON-able data; with `portable`, one that can be read back."""
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
    """xxh3-128 (hex) of the canonical form: equal for graphs that compute the same under any name."""
    canonical = graph_to_dict(graph, portable=False)
    canonical |= {"name": "", "sinks": sorted(graph.sinks)}
    canonical.pop("allow", None)
    return xxhash.xxh3_128_hexdigest(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode())


def graph_from_dict(
    kind: type[GraphT],
    data: Mapping[str, Any],
    imports: bool | None,
    source: object = "the data",
    call: str = "Graph.from_dict(data, imports=True)",
) -> GraphT:
    """The inverse of `graph_to_dict`, as this class; see `flowrl.files.values` for `imports`."""
    _refuse_other_data(data, source)
    refuse_other_keys(data, KEYS, "the data")
    if imports is None:
        refuse_foreign(data, source, call)
    nodes = {}
    written: Mapping[str, Any] = _part(data, "nodes", Mapping, "the data")
    for name in written:
        entry = _part(written, name, Mapping, "nodes")
        refuse_other_keys(entry, ("operator", "inputs", "when"), name)
        operator = decode(_part(entry, "operator", Mapping, name), name, imports)
        if not isinstance(operator, Operator):
            found = repr(operator) if isinstance(operator, Spec) else type_of(operator)
            raise GraphError(
                f"The node {name} is {found}; expected an operator.", code="file.wrong-object", node=name, found=found
            )
        inputs = _expand_inputs(name, operator, _part(entry, "inputs", Mapping, name))
        nodes[name] = Node(name, _timed(operator.named(name), entry), inputs)
    sinks, lag = _part(data, "sinks", list, "the data"), _lag(data)
    if odd := [sink for sink in sinks if not isinstance(sink, str)]:
        raise malformed(
            f"The sinks of the data contain {type_of(odd[0])}; expected names of nodes.", where="the data", key="sinks"
        )
    allow: Mapping[str, str] = _part(data, "allow", Mapping, "the data") if "allow" in data else {}
    refuse_unknown_rules(allow, "The data, under 'allow',", nodes)
    graph = kind.build(_part(data, "name", str, "the data"), nodes, sinks, lag, allow=allow)
    bindings: Mapping[str, Any] = _part(data, "bindings", Mapping, "the data")
    return graph.bound({role: decode(backend, f"bindings.{role}", imports) for role, backend in bindings.items()})


def _refuse_other_data(data: Mapping[str, Any], source: object) -> None:
    """Refuse data that is not a graph of this format, such as the description of a run."""
    if not isinstance(data, Mapping):
        raise malformed(
            f"The data is {type_of(data)}; expected a mapping, as graph.to_dict() returns it.",
            where="the data",
            found=type(data).__name__,
        )
    plain.check(data, "the data")
    if "flowrl" not in data and isinstance(data.get("graph"), Mapping):
        raise malformed(
            f"{source} describes a run, not a graph. Pass the graph in it: "
            f"Graph.from_dict(json.loads(Path({str(source)!r}).read_text())['graph']).",
            where=source,
            key="flowrl",
        )
    if _part(data, "flowrl", int, "the data") != FORMAT:
        raise GraphError(
            f"The graph was saved in format {data['flowrl']!r}, but this version of flowrl reads format {FORMAT}. Save "
            f"it again from its Python file.",
            code="file.wrong-format",
            found=data["flowrl"],
            expected=FORMAT,
        )


def _lag(data: Mapping[str, Any]) -> int | Lag:
    """The lag of the data: a number, or with spans all parameters of a `Lag`."""
    if not isinstance(data.get("lag"), Mapping):
        number: int = _part(data, "lag", int, "the data")
        return number
    refuse_other_keys(data["lag"], ("versions", "spans", "caches"), "the data, under 'lag',")
    try:
        return Lag(**data["lag"])
    except ParameterError as error:
        raise at_place("The data, under 'lag'", error) from error


def _timed(operator: Operator, entry: Mapping[str, Any]) -> Operator:
    """The operator with the `when` of its entry."""
    if "when" not in entry:
        return operator
    when = _part(entry, "when", Mapping, operator.name)
    refuse_other_keys(when, ("every", "start"), f"{operator.name}.when")
    try:
        return operator.when(**when)
    except ParameterError as error:
        raise at_place(f"{operator.name}.when", error) from error


def _part(data: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """The value under a key, refused unless it is of `kind`."""
    if key not in data or not isinstance(data[key], kind) or (kind is int and isinstance(data[key], bool)):
        found = f"has {type_of(data[key])} under {key!r}" if key in data else f"lacks {key!r}"
        expected = kind.__name__.lower()
        raise malformed(
            f"{where} {found}, so this is not a flowrl graph, or it is damaged; expected "
            f"{article(kind.__name__.lower())}, as graph.to_dict() returns it.",
            where=where,
            key=key,
            expected=expected,
        )
    return data[key]


def save(graph: Graph, path: str | Path) -> None:
    """Write a graph to ``.yaml``/``.yml`` or ``.json``, atomically.

    Raises:
        GraphError: it is not a graph, or has a parameter that cannot be written.
        StorageError: the file cannot be written.
    """
    refuse_non_graph(graph)
    path = path_of(path, "save", "For the graph as data, call graph.to_dict().")
    is_json, data = plain.is_json(path), graph_to_dict(graph)
    text = json.dumps(data, indent=2) + "\n" if is_json else yaml.safe_dump(data, sort_keys=False, width=120)
    write(path, text.encode())


def read(path: str | Path) -> tuple[Path, Mapping[str, Any]]:
    """The path, and the plain data in a ``.yaml``/``.yml`` or ``.json`` file, which is a mapping."""
    path = path_of(path, "load", "To read data as graph.to_dict() returns it, call Graph.from_dict(data).")
    data = plain.read(path)
    if not isinstance(data, Mapping):
        raise malformed(
            f"{path} holds {type_of(data)}; expected a graph or a training, as flowrl.save(...) writes it.",
            where=path,
            found=type(data).__name__,
        )
    return path, data


def path_of(path: Any, call: str, fix: str) -> Path:
    """The path of a graph's file."""
    if not isinstance(path, str | os.PathLike):
        raise malformed(
            f"flowrl.{call}(...) got {type_of(path)}; expected the path of a .yaml or .json file. {fix}",
            where=f"flowrl.{call}",
            found=type(path).__name__,
        )
    return Path(path)


def not_imported(graph: Graph) -> list[str]:
    """The functions of `graph` that were not imported when it was read."""
    found: dict[str, None] = {}
    specs: list[Spec] = [node.operator for node in graph.nodes.values()]
    while specs:
        for value in parameters(specs.pop()).values():
            if isinstance(value, NotImported):
                found[value.path] = None
            elif isinstance(value, Spec):
                specs.append(value)
    return list(found)


def refuse_not_imported(graph: Graph) -> None:
    """Refuse to run a graph that was read without importing its functions."""
    if missing := not_imported(graph):
        raise GraphError(
            f"{graph.name} was loaded without importing {', '.join(missing)}, so it cannot run. Load it with "
            f"flowrl.load(..., imports=True).",
            code="file.not-imported",
            path=missing[0],
        )


def compact_inputs(node: Node) -> dict[str, str]:
    """The inputs of a node by port: a record that one node writes is written as that node's name."""
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
            raise malformed(
                f"{name} has no port {written!r}; {offer(written, map(str, signature.fields))}", node=name, port=written
            )
    return edges

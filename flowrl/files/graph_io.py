"""Graphs as data: JSON-able dictionaries, files, and the canonical form behind fingerprints.

A spec is written as its class and parameters, a callable as its import path and the hash of its source, a role as its
name. Nothing is pickled. ``imports=True`` imports the classes and functions that the data names, which runs their files
as any Python import does; ``imports=False`` imports only those of flowrl and of installed operators.
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
"""The keys of a written graph."""

GraphT = TypeVar("GraphT", bound=Graph)


@dataclass(frozen=True)
class NotImported:
    """A function named by data that was not imported: it can be shown and compared, but not called.

    Args:
        path: its name in the data.
        source: the hash of its source in the data.
        key: ``"$function"``, or ``"$named"`` if it is a string in Python.
    """

    path: str
    source: str | None
    key: Literal["$function", "$named"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise GraphError(
            f"{self.path} cannot be called: its graph was loaded without imports. Load the graph with "
            f"flowrl.load(..., imports=True).",
            code="file.not-imported",
            path=self.path,
        )

    @property
    def __name__(self) -> str:
        """The name in pictures: that of a function, or the whole string."""
        return self.path.rpartition(":")[2] if self.key == "$function" else self.path

    def __repr__(self) -> str:
        return self.path


def encode(value: Any, where: str, portable: bool = True) -> Any:
    """A parameter as JSON-able data.

    Args:
        value: the parameter.
        where: ``node.field`` for messages.
        portable: False also accepts values that cannot be read back (a lambda), for fingerprints and diffs.
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
        f"{where} is {value!r}, {type_of(value)}, which cannot be written to a file. Use plain values or specs.",
        code="file.unwritable-value",
        where=where,
        found=value,
    )


def _type(spec: Spec, where: str, portable: bool) -> dict[str, str]:
    """The class of a spec: its path; for an operator that is a function, also the hash of its source."""
    if isinstance(spec, OfFunction):
        return {"$type": _path(plain_of(spec), where, portable), "$source": source_hash(function_of(spec))}
    return {"$type": _path(type(spec), where, portable)}


def _reference(ref: str) -> dict[str, str]:
    """A function named by a string, which is read back as a string."""
    source, name = parse_reference(ref)
    if source.endswith(".py"):
        relative = os.path.relpath(source)
        source = os.path.abspath(source) if relative.startswith(os.pardir) else relative
    return {"$named": f"{source}:{name}", "source": named_source_hash(ref)}


def decode(data: Any, where: str, imports: bool) -> Any:
    """The inverse of `encode`.

    Args:
        data: plain data.
        where: ``node.field`` for messages.
        imports: import what the data names. False leaves functions as `NotImported`.
    """
    if isinstance(data, list | tuple):
        return tuple(decode(item, where, imports) for item in data)
    if not isinstance(data, Mapping):
        return data
    form = next((key for key in ("$type", *data) if key in data and key.startswith("$")), None)
    if form is None:
        return {k: decode(v, f"{where}[{k!r}]", imports) for k, v in data.items()}
    if not isinstance(data[form], str):
        raise _malformed(f"{where} has {type_of(data[form])} under {form!r}; expected a name.", where=where, key=form)
    if form == "$type":
        return _spec(data, where, imports)
    allowed = {"$role": (), "$class": (), "$function": ("source",), "$named": ("source",)}
    if form not in allowed:
        raise _malformed(
            f"{where} has {form!r}; {offer(form, ('$type', *allowed), 'expected one of')}", where=where, key=form
        )
    _refuse_other_keys(data, (form, *allowed[form]), where)
    if form == "$role":
        try:
            return RoleRef(data[form])
        except ParameterError as error:
            raise _at(where, error) from error
    if form != "$class":
        return _function(data, form, where, imports)
    if not isinstance(found := _class(data[form], where, imports), type):
        raise GraphError(
            f"{where} names {data[form]}, which is not a class; expected a record.",
            code="file.wrong-object",
            where=where,
            path=data[form],
        )
    return found


def _spec(data: Mapping[str, Any], where: str, imports: bool) -> Spec:
    """The spec from its class and parameters."""
    name = data["$type"]
    cls = entry_points.load(name) if name.isidentifier() else _class(name, where, imports)
    if isinstance(cls, OfFunction):
        _refuse_changed(function_of(cls), data.get("$source"), name, where)
        data, cls = {k: v for k, v in data.items() if k != "$source"}, type(cls)
    if not isinstance(cls, type) or not issubclass(cls, Spec):
        raise GraphError(
            f"{where} names {name}, which is not a Spec; expected an operator, loss or backend.",
            code="file.wrong-object",
            where=where,
            path=name,
        )
    given = {k: decode(v, f"{where}.{k}", imports) for k, v in data.items() if k != "$type"}
    if not imports:  # checking a function named by a string may import its package
        given |= {k: NotImported(v, None, "$named") for k, v in given.items() if k in cls.references and type(v) is str}
    try:
        return cls(**given)
    except ParameterError as error:
        raise _at(where, error) from error


def _function(data: Mapping[str, Any], form: Literal["$function", "$named"], where: str, imports: bool) -> Any:
    """The function of this path, checked against its source; or the path, if it is a string in Python."""
    path, source = data[form], data.get("source")
    if not imports and not _comes_with_flowrl(path):
        return NotImported(path, source, form)
    found = _import(path, where)
    _refuse_changed(found, source, path, where)
    if form == "$function":
        return found
    return path if imports else NotImported(path, source, form)


def _refuse_changed(function: Callable[..., Any], source: Any, path: str, where: str) -> None:
    """Refuse a function whose source does not match the hash in the data."""
    if source_hash(function) != source:
        raise GraphError(
            f"{where} names {path}, whose source has changed since the graph was saved, so it would not be the same "
            f"graph. Save the graph again from its Python file, or restore the function.",
            code="file.source-changed",
            where=where,
            path=path,
        )


def _class(path: str, where: str, imports: bool) -> Any:
    """The object at this path: a class, or an operator that is a function."""
    if not imports and not _comes_with_flowrl(path):
        raise GraphError(
            f"{where} is of the class {path}, which flowrl would have to import, and an import runs its file. If you "
            f"trust that file, pass imports=True, or --import on the command line.",
            code="file.not-imported",
            where=where,
            path=path,
        )
    return _import(path, where)


def _comes_with_flowrl(path: str) -> bool:
    """Whether a path names an object of flowrl, or an operator of an installed package."""
    module, _, name = path.rpartition(":")
    if module.startswith("flowrl.") and not module.endswith(".py") and name.isidentifier():
        return True
    return any(path == point.value for point in entry_points.names().values())


def _refuse_other_keys(data: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse unknown keys: they may be misspelled."""
    if other := [key for key in data if key not in known]:
        raise _malformed(
            f"{where} has the unknown key {other[0]!r}; {offer(other[0], known, 'expected')}", where=where, key=other[0]
        )


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


def graph_from_dict(kind: type[GraphT], data: Mapping[str, Any], imports: bool) -> GraphT:
    """The inverse of `graph_to_dict`, as this class; see `decode` for `imports`."""
    if not isinstance(data, Mapping):
        raise _malformed(
            f"The data is {type_of(data)}; expected a mapping, as graph.to_dict() returns it.",
            where="the data",
            found=type(data).__name__,
        )
    plain.check(data, "the data")
    if _part(data, "flowrl", int, "the data") != FORMAT:
        raise GraphError(
            f"The graph was saved in format {data['flowrl']!r}, but this version of flowrl reads format {FORMAT}. Save "
            f"it again from its Python file.",
            code="file.wrong-format",
            found=data["flowrl"],
            expected=FORMAT,
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
            raise GraphError(
                f"The node {name} is {found}; expected an operator.", code="file.wrong-object", node=name, found=found
            )
        inputs = _expand_inputs(name, operator, _part(entry, "inputs", Mapping, name))
        nodes[name] = Node(name, _timed(operator.named(name), entry), inputs)
    sinks, lag = _part(data, "sinks", list, "the data"), _lag(data)
    if odd := [sink for sink in sinks if not isinstance(sink, str)]:
        raise _malformed(
            f"The sinks of the data contain {type_of(odd[0])}; expected names of nodes.", where="the data", key="sinks"
        )
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
    """The operator with the `when` of its entry."""
    if "when" not in entry:
        return operator
    when = _part(entry, "when", Mapping, operator.name)
    _refuse_other_keys(when, ("every", "start"), f"{operator.name}.when")
    try:
        return operator.when(**when)
    except ParameterError as error:
        raise _at(f"{operator.name}.when", error) from error


def _part(data: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """The value under a key, refused unless it is of `kind`."""
    if key not in data or not isinstance(data[key], kind) or (kind is int and isinstance(data[key], bool)):
        found = f"has {type_of(data[key])} under {key!r}" if key in data else f"lacks {key!r}"
        raise _malformed(
            f"{where} {found}, so this is not a flowrl graph, or it is damaged; expected a {kind.__name__.lower()}, as "
            f"graph.to_dict() returns it.",
            where=where,
            key=key,
            expected=kind.__name__.lower(),
        )
    return data[key]


def save(graph: Graph, path: str | Path) -> None:
    """Write a graph to ``.yaml``/``.yml`` or ``.json``, atomically.

    Raises:
        GraphError: it is not a graph, or has a parameter that cannot be written.
        StorageError: the file cannot be written.
    """
    refuse_no_graph(graph)
    path = Path(path)
    is_json, data = plain.is_json(path), graph_to_dict(graph)
    text = json.dumps(data, indent=2) + "\n" if is_json else yaml.safe_dump(data, sort_keys=False, width=120)
    write(path, text.encode())


def load(kind: type[GraphT], path: str | Path, imports: bool) -> GraphT:
    """The graph, as this class, in a ``.yaml``/``.yml`` or ``.json`` file; see `decode` for `imports`."""
    data = plain.read(Path(path))
    if not isinstance(data, Mapping):
        raise _malformed(
            f"{path} holds {type_of(data)}; expected a graph, as flowrl.save(...) writes it.",
            where=path,
            found=type(data).__name__,
        )
    return graph_from_dict(kind, data, imports)


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
            raise _malformed(
                f"{name} has no port {written!r}; {offer(written, map(str, signature.fields))}", node=name, port=written
            )
    return edges


def _path(value: Callable[..., Any], where: str, portable: bool) -> str:
    """The import path of a class or function."""
    if (path := reference(value)) is not None:
        return path
    if portable:
        raise GraphError(
            f"{where} is {value!r}, which has no import path, so the graph can run but not be saved. Move it to the "
            f"top level of a module or file, where it is 'package.module:name' or 'path/to/file.py:name'.",
            code="file.no-import-path",
            where=where,
            found=value,
        )
    return f"{value.__module__}:{getattr(value, '__qualname__', type(value).__qualname__)}"


def _import(path: str, where: str) -> Any:
    try:
        return resolve(path)
    except ParameterError as error:
        raise _at(where, error) from error


def _at(where: str, error: ParameterError) -> GraphError:
    """The error with its place in the data."""
    return GraphError(f"{where}: {error.message}", code=error.code, **error.facts)


def _malformed(message: str, **facts: object) -> GraphError:
    return GraphError(message, code="file.malformed", **facts)

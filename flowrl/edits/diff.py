"""`Graph.diff`: the changes from one graph to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.core.graphs.graph import Graph, Node, refuse_non_graph
from flowrl.core.graphs.lag import Lag
from flowrl.core.operators.function import OfFunction
from flowrl.core.operators.when import ALWAYS
from flowrl.draw import mermaid
from flowrl.draw.notebook import svg_bundle
from flowrl.files.graph_io import compact_inputs
from flowrl.files.values import encode
from flowrl.record_types import accepts
from flowrl.spec import Spec, non_default, shown


@dataclass(frozen=True)
class NodeChange:
    """The changes of a node that both graphs have: ``(before, after)`` by parameter and by port; None is absent."""

    parameters: Mapping[str, tuple[Any, Any]]
    ports: Mapping[str, tuple[str | None, str | None]]


@dataclass(frozen=True)
class Diff:
    """The changes from `before` to `after`: ``str()`` for text, `mermaid()` for a picture; falsy without changes.

    Attributes:
        pruned: nodes that were removed because no node reads them any more.
        removed: other nodes that were removed: sinks, nodes with remaining readers, and nodes whose outputs an added
            node writes.
        replacements: for a removed node, the nodes that its readers read now, or that write its outputs.
        renamed: new names by old, of nodes that differ in nothing else; these are neither added nor removed.
        allow: the reasons for breaking a rule, before and after; None is not allowed.
        seconds: the predicted time of a step, before and after; None without costs.
    """

    before: Graph
    after: Graph
    added: tuple[str, ...]
    removed: tuple[str, ...]
    pruned: tuple[str, ...]
    changed: Mapping[str, NodeChange]
    bindings: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    lag: tuple[Lag, Lag] | None = None
    sinks: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    replacements: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    allow: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)
    seconds: tuple[float, float] | None = None

    def __bool__(self) -> bool:
        nodes = self.added or self.removed or self.pruned or self.changed or self.renamed
        return bool(nodes or self.bindings or self.lag or self.sinks or self.allow)

    def __str__(self) -> str:
        lines = [f"{self.before.name} -> {self.after.name}" + ("" if self else ": no difference")]
        for name in self.added:
            sources = ", ".join(self.after[name].sources)
            lines.append(f"+ {name}: {describe(self.after[name])}" + (f"  <- {sources}" if sources else ""))
        for name in self.removed:
            place = f"  (in its place: {', '.join(self.replacements[name])})" if name in self.replacements else ""
            lines.append(f"- {name}: {describe(self.before[name])}{place}")
        for name in self.pruned:
            lines.append(f"- {name}: {describe(self.before[name])}  (nothing reads it any more)")
        for old_name, new_name in self.renamed.items():
            lines.append(f"~ {old_name} -> {new_name} (renamed)")
        for name, change in self.changed.items():
            for parameter, (old, new) in change.parameters.items():
                lines.append(f"~ {name}.{parameter}: {_change(old, new)}")
            for port, (source, target) in change.ports.items():
                lines.append(f"~ {name} <- {port}: {source or 'unwired'} -> {target or 'unwired'}")
        for role, (old, new) in self.bindings.items():
            lines.append(f"~ role {role}: {_backend(old, role)} -> {_backend(new, role)}")
        if self.lag:
            lines.append(f"~ lag of Sync -> Generate: {self.lag[0]} -> {self.lag[1]}")
        if self.sinks:
            lines.append(f"~ sinks: {', '.join(self.sinks[0])} -> {', '.join(self.sinks[1])}")
        for rule, (old_reason, new_reason) in self.allow.items():
            was, now = (repr(reason) if reason else "refused" for reason in (old_reason, new_reason))
            lines.append(f"~ allow {rule}: {was} -> {now}")
        if self.seconds is not None:
            lines.append(f"this edit: {self.seconds[0]:.3g} s → {self.seconds[1]:.3g} s")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def mermaid(self) -> str:
        """Both graphs in one picture that marks added, removed and changed nodes."""
        return mermaid.draw(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return svg_bundle(self, str(self))


def diff(before: Graph, after: Graph) -> Diff:
    """The changes from `before` to `after`.

    Nodes match by name; a node with another operator class counts as changed. A node without a match by name matches a
    node with a new name and the same type, parameters and wiring.
    """
    refuse_non_graph(before)
    refuse_non_graph(after)
    renamed = _renamed(before, after)
    gone = [name for name in before.nodes if name not in after and name not in renamed]
    added = [name for name in after.nodes if name not in before and name not in renamed.values()]
    written = [t for name in added for t in after[name].signature.outputs.values()]
    pruned = [
        name
        for name in gone
        if name not in before.sinks
        and set(before.network.successors(name)) <= set(gone)
        and not any(accepts(t, w) for t in before[name].signature.outputs.values() for w in written)
    ]
    changed = {}
    for name, node in after.nodes.items():
        if name in before and (change := _node_change(before[name], node, renamed)):
            changed[name] = change
    roles = sorted({*before.bindings, *after.bindings})
    bindings = {
        r: (before.bindings.get(r), after.bindings.get(r))
        for r in roles
        if before.bindings.get(r) != after.bindings.get(r)
    }
    removed = tuple(name for name in gone if name not in pruned)
    moved = {renamed.get(s, s) for s in before.sinks if s not in gone} != set(after.sinks).difference(added)
    return Diff(
        before,
        after,
        tuple(added),
        removed,
        tuple(pruned),
        changed,
        bindings,
        (before.lag, after.lag) if before.lag != after.lag else None,
        (before.sinks, after.sinks) if moved else None,
        renamed,
        {name: place for name in removed if (place := _in_place_of(name, before, after, added, renamed))},
        _changes(before.allow, after.allow),
    )


def _in_place_of(
    name: str, before: Graph, after: Graph, added: Sequence[str], renamed: Mapping[str, str]
) -> tuple[str, ...]:
    """The nodes that the readers of a removed node read now; without such readers, the added ones with its outputs."""
    now: dict[str, None] = {}
    for reader in before.nodes.values():
        new = renamed.get(reader.name, reader.name)
        edges = after[new].inputs if new in after else {}
        now |= {edges[f].node: None for f, edge in reader.inputs.items() if edge.node == name and f in edges}
    if now:
        return tuple(now)
    outputs = before[name].signature.outputs.values()
    return tuple(
        other
        for other in added
        if any(accepts(t, written) for t in outputs for written in after[other].signature.outputs.values())
    )


def _renamed(before: Graph, after: Graph) -> dict[str, str]:
    """New names by old, of the nodes that differ only in their name."""
    renamed: dict[str, str] = {}
    for node in after.nodes.values():  # in topological order, so the new names of its sources are known
        gone = [old for name, old in before.nodes.items() if name not in after and name not in renamed]
        same = [old.name for old in gone if node.name not in before and not _node_change(old, node, renamed)]
        if same:
            renamed[same[0]] = node.name
    return renamed


def _node_change(old: Node, new: Node, renamed: Mapping[str, str]) -> NodeChange | None:
    """The changes of a node, except for names in `renamed`."""
    inputs = {field: edge._replace(node=renamed.get(edge.node, edge.node)) for field, edge in old.inputs.items()}
    old = Node(old.name, old.operator, inputs)
    before, after = _parameters(old), _parameters(new)
    types = [before["operator"], after["operator"]]
    if types[0] != types[1] and _short(types[0]) != _short(types[1]):
        before["operator"], after["operator"] = map(_short, types)
    changes, ports = _changes(before, after), _changes(compact_inputs(old), compact_inputs(new))
    return NodeChange(changes, ports) if changes or ports else None


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The differences by key; None is absent. For two specs of one class, their parameters that differ."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict) and old.get("$type", old) == new.get("$type", new):
            found |= _changes(old, new, f"{prefix}{name}.")
        elif old != new:
            found[f"{prefix}{name}"] = (old, new)
    return found


def _parameters(node: Node) -> dict[str, Any]:
    encoded = encode(node.operator, node.name, portable=False)
    found = {"operator": _operator(encoded), **{name: encoded[name] for name in shown(node.operator)}}
    return found if node.when == ALWAYS else {**found, "when": encode(node.when, node.name)}


def _operator(encoded: Mapping[str, Any]) -> Any:
    if "$source" in encoded:
        return {"$function": encoded["$type"], "source": encoded["$source"]}
    return encoded["$type"]


def backend_changes(role: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> list[str]:
    """The changes between two backends of a role, as `encode` returns them: ``role actor.optimizer.lr: ...``."""
    if before is None or after is None or before["$type"] != after["$type"]:
        return [f"role {role}: {_show(before)} -> {_show(after)}"]
    changes = _changes(before, after).items()
    return [f"role {role}.{name}: {_show(old)} -> {_show(new)}" for name, (old, new) in changes]


def describe(node: Node) -> str:
    """``GAE(lam=0.9)``: the operator with the parameters that differ from their defaults."""
    return ".".join(filter(None, (_spec(node.operator, node.name), str(node.when))))


def _spec(spec: Spec, where: str) -> str:
    given = [f"{name}={_show(encode(value, where, portable=False))}" for name, value in non_default(spec).items()]
    if isinstance(spec, OfFunction) and not given:
        return type(spec).__name__
    return f"{type(spec).__name__}({', '.join(given)})"


def _backend(backend: Any, role: str) -> str:
    return _spec(backend, role) if isinstance(backend, Spec) else repr(backend)


def _change(old: Any, new: Any) -> str:
    """Both values, with full paths if their short forms are equal; equal paths have another source."""
    short, full = ([_show(value, paths) for value in (old, new)] for paths in (False, True))
    other = " (with another source)" if full[0] == full[1] else ""
    return " -> ".join(full if short[0] == short[1] else short) + other


def _show(value: Any, paths: bool = False) -> str:
    """A parameter as `encode` returns it, with classes by name or by full path."""
    if isinstance(value, Mapping) and "$type" in value:
        inner = ", ".join(f"{k}={_show(v, paths)}" for k, v in value.items() if k != "$type" and v is not None)
        return f"{value['$type'] if paths else _short(value['$type'])}({inner})"
    if isinstance(value, Mapping) and "$role" in value:
        return f"role {value['$role']}"
    if isinstance(value, Mapping) and ("$function" in value or "$named" in value):
        return str(value.get("$function", value.get("$named")))
    if isinstance(value, Mapping) and "$class" in value:
        return str(value["$class"]) if paths else _short(value["$class"])
    return repr(value)


def _short(path: object) -> str:
    """``flowrl.operators.advantages.gae:GAE`` -> ``GAE``; for an operator that is a function, its name."""
    named = path["$function"] if isinstance(path, Mapping) else path
    return str(named).rpartition(":")[2].rpartition(".")[2]

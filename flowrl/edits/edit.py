"""`Graph.edit`: one atomic change.

All verbs resolve against the original graph, which does not change. Nodes that no sink reaches are removed at the end.

- ``replace={"gae": GroupAdvantage()}``: the replacement has its own name. A port keeps the edge of the predecessor's
  port with that name; else it reads the only ancestor that writes its column, else the only node that writes it and
  does not depend on the replaced node.
- ``drop=["whiten"]``: removes a sink; bypasses an inner node if exactly one of its inputs fits its readers.
- ``insert={"length_penalty": After("reward", LengthPenalty())}``: a column of ``reward`` that the operator reads and
  writes is rewritten, and all its readers read the new one. The ports read outputs of ``reward``, else of the nodes
  that a replacement may read. A gate (`Filter`) rewrites nothing: all edges across it go through it (see
  `flowrl.edits.gating`).
- ``wire={"gae.values": "old_values.values"}``: sets edges explicitly, and overrides all of the above.
- ``set={"generate.temperature": 0.7, "update_actor.loss.clip_high": 0.28}``: parameters of an operator, or of a spec
  that is one of its parameters. Parameters of one spec change at once.
- ``when={"update_actor": When(start=20)}``: the steps in which a node and its readers run.
- ``rename={"old": "new"}``, ``bind={"rollout": ...}``, ``lag=1``, ``name="grpo"``.
- ``lag=Lag(2, spans=True)``: weights change while requests are in flight; see `flowrl.core.graphs.lag`.
- ``allow={"FR007": "greedy is the baseline only"}``: allows breaking a rule, for this reason; None revokes that.
  ``{"FR007 generate": "..."}`` allows it only in one node.

Only ``drop`` and ``replace`` remove a node that writes weights: without readers, it remains as a sink.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from flowrl.core.graphs.after import After
from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.graph import Graph, unknown_node
from flowrl.core.graphs.lag import Lag
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge
from flowrl.core.operators.when import When
from flowrl.edits.fixes import FixableError, added, first_fix, of_cycle, of_hint
from flowrl.edits.gating import anchor_of, expose_columns, insert_gate
from flowrl.edits.parameters import with_parameters
from flowrl.edits.rewiring import Rewiring
from flowrl.errors import GraphError, PortError, offer, refuse_staleness, type_of
from flowrl.rules.check import refuse_unknown_rules

P = ParamSpec("P")
R = TypeVar("R")
GraphT = TypeVar("GraphT", bound=Graph)


def refuse_unknown_verbs(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of an ``edit``: a call with invalid arguments raises a `GraphError` that lists the verbs."""
    signature = inspect.signature(function)
    verbs = [name for name, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            refuse_staleness("edit(...)", kwargs, verbs)
            raise GraphError(
                f"edit(...) cannot be called: {error}. Pass its verbs by name, as in edit(drop=['whiten']); they are "
                f"{', '.join(verbs)}.",
                code="edit.bad-call",
                reason=str(error),
            ) from None
        return function(*args, **kwargs)

    return checked


@refuse_unknown_verbs
def edit(
    graph: GraphT,
    *,
    replace: Mapping[str, Operator] | None = None,
    drop: str | Iterable[str] = (),
    insert: Mapping[str, After] | None = None,
    set: Mapping[str, Any] | None = None,
    when: Mapping[str, When] | None = None,
    wire: Mapping[str, str] | None = None,
    rename: Mapping[str, str] | None = None,
    bind: Mapping[str, Any] | None = None,
    lag: int | Lag | None = None,
    name: str | None = None,
    allow: Mapping[str, str | None] | None = None,
) -> GraphT:
    """A changed copy of `graph`; see the module's docstring."""
    verbs: dict[str, Any] = {
        "replace": replace,
        "drop": _names(drop),
        "insert": insert,
        "set": set,
        "when": when,
        "wire": wire,
    }
    verbs |= {"rename": rename, "bind": bind, "lag": lag, "name": name, "allow": allow}
    try:
        return _edited(graph, **verbs)
    except FixableError as error:
        refused = error
    except PortError as error:
        if (hinted := of_hint(error, wire or {})) is None:
            raise
        refused = hinted
    except GraphError as error:
        if (rewired := of_cycle(error, graph, wire or {})) is None:
            raise
        refused = rewired
    fix = first_fix(refused, graph, lambda more: _edited(graph, **added(verbs, more)))
    raise refused.with_fix(fix)


def _edited(
    graph: GraphT,
    *,
    replace: Mapping[str, Operator] | None,
    drop: Sequence[str],
    insert: Mapping[str, After] | None,
    set: Mapping[str, Any] | None,
    when: Mapping[str, When] | None,
    wire: Mapping[str, str] | None,
    rename: Mapping[str, str] | None,
    bind: Mapping[str, Any] | None,
    lag: int | Lag | None,
    name: str | None,
    allow: Mapping[str, str | None] | None,
) -> GraphT:
    before = expose_columns(graph)
    replace, insert, set, when = replace or {}, insert or {}, set or {}, when or {}
    wire, rename, bind, allow = wire or {}, rename or {}, bind or {}, allow or {}
    _refuse_unmapped(
        replace=replace, insert=insert, set=set, when=when, wire=wire, rename=rename, bind=bind, allow=allow
    )
    _refuse_no_operators(replace, insert)
    changed_in_place = _timed(before, replace, when, _with_parameters(before, replace, set))
    replace = {**_through_same(before, replace), **changed_in_place}
    _refuse_misuse(graph, replace, drop, insert, rename)
    gates = {name: after.operator for name, after in insert.items() if isinstance(after.operator, Gate)}
    anchors = {name: after.node for name, after in insert.items()}
    change = Rewiring(
        before,
        replace,
        drop,
        {name: after.operator for name, after in insert.items() if name not in gates},
        {name: anchor for name, anchor in anchors.items() if name not in gates},
        rename,
        {end: source for end, source in wire.items() if end.partition(".")[0] not in gates},
    )
    nodes, sinks = change.reached()
    now = {name: name for name in (*nodes, *gates)}
    refuse_unknown_rules(allow, f"edit(allow={dict(allow)!r})", now.keys() | graph.nodes.keys())
    allowed = _allowed({**graph.allow, **allow}, {**change.new_names, **now}, now)
    name, lag = graph.name if name is None else name, graph.lag if lag is None else lag
    changed = graph.build(name, nodes, sinks, lag, allow=allowed)
    for at, gate in gates.items():
        moved = [other for other in anchors if other in gates or change.rewrites.get(other)]
        anchor = anchor_of(at, anchors[at], anchors, moved, change.new_names[anchors[at]])
        changed = insert_gate(changed, at, gate, anchor, _wires_of(at, gate, changed, wire, change.new_names))
    bindings = {role: backend for role, backend in graph.bindings.items() if role in changed.roles()}
    return changed.bound({**bindings, **bind})


def _allowed(allow: Mapping[str, str | None], new_names: Mapping[str, str], nodes: Container[str]) -> dict[str, str]:
    """The allowances of the changed graph, with the new names of their nodes, but without those of removed nodes."""
    found = {}
    for key, reason in allow.items():
        rule, _, node = key.partition(" ")
        if reason is not None and (not node or new_names[node] in nodes):
            found[f"{rule} {new_names[node]}" if node else rule] = reason
    return found


def _through_same(graph: Graph, replace: Mapping[str, Operator]) -> dict[str, Operator]:
    """`replace`, in which a gate that replaces a gate passes the same columns."""
    return {
        node: new.passing(old.operator.columns)
        if isinstance(new, Gate) and (old := graph.nodes.get(node)) is not None and isinstance(old.operator, Gate)
        else new
        for node, new in replace.items()
    }


def _wires_of(
    name: str, gate: Gate, graph: Graph, wire: Mapping[str, str], new_names: Mapping[str, str]
) -> dict[PortField, Edge]:
    """The edges that ``wire=`` sets for the ports of an inserted gate."""
    found = {}
    for end, source in wire.items():
        node, _, port = end.partition(".")
        if node != name:
            continue
        field, edge = PortField.parse(port), Edge.parse(source)
        edge = edge._replace(node=new_names.get(edge.node, edge.node))
        if field not in (known := gate.passing({}).signature.fields):
            raise GraphError(
                f"wire={{{end!r}: ...}} does not name a port; {offer(port, map(str, known), f'{name} has')}",
                code="edit.unknown-port",
                node=name,
                port=port,
            )
        if edge not in graph.types:
            raise GraphError(
                f"wire={{{end!r}: {source!r}}} names {source!r}, which is not an output; "
                f"{offer(source, map(str, graph.types), 'expected one of:')}",
                code="graph.unknown-output",
                node=name,
                output=source,
            )
        found[field] = edge
    return found


def _with_parameters(graph: Graph, replace: Mapping[str, Operator], set: Mapping[str, Any]) -> dict[str, Operator]:
    """The operator of each node that `set` names, with these parameters."""
    given: dict[str, dict[str, Any]] = {}
    for path, value in set.items():
        node, _, parameter = path.partition(".")
        if node not in graph:
            raise unknown_node(
                f"edit(set={{{path!r}: ...}}) names {node!r}, not a node of {graph.name}", node, graph.nodes
            )
        if node in replace:
            raise GraphError(
                f"edit replaces {node!r} and sets {path!r}. Pass the parameter to the replacement.",
                code="edit.conflict",
                node=node,
            )
        if graph[node].is_input:
            raise GraphError(
                f"edit(set={{{path!r}: ...}}) names the input {node!r}, which has the columns of the algorithm's "
                f"argument. Write another algorithm instead.",
                code="edit.input-node",
                node=node,
            )
        given.setdefault(node, {})[parameter] = value
    operators = {node: graph[node].operator for node in given}
    return {
        node: with_parameters(operators[node], node, values, _set_call).in_place_of(operators[node])
        for node, values in given.items()
    }


def _set_call(path: str) -> str:
    return f"edit(set={{{path!r}: ...}})"


def _timed(
    graph: Graph, replace: Mapping[str, Operator], when: Mapping[str, When], changed: Mapping[str, Operator]
) -> dict[str, Operator]:
    """`changed`, and the operator of each node that `when` names, with these steps."""
    found = dict(changed)
    for node, steps in when.items():
        call = f"edit(when={{{node!r}: {steps!r}}})"
        if not isinstance(steps, When):
            raise _bad_argument(f"{call} has {type_of(steps)} for steps", "when")
        if node not in graph:
            raise unknown_node(f"{call} names {node!r}, not a node of {graph.name}", node, graph.nodes)
        if graph[node].is_input:
            raise GraphError(
                f"{call} names an input, but every step has a batch. Name the node that reads it.",
                code="edit.input-node",
                node=node,
            )
        if node in replace:
            raise GraphError(
                f"edit replaces {node!r}, and {call} sets its steps. Set them on the replacement: "
                f"Operator(...).{steps}.",
                code="edit.conflict",
                node=node,
            )
        found[node] = found.get(node, graph[node].operator).when(steps.every, steps.start)
    return found


def _names(drop: Any) -> tuple[str, ...]:
    """The nodes that ``drop=`` names."""
    names = (drop,) if isinstance(drop, str) else tuple(drop) if isinstance(drop, Iterable) else None
    if names is None or isinstance(drop, Mapping) or not all(isinstance(name, str) for name in names):
        raise _bad_argument(f"edit(drop={drop!r}) does not name nodes", "drop")
    return names


def _refuse_unmapped(**verbs: Any) -> None:
    """Refuse verbs that are not mappings from names."""
    for verb, given in verbs.items():
        if not isinstance(given, Mapping):
            raise _bad_argument(f"edit({verb}={given!r}) is not a mapping", verb)
        for key, value in given.items():
            wrong = value if verb in ("wire", "rename") and not isinstance(value, str) else key
            if not isinstance(wrong, str):
                raise _bad_argument(f"edit({verb}={{{key!r}: {value!r}}}) has {wrong!r} instead of a name", verb)


_EXAMPLES = {
    "replace": "{'gae': GAE(lam=0.9)}",
    "drop": "['whiten']",
    "set": "{'gae.lam': 0.9}",
    "when": "{'update_actor': When(start=20)}",
    "insert": "{'length_penalty': After('reward', LengthPenalty())}",
    "wire": "{'gae.values': 'value.values'}",
    "rename": "{'gae': 'advantage'}",
    "bind": "{'rollout': TorchRollout()}",
    "allow": "{'FR007': 'greedy is the baseline only'}",
}


def _bad_argument(what: str, verb: str) -> GraphError:
    return GraphError(f"{what}. Pass, for example, {verb}={_EXAMPLES[verb]}.", code="edit.bad-argument", verb=verb)


def _refuse_no_operators(replace: Mapping[str, Any], insert: Mapping[str, Any]) -> None:
    """Refuse values of ``replace=`` and ``insert=`` that are not operators."""
    for node, operator in replace.items():
        if not isinstance(operator, Operator):
            raise _not_an_operator(f"edit(replace={{{node!r}: ...}})", operator)
    for node, after in insert.items():
        if not isinstance(after, After) or not isinstance(after.node, str):
            raise _bad_argument(
                f"edit(insert={{{node!r}: {after!r}}}) does not name the node to insert after", "insert"
            )
        if not isinstance(after.operator, Operator):
            raise _not_an_operator(f"edit(insert={{{node!r}: After({after.node!r}, ...)}})", after.operator)


def _refuse_misuse(
    graph: Graph,
    replace: Mapping[str, Operator],
    drop: Sequence[str],
    insert: Mapping[str, After],
    rename: Mapping[str, str],
) -> None:
    """Refuse unknown nodes, nodes named twice, edits of inputs, and duplicate names."""
    named = [("replace", n) for n in replace] + [("drop", n) for n in drop] + [("rename", n) for n in rename]
    named += [("insert", after.node) for after in insert.values()]
    for verb, node in named:
        if node not in graph:
            raise unknown_node(f"edit({verb}=...) names {node!r}, not a node of {graph.name}", node, graph.nodes)
    changed = [node for verb, node in named if verb != "insert"]
    if twice := next((n for n in changed if changed.count(n) > 1), None):
        raise GraphError(
            f"edit names {twice!r} more than once in replace=, set=, drop= and rename=. Name it once, and edit the "
            f"result for the rest.",
            code="edit.conflict",
            node=twice,
        )
    if anchor := next((after.node for after in insert.values() if after.node in drop), None):
        raise GraphError(
            f"edit inserts after {anchor!r} and drops it. Use replace={{{anchor!r}: ...}}.",
            code="edit.conflict",
            node=anchor,
        )
    if source := next((n for n in replace if graph[n].is_input), None):
        raise GraphError(
            f"edit replaces the input {source!r}, which has the columns of the algorithm's argument. Insert an "
            f"operator after it: insert={{'mine': After({source!r}, ...)}}.",
            code="edit.input-node",
            node=source,
        )
    if source := next((n for n in drop if graph[n].is_input), None):
        raise GraphError(
            f"edit drops the input {source!r}. Remove its readers instead: an input without readers is removed.",
            code="edit.input-node",
            node=source,
        )
    _refuse_duplicate_names(graph, replace, drop, insert, rename)


def _refuse_duplicate_names(
    graph: Graph,
    replace: Mapping[str, Operator],
    drop: Sequence[str],
    insert: Mapping[str, After],
    rename: Mapping[str, str],
) -> None:
    names = [op.name for op in replace.values()] + list(rename.values()) + list(insert)
    names += [n for n in graph.nodes if n not in (*replace, *drop, *rename)]
    if clash := next((n for n in names if names.count(n) > 1), None):
        other = f"{clash}_2nd"
        by_key = f"insert={{{other!r}: ...}}" if clash in insert else f"rename={{...: {other!r}}}"
        how = by_key if clash in (*insert, *rename.values()) else f'.named("{other}")'
        free = clash in graph and clash not in (*replace, *drop, *rename)
        raise FixableError(
            f"edit makes two nodes named {clash!r}.",
            "Rename one",
            [{"rename": {clash: other}}] if free else [],
            how,
            code="graph.duplicate-name",
            node=clash,
        )


def _not_an_operator(call: str, given: Any) -> GraphError:
    if isinstance(given, type) and issubclass(given, Operator):
        what = f"the class {given.__name__}. Make an operator of it: {given.__name__}(...)"
    elif inspect.isfunction(given):
        what = f"the function {given.__name__}. Write @operator above it"
    else:
        what = f"{given!r}. Pass an operator, such as GAE(lam=0.9)"
    return GraphError(f"{call} got {what}.", code="edit.bad-argument", found=type_of(given))

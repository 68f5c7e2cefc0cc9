"""`Graph.edit`: one atomic change.

Everything resolves against the graph as it was; what nothing reaches any more vanishes once, at the end; the original
is untouched.

- ``replace={"gae": GroupAdvantage()}``: the replacement has its own name. A port keeps the edge that the predecessor's
  port of that name has, else it takes the one ancestor that writes the column it wants, else the one node that writes
  it and does not depend on what is replaced.
- ``drop=["whiten"]``: a sink is gone; an inner node is bypassed where exactly one of its inputs is acceptable to its
  readers.
- ``insert={"length_penalty": After("reward", LengthPenalty())}``: what it reads of ``reward`` and writes anew, it
  rewrites, and every reader moves to it. Its ports take what ``reward`` writes, else are found in the same way.
  A gate (`Filter`) rewrites nothing: all that is read across it is led through (see `flowrl.edits.gating`).
- ``wire={"gae.values": "old_values.values"}``: sets edges by hand and overrides all of the above.
- ``set={"generate.temperature": 0.7, "update_actor.loss.clip_high": 0.28}``: parameters of an operator, or of a spec
  that is one; the others stay. Those of one spec change at once.
- ``when={"update_actor": When(start=20)}``: the steps in which a node runs, and so what reads it.
- ``rename={"old": "new"}``, ``bind={"rollout": ...}``, ``lag=1``, ``name="grpo"``.
- ``lag=Lag(2, spans=True)``: weights change under answers that are under way; see `flowrl.core.graphs.lag`.
- ``allow={"FR007": "greedy is the baseline only"}``: a rule may be broken, for this reason; None takes that back.

What writes weights leaves by name only (``drop``, ``replace``): where its last reader is gone, it stays as a sink.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast

from flowrl.core.graphs.after import After
from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.lag import Lag
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge
from flowrl.core.operators.when import When
from flowrl.edits.gating import anchor_of, expose_columns, insert_gate
from flowrl.edits.rewiring import Rewiring
from flowrl.errors import GraphError, offer
from flowrl.rules.check import refuse_no_rules
from flowrl.spec import Spec, parameters

P = ParamSpec("P")
R = TypeVar("R")
GraphT = TypeVar("GraphT", bound=Graph)
SpecT = TypeVar("SpecT", bound=Spec)


def refuses_other_verbs(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of an ``edit``: a call that Python itself would refuse raises a `GraphError` that lists the verbs."""
    signature = inspect.signature(function)
    verbs = [name for name, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise GraphError(
                f"edit(...) cannot be called like this: {error}. Its verbs are {', '.join(verbs)}, each given by name: "
                f"edit(drop=['whiten'])."
            ) from None
        return function(*args, **kwargs)

    return checked


@refuses_other_verbs
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
    """A changed copy of `graph`; see the module's docstring.

    Raises:
        GraphError: a node or rule that is not there, one named twice, an edit after which it is not clear what a port
            reads; the message names the `wire=` that settles it.
        PortError: the changed graph connects what does not fit.
        BindError: a backend for a role that the changed graph does not have, or that cannot serve it.
    """
    drop, before = _names(drop), expose_columns(graph)
    replace, insert, set, when = replace or {}, insert or {}, set or {}, when or {}
    wire, rename, bind, allow = wire or {}, rename or {}, bind or {}, allow or {}
    _refuse_unmapped(
        replace=replace, insert=insert, set=set, when=when, wire=wire, rename=rename, bind=bind, allow=allow
    )
    refuse_no_rules(allow, f"edit(allow={dict(allow)!r})")
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
    allowed = {rule: reason for rule, reason in {**graph.allow, **allow}.items() if reason is not None}
    name, lag = graph.name if name is None else name, graph.lag if lag is None else lag
    changed = graph.build(name, nodes, sinks, lag, allow=allowed)
    for at, gate in gates.items():
        moved = [other for other in anchors if other in gates or change.rewrites.get(other)]
        anchor = anchor_of(at, anchors[at], anchors, moved, change.new_names[anchors[at]])
        changed = insert_gate(changed, at, gate, anchor, _wires_of(at, gate, changed, wire, change.new_names))
    kept = {role: backend for role, backend in graph.bindings.items() if role in changed.roles()}
    return changed.bound({**kept, **bind})


def _through_same(graph: Graph, replace: Mapping[str, Operator]) -> dict[str, Operator]:
    """`replace`, where through a gate that takes the place of another the same columns pass."""
    return {
        node: new.passing(old.operator.columns)
        if isinstance(new, Gate) and (old := graph.nodes.get(node)) is not None and isinstance(old.operator, Gate)
        else new
        for node, new in replace.items()
    }


def _wires_of(
    name: str, gate: Gate, graph: Graph, wire: Mapping[str, str], new_names: Mapping[str, str]
) -> dict[PortField, Edge]:
    """What ``wire=`` says of the ports of a gate that is inserted."""
    found = {}
    for end, source in wire.items():
        node, _, port = end.partition(".")
        if node != name:
            continue
        field, edge = PortField.parse(port), Edge.parse(source)
        edge = edge._replace(node=new_names.get(edge.node, edge.node))
        if field not in (known := gate.passing({}).signature.fields):
            raise GraphError(
                f"wire={{{end!r}: ...}} does not name a port; {offer(port, map(str, known), f'{name} has')}"
            )
        if edge not in graph.types:
            raise GraphError(
                f"wire={{{end!r}: {source!r}}} names {source!r}, which is not an output; "
                f"{offer(source, map(str, graph.types), 'expected one of:')}"
            )
        found[field] = edge
    return found


def _with_parameters(graph: Graph, replace: Mapping[str, Operator], set: Mapping[str, Any]) -> dict[str, Operator]:
    """For every node that `set` names, its operator with these parameters.

    Raises:
        GraphError: a node or parameter that is not there, or a node that is replaced too.
    """
    given: dict[str, dict[str, Any]] = {}
    for path, value in set.items():
        node, _, parameter = path.partition(".")
        if node not in graph:
            raise GraphError(
                f"edit(set={{{path!r}: ...}}) names {node!r}, which {graph.name} does not have; "
                f"{offer(node, graph.nodes)}"
            )
        if node in replace:
            raise GraphError(f"edit replaces {node!r} and sets {path!r}; give the parameter to the replacement.")
        if graph[node].is_input:
            raise GraphError(
                f"edit(set={{{path!r}: ...}}) goes into the input {node!r}, whose columns are those of the algorithm's "
                f"own argument; write another algorithm."
            )
        given.setdefault(node, {})[parameter] = value
    operators = {node: graph[node].operator for node in given}
    return {node: _with(operators[node], node, values).in_place_of(operators[node]) for node, values in given.items()}


def _timed(
    graph: Graph, replace: Mapping[str, Operator], when: Mapping[str, When], changed: Mapping[str, Operator]
) -> dict[str, Operator]:
    """Those of `changed`, and every node that `when` names, in the steps that this says.

    Raises:
        GraphError: a node that is not there, that is an input, or that is replaced too.
    """
    found = dict(changed)
    for node, steps in when.items():
        said = f"edit(when={{{node!r}: {steps!r}}})"
        if not isinstance(steps, When):
            raise GraphError(f"{said} does not say in which steps; expected {{{_EXAMPLES['when']}}}.")
        if node not in graph:
            raise GraphError(f"{said} names {node!r}, which {graph.name} does not have; {offer(node, graph.nodes)}")
        if graph[node].is_input:
            raise GraphError(f"{said} names an input, and every step has its batch; name the node that reads it.")
        if node in replace:
            raise GraphError(f"edit replaces {node!r}, and {said}; say it of the replacement: Operator(...).{steps}.")
        found[node] = found.get(node, graph[node].operator).when(steps.every, steps.start)
    return found


def _with(spec: SpecT, where: str, given: Mapping[str, Any]) -> SpecT:
    """`spec` with other parameters, some of them of a spec that is a parameter: ``{"loss.clip_high": 0.3}``.

    All change at once, since one may be right only with another.
    """
    known = parameters(spec)
    changed: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for path, value in given.items():
        name, dot, inner = path.partition(".")
        if name not in known or (dot and not inner):
            said = f"edit(set={{'{where}.{path}': ...}})" if path else f"edit(set={{{where!r}: ...}})"
            raise GraphError(f"{said} does not name a parameter; {offer(path, known, f'{where} has')}")
        if inner:
            below.setdefault(name, {})[inner] = value
        else:
            changed[name] = value
    for name, values in below.items():
        owner = changed.get(name, known[name])
        if not isinstance(owner, Spec):
            raise GraphError(
                f"edit(set={{'{where}.{name}.{next(iter(values))}': ...}}) goes into {where}.{name}, which is "
                f"{owner!r} and has no parameters; set it as a whole: set={{'{where}.{name}': ...}}."
            )
        changed[name] = _with(owner, f"{where}.{name}", values)
    return cast("SpecT", dataclasses.replace(cast(Any, spec), **changed))


def _names(drop: Any) -> tuple[str, ...]:
    """The nodes that ``drop=`` names.

    Raises:
        GraphError: it is something else than a name or several.
    """
    names = (drop,) if isinstance(drop, str) else tuple(drop) if isinstance(drop, Iterable) else None
    if names is None or isinstance(drop, Mapping) or not all(isinstance(name, str) for name in names):
        raise GraphError(f"edit(drop={drop!r}) does not name nodes; expected names: drop=['whiten'].")
    return names


def _refuse_unmapped(**verbs: Any) -> None:
    """Refuse anything but a mapping for the verbs that say what happens to which node or role."""
    for verb, given in verbs.items():
        if not isinstance(given, Mapping):
            raise GraphError(f"edit({verb}={given!r}) does not say where; expected {verb}={{{_EXAMPLES[verb]}}}.")
        for key, value in given.items():
            wrong = value if verb in ("wire", "rename") and not isinstance(value, str) else key
            if not isinstance(wrong, str):
                raise GraphError(
                    f"edit({verb}={{{key!r}: {value!r}}}) has {wrong!r} where a name is due; expected "
                    f"{verb}={{{_EXAMPLES[verb]}}}."
                )


_EXAMPLES = {
    "replace": "'gae': GAE(lam=0.9)",
    "set": "'gae.lam': 0.9",
    "when": "'update_actor': When(start=20)",
    "insert": "'length_penalty': After('reward', LengthPenalty())",
    "wire": "'gae.values': 'value.values'",
    "rename": "'gae': 'advantage'",
    "bind": "'rollout': TorchRollout()",
    "allow": "'FR007': 'greedy is the baseline only'",
}


def _refuse_no_operators(replace: Mapping[str, Any], insert: Mapping[str, Any]) -> None:
    """Refuse what ``replace=`` and ``insert=`` give where an operator is due."""
    for node, operator in replace.items():
        if not isinstance(operator, Operator):
            raise GraphError(f"edit(replace={{{node!r}: ...}}) gives {_no_operator(operator)}.")
    for node, after in insert.items():
        if not isinstance(after, After) or not isinstance(after.node, str):
            raise GraphError(
                f"edit(insert={{{node!r}: {after!r}}}) does not say where; expected "
                f"{{{node!r}: After('reward', Operator())}}."
            )
        if not isinstance(after.operator, Operator):
            raise GraphError(
                f"edit(insert={{{node!r}: After({after.node!r}, ...)}}) gives {_no_operator(after.operator)}."
            )


def _refuse_misuse(
    graph: Graph,
    replace: Mapping[str, Operator],
    drop: Sequence[str],
    insert: Mapping[str, After],
    rename: Mapping[str, str],
) -> None:
    """Refuse what is wrong whatever the types are."""
    named = [("replace", n) for n in replace] + [("drop", n) for n in drop] + [("rename", n) for n in rename]
    named += [("insert", after.node) for after in insert.values()]
    for verb, node in named:
        if node not in graph:
            raise GraphError(
                f"edit({verb}=...) names {node!r}, which {graph.name} does not have; {offer(node, graph.nodes)}"
            )
    changed = [node for verb, node in named if verb != "insert"]
    if twice := next((n for n in changed if changed.count(n) > 1), None):
        raise GraphError(
            f"edit names {twice!r} more than once in replace=, set=, drop= and rename=; name it once, and edit the "
            f"result for the rest."
        )
    if anchor := next((after.node for after in insert.values() if after.node in drop), None):
        raise GraphError(f"edit inserts after {anchor!r} and drops it; use replace={{{anchor!r}: ...}}.")
    if source := next((n for n in replace if graph[n].is_input), None):
        raise GraphError(
            f"edit replaces the input {source!r}, whose columns are given to the algorithm; put an operator behind it: "
            f"insert={{'mine': After({source!r}, ...)}}."
        )
    if source := next((n for n in drop if graph[n].is_input), None):
        raise GraphError(f"edit drops the input {source!r}; an input falls away by itself once nothing reads it.")
    names = [op.name for op in replace.values()] + list(rename.values()) + list(insert)
    names += [n for n in graph.nodes if n not in (*replace, *drop, *rename)]
    if clash := next((n for n in names if names.count(n) > 1), None):
        other = f"{clash}_2nd"
        by_key = f"insert={{{other!r}: ...}}" if clash in insert else f"rename={{...: {other!r}}}"
        how = by_key if clash in (*insert, *rename.values()) else f'.named("{other}")'
        raise GraphError(f"edit leaves two nodes named {clash!r}; give one another name: {how}.")


def _no_operator(given: Any) -> str:
    if isinstance(given, type) and issubclass(given, Operator):
        return f"the class {given.__name__}; expected an operator, which has parameters: {given.__name__}(...)"
    if inspect.isfunction(given):
        return f"the function {given.__name__}, which is not an operator; expected one: write @operator above it"
    return f"{given!r}, which is not an operator; expected one, such as GAE(lam=0.9)"

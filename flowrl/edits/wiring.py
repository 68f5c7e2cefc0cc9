"""Wire a node by types: which outputs its ports read without explicit edges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flowrl.core.graphs.inference import Available, Bound, bind, candidates, fits
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge
from flowrl.edits.fixes import FixableError
from flowrl.edits.suggest import suggest_insert
from flowrl.record_types import FieldType, accepts

Wires = Mapping[PortField, Edge]


class End(NamedTuple):
    """The end of an edge: a node, a field of its ports, and the type of that field."""

    node: str
    field: PortField
    expected: FieldType

    def __str__(self) -> str:
        return f"{self.node}.{self.field}"


def wire_by_type(
    name: str,
    operator: Operator,
    inherited: Wires,
    pools: Sequence[Available],
    types: Available,
    by_hand: Wires,
) -> dict[PortField, Edge]:
    """The edges of a node, except for the explicit ones.

    A port of a record reads all of it from one node, if one writes it.

    Args:
        operator: its operator. An optional port stays open unless the operator needs it or inherits its edge.
        inherited: edges to keep if they fit; the other fields of their port read the same node.
        pools: the outputs that it may read; the first pool with a fitting output counts.
        types: the type of every output.
    """
    wiring, required = _Wiring(name, types), operator.in_step(0).optional_ports()
    still_open: list[list[End]] = []
    for port in operator.signature.ports.values():
        if required.get(port.name) is False:
            continue
        ends = [End(name, field, expected) for field, expected in port.fields.items() if field not in by_hand]
        fitting = [e for e in ends if e.field in inherited and accepts(e.expected, types[inherited[e.field]].type)]
        for end in fitting:
            wiring.take({end: inherited[end.field]})
        rest = [end for end in ends if end not in fitting]
        if rest and (fitting or required.get(port.name) or not port.optional):
            before = {edge.node for field, edge in inherited.items() if field.port == port.name}
            record = wiring.records(rest, types, before) if len(before) == 1 else []
            if record:
                wiring.take(record[0])
            else:
                still_open.append(rest)
    wiring.settle(still_open, pools)
    wires = {end.field: edge for end, edge in wiring.edges.items()}
    for end, edge in wiring.edges.items():
        if inherited.get(end.field) != edge:
            _refuse_double(end, edge, {**wires, **by_hand}, operator.signature.fields, types)
    return wires


class _Wiring:
    """The edges so far; each binds axes, which restricts the others."""

    def __init__(self, node: str, types: Available) -> None:
        self.edges: dict[End, Edge] = {}
        self._node, self._types = node, types
        self._binding: dict[str, Bound] = {}

    def take(self, wires: Mapping[End, Edge]) -> None:
        """Add edges."""
        self.edges |= wires
        for end, edge in wires.items():
            bind(self._binding, end.field, end.expected, edge, self._types[edge])

    def settle(self, still_open: Sequence[list[End]], pools: Sequence[Available]) -> None:
        """Wire all fields of these ports, those with only one choice first; refuse one with several or none."""
        units = [*still_open]
        while units:
            found = [self._offers(unit, pools) for unit in units]
            at = next((i for i, offers in enumerate(found) if len(offers) == 1), 0)
            unit, offers = units.pop(at), found[at]
            if len(offers) == 1:
                self.take(offers[0])
            elif not offers and len(unit) > 1:  # no node writes all of the record
                units += [[end] for end in unit]
            else:
                self._refuse_choice(unit, offers, pools)

    def records(self, ends: Sequence[End], pool: Available, nodes: Iterable[str]) -> list[dict[End, Edge]]:
        """Each way to read all of `ends` from one of `nodes`, by the names of its outputs."""
        ways = [{end: Edge(node, end.field.name) for end in ends} for node in nodes]
        return [
            way
            for way in ways
            if all(edge in pool and fits(end.expected, self._binding, pool[edge]) for end, edge in way.items())
        ]

    def _offers(self, unit: list[End], pools: Sequence[Available]) -> list[dict[End, Edge]]:
        """The choices for a port, from the first pool that has any."""
        for pool in pools:
            if len(unit) == 1:
                found = [{unit[0]: edge} for edge in candidates(unit[0].expected, self._binding, pool)]
            else:
                found = self.records(unit, pool, dict.fromkeys(edge.node for edge in pool))
            if found:
                return found
        return []

    def _refuse_choice(
        self, unit: Sequence[End], offers: Sequence[Mapping[End, Edge]], pools: Sequence[Available]
    ) -> None:
        """Refuse a port with no or several choices."""
        end = unit[0]
        if len(unit) > 1:
            nodes = [next(iter(way.values())).node for way in offers]
            raise FixableError(
                f"{end.node}.{end.field.port} expects a record of {', '.join(e.field.name for e in unit)}, and several "
                f"nodes write one: {', '.join(nodes)}.",
                "Wire one",
                [{"wire": {f"{end.node}.{end.field.port}": node}} for node in nodes],
                f"wire={{'{end.node}.{end.field.port}': 'node'}}",
                code="edit.ambiguous-source",
                node=end.node,
                port=end.field.port,
                known=nodes,
            )
        found = [str(way[end]) for way in offers]
        if found:
            raise FixableError(
                f"{end} expects {end.expected}, and several nodes write one: {', '.join(found)}.",
                "Wire one",
                [{"wire": {str(end): output}} for output in found],
                f"wire={{'{end}': 'node.column'}}",
                code="edit.ambiguous-source",
                node=end.node,
                port=str(end.field),
                known=found,
            )
        outputs = {edge: typed for edge, typed in self._types.items() if any(edge in pool for pool in pools)}
        raise FixableError(
            f"{end} expects {end.expected}, but no node that it may read writes one.",
            "Insert one, and wire it",
            suggest_insert(str(end), end.expected, self._binding, outputs),
            f"wire={{'{end}': 'node.column'}}",
            code="edit.no-source",
            node=end.node,
            port=str(end.field),
            expected=end.expected,
        )


def same(one: FieldType, other: FieldType) -> bool:
    """Whether each fits a port of the other's type."""
    return accepts(one, other) and accepts(other, one)


def _refuse_double(end: End, edge: Edge, wires: Wires, fields: Mapping[PortField, FieldType], types: Available) -> None:
    """Refuse to wire two ports of one type but different names to the same output: that would be a guess."""
    for field, read in wires.items():
        if read == edge and field.name != end.field.name and same(fields[field], end.expected):
            ends = [(str(end), f"{end.node}.{field}"), (f"{end.node}.{field}", str(end))]
            others = [str(other) for other, typed in types.items() if other != edge and same(typed.type, end.expected)]
            raise FixableError(
                f"{end} and {end.node}.{field} both expect {end.expected}, so by type both would read {edge}.",
                "Wire each",
                [{"wire": {one: str(edge), two: source}} for one, two in ends for source in others],
                f"wire={{'{end}': '{edge}', '{end.node}.{field}': 'node.column'}}",
                code="edit.ambiguous-source",
                node=end.node,
                port=str(end.field),
                known=[str(edge)],
            )

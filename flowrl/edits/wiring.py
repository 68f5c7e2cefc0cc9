"""Wiring a node by types: which of the outputs that exist its ports read, where nobody says so by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flowrl.core.graphs.inference import Available, Bound, bind, candidates, fits
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.symbols import Edge
from flowrl.edits.suggest import suggest_insert
from flowrl.errors import GraphError
from flowrl.record_types import FieldType, accepts

Wires = Mapping[PortField, Edge]


class End(NamedTuple):
    """Where an edge ends: a node, a field of its ports, and what that field wants."""

    node: str
    field: PortField
    wanted: FieldType

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
    """The edges of a node, except those that are set by hand.

    A port that takes a record reads all of it from one node, where there is one that writes it.

    Args:
        name: of the node.
        operator: whose ports are wired. An optional port stays open unless the operator wants it or inherits its edge.
        inherited: edges that are kept where they still fit; the other fields of their port come from the same node.
        pools: what may be read; an earlier pool that offers anything goes before a later one.
        types: of every output.
        by_hand: the edges of the fields to leave out.

    Raises:
        GraphError: a field for which there is no output, or more than one; two ports of one type that would read the
            same output.
    """
    wiring, wants = _Wiring(name, types), operator.in_step(0).wants()
    still_open: list[list[End]] = []
    for port in operator.signature.ports.values():
        if wants.get(port.name) is False:
            continue
        ends = [End(name, field, wanted) for field, wanted in port.fields.items() if field not in by_hand]
        kept = [e for e in ends if e.field in inherited and accepts(e.wanted, types[inherited[e.field]].type)]
        for end in kept:
            wiring.take({end: inherited[end.field]})
        rest = [end for end in ends if end not in kept]
        if rest and (kept or wants.get(port.name) or not port.optional):
            before = {edge.node for field, edge in inherited.items() if field.port == port.name}
            whole = wiring.records(rest, types, before) if len(before) == 1 else []
            if whole:
                wiring.take(whole[0])
            else:
                still_open.append(rest)
    wiring.settle(still_open, pools)
    wires = {end.field: edge for end, edge in wiring.edges.items()}
    for end, edge in wiring.edges.items():
        if inherited.get(end.field) != edge:
            _refuse_double(end, edge, {**wires, **by_hand}, operator.signature.fields)
    return wires


class _Wiring:
    """The edges that are settled so far; each binds axes, and so may settle the rest."""

    def __init__(self, node: str, types: Available) -> None:
        self.edges: dict[End, Edge] = {}
        self._node, self._types = node, types
        self._binding: dict[str, Bound] = {}

    def take(self, wires: Mapping[End, Edge]) -> None:
        """Settle fields."""
        self.edges |= wires
        for end, edge in wires.items():
            bind(self._binding, end.field, end.wanted, edge, self._types[edge])

    def settle(self, still_open: Sequence[list[End]], pools: Sequence[Available]) -> None:
        """Settle all fields of these ports, those first for which there is one choice.

        Raises:
            GraphError: a field or record for which there is no output, or more than one.
        """
        units = [*still_open]
        while units:
            found = [self._offers(unit, pools) for unit in units]
            at = next((i for i, offers in enumerate(found) if len(offers) == 1), 0)
            unit, offers = units.pop(at), found[at]
            if len(offers) == 1:
                self.take(offers[0])
            elif not offers and len(unit) > 1:  # no node writes the whole record
                units += [[end] for end in unit]
            else:
                self._refuse_choice(unit, offers, pools)

    def records(self, ends: Sequence[End], pool: Available, nodes: Iterable[str]) -> list[dict[End, Edge]]:
        """Each way to read all of `ends` from one of `nodes`, by the names of its outputs."""
        ways = [{end: Edge(node, end.field.name) for end in ends} for node in nodes]
        return [
            way
            for way in ways
            if all(edge in pool and fits(end.wanted, self._binding, pool[edge]) for end, edge in way.items())
        ]

    def _offers(self, unit: list[End], pools: Sequence[Available]) -> list[dict[End, Edge]]:
        """What a port could read, from the first pool that has any of it."""
        for pool in pools:
            if len(unit) == 1:
                found = [{unit[0]: edge} for edge in candidates(unit[0].wanted, self._binding, pool)]
            else:
                found = self.records(unit, pool, dict.fromkeys(edge.node for edge in pool))
            if found:
                return found
        return []

    def _refuse_choice(
        self, unit: Sequence[End], offers: Sequence[Mapping[End, Edge]], pools: Sequence[Available]
    ) -> None:
        """Refuse a port for which there is no output, or more than one."""
        end = unit[0]
        if len(unit) > 1:
            nodes = [next(iter(way.values())).node for way in offers]
            raise GraphError(
                f"{end.node}.{end.field.port} wants a record of {', '.join(e.field.name for e in unit)}, and several "
                f"nodes write one: {', '.join(nodes)}; say which: wire={{'{end.node}.{end.field.port}': '{nodes[0]}'}}."
            )
        found = [str(way[end]) for way in offers]
        if found:
            said, fix = f"several nodes write one: {', '.join(found)}; say which", f"wire={{'{end}': '{found[0]}'}}"
        else:
            said = "no node that it could read writes one; insert one that does, and wire it"
            outputs = {edge: typed for edge, typed in self._types.items() if any(edge in pool for pool in pools)}
            fix = suggest_insert(str(end), end.wanted, self._binding, outputs) or f"wire={{'{end}': 'node.column'}}"
        raise GraphError(f"{end} wants {end.wanted}, and {said}: {fix}.")


def same(one: FieldType, other: FieldType) -> bool:
    """Whether either may be read where the other is wanted."""
    return accepts(one, other) and accepts(other, one)


def _refuse_double(end: End, edge: Edge, wires: Wires, fields: Mapping[PortField, FieldType]) -> None:
    """Refuse two ports of one type, and of different names, that would read the same output: it is a guess."""
    for field, read in wires.items():
        if read == edge and field.name != end.field.name and same(fields[field], end.wanted):
            raise GraphError(
                f"{end} and {end.node}.{field} both want {end.wanted}, and by type both would read {edge}; say what "
                f"each reads: wire={{'{end}': '{edge}', '{end.node}.{field}': 'node.column'}}."
            )

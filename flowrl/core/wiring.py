"""Wiring a node by types: which of the outputs that exist its ports read, where nobody says so by hand."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from flowrl.columns import ColumnType
from flowrl.core.inference import Available, Bound, candidates
from flowrl.core.operator import Operator
from flowrl.core.ports import PortField
from flowrl.core.symbols import Edge
from flowrl.data.record_types import FieldType, accepts
from flowrl.errors import GraphError


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
    inherited: Mapping[PortField, Edge],
    pools: Sequence[Available],
    types: Available,
    by_hand: Container[PortField],
) -> dict[PortField, Edge]:
    """The edges of a node, except those that are set by hand.

    Args:
        name: of the node.
        operator: whose ports are wired. An optional port stays open unless the operator wants it or inherits its edge.
        inherited: edges that are kept where they still fit.
        pools: what may be read; an earlier pool that offers anything goes before a later one.
        types: of every output.
        by_hand: the fields to leave out.

    Raises:
        GraphError: a field for which there is no output, or more than one.
    """
    wiring, wants = _Wiring(types), operator.wants()
    still_open: dict[PortField, FieldType] = {}
    for field, wanted in operator.signature.fields.items():
        if field in by_hand or wants.get(field.port) is False:
            continue
        if field in inherited and accepts(wanted, types[inherited[field]].type):
            wiring.take(field, wanted, inherited[field])
        elif wants.get(field.port) or not operator.signature.ports[field.port].optional:
            still_open[field] = wanted
    while still_open:
        found = {field: wiring.offers(wanted, pools) for field, wanted in still_open.items()}
        field = next((field for field, edges in found.items() if len(edges) == 1), next(iter(found)))
        wanted = still_open.pop(field)
        wiring.take(field, wanted, _only(found[field], End(name, field, wanted)))
    return wiring.edges


class _Wiring:
    """The edges that are settled so far; each binds axes, and so may settle the rest."""

    def __init__(self, types: Available) -> None:
        self.edges: dict[PortField, Edge] = {}
        self._types = types
        self._binding: dict[str, Bound] = {}

    def take(self, field: PortField, wanted: FieldType, edge: Edge) -> None:
        """Settle a field."""
        self.edges[field] = edge
        if isinstance(wanted, ColumnType):
            for axis, identity in zip(wanted.axes, self._types[edge].axes, strict=True):
                self._binding.setdefault(axis, Bound(identity, field, edge))

    def offers(self, wanted: FieldType, pools: Sequence[Available]) -> list[Edge]:
        """What a field could read, from the first pool that has any of it."""
        return next((found for pool in pools if (found := candidates(wanted, self._binding, pool))), [])


def _only(found: Sequence[Edge], end: End) -> Edge:
    """The one edge that was found."""
    if len(found) != 1:
        several = f"several nodes write one: {', '.join(map(str, found))}; say which"
        none = "no node that it could read writes one; insert one that does, and wire it"
        choice = found[0] if found else "node.column"
        raise GraphError(f"{end} wants {end.wanted}, and {several if found else none}: wire={{'{end}': '{choice}'}}.")
    return found[0]

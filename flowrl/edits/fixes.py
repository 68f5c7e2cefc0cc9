"""Fixes of refused edits: verbs to add to an edit, each tried before a message offers it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, cast

from flowrl.core.graphs.after import After
from flowrl.core.graphs.graph import Graph
from flowrl.errors import FlowrlError, GraphError
from flowrl.record_types import accepts
from flowrl.rules.check import check
from flowrl.spec import Spec, written

Verbs = Mapping[str, Any]

TRIES = 24
"""The fixes that are tried for one refused edit."""


class FixableError(GraphError):
    """A refusal inside an edit, which becomes a `GraphError` with the first of `fixes` that leads to a valid graph.

    Args:
        what: what happened, as sentences.
        lead: the start of the advice, such as ``"Wire one"``.
        fixes: the verbs that may fix it, the most likely first.
        otherwise: the code of the advice if none of them does, with placeholders.
    """

    def __init__(
        self, what: str, lead: str, fixes: Iterable[Verbs], otherwise: str, *, code: str, **facts: object
    ) -> None:
        super().__init__("", code=code, **cast(Any, facts))
        self.kind: type[FlowrlError] = GraphError
        self.fixes = tuple(fixes)
        self._what, self._lead, self._otherwise = what, lead, otherwise

    def with_fix(self, fix: Verbs | None) -> FlowrlError:
        """The error to raise; without a fix, it has placeholders."""
        code = self._otherwise if fix is None else spelled(fix)
        facts: dict[str, Any] = {**self.facts, "fix": code}
        return self.kind(f"{self._what} {self._lead}: {code}.", code=self.code, **facts)


def first_fix(error: FixableError, graph: Graph, edited: Callable[[Verbs], Graph]) -> Verbs | None:
    """The first fix that leads to a graph without findings that `graph` does not have.

    If a fix leads to a further refusal, the fixes of both are tried together.

    Args:
        edited: the refused edit with these verbs added.
    """
    before = {(finding.rule, finding.node) for finding in check(graph)}
    waiting = deque(error.fixes)
    for _ in range(TRIES):
        if not waiting:
            break
        fix = waiting.popleft()
        try:
            found = {(finding.rule, finding.node) for finding in check(edited(fix))}
        except FixableError as further:
            if further.code != "graph.duplicate-name":  # an operator that the graph already has is no fix
                waiting.extend(added(fix, other) for other in islice(further.fixes, 3))
        except FlowrlError:
            continue
        else:
            if found <= before:
                return fix
    return None


def of_hint(error: FlowrlError) -> FixableError | None:
    """An error about an edge that asks "did you mean value.values?", as one that tries this edge first."""
    end, meant = f"{error.facts.get('node')}.{error.facts.get('port')}", str(error.facts.get("suggestion"))
    what, asked, _ = error.message.partition(f"; did you mean {meant}?")
    if not asked:
        return None
    fixes, otherwise = [{"wire": {end: meant}}], f"wire={{'{end}': 'node.column'}}"
    found = FixableError(f"{what}.", "Wire another output", fixes, otherwise, code=error.code, **error.facts)
    found.kind = type(error)
    return found


def of_cycle(error: FlowrlError, graph: Graph, wire: Mapping[str, str]) -> FixableError | None:
    """An error about a cycle, as one that tries other sources for the explicit edges of its nodes."""
    if error.code != "graph.cycle":
        return None
    fixes = []
    for end, source in wire.items():
        node, _, port = end.partition(".")
        fields = graph[node].signature.fields if node in graph else {}
        expected = next((type for field, type in fields.items() if str(field) == port), None)
        sources = [edge for edge, typed in graph.types.items() if expected and accepts(expected, typed.type)]
        fixes += [{"wire": {end: str(edge)}} for edge in reversed(sources) if str(edge) != source]
    what, _, _ = error.message.partition(" Wire one of these nodes")
    otherwise = "wire={'node.port': 'node.column'}"
    return FixableError(
        what, "Wire one of these nodes to another source", fixes, otherwise, code=error.code, **error.facts
    )


def added(verbs: Verbs, more: Verbs) -> dict[str, Any]:
    """`verbs` with those of a fix."""
    both = dict(verbs)
    for verb, value in more.items():
        if verb == "drop":
            dropped = both.get(verb, ())
            both[verb] = [*dict.fromkeys([*((dropped,) if isinstance(dropped, str) else dropped), *value])]
        else:
            both[verb] = {**(both.get(verb) or {}), **value}
    return both


def spelled(verbs: Verbs) -> str:
    """Verbs as they are written in a call of `edit`."""
    return ", ".join(f"{verb}={_written(value)}" for verb, value in verbs.items())


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, After):
        return f"After({value.node!r}, {written(value.operator)})"
    return written(value) if isinstance(value, Spec) else repr(value)

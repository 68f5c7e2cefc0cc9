"""The ranking of a search as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.protocols.footprint import GIB
from flowrl.protocols.mesh import Mesh
from flowrl.run.prediction.search import Candidate, Ranking
from flowrl.spec import written

TOP = 5
"""The candidates of a table."""


def ranked(ranking: Ranking, basis: Sequence[str]) -> list[str]:
    """The best candidates, each with the options that make it; then those that do not fit, and what numbers rest on."""
    found, unfit, refused = ranking.candidates, ranking.unfit, ranking.refused
    total = len(found) + sum(unfit.values()) + sum(refused.values())
    lines = [f"the best {min(TOP, len(found))} of {total} candidates, by predicted seconds of a step:"]
    for number, one in enumerate(found[:TOP], 1):
        memory = "" if one.memory is None else f", {one.memory.worst.bytes / GIB:.1f} GiB at most"
        lines += [f"  {number}. {one.seconds:.3g} s{memory}: {_place(one)}", f"     {one.options or 'as it is'}"]
    lines += _counted("do not fit, at their peak in", unfit)
    lines += _counted("are refused", refused)
    return [*lines, *(f"  {line}" for line in basis)]


def _counted(what: str, counts: Mapping[str, int]) -> list[str]:
    if not counts:
        return []
    most = sorted(counts.items(), key=lambda pair: -pair[1])
    return [f"  {sum(counts.values())} {what}:", *(f"    {count}: {reason}" for reason, count in most[:TOP])]


def _place(one: Candidate) -> str:
    """Place, mesh, engines and lag in words."""
    bindings: Mapping[str, Any] = one.job.graph.bindings
    parts = ["one process" if one.job.place is None else written(one.job.place)]
    meshes = {role: backend.geometry for role, backend in bindings.items() if hasattr(backend, "mesh")}
    parts += [written(mesh) for mesh in dict.fromkeys(meshes.values()) if mesh != Mesh()]
    for role in one.job.graph.generators:
        backend = bindings[role]
        if backend.shares is None:
            wide = f" of {backend.slots_per_rank} slots" if backend.slots_per_rank > 1 else ""
            parts.append(f"{role}: {backend.ranks} x {type(backend).__name__}{wide}")
    lag = one.job.graph.lag
    return ", ".join([*parts, *([f"lag {lag}"] if lag.versions else [])])

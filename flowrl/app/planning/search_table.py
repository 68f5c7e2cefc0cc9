"""The ranking of a search as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flowrl.errors import FlowrlError
from flowrl.protocols.footprint import GIB
from flowrl.protocols.mesh import Mesh
from flowrl.run.prediction.search import Candidate, Ranking
from flowrl.run.prediction.stages import OWN_CODE, by_reason
from flowrl.spec import written

TOP = 5
"""The candidates of a table."""


def ranked(ranking: Ranking, basis: Sequence[str]) -> list[str]:
    """The best candidates, each with the options that make it, and the unchanged job; then those that do not fit, and
    what numbers rest on."""
    found, unfit, refused = ranking.candidates, ranking.unfit, ranking.refused
    total = len(found) + sum(unfit.values()) + sum(refused.values())
    best = f"the best {min(TOP, len(found))} of {total} candidates, by predicted seconds of a step:"
    lines = [best if found else f"none of {total} candidates can run:"]
    for number, one in enumerate(found[:TOP], 1):
        lines += [f"  {number}. {_numbers(one)}: {_place(one)}", f"     {one.options or 'the unchanged job'}"]
    lines.append(f"  the unchanged job {_own(ranking)}")
    lines += _counted("do not fit, at their peak in", unfit)
    lines += _counted("are refused", refused)
    return [*lines, *(f"  {line}" for line in (*_gaps(ranking), *basis))]


def _numbers(one: Candidate) -> str:
    """Seconds and memory of a candidate."""
    memory = "" if one.memory is None else f", {one.memory.worst.bytes / GIB:.1f} GiB at most"
    if one.missing:
        return f"at least {one.seconds:.3g} s, without {', '.join(one.missing)}{memory}"
    return f"{one.seconds:.3g} s{memory}"


def _own(ranking: Ranking) -> str:
    """The rank of the unchanged job, and how much slower than the best it is."""
    own, found = ranking.own, ranking.candidates
    if isinstance(own, FlowrlError):
        return f"is refused: {own.code}: {' '.join(own.message.split())}"
    best = found[0] if found else own
    factor = ""
    if ranking.rank != 1 and best.seconds > 0 and best.missing == own.missing:
        factor = f", {own.seconds / best.seconds:.3g} times as long as the best"
    numbers = f"{_numbers(own)}{factor}: {_place(own)}"
    if own.memory is not None and not own.fits:
        slot = f"{own.memory.hardware.memory:.1f} GiB of a slot"
        return f"does not fit into the {slot} at its peak in {own.memory.worst.node}: {numbers}"
    return f"has rank {ranking.rank} of {len(found)}: {numbers}"


def _counted(what: str, counts: Mapping[str, int]) -> list[str]:
    if not counts:
        return []
    most = sorted(counts.items(), key=lambda pair: -pair[1])
    return [f"  {sum(counts.values())} {what}:", *(f"    {count}: {reason}" for reason, count in most[:TOP])]


def _gaps(ranking: Ranking) -> Iterator[str]:
    """What the seconds and the memory of candidates leave out."""
    models = {node: why for node, why in ranking.unknown.items() if why != OWN_CODE}
    if models:
        yield (
            f"NOT predicted for any candidate: {by_reason(models)}; candidates are ranked by the other nodes, so those "
            f"that slow these down look too fast"
        )
    if code := [node for node, why in ranking.unknown.items() if why == OWN_CODE]:
        yield f"not counted, since they run no model: {', '.join(code)}"
    missing = {node: one.times.unknown[node] for one in ranking.candidates for node in one.missing}
    if missing:
        yield f"ranked last, since some of their nodes are not predicted: those without {by_reason(missing)}"
    every = [*ranking.candidates, *([ranking.own] if isinstance(ranking.own, Candidate) else [])]
    if uncounted := sorted({role for one in every if one.memory is not None for role in one.memory.unknown}):
        yield (
            f"NOT in the memory: {', '.join(uncounted)}, whose backend predicts none; state what it takes: memory=<GiB>"
        )
    if float32 := dict.fromkeys(stage.node for one in every for stage in one.times.stages if stage.float32):
        yield f"in float32: {', '.join(float32)}, by the stated speed in float32; published steps compute in bfloat16"


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

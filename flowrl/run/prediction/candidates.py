"""The settings of the candidates of a search: places, meshes, widths of engines and lags, each only what it changes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from flowrl.errors import BindError, GraphError
from flowrl.protocols.backend import Backend
from flowrl.protocols.mesh import Mesh
from flowrl.run.prediction.fitting import with_changes
from flowrl.run.prediction.stages import MACHINE, config_of_backend, shape_of_backend
from flowrl.run.training.job import Job

Settings = Mapping[str, Any]
"""Values by path, as ``--set`` takes them."""


def candidates(job: Job[Any], gpus: Sequence[int], refused: Counter[str], with_axes: bool) -> Iterator[Settings]:
    """The settings of all candidates on so many slots.

    Args:
        refused: counts of what rules refuse, to which refused lags are added.
        with_axes: with meshes and engines' widths; without, only with ranks.
    """
    lags, staged = list(_lags(job, refused)), any(_has_stages(job.graph.bindings[role]) for role in trainers_of(job))
    shares = any(job.graph.bindings[role].shares is not None for role in engines_of(job))
    if job.place is None and 1 in gpus:
        yield {}
    for count in gpus:
        for place, trained, rolled in _places(job, count, shares):
            for lag in lags if "rollout" in place else lags[:1]:
                at = _place_of(place, job.place)
                base = {} if at == job.place else {"place": at}
                base |= {} if lag == job.graph.lag.versions else {"lag": lag}
                ranks = Mesh(replicate=trained) if staged else Mesh(fsdp=trained)
                for mesh in dict.fromkeys(_meshes(job, trained)) if with_axes else [ranks]:
                    for wide in dict.fromkeys(_widths(job, rolled)) if with_axes else [None]:
                        yield {**base, **_meshed(job, mesh, staged), **_wide(job, rolled, wide, shares)}


def trainers_of(job: Job[Any]) -> list[str]:
    """The roles on a mesh with weights of their own."""
    return [role for role in job.graph.bindings if has_setting(job, role, "mesh")]


def engines_of(job: Job[Any]) -> list[str]:
    """The roles that generate."""
    return [role for role in job.graph.generators if role in job.graph.bindings]


def has_setting(job: Job[Any], role: str, name: str) -> bool:
    """Whether a role's backend has weights of its own, and a setting of this name."""
    backend: Backend = job.graph.bindings[role]
    fields: Any = dataclasses.fields(backend)
    return backend.shares is None and any(field.name == name for field in fields)


def mesh_settings(job: Job[Any], role: str, mesh: Mesh) -> dict[str, Any]:
    """Settings that give a role this mesh; ``ranks`` where they are enough."""
    backend: Any = job.graph.bindings[role]
    if backend.geometry == mesh:
        return {}
    if backend.mesh is None and mesh == Mesh(fsdp=mesh.fsdp):
        return {f"{role}.ranks": mesh.fsdp}
    return {f"{role}.mesh": mesh} | ({f"{role}.ranks": 1} if backend.ranks > 1 else {})


def _lags(job: Job[Any], refused: Counter[str]) -> Iterator[int]:
    """The lag of the job, then 0 and 1, where rules allow them."""
    own = job.graph.lag.versions
    for lag in (own, *sorted({0, 1} - {own})):
        try:
            with suppress(BindError):  # of places and backends, which other settings change
                with_changes(job, {"lag": lag}).refuse_unready()
        except GraphError as error:
            refused[f"{error.code}: lag={lag}: {' '.join(error.message.split())}"] += 1
        else:
            yield lag


def _places(job: Job[Any], count: int, shares: bool) -> Iterator[tuple[dict[str, int], int, int]]:
    """Places of so many slots, with those of trainers and of engines."""
    yield {"gpus": count}, count, count
    if shares:
        return
    quarters = {count * part // 4 for part in (1, 2, 3)} if count > 4 else set(range(1, count))
    for train in sorted(quarters - {0}):
        yield {"train": train, "rollout": count - train}, train, count - train


_KEPT = ("memory", "per_machine", "address", "deadline", "restart")
"""Settings of a place that do not depend on its kind."""


def _place_of(slots: Mapping[str, int], own: Any) -> Any:
    """``Colocate(gpus=)``, or ``Split(train=, rollout=)``, with the other settings of the job's own place."""
    from flowrl.files.names import named

    kept = {name: getattr(own, name) for name in _KEPT if hasattr(own, name)}
    return named("Split" if "rollout" in slots else "Colocate")(**slots, **kept)


def _meshes(job: Job[Any], slots: int) -> Iterator[Mesh]:
    """Meshes of all slots, the job's own first. Axes whose processes talk in every layer stay within a machine, and
    copies are of a whole one; a backend with pipelines has copies and stages in place of shards."""
    backends: list[Any] = [job.graph.bindings[role] for role in trainers_of(job)]
    yield from (backend.geometry for backend in backends if backend.geometry.ranks == slots)
    if any(map(_has_stages, backends)):
        for tensor in _divisors(min(slots, MACHINE), slots):
            for pipeline in _divisors(slots, slots // tensor):
                yield Mesh(replicate=slots // tensor // pipeline, pipeline=pipeline, tensor=tensor)
        return
    experts = max(map(_experts, backends), default=0)
    for tensor in _divisors(min(slots, MACHINE), slots):
        rows = slots // tensor
        machines = slots // MACHINE if slots % MACHINE == 0 else 1
        for replicate in sorted({1, machines if rows % max(machines, 1) == 0 else 1}):
            fsdp = rows // replicate
            near = max(_divisors(MACHINE, fsdp * tensor))
            for expert in sorted({1, near, fsdp * tensor}) if experts else (1,):
                yield Mesh(replicate=replicate, fsdp=fsdp, tensor=tensor, expert=expert)


def _divisors(most: int, number: int) -> list[int]:
    return [one for one in range(1, most + 1) if number % one == 0]


def _experts(backend: Any) -> int:
    """The experts of a layer of a backend's model."""
    shape = shape_of_backend(backend)
    return 0 if shape is None else shape.experts


def _widths(job: Job[Any], slots: int) -> Iterator[int | None]:
    """The slots of each engine: the job's own, and those that divide its heads; None leaves them."""
    engines: list[Any] = [job.graph.bindings[r] for r in engines_of(job) if has_setting(job, r, "tensor_parallel")]
    if not engines:
        yield None
        return
    yield from (engine.tensor_parallel for engine in engines if slots % engine.tensor_parallel == 0)
    heads = [config_of_backend(engine).get("num_attention_heads") or 1 for engine in engines]
    yield from (one for one in _divisors(min(slots, MACHINE), slots) if not any(count % one for count in heads))


def _meshed(job: Job[Any], mesh: Mesh, staged: bool) -> dict[str, Any]:
    """Settings that give all trainers this mesh; if some have stages, the others have shards in place of stages and
    copies."""
    sharded = dataclasses.replace(mesh, replicate=1, pipeline=1, fsdp=mesh.replicate * mesh.pipeline * mesh.fsdp)
    found: dict[str, Any] = {}
    for role in trainers_of(job):
        found |= mesh_settings(job, role, sharded if staged and not _has_stages(job.graph.bindings[role]) else mesh)
    return found


def _has_stages(backend: Any) -> bool:
    return bool(getattr(backend, "pipelined", False))


def _wide(job: Job[Any], slots: int, wide: int | None, shares: bool) -> dict[str, Any]:
    """Settings that give engines all slots, each so many."""
    found: dict[str, Any] = {}
    for role in () if shares else engines_of(job):
        backend: Any = job.graph.bindings[role]
        each = backend.slots_per_rank if wide is None else wide
        wanted = {"tensor_parallel": each, "ranks": max(slots // each, 1)}
        found |= {
            f"{role}.{name}": value
            for name, value in wanted.items()
            if has_setting(job, role, name) and getattr(backend, name) != value
        }
    return found

"""Places, meshes, engines and lags of a job, ranked by predicted seconds: enumerate, prune, predict, sort."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowrl.errors import FlowrlError
from flowrl.protocols.backend import Backend
from flowrl.protocols.footprint import MICRO_BATCH
from flowrl.protocols.mesh import Mesh
from flowrl.run.placement.place import lay_out
from flowrl.run.prediction.fitting import as_options, with_changes
from flowrl.run.prediction.memory import Memory
from flowrl.run.prediction.stages import MACHINE, config_of_backend, shape_of_backend
from flowrl.run.training.job import Job

Settings = Mapping[str, Any]
"""Values by path, as ``--set`` takes them."""

FRACTIONS = (0.8, 0.6, 0.4, 0.2)
"""The shares of a GPU that are tried for engines that take turns with trainers."""


class Candidate(NamedTuple):
    """A changed job, its predicted seconds of a step and its memory, and the settings that changed.

    Args:
        memory: None if the hardware is not stated.
    """

    job: Job[Any]
    settings: Settings
    seconds: float
    memory: Memory | None

    @property
    def options(self) -> str:
        """The settings as options of a command."""
        return as_options(self.settings)


@dataclass(frozen=True)
class Ranking:
    """What a search found.

    Args:
        candidates: those that fit, the fastest first.
        unfit: the number of those that do not fit, by what takes the most.
        refused: the number of those that flowrl refuses, by the code of the error and its message.
    """

    candidates: Sequence[Candidate]
    unfit: Mapping[str, int]
    refused: Mapping[str, int]


def search(
    job: Job[Any],
    gpus: Sequence[int],
    seconds: Callable[[Job[Any]], float],
    memory: Callable[[Job[Any]], Memory] | None,
) -> Ranking:
    """The ranking of the candidates on so many slots.

    A candidate that does not fit is tried again with settings that take less: a smaller share for an engine that takes
    turns with trainers, then the shortest micro-batches, then recomputed layers, both, and rows that neighbors share.

    Args:
        seconds: predicts a step.
        memory: predicts the memory; None checks none, and leaves meshes and engines' widths out, which `seconds` from
            measured costs cannot tell apart.
    """
    found: list[Candidate] = []
    unfit: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for settings in _candidates(job, gpus, refused, with_axes=memory is not None):
        try:
            changed = with_changes(job, settings)
            if changed.place is not None:
                lay_out(changed.graph, changed.place)
        except FlowrlError as error:
            refused[_reason(error)] += 1
            continue
        one: Candidate | None = Candidate(changed, settings, 0.0, None)
        if memory is not None:
            one = _fitting(job, settings, memory, unfit, refused)
        if one is not None:
            try:
                found.append(one._replace(seconds=seconds(one.job)))
            except FlowrlError as error:
                refused[_reason(error)] += 1
    found.sort(key=lambda one: (one.seconds, 0 if one.memory is None else one.memory.worst.bytes, len(one.settings)))
    return Ranking(found, unfit, refused)


def _reason(error: FlowrlError) -> str:
    return f"{error.code}: {error.message.partition('. ')[0]}"


def _fitting(
    job: Job[Any],
    settings: Settings,
    memory: Callable[[Job[Any]], Memory],
    unfit: Counter[str],
    refused: Counter[str],
) -> Candidate | None:
    """The candidate with the first smaller settings that fit; None, and counted, if it never does."""
    if (why := _refusal(with_changes(job, settings))) is not None:
        refused[_reason(why)] += 1
        return None
    found = memory(with_changes(job, settings))
    if found.fits:
        return Candidate(with_changes(job, settings), settings, 0.0, found)
    shares = _shares(job, settings)
    for less in _smaller(job, settings, found):
        for share in (shares[-1], *shares[:-1]):  # the least first: most do not fit
            one = {**settings, **less, **share}
            changed = with_changes(job, one)
            if _refusal(changed) is not None:
                break
            found = memory(changed)
            if not found.fits and share == shares[-1]:
                break
            if found.fits and (share != shares[-1] or len(shares) == 1):
                return Candidate(changed, one, 0.0, found)
        else:
            one = {**settings, **less, **shares[-1]}
            return Candidate(with_changes(job, one), one, 0.0, memory(with_changes(job, one)))
    parts: Counter[str] = Counter()
    for alive in found.worst.alive:
        parts.update(alive.parts)
    unfit[f"{found.worst.node}, most of it {parts.most_common(1)[0][0]}"] += 1
    return None


def _refusal(job: Job[Any]) -> FlowrlError | None:
    """Why a model does not fit a mesh, by its configuration."""
    for backend in job.graph.bindings.values():
        try:
            backend.refuse_missing()
        except FlowrlError as error:
            return error
    return None


def _shares(job: Job[Any], settings: Settings) -> list[dict[str, Any]]:
    """Shares of a GPU of engines that take turns with trainers, from their own to the smallest."""
    takes_turns = getattr(settings.get("place", job.place), "gpus", None) is not None
    engines = [role for role in _engines(job) if takes_turns and _has(job, role, "memory_fraction")]
    return [{}, *({f"{role}.memory_fraction": f for role in engines} for f in FRACTIONS if engines)]


def _smaller(job: Job[Any], settings: Settings, memory: Memory) -> list[dict[str, Any]]:
    """Further settings of trainers, from none to those that take the least."""
    roles, changed = _trainers(job), with_changes(job, settings)
    again = {f"{role}.gradient_checkpointing": True for role in roles if _has(job, role, "gradient_checkpointing")}
    longest, default = max(sum(memory.limits), 1), MICRO_BATCH[memory.hardware.device]
    budgets = {role: getattr(job.graph.bindings[role], "max_tokens", None) or default for role in roles}
    short = {f"{role}.max_tokens": longest for role, budget in budgets.items() if longest < budget}
    parts = (_context(changed, roles, count) for count in (2, 4, 8))
    return [{}, short, again, short | again, *({**short, **again, **axes} for axes in parts if axes)]


def _context(job: Job[Any], roles: Sequence[str], parts: int) -> dict[str, Any]:
    """Meshes on which neighbors share each row."""
    meshes = {role: job.graph.bindings[role].geometry for role in roles}
    if any(mesh.fsdp % parts or mesh.context > 1 or parts > MACHINE for mesh in meshes.values()):
        return {}
    shared = {role: dataclasses.replace(mesh, context=parts) for role, mesh in meshes.items()}
    return {path: value for role, mesh in shared.items() for path, value in _mesh(job, role, mesh).items()}


def _candidates(job: Job[Any], gpus: Sequence[int], refused: Counter[str], with_axes: bool) -> Iterator[Settings]:
    """The settings of all candidates, each only what differs from the job."""
    lags = list(_lags(job, refused))
    shares = any(job.graph.bindings[role].shares is not None for role in _engines(job))
    if job.place is None and 1 in gpus:
        yield {}
    for count in gpus:
        for place, trained, rolled in _places(job, count, shares):
            for lag in lags if "rollout" in place else lags[:1]:
                at = _place_of(place, job.place)
                base = {} if at == job.place else {"place": at}
                base |= {} if lag == job.graph.lag.versions else {"lag": lag}
                for mesh in _meshes(job, trained) if with_axes else [Mesh(fsdp=trained)]:
                    for wide in _widths(job, rolled) if with_axes else [None]:
                        yield {**base, **_meshed(job, mesh), **_wide(job, rolled, wide, shares)}


def _lags(job: Job[Any], refused: Counter[str]) -> Iterator[int]:
    """The lag of the job, then 0 and 1 where rules allow them."""
    own = job.graph.lag.versions
    yield own
    for lag in sorted({0, 1} - {own}):
        try:
            with_changes(job, {"lag": lag}).refuse_unready()
        except FlowrlError as error:
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
    """Meshes of all slots. Axes whose processes talk in every layer stay within a machine, and copies are of a whole
    one."""
    experts = max((_experts(job.graph.bindings[role]) for role in _trainers(job)), default=0)
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
    """The slots of each engine that divide its heads; None leaves them."""
    engines = [job.graph.bindings[role] for role in _engines(job) if _has(job, role, "tensor_parallel")]
    if not engines:
        yield None
        return
    heads = [config_of_backend(engine).get("num_attention_heads") or 1 for engine in engines]
    yield from (one for one in _divisors(min(slots, MACHINE), slots) if not any(count % one for count in heads))


def _meshed(job: Job[Any], mesh: Mesh) -> dict[str, Any]:
    return {path: value for role in _trainers(job) for path, value in _mesh(job, role, mesh).items()}


def _mesh(job: Job[Any], role: str, mesh: Mesh) -> dict[str, Any]:
    """Settings that give a role this mesh; ``ranks`` where they are enough."""
    backend: Any = job.graph.bindings[role]
    if backend.geometry == mesh:
        return {}
    if backend.mesh is None and mesh == Mesh(fsdp=mesh.fsdp):
        return {f"{role}.ranks": mesh.fsdp}
    return {f"{role}.mesh": mesh} | ({f"{role}.ranks": 1} if backend.ranks > 1 else {})


def _wide(job: Job[Any], slots: int, wide: int | None, shares: bool) -> dict[str, Any]:
    """Settings that give engines all slots, each so many."""
    found: dict[str, Any] = {}
    for role in () if shares else _engines(job):
        backend: Any = job.graph.bindings[role]
        each = backend.slots_per_rank if wide is None else wide
        wanted = {"tensor_parallel": each, "ranks": max(slots // each, 1)}
        found |= {
            f"{role}.{name}": value
            for name, value in wanted.items()
            if _has(job, role, name) and getattr(backend, name) != value
        }
    return found


def _trainers(job: Job[Any]) -> list[str]:
    """The roles on a mesh with weights of their own."""
    return [role for role in job.graph.bindings if _has(job, role, "mesh")]


def _engines(job: Job[Any]) -> list[str]:
    """The roles that generate."""
    return [role for role in job.graph.generators if role in job.graph.bindings]


def _has(job: Job[Any], role: str, name: str) -> bool:
    backend: Backend = job.graph.bindings[role]
    fields: Any = dataclasses.fields(backend)
    return backend.shares is None and any(field.name == name for field in fields)

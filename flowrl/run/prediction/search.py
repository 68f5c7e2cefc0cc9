"""Places, meshes, engines and lags of a job, ranked by predicted seconds: enumerate, prune, predict, sort."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowrl.errors import BindError, FlowrlError, GraphError
from flowrl.protocols.footprint import MICRO_BATCH
from flowrl.run.placement.place import lay_out
from flowrl.run.prediction.candidates import (
    Settings,
    candidates,
    engines_of,
    has_setting,
    mesh_settings,
    trainers_of,
)
from flowrl.run.prediction.fitting import as_options, with_changes
from flowrl.run.prediction.memory import Memory
from flowrl.run.prediction.stages import MACHINE, Times
from flowrl.run.training.job import Job

FRACTIONS = (0.8, 0.6, 0.4, 0.2)
"""The shares of a GPU that are tried for engines that take turns with trainers."""


class Candidate(NamedTuple):
    """A changed job, its predicted times and memory, and the settings that changed.

    Args:
        settings: empty for the unchanged job.
        memory: None if the hardware is not stated.
        missing: nodes that have no predicted time here, but have one in other candidates; without them, the seconds
            are a lower bound.
    """

    job: Job[Any]
    settings: Settings
    times: Times
    memory: Memory | None
    missing: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        return self.times.seconds

    @property
    def fits(self) -> bool:
        """Whether every slot has room, as far as memory is predicted."""
        return self.memory is None or self.memory.fits

    @property
    def options(self) -> str:
        """The settings as options of a command."""
        return as_options(self.settings)


@dataclass(frozen=True)
class Ranking:
    """What a search found.

    Args:
        candidates: those that fit, the fastest first; those with `Candidate.missing` nodes after all others.
        own: the unchanged job, also if it does not fit; or why flowrl refuses it.
        unknown: the nodes without a predicted time in any candidate, by the reason.
        unfit: the number of those that do not fit, by what takes the most.
        refused: the number of those that flowrl refuses, by the code of the error and its message.
    """

    candidates: Sequence[Candidate]
    own: Candidate | FlowrlError
    unknown: Mapping[str, str]
    unfit: Mapping[str, int]
    refused: Mapping[str, int]

    @property
    def rank(self) -> int | None:
        """The rank of the unchanged job, from 1; None if it does not fit or is refused."""
        return next((rank for rank, one in enumerate(self.candidates, 1) if not one.settings), None)


_Times = Callable[[Job[Any]], Times]
_Memory = Callable[[Job[Any]], Memory]


def search(job: Job[Any], gpus: Sequence[int], times: _Times, memory: _Memory | None) -> Ranking:
    """The ranking of the unchanged job and of the candidates on so many slots.

    A candidate that does not fit is tried again with settings that take less: a smaller share for an engine that takes
    turns with trainers, then the shortest micro-batches, then recomputed layers, both, and rows that neighbors share.

    Args:
        times: predicts a step.
        memory: predicts the memory; None checks none, and leaves meshes and engines' widths out, which `times` from
            measured costs cannot tell apart.
    """
    own = _own(job, times, memory)
    settled = isinstance(own, FlowrlError) or own.fits
    found = [own] if isinstance(own, Candidate) and own.fits else []
    unfit: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for settings in candidates(job, gpus, refused, with_axes=memory is not None):
        if settled and not settings:
            continue
        try:
            changed = with_changes(job, settings)
            if changed.place is not None:
                lay_out(changed.graph, changed.place)
        except FlowrlError as error:
            refused[_reason(error)] += 1
            continue
        fitting: _Fitting | None = _Fitting(changed, settings, None)
        if memory is not None:
            fitting = _fitting(job, settings, memory, unfit, refused)
        if fitting is not None:
            try:
                found.append(Candidate(fitting.job, fitting.settings, times(fitting.job), fitting.memory))
            except FlowrlError as error:
                refused[_reason(error)] += 1
    return _ranked(found, own, unfit, refused)


def _own(job: Job[Any], times: _Times, memory: _Memory | None) -> Candidate | FlowrlError:
    """The unchanged job, or why flowrl refuses it."""
    try:
        job.refuse_unready()
        if (why := _refusal(job)) is not None:
            return why
        return Candidate(job, {}, times(job), None if memory is None else memory(job))
    except (BindError, GraphError) as error:
        return error


def _ranked(
    found: Sequence[Candidate], own: Candidate | FlowrlError, unfit: Mapping[str, int], refused: Mapping[str, int]
) -> Ranking:
    """Candidates in order. A node without a time in some is missing there, so that their seconds compare with others'
    only as a bound."""
    known = found or ([own] if isinstance(own, Candidate) else [])
    everywhere = set[str].intersection(*(set(one.times.unknown) for one in known)) if known else set[str]()

    def complete(one: Candidate) -> Candidate:
        return one._replace(missing=tuple(node for node in one.times.unknown if node not in everywhere))

    def key(one: Candidate) -> tuple[int, float, int, int]:
        return len(one.missing), one.seconds, 0 if one.memory is None else one.memory.worst.bytes, len(one.settings)

    unknown = {node: why for node, why in known[0].times.unknown.items() if node in everywhere} if known else {}
    own = complete(own) if isinstance(own, Candidate) else own
    return Ranking(sorted(map(complete, found), key=key), own, unknown, unfit, refused)


def _reason(error: FlowrlError) -> str:
    return f"{error.code}: {error.message.partition('. ')[0]}"


class _Fitting(NamedTuple):
    """A changed job that fits, if its memory is predicted."""

    job: Job[Any]
    settings: Settings
    memory: Memory | None


def _fitting(
    job: Job[Any], settings: Settings, memory: _Memory, unfit: Counter[str], refused: Counter[str]
) -> _Fitting | None:
    """The job with the first smaller settings that fit; None, and counted, if it never does."""
    if (why := _refusal(with_changes(job, settings))) is not None:
        refused[_reason(why)] += 1
        return None
    found = memory(with_changes(job, settings))
    if found.fits:
        return _Fitting(with_changes(job, settings), settings, found)
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
                return _Fitting(changed, one, found)
        else:
            one = {**settings, **less, **shares[-1]}
            return _Fitting(with_changes(job, one), one, memory(with_changes(job, one)))
    parts: Counter[str] = Counter()
    for alive in found.worst.alive:
        parts.update(alive.parts)
    unfit[f"{found.worst.node}, most of it {parts.most_common(1)[0][0]}"] += 1
    return None


def _refusal(job: Job[Any]) -> BindError | None:
    """Why a model does not fit a mesh, by its configuration."""
    for backend in job.graph.bindings.values():
        try:
            backend.refuse_missing()
        except BindError as error:
            return error
    return None


def _shares(job: Job[Any], settings: Settings) -> list[dict[str, Any]]:
    """Shares of a GPU of engines that take turns with trainers, from their own to the smallest."""
    takes_turns = getattr(settings.get("place", job.place), "gpus", None) is not None
    engines = [role for role in engines_of(job) if takes_turns and has_setting(job, role, "memory_fraction")]
    return [{}, *({f"{role}.memory_fraction": f for role in engines} for f in FRACTIONS if engines)]


def _smaller(job: Job[Any], settings: Settings, memory: Memory) -> list[dict[str, Any]]:
    """Further settings of trainers, from none to those that take the least."""
    roles, changed = trainers_of(job), with_changes(job, settings)
    recomputes = "gradient_checkpointing"
    again = {f"{role}.{recomputes}": True for role in roles if has_setting(job, role, recomputes)}
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
    return {path: value for role, mesh in shared.items() for path, value in mesh_settings(job, role, mesh).items()}

"""Changes that make a job fit: settings that flowrl has, from cheap to costly, verified by the same prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from flowrl.protocols.footprint import MICRO_BATCH
from flowrl.run.prediction.memory import Memory
from flowrl.run.training.job import Job
from flowrl.spec import Spec, written

_FEWEST = 256
"""The smallest micro-batch that is tried, if rows are shorter."""

_MOST_RANKS = 64


class Change(NamedTuple):
    """A changed job, its memory, and the settings that changed: values by path, as ``--set`` takes them."""

    job: Job[Any]
    memory: Memory
    settings: Mapping[str, Any]

    @property
    def options(self) -> str:
        """The settings as options of a command."""
        return as_options(self.settings)


def cheapest(job: Job[Any], memory: Memory, predict: Callable[[Job[Any]], Memory]) -> Change | None:
    """The first change that fits, in this order: smaller micro-batches, every second layer recomputed, or all (about a
    third more compute), a smaller share or fewer rows for an engine, gathered layers freed after the forward pass,
    inputs of recomputed layers in CPU memory, more ranks, the optimizer's state in CPU memory, weights too, an adapter
    in place of all weights; each also with cheaper ones. None if none fits.
    """
    combinations = _combinations(job, memory)
    in_one = [one for one in combinations if not any(path.endswith((".ranks", ".offload")) for path in one)]
    # shards take more where weights are few, so the most of both is tried first
    if not any(predict(with_changes(job, most[-1])).fits for most in (combinations, in_one) if most):
        return None
    for settings in combinations:
        changed = with_changes(job, settings)
        if (found := predict(changed)).fits:
            return Change(changed, found, settings)
    return None


def _combinations(job: Job[Any], memory: Memory) -> list[dict[str, Any]]:
    """Settings of the roles that are awake where it does not fit, sorted by what they cost."""
    roles = memory.awake
    axes = [list(_micro_batches(job, memory, roles)), *_switches(job, memory, roles), list(_more_ranks(job, roles))]
    chosen = product(*([_NONE, *axis] for axis in axes))
    sums = ((sum(cost for cost, _ in some), dict(pair for _, one in some for pair in one.items())) for some in chosen)
    return [settings for _, settings in sorted(sums, key=lambda one: one[0]) if settings]


_Choice = tuple[int, dict[str, Any]]
"""A cost, and settings."""

_NONE: _Choice = (0, {})


def _micro_batches(job: Job[Any], memory: Memory, roles: list[str]) -> Iterator[_Choice]:
    """Half, a quarter and an eighth of the micro-batch, but no less than the longest row."""
    default = MICRO_BATCH[memory.hardware.device]
    least = max(sum(memory.limits), _FEWEST)
    has = {role: job.graph.bindings[role].max_tokens or default for role in roles if _field(job, role, "max_tokens")}
    for halvings in range(1, 4):
        if smaller := {f"{role}.max_tokens": n >> halvings for role, n in has.items() if n >> halvings >= least}:
            yield halvings, smaller


def _switches(job: Job[Any], memory: Memory, roles: list[str]) -> list[list[_Choice]]:
    """Changes of one setting of each role that has it."""
    from flowrl.files.names import named

    shared = {backend.shares for backend in job.graph.bindings.values()}
    recomputed = {role: job.graph.bindings[role] for role in roles if _field(job, role, "gradient_checkpointing")}
    kept = [role for role in roles if _field(job, role, "reshard_after_forward", False)]
    is_cuda = memory.hardware.device == "cuda"
    offloaded = [role for role in roles if is_cuda and role not in shared and _field(job, role, "offload", False)]
    stepped = [role for role in offloaded if _field(job, role, "optimizer")]
    adapted = {role for role in roles if _field(job, role, "lora", None) and _field(job, role, "optimizer")}
    engines = [role for role in roles if _field(job, role, "memory_fraction")]
    fractions = [(12 + i, {f"{role}.memory_fraction": f for role in engines}) for i, f in enumerate((0.6, 0.4, 0.2))]
    rows = {role: job.graph.bindings[role].max_rows for role in roles if hasattr(job.graph.bindings[role], "max_rows")}
    fewer = [(12 + i, {f"{role}.max_rows": max(1, n >> i) for role, n in rows.items()}) for i in range(1, 6)]
    return [
        list(_recomputed(recomputed, is_cuda)),
        [(20, {f"{role}.reshard_after_forward": True for role in kept})] if kept else [],
        fractions if engines else [],
        fewer if rows else [],
        [
            *([(900, {f"{role}.offload": "optimizer" for role in stepped})] if stepped else []),
            *([(1000, {f"{role}.offload": True for role in offloaded})] if offloaded else []),
        ],
        [(10000, {f"{role}.lora": named("LoRA")(r=16) for role in adapted})] if adapted else [],
    ]


def _recomputed(trained: Mapping[str, Any], is_cuda: bool) -> Iterator[_Choice]:
    """More recomputed layers of these roles: every second one, all of them, and with their inputs in CPU memory."""
    steps: list[tuple[int, bool | int | str]] = [(8, 2), (10, True), *([(30, "offload")] if is_cuda else [])]
    for cost, value in steps:
        if less := [role for role, x in trained.items() if _depth(x.gradient_checkpointing) < _depth(value)]:
            yield cost, {f"{role}.gradient_checkpointing": value for role in less}


def _depth(checkpointing: bool | int | str) -> int:
    """The order of values of ``gradient_checkpointing`` by the memory that they save."""
    if isinstance(checkpointing, bool):
        return 2 if checkpointing else 0
    return 3 if checkpointing == "offload" else 1


_ANY = object()


def _field(job: Job[Any], role: str, name: str, value: Any = _ANY) -> bool:
    """Whether a role's backend has its own weights, and a setting of this name, with this value if one is given."""
    backend: Any = job.graph.bindings[role]
    has = backend.shares is None and any(field.name == name for field in dataclasses.fields(backend))
    return has and (value is _ANY or getattr(backend, name) == value)


def _more_ranks(job: Job[Any], roles: list[str]) -> Iterator[_Choice]:
    """Two to `_MOST_RANKS` times the ranks of each trained role whose weights no engine uses, and a place with as many
    slots."""
    if job.place is None:
        return
    shared = {backend.shares for backend in job.graph.bindings.values()}
    owners = [role for role in roles if role not in shared and _field(job, role, "offload")]
    ranks = {role: job.graph.bindings[role].ranks for role in owners if job.graph.bindings[role].mesh is None}
    most, factor = max(ranks.values(), default=_MOST_RANKS), 2
    while most * factor <= _MOST_RANKS:
        wider = {f"{role}.ranks": n * factor for role, n in ranks.items()}
        yield 100 * factor, wider | _place(job.place, most * factor)
        factor *= 2


def _place(place: Any, slots: int) -> dict[str, Any]:
    """The place with at least as many slots for training."""
    name = "gpus" if hasattr(place, "gpus") else "train"
    return {"place": dataclasses.replace(place, **{name: slots})} if getattr(place, name, slots) < slots else {}


def with_changes(job: Job[Any], settings: Mapping[str, Any]) -> Job[Any]:
    """The job with these settings: fields of backends below their role, ``place`` and ``lag``."""
    bindings: dict[str, Any] = dict(job.graph.bindings)
    fields: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        role, _, name = path.partition(".")
        if name:
            fields.setdefault(role, {})[name] = value
    changed = {role: dataclasses.replace(bindings[role], **each) for role, each in fields.items()}
    graph = job.graph.bound(bindings | changed)
    graph = graph.edit(lag=settings["lag"]) if "lag" in settings else graph
    return dataclasses.replace(job, graph=graph, place=settings.get("place", job.place))


def as_options(settings: Mapping[str, Any]) -> str:
    """Settings as options of a command."""
    return " ".join(f"--set {_quoted(f'{path}={_text(value)}')}" for path, value in settings.items())


def _text(value: Any) -> str:
    """A value as ``--set`` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return written(value) if isinstance(value, Spec) else str(value)


def _quoted(text: str) -> str:
    """Text as one word of a shell."""
    return f"'{text}'" if "(" in text else text

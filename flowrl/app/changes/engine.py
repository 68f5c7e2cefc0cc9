"""``--engine``: another rollout engine, with what carries over from the present one."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from flowrl.core.graphs.plan import Plan
from flowrl.errors import ParameterError
from flowrl.protocols.backend import Backend
from flowrl.run.training.job import Job
from flowrl.run.training.training import Training
from flowrl.spec import non_default, parameters, written

Engine = Literal["vllm", "sglang", "torch"]
_NAMES = {"TorchRollout": "max_rows", "VLLM": "max_num_seqs", "SGLang": "max_num_seqs"}
"""By backend, the parameter for the number of rows that are sampled at a time."""
_OF_ONE_ENGINE = "engine_args"
"""The parameter whose names only one engine knows."""


def with_engine(training: Training, name: Engine) -> tuple[Training, list[str]]:
    """A training with other engines for all synced rollouts, and a line for each change.

    Raises:
        ParameterError: no engine is synced, or it has no model to load.
    """
    job, kind = training.job, kinds()[name]
    roles = [role for node in Plan(job.graph).syncs for role in node.writes if role in job.graph.bindings]
    if not roles:
        raise ParameterError(
            f"--engine {name} finds no rollout engine in {job.graph.name}: no node syncs weights to a bound role. "
            f"Leave --engine out.",
            code="cli.bad-option",
            option="--engine",
            found=name,
        )
    found = {role: _replaced(job, role, kind) for role in roles if type(job.graph.bindings[role]) is not kind}
    lines = [_described(role, job.graph.bindings[role], backend) for role, backend in found.items()]
    return dataclasses.replace(training, job=job.edit(bind=found)), lines


def kinds() -> dict[Engine, type[Any]]:
    """The backends by the names of engines."""
    from flowrl.backends import VLLM, SGLang, TorchRollout  # here: they import transformers

    return {"vllm": VLLM, "sglang": SGLang, "torch": TorchRollout}


def _replaced(job: Job[Any], role: str, kind: type[Any]) -> Backend:
    """The engine of a role as a backend of another kind."""
    old, rows = job.graph.bindings[role], _NAMES[kind.__name__]
    known = {field.name for field in dataclasses.fields(kind)} - {_OF_ONE_ENGINE}
    given = {_renamed(name, old, rows): value for name, value in non_default(old).items()}
    carried = {name: value for name, value in given.items() if name in known and value is not None}
    owner = job.graph.bindings.get(old.shares) if old.shares is not None else None
    if "model" not in carried and owner is not None:
        carried["model"] = owner.starts_from
    if carried.get("model") is None:
        raise ParameterError(
            f"--engine finds no model for the role {role!r}: {written(old)} names none. Bind it with one, such as "
            f"--set '{role}={kind.__name__}(\"model\")'.",
            code="cli.bad-option",
            option="--engine",
            role=role,
        )
    made: Backend = kind(**carried)
    return made


def _renamed(name: str, old: Backend, rows: str) -> str:
    return rows if name == _NAMES.get(type(old).__name__) else name


def _described(role: str, old: Backend, new: Backend) -> str:
    """What an engine replaces, and what it leaves out."""
    rows = _NAMES[type(new).__name__]
    known = parameters(new).keys() - {_OF_ONE_ENGINE}
    lost = [name for name in non_default(old) if _renamed(name, old, rows) not in known]
    without = f", without {', '.join(lost)} of {type(old).__name__}" if lost else ""
    return f"--engine: {role} is {written(new)}{without}"

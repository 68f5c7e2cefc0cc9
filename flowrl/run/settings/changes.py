"""A training with other settings, by path: what ``--set`` does.

The paths are those of ``edit(set=...)`` for nodes (``update_actor.loss.clip_high``), of backends below their role
(``actor.optimizer.lr``), and of the fields of `Training` and `Job` (``data.path``, ``seed``, ``place``) and ``lag``.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast

from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.lag import Lag
from flowrl.edits.edit import edit
from flowrl.edits.parameters import paths, with_parameters
from flowrl.errors import FlowrlError, ParameterError, offer
from flowrl.protocols.backend import Backend
from flowrl.run.placement.place import Place
from flowrl.run.settings.typed import typed
from flowrl.run.training.training import Training

Kind = Literal["node", "role", "training", "job", "graph"]
OTHERS: Mapping[str, tuple[Kind, Any]] = {
    "place": ("job", Place | None),
    "optimize": ("job", bool),
    "lag": ("graph", int | Lag),
}
"""Settings besides those of nodes, roles and `Training`, with their kind and type."""


class Owner(NamedTuple):
    """What the first name of a path stands for: its kind, value and type."""

    kind: Kind
    value: Any
    annotation: Any


def owners(training: Training, root: str) -> Iterator[Owner]:
    """What a first name may stand for: a node, a role, a field."""
    job, graph = training.job, training.job.graph
    if root in graph.nodes and not graph[root].is_input:
        yield Owner("node", graph[root].operator, Any)
    if root in graph.roles():
        yield Owner("role", graph.bindings.get(root), Backend)
    fields = cast(Any, Training).__pydantic_fields__
    if root in fields and root != "job":
        yield Owner("training", getattr(training, root), fields[root].annotation)
    if root in OTHERS:
        kind, annotation = OTHERS[root]
        yield Owner(kind, getattr(job if kind == "job" else graph, root), annotation)


def owner_of(training: Training, path: str) -> Owner | None:
    """What the first name of a path stands for, by the rest of the path; None for an unknown name."""
    root, _, rest = path.partition(".")
    found = list(owners(training, root))
    fitting = (one for one in found if rest in paths(one.value) or (not rest and one.kind != "node"))
    return next(fitting, found[0] if found else None)


def with_settings(training: Training, given: Mapping[str, str], flag: str = "--set") -> Training:
    """A training with the settings at these paths, each from text by the type of what it sets.

    Args:
        flag: the option that gave them, for messages.

    Raises:
        ParameterError, GraphError: a path that names nothing, with the nearest ones; a value that does not fit.
    """
    graph, job = training.job.graph, training.job
    by_root: dict[str, dict[str, str]] = {}
    for path, text in given.items():
        root, _, rest = path.partition(".")
        by_root.setdefault(root, {})[rest] = text
    found: dict[Kind, dict[str, Any]] = {"node": {}, "role": {}, "training": {}, "job": {}, "graph": {}}
    for root, texts in by_root.items():
        kind, value = _changed(training, root, texts, flag)
        if kind == "node":
            names = dict.fromkeys(path.partition(".")[0] for path in texts)
            found[kind] |= {f"{root}.{name}": getattr(value, name) for name in names}
        else:
            found[kind][root] = value
    length = {"steps", "epochs"} & found["training"].keys()
    if len(length) == 1:  # the other one gives way
        found["training"] |= dict.fromkeys({"steps", "epochs"} - length)
    said = " ".join(f"{flag} {path}={text}" for path, text in given.items())
    with _named(said):
        edited = edit(graph, set=found["node"], bind=found["role"], **found["graph"])
        changed = dataclasses.replace(job, graph=edited, **found["job"])
        return dataclasses.replace(training, job=changed, **found["training"])


def _changed(training: Training, root: str, texts: Mapping[str, str], flag: str) -> tuple[Kind, Any]:
    """What a first name stands for, with the values of its paths."""
    first = next(f"{root}.{rest}" if rest else root for rest in texts)
    owner = owner_of(training, first)
    if owner is None:
        raise _unknown(training, first, texts[first.partition(".")[2]], flag)
    value, below = owner.value, {rest: text for rest, text in texts.items() if rest}
    with _named(" ".join(f"{flag} {f'{root}.{rest}' if rest else root}={text}" for rest, text in texts.items())):
        if owner.kind != "node" and "" in texts:
            value = typed(texts[""], owner.annotation)
        known = list(paths(value))
        for rest, text in texts.items():
            parent, is_whole = rest.rpartition(".")[0], not rest and owner.kind != "node"
            inside_nothing = parent in known and not any(path.startswith(f"{parent}.") for path in known)
            if not (is_whole or rest in known or inside_nothing):  # the last one `with_parameters` refuses
                raise _unknown(training, f"{root}.{rest}" if rest else root, text, flag)
        if not below:
            return owner.kind, value

        def call(path: str) -> str:
            return f"{flag} '{path}=...'"

        return owner.kind, with_parameters(
            value, root, below, call, lambda text, of, _: typed(text, of), owner.annotation
        )


def settable(training: Training) -> Iterator[str]:
    """All paths that can be set."""
    graph: Graph = training.job.graph
    fields = [name for name in cast(Any, Training).__pydantic_fields__ if name != "job"]
    for root in dict.fromkeys([*graph.nodes, *graph.roles(), *fields, *OTHERS]):
        for owner in owners(training, root):
            if owner.kind != "node":
                yield root
            yield from (f"{root}.{path}" for path in paths(owner.value))


def _unknown(training: Training, path: str, text: str, flag: str) -> ParameterError:
    """The error for a path that names nothing, with the nearest paths."""
    known = list(dict.fromkeys(settable(training)))
    root, _, last = path.partition(".")[0], *path.rpartition(".")[1:]
    same = sorted((p for p in known if p.endswith(f".{last}")), key=lambda p: not p.startswith(f"{root}."))
    near = same[:3] or difflib.get_close_matches(path, known, n=3)
    inside = sorted({p.split(".")[1] for p in known if p.startswith(f"{root}.")})
    names = sorted({p.partition(".")[0] for p in known})
    has = f"{root} has" if inside else "expected one of"
    hint = f"did you mean {' or '.join(near)}?" if near else offer(last, inside or names, has)
    return ParameterError(
        f"{flag} {path}={text} names no setting of {training.job.graph.name}; {hint}",
        code="parameter.unknown",
        option=flag,
        parameter=path,
        near=near,
    )


@contextmanager
def _named(said: str) -> Iterator[None]:
    """Name the options in front of an error about their values."""
    try:
        yield
    except FlowrlError as error:
        is_named = error.message.startswith(said.partition(" ")[0])
        message = error.message if is_named else f"{said}: {error.message}"
        raise type(error)(message, code=error.code, **error.facts) from error

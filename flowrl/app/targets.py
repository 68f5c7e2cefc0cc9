"""Targets: the arguments of commands.

A target is ``FILE.py:name`` or ``package.module:name``: a graph, a job, a training, or a function that returns one;
a file of a graph or a training (``.yaml``, ``.json``); or the name of an algorithm of `flowrl.graphs`, which
`flowrl.app.algorithms` makes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flowrl.app.changes.arguments import bound, unknown
from flowrl.errors import GraphError, ParameterError, offer, type_of


def load_target(
    target: str,
    imports: bool | None = True,
    arguments: Mapping[str, str] = MappingProxyType({}),
    options: Sequence[str] = (),
) -> Any:
    """The object that a target names; for an algorithm or a function, its result.

    Args:
        imports: see `flowrl.load`.
        arguments: of a function, as text.
        options: of the command, for messages.
    """
    found = _found(target, imports)
    if not inspect.isfunction(inspect.unwrap(found)):  # an algorithm that is an edit of another wraps its function
        for name, text in arguments.items():
            raise unknown(name, text, target, (), options)
        return found
    given = bound(found, arguments, target, options)
    if missing := [name for name in _required(found) if name not in given]:
        raise GraphError(
            f"{target} needs arguments: {', '.join(missing)}. Pass {' '.join(f'--{name}=...' for name in missing)} to "
            f"flowrl run, or name its result in {target.rpartition(':')[0]}, such as target = {found.__name__}(...).",
            code="cli.wrong-target",
            target=target,
            found=found.__name__,
            missing=missing,
        )
    return found(**given)


def _found(target: str, imports: bool | None) -> Any:
    """The object that a target names; for an algorithm, its graph."""
    from flowrl.core.graphs.algorithm import Algorithm
    from flowrl.graph import load
    from flowrl.references import load_object

    if target.endswith((".yaml", ".yml", ".json")):
        if imports:
            sys.path.insert(0, str(Path(target).resolve().parent))
        return load(target, imports=imports)
    if target.isidentifier():
        return _by_name(target)
    if (folder := _folder(target)) is not None:
        sys.path.insert(0, str(folder))  # so that the file can import its neighbors, as with `python FILE.py`
    found = load_object(target)
    return found() if isinstance(found, Algorithm) else found


def graph_of(found: Any, target: str) -> Any:
    """The graph of a loaded target."""
    from flowrl.graph import Graph

    if isinstance(found, Graph):
        return found
    from flowrl.run.training.job import Job
    from flowrl.run.training.training import Training

    graph = found.job if isinstance(found, Training) else found
    graph = graph.graph if isinstance(graph, Job) else graph
    if not isinstance(graph, Graph):
        raise GraphError(
            f"{target} is {type_of(found)}; expected a graph, a job, a training, or a function without arguments that "
            f"returns one.",
            code="cli.wrong-target",
            target=target,
            found=type(found).__name__,
        )
    return graph


def _required(function: Callable[..., Any]) -> list[str]:
    """The parameters of a function that have no default."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def refuse_namesakes(first: str, second: str) -> None:
    """Refuse two files whose imported neighbors share a name: Python has one module per name."""
    loaded, folder = _folder(first), _folder(second)
    if loaded is None or folder is None or loaded == folder:
        return
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).parent == loaded and (folder / f"{name}.py").is_file():
            raise ParameterError(
                f"{first} imports {file}, and {folder / name}.py has the same name, so in one process {second} would "
                f"import the wrong one. Rename one of the two files.",
                code="cli.same-module",
                first=file,
                second=f"{folder / name}.py",
            )


def _by_name(name: str) -> Any:
    """The graph of the algorithm with this name."""
    from flowrl.app.algorithms import graph, names

    if name in names():
        return graph(name)
    raise ParameterError(
        f"{name!r} is neither an algorithm nor a file; expected 'package.module:name', 'path/to/file.py:name', or an "
        f"algorithm; {offer(name, names(), 'flowrl has')}",
        code="cli.unknown-target",
        target=name,
    )


def _folder(target: str) -> Path | None:
    """The folder of the file in a target, if it has one."""
    source = target.rpartition(":")[0]
    return Path(source).resolve().parent if source.endswith(".py") else None

"""Targets: what a command of the command line may be given.

A target is ``FILE.py:name`` or ``package.module:name``: a graph, a job, a training, or a function without arguments
that makes one; a graph file (``.yaml``, ``.json``); or the name of an algorithm of `flowrl.graphs`, which
`flowrl.app.shelf` makes.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

from flowrl.errors import GraphError, ParameterError, offer


def load_target(target: str, imports: bool = True) -> Any:
    """The object that a target names; if that is an algorithm or a function, what it returns.

    Args:
        target: a file or module with a name in it, a graph file, or an algorithm.
        imports: import what a graph file names; see `flowrl.load`.

    Raises:
        GraphError: a graph file cannot be read, or names what would have to be imported; a function wants arguments.
        ParameterError: a name does not exist, or a file raises when it is imported.
    """
    from flowrl.core.graphs.algorithm import Algorithm
    from flowrl.core.operators.references import load_object
    from flowrl.graph import load

    if target.endswith((".yaml", ".yml", ".json")):
        return load(target, imports=imports)
    if target.isidentifier():
        return _by_name(target)
    if (folder := _folder(target)) is not None:
        sys.path.insert(0, str(folder))  # so that the file can import its neighbours, as `python FILE.py` lets it
    found = load_object(target)
    if isinstance(found, Algorithm):
        return found()
    if not inspect.isfunction(found):
        return found
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise GraphError(
            f"{target} cannot be called without arguments: {error}; name what it makes instead, such as "
            f"`graph = {found.__name__}(...)` in your file and FILE.py:graph here."
        ) from error
    return found()


def graph_of(found: Any, target: str) -> Any:
    """The graph of what was loaded.

    Raises:
        GraphError: it is or has no graph.
    """
    from flowrl.graph import Graph

    if isinstance(found, Graph):
        return found
    from flowrl.run.training.job import Job
    from flowrl.run.training.training import Training

    graph = found.job if isinstance(found, Training) else found
    graph = graph.graph if isinstance(graph, Job) else graph
    if not isinstance(graph, Graph):
        raise GraphError(
            f"{target} is of type {type(found).__name__}; expected a graph, a job, a training, or a function of no "
            f"arguments that makes one."
        )
    return graph


def refuse_namesakes(first: str, second: str) -> None:
    """Python keeps one module for a name, so a neighbour of the first file would replace one of the second.

    Raises:
        ParameterError: the first file has imported a neighbour, and the second has a neighbour of the same name.
    """
    loaded, folder = _folder(first), _folder(second)
    if loaded is None or folder is None or loaded == folder:
        return
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).parent == loaded and (folder / f"{name}.py").is_file():
            raise ParameterError(
                f"{first} imports {file}, and {folder / name}.py has the same name, so in one process {second} would "
                f"get the wrong one; give one of the two files another name."
            )


def _by_name(name: str) -> Any:
    """The graph of an algorithm.

    Raises:
        ParameterError: there is none of that name.
    """
    from flowrl.app.shelf import graph, names

    if name in names():
        return graph(name)
    raise ParameterError(
        f"{name!r} is no algorithm, and names no file; expected 'package.module:name' or 'path/to/file.py:name', or an "
        f"algorithm; {offer(name, names(), 'flowrl has')}"
    )


def _folder(target: str) -> Path | None:
    """The folder of the file that a target names, if it names one."""
    source = target.rpartition(":")[0]
    return Path(source).resolve().parent if source.endswith(".py") else None

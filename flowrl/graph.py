"""`Graph`, and `algorithm`, which turns a function into one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from flowrl.core.graphs import graph
from flowrl.core.graphs.algorithm import Algorithm
from flowrl.draw import mermaid
from flowrl.draw.notebook import svg_bundle
from flowrl.edits import diff
from flowrl.edits import edit as edits
from flowrl.edits.diff import Diff
from flowrl.errors import BindError, type_of
from flowrl.files import graph_io
from flowrl.rules import check as rules
from flowrl.rules.check import Allowance, Finding
from flowrl.run.placement.place import Place
from flowrl.run.prediction.costs import Costs, refuse_no_costs
from flowrl.run.prediction.prediction import predict
from flowrl.run.training.job import Job

if TYPE_CHECKING:
    from flowrl.look.recorded_run import RecordedRun
    from flowrl.run.training.training import Training

P = ParamSpec("P")
R = TypeVar("R")


class Graph(graph.Graph):
    """A dataflow graph: exactly what its sinks reach. `algorithm` makes one; every change is a copy.

    Args:
        name: the algorithm's name.
        nodes: by name, in topological order.
        sinks: the nodes whose outputs a step computes.
        lag: how far generation may run ahead, on the edge from `Sync` to `Generate` of the next step.
        bindings: backends by role; unbound roles are left out.
        allow: the rules that it may break, each with the reason.
    """

    edit = edits.edit

    def bind(self, *misplaced: Any, place: Place | None = None, optimize: bool = True, **backends: Any) -> Job[Graph]:
        """Bind backends to roles: ``graph.bind(actor=TorchTrainer(model), rollout=TorchRollout())``.

        Args:
            place: where they run, such as ``Colocate(gpus=2)``, on Ray; None is this process.
            optimize: compute duplicate nodes once; see `Job`.
            backends: by role.

        Raises:
            BindError: an unknown role, a backend that cannot serve its role, or a backend without a role.
            GraphError: the graph was loaded without imports.
        """
        if misplaced:
            raise BindError(
                f"bind(...) got {type_of(misplaced[0])} without a role. Pass backends by role "
                f"({', '.join(self.roles())}): bind({next(iter(self.roles()), 'actor')}=...).",
                code="graph.unnamed-backend",
                found=type(misplaced[0]).__name__,
            )
        graph_io.refuse_not_imported(self)
        return Job(self.bound({**self.bindings, **backends}), place, optimize)

    def diff(self, other: graph.Graph, costs: Costs | None = None) -> Diff:
        """The changes from this graph to `other`.

        Args:
            other: the graph after the edit.
            costs: the costs of a run; the diff then predicts the time of a step before and after, with the prompts per
                step and the place of that run.

        Raises:
            GraphError: `other` is not a graph.
            ParameterError: `costs` are not costs.
            DataError: `costs` lack a node of one of the graphs.
            BindError: the run was on Ray, and roles of the graphs are not bound, or do not fit there.
        """
        found = diff.diff(self, other)
        if costs is None:
            return found
        refuse_no_costs(costs)
        before, after = (predict(graph, costs.place, costs.prompts, costs).seconds for graph in (self, other))
        return replace(found, seconds=(before, after))

    def check(self, *, prompts: int | None = None) -> list[Finding]:
        """The findings of all rules that the graph does not allow; `prompts` is their number per step, if known.

        Raises:
            ParameterError: `prompts` is not a positive integer.
        """
        return rules.check(self, prompts)

    def allowances(self, *, prompts: int | None = None) -> list[Allowance]:
        """The rules that the graph may violate, each with the reason and its findings.

        Raises:
            ParameterError: `prompts` is not a positive integer.
        """
        return rules.allowances(self, prompts)

    def mermaid(self) -> str:
        """The graph as Mermaid text."""
        return mermaid.draw(self)

    def to_dict(self) -> dict[str, Any]:
        """The graph as JSON-able data; `from_dict` reads it back.

        Raises:
            GraphError: a parameter cannot be saved, such as a lambda.
        """
        return graph_io.graph_to_dict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any], *, imports: bool | None = None) -> Graph:
        """The graph of the data that `to_dict` returned; see `load` for `imports`.

        Raises:
            GraphError: the data is not a graph, has another format, or names something unknown or not imported.
        """
        return graph_io.graph_from_dict(Graph, data, imports)

    def fingerprint(self) -> str:
        """xxh3-128 (hex) of the canonical form: equal for graphs that compute the same under any name."""
        return graph_io.fingerprint(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return svg_bundle(self, repr(self))


def algorithm(function: Callable[P, R]) -> Algorithm[P, R, Graph]:
    """Decorator: see `flowrl.core.graphs.algorithm.Algorithm`.

    Raises:
        DefinitionError: the function has no input, or an undefined annotation; with file and line.
    """
    # annotations may use local names of the function that defines the algorithm
    return Algorithm(function, sys._getframe(1).f_locals, Graph)


def save(value: Graph | Training, path: str | Path) -> None:
    """Write a graph, or a training with its graph, to ``.yaml``/``.yml`` or ``.json``, atomically.

    Raises:
        GraphError: it is neither, or has a parameter that cannot be written.
        StorageError: the file cannot be written.
    """
    from flowrl.run.settings import run_file  # here: graphs alone need no training
    from flowrl.run.training.training import Training

    if isinstance(value, Training):
        run_file.save(value, graph_io.path_of(path, "save", "For the settings as data, read the file."))
    else:
        run_file.refuse_unsaved(value)
        graph_io.save(value, path)


def load(path: str | Path, *, imports: bool | None = None) -> Any:
    """The graph or training in a ``.yaml``/``.yml`` or ``.json`` file.

    Args:
        path: the file's path.
        imports: whether to import the classes and functions that the file names, which runs their modules. By default,
            those of flowrl, of installed operators, and those that your program has already imported are used, and
            other references are refused. True imports them. False only names functions, so that the graph can be
            shown, checked and compared but not bound.

    Raises:
        GraphError: the file is missing, damaged, neither a graph nor a training, or names code that is not imported.
    """
    path, data = graph_io.read(path)
    if "flowrl" in data and "graph" in data:
        from flowrl.run.settings.run_file import training_from_dict  # as above

        return training_from_dict(Graph, data, imports, path)
    call = f"flowrl.load({str(path)!r}, imports=True), or pass --import on the command line"
    return graph_io.graph_from_dict(Graph, data, imports, path, call)


def open(path: str | Path, *, imports: bool = False) -> RecordedRun:
    """Open a run folder to look into it; also a run in progress, and one that failed or was killed.

    Reading takes no lock and writes nothing.

    Args:
        path: the run folder.
        imports: whether to import the classes and functions that the run's graph names, which runs their modules.
            Without, those of flowrl, of installed operators, and those that your program has already imported are
            used, and functions are only named.

    Raises:
        DataError: the folder holds no run.
    """
    from flowrl.look.recorded_run import open_run  # here: graphs alone need no pyarrow

    return open_run(path, imports, Graph)

"""`Graph`, with all that can be done to it, and `algorithm`, which turns a function into one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from flowrl.core.graphs import graph
from flowrl.core.graphs.algorithm import Algorithm
from flowrl.draw import mermaid
from flowrl.edits import diff
from flowrl.edits import edit as edits
from flowrl.edits.diff import Diff
from flowrl.errors import BindError, GraphError
from flowrl.files import graph_io
from flowrl.rules import check as rules
from flowrl.rules.check import Allowance, Finding
from flowrl.run.placement.place import Place
from flowrl.run.prediction.costs import Costs, refuse_no_costs
from flowrl.run.prediction.prediction import predict
from flowrl.run.training.job import Job

P = ParamSpec("P")
R = TypeVar("R")


class Graph(graph.Graph):
    """A dataflow graph: exactly what its sinks reach. `algorithm` makes one; every change is a copy.

    Args:
        name: the algorithm's name.
        nodes: by name, in topological order.
        sinks: the nodes that the graph is run for.
        lag: by how far generation may run ahead, on the back-edge from `Sync` to `Generate`.
        bindings: backends by role, as far as they are bound.
        allow: the rules that it may break, each with the reason.
    """

    edit = edits.edit

    def bind(self, *misplaced: Any, place: Place | None = None, optimize: bool = True, **backends: Any) -> Job[Graph]:
        """Give roles their backends: ``graph.bind(actor=TorchTrainer(model), rollout=TorchRollout())``.

        Args:
            place: where they run, such as ``Colocate(gpus=2)``, on Ray; None is this process.
            optimize: compute once what the graph says twice; see `Job`.
            backends: by role.

        Raises:
            BindError: a role that the graph does not have, a backend that cannot serve it, or one without its role.
            GraphError: the graph was read without the functions that it names.
        """
        if misplaced:
            raise BindError(
                f"bind(...) was given {type(misplaced[0]).__name__} without the role that it is for; expected backends "
                f"by role ({', '.join(self.roles())}): bind({next(iter(self.roles()), 'actor')}=...)."
            )
        if missing := graph_io.not_imported(self):
            raise GraphError(
                f"{self.name} was read without importing {', '.join(missing)}, so it cannot run; read it with what it "
                f"names: flowrl.load(..., imports=True)."
            )
        return Job(self.bound({**self.bindings, **backends}), place, optimize)

    def diff(self, other: graph.Graph, costs: Costs | None = None) -> Diff:
        """What changes from this graph to `other`.

        Args:
            other: the graph after the edit.
            costs: of a run; then the diff says what the edit does to the time of a step, with as many prompts as in
                that run, and at its place.

        Raises:
            GraphError: `other` is no graph.
            ParameterError: `costs` are none.
            DataError: a node of the two that `costs` does not know.
            BindError: the run was on Ray, and roles of the two are not bound, or do not fit there.
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
            GraphError: a parameter cannot be written, such as a lambda.
        """
        return graph_io.graph_to_dict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any], *, imports: bool = True) -> Graph:
        """The graph that `to_dict` wrote; see `load` for `imports`.

        Raises:
            GraphError: not a graph, of another format, naming what is not there, or what would have to be imported.
        """
        return graph_io.graph_from_dict(Graph, data, imports)

    def fingerprint(self) -> str:
        """xxh3-128 (hex) of the canonical form: equal for graphs that compute the same, whatever their name."""
        return graph_io.fingerprint(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Jupyter draws the Mermaid block of Markdown by itself."""
        return {"text/plain": repr(self), "text/markdown": f"```mermaid\n{self.mermaid()}\n```"}


def algorithm(function: Callable[P, R]) -> Algorithm[P, R, Graph]:
    """Decorator: see `flowrl.core.graphs.algorithm.Algorithm`.

    Raises:
        DefinitionError: with file and line, where the function has no input or an annotation that is not defined.
    """
    # The annotations of an algorithm that a function defines may use that function's names.
    return Algorithm(function, sys._getframe(1).f_locals, Graph)


def load(path: str | Path, *, imports: bool = True) -> Graph:
    """The graph in a ``.yaml``/``.yml`` or ``.json`` file.

    Args:
        path: of the file.
        imports: import the classes and functions that the file names, which runs the files that these are in. With
            False nothing of others is run: functions are names only, so that the graph can be shown, checked and
            compared but not bound, and a class that neither flowrl nor an installed package brings is refused.

    Raises:
        GraphError: the file is missing, broken, no graph, or names what would have to be imported.
    """
    return graph_io.load(Graph, path, imports)

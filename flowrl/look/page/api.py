"""The views of some runs as plain JSON; the page computes nothing that is not here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowrl.core.graphs.graph import Graph
from flowrl.errors import DataError, FlowrlError
from flowrl.look.page.descriptions import description
from flowrl.look.page.graphs import graph_view
from flowrl.look.page.metrics import metrics
from flowrl.look.page.now import now
from flowrl.look.page.prompts import prompt, prompts
from flowrl.look.page.rows import row, rows
from flowrl.look.page.times import times
from flowrl.look.recorded_run import RecordedRun


class Api:
    """The views of runs, by the name of a view and its parameters as text, as they are in an address.

    Args:
        runs: by a name of each.
    """

    def __init__(self, runs: Mapping[str, RecordedRun]) -> None:
        self.named = dict(runs)
        self._graphs: dict[str, Graph | None] = {}
        self._views: dict[str, Callable[[Mapping[str, str]], Any]] = {
            "runs": lambda asked: self.runs(),
            "graph": lambda asked: self._graph_view(asked["run"]),
            "metrics": lambda asked: metrics(self._run(asked), int(asked.get("after", 0)), _number(asked, "start")),
            "now": lambda asked: now(self._run(asked), _number(asked, "step")),
            "rows": lambda asked: rows(self._run(asked), int(asked["step"])),
            "row": lambda asked: row(self._run(asked), int(asked["step"]), asked["row"]),
            "prompts": lambda asked: prompts(self._run(asked), asked.get("of")),
            "prompt": lambda asked: prompt(self._run(asked), asked["prompt"], asked["of"]),
            "time": lambda asked: times(self._run(asked), int(asked["step"]), self.graph(asked["run"])),
            "run": lambda asked: description(self._run(asked)),
        }

    def answer(self, view: str, asked: Mapping[str, str]) -> Any:
        """The answer to a view.

        Raises:
            LookupError, ValueError: there is no such view, run, step or row.
            FlowrlError: a file of the run cannot be read.
        """
        return self._views[view](asked)

    def runs(self) -> list[dict[str, Any]]:
        """What the page's head shows of every run."""
        return [self._of(name, run) for name, run in self.named.items()]

    def graph(self, name: str) -> Graph | None:
        """The graph of a run; None if its folder has none that can be read."""
        if name not in self._graphs:
            try:
                self._graphs[name] = self.named[name].graph
            except FlowrlError:
                self._graphs[name] = None
        return self._graphs[name]

    def _graph_view(self, name: str) -> dict[str, Any]:
        graph = self.graph(name)
        if graph is None:
            raise DataError(f"The graph of {self.named[name].path} cannot be read.", code="run.damaged")
        return graph_view(graph, self.named[name].description.get("metrics", {}))

    def _run(self, asked: Mapping[str, str]) -> RecordedRun:
        return self.named[asked["run"]]

    def _of(self, name: str, run: RecordedRun) -> dict[str, Any]:
        described = run.description
        return {
            "name": name,
            "path": str(run.path),
            "status": run.status,
            "steps": described.get("training", {}).get("steps"),
            "starts": [one["step"] for one in described.get("starts", ())],
            "error": described.get("error"),
        }


def named(runs: Sequence[RecordedRun]) -> dict[str, RecordedRun]:
    """Runs by their names; those of one name by their paths."""
    names = [run.name for run in runs]
    return {run.name if names.count(run.name) == 1 else str(run.path): run for run in runs}


def _number(asked: Mapping[str, str], name: str) -> int | None:
    return int(asked[name]) if name in asked else None

"""The views of some runs as plain JSON; the page computes nothing that is not here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flowrl.look.page.views.comparisons import comparison
from flowrl.look.page.views.descriptions import description
from flowrl.look.page.views.graphs import graph_view
from flowrl.look.page.views.metrics import metrics
from flowrl.look.page.views.now import now
from flowrl.look.page.views.prompts import prompt, prompts
from flowrl.look.page.views.rows import replay, row, rows, why
from flowrl.look.page.views.times import times
from flowrl.look.page.watched import WatchedRun

Asked = Mapping[str, str]


class Api:
    """The views of runs, by the name of a view and its parameters as text, as they are in an address.

    Args:
        runs: by what the page calls them.
    """

    def __init__(self, runs: Mapping[str, WatchedRun]) -> None:
        self.named = dict(runs)

    def answer(self, view: str, asked: Asked) -> Any:
        """The answer to a view.

        Raises:
            LookupError, ValueError: there is no such view, run, step or row.
            FlowrlError: a file of the run cannot be read, or was not recorded.
        """
        if view == "runs":
            return [_head(run) for run in self.named.values()]
        if view == "compare":
            return comparison(list(self.named.values()))
        return _VIEWS[view](self.named[asked["run"]], asked)

    def warm_up(self) -> None:
        """Read what the first answers need, so that the page opens at once."""
        for run in self.named.values():
            _ = run.graph, run.decode
            now(run)


def _head(run: WatchedRun) -> dict[str, Any]:
    """What the page's head shows of a run."""
    described = run.description
    return {
        "name": run.name,
        "path": str(run.path),
        "status": run.status,
        "steps": (described.get("training") or {}).get("steps"),
        "starts": [one["step"] for one in described.get("starts", ())],
        "alarms": [[alarm.get("step"), alarm.get("metric")] for alarm in run.alarms],
        "error": described.get("error"),
        "damage": run.damage,
    }


def _graph(run: WatchedRun, asked: Asked) -> dict[str, Any]:
    graph = run.graph
    if run.graph_problem is not None:
        raise run.graph_problem
    assert graph is not None
    return graph_view(graph, run.reporters)


def _number(asked: Asked, name: str) -> int | None:
    return int(asked[name]) if name in asked else None


_VIEWS: dict[str, Callable[[WatchedRun, Asked], Any]] = {
    "graph": _graph,
    "metrics": lambda run, asked: metrics(run, int(asked.get("after", 0)), _number(asked, "start")),
    "now": lambda run, asked: now(run, _number(asked, "step")),
    "rows": lambda run, asked: rows(run.rows(int(asked["step"]))),
    "row": lambda run, asked: row(run, int(asked["step"]), asked["row"]),
    "prompts": lambda run, asked: prompts(run, asked.get("of")),
    "prompt": lambda run, asked: prompt(run, asked["prompt"], asked["of"]),
    "why": lambda run, asked: why(run, asked["address"]),
    "replay": lambda run, asked: replay(run, int(asked["step"])),
    "time": lambda run, asked: times(run, int(asked["step"])),
    "run": lambda run, asked: description(run),
}

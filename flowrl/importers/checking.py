"""What is wrong with an imported training: the rules of its graph, and what its settings contradict."""

from __future__ import annotations

from typing import Any

from flowrl.errors import FlowrlError
from flowrl.graph import Graph
from flowrl.importers.plan import Imported


def problems_of(found: Imported) -> list[str]:
    """Findings of every rule, and the errors of the written file; no model, data or engine is needed.

    The reward function is left out where its file does not exist.
    """
    try:
        training = _loaded(found.program().source())
    except FlowrlError as error:
        if error.code != "reference.missing-source":
            return [str(error)]
        missing = [str(error)]
        training = _loaded(found.program(reward=False).source())
    else:
        missing = []
    graph: Graph = training.job.graph
    problems = [str(finding) for finding in graph.check(prompts=training.prompts)]
    try:
        graph.refuse_idle()
        if not problems:
            training.refuse_unready()
    except FlowrlError as error:
        problems.append(str(error))
    return missing + problems


def _loaded(source: str) -> Any:
    """The training that a written file defines; it calls flowrl alone."""
    names: dict[str, Any] = {}
    exec(compile(source, "<imported>", "exec"), names)  # written by `Program.source`, not by the user
    return names["training"]

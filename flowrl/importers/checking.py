"""What is wrong with an imported training: the rules of its graph, and what its settings contradict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flowrl.errors import FlowrlError
from flowrl.graph import Graph
from flowrl.importers.plan import Imported

ABSENT = frozenset({"reference.missing-source", "prompts.missing-file"})
"""Codes of what only this machine lacks."""


@dataclass
class Findings:
    """What a check found."""

    problems: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    """What is not on this machine, and so is not checked."""

    def add(self, error: FlowrlError) -> None:
        """Add an error that the check raised."""
        (self.absent if error.code in ABSENT else self.problems).append(str(error))


def check(found: Imported) -> Findings:
    """Findings of every rule, and the errors of the written file; no model, data or engine is needed.

    The reward function is left out where its file does not exist.
    """
    findings = Findings()
    try:
        training = _loaded(found.program().source())
    except FlowrlError as error:
        findings.add(error)
        if error.code not in ABSENT:
            return findings
        training = _loaded(found.program(reward=False).source())
    graph: Graph = training.job.graph
    findings.problems += [str(finding) for finding in graph.check(prompts=training.prompts)]
    try:
        graph.refuse_idle()
        if not findings.problems:
            training.refuse_unready()
    except FlowrlError as error:
        findings.add(error)
    return findings


def _loaded(source: str) -> Any:
    """The training that a written file defines; it calls flowrl alone."""
    names: dict[str, Any] = {}
    exec(compile(source, "<imported>", "exec"), names)  # written by `Program.source`, not by the user
    return names["training"]

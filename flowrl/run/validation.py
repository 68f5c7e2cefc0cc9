"""`Validation`: held-out prompts for a job's engines, as an edit of its graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from flowrl.core.edit import edit
from flowrl.core.graph import Graph
from flowrl.data.prompts import PromptData
from flowrl.spec import Spec


class Validation(Spec):
    """Every few steps, and before the first, the job's engines answer held-out prompts.

    The graph of a validation is the job's own graph up to `until`, with `changes` applied.

    Args:
        data: the held-out prompts.
        every: steps between two validations; there is always one after the last step.
        name: metrics are logged as ``<name>/<key>``.
        changes: ``"node.parameter"`` to value; by default one greedy answer per prompt.
        until: the node that scores.
        batch: how many prompts are answered at a time.
    """

    data: PromptData
    every: int = Field(default=10, ge=1)
    name: str = "val"
    changes: Mapping[str, Any] = Field(default_factory=lambda: {"repeat.n": 1, "generate.temperature": 0.0})
    until: str = "reward"
    batch: int = Field(default=256, ge=1)

    def graph(self, graph: Graph) -> Graph:
        """The graph of the validation, as an edit of `graph`.

        Raises:
            GraphError: a change names a node or parameter that is not there.
        """
        return edit(graph.subgraph(self.until), set=self.changes, name=self.name)

"""`Validation`: held-out prompts for a job's engines, as an edit of its graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from flowrl.data import PromptData
from flowrl.errors import GraphError
from flowrl.graph import Graph
from flowrl.spec import Spec


class Validation(Spec):
    """Every so many steps, and before the first, the job's engines answer held-out prompts.

    The graph of a validation is the job's own up to `until`, with `changes` made to it.

    Args:
        data: the held-out prompts.
        every: steps between two validations; the last step is always followed by one.
        name: metrics are logged as ``<name>/<key>``.
        changes: ``"node.parameter"`` to value; by default one greedy answer a prompt.
        until: the node that scores.
        batch: prompts at a time.
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
        scoring = graph.subgraph(self.until)
        operators: dict[str, Any] = {}
        for path, value in self.changes.items():
            node, _, parameter = path.partition(".")
            if node not in scoring:
                raise GraphError(
                    f"the validation {self.name!r} changes {path!r}, but {graph.name} has only the nodes "
                    f"{', '.join(scoring.nodes)} up to {self.until!r}; say what to change: "
                    f"Validation(..., changes={{...}})."
                )
            operator = operators.get(node, scoring[node].operator)
            known = [field.name for field in dataclasses.fields(operator)]
            if parameter not in known:
                raise GraphError(
                    f"the validation {self.name!r} changes {path!r}, but {node} has only the parameters "
                    f"{', '.join(known)}; write changes={{'{node}.{known[0] if known else 'parameter'}': ...}}."
                )
            operators[node] = dataclasses.replace(operator, **{parameter: value}).named(node)
        return scoring.edit(replace=operators, name=self.name)

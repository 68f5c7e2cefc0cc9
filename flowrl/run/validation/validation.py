"""`Validation`: held-out prompts on a job's engines, as an edit of its graph; `.validating` runs it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, field_validator

from flowrl.core.graphs.after import After
from flowrl.core.graphs.graph import Graph
from flowrl.core.graphs.plan import gates_of
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.when import ALWAYS
from flowrl.edits.edit import edit
from flowrl.errors import GraphError, ParameterError, offer
from flowrl.hub.repositories import Commits
from flowrl.protocols.backend import Backend
from flowrl.run.training.sources import Data, pinned_data, refuse_no_source
from flowrl.spec import Spec


class Validation(Spec):
    """Evaluates held-out prompts with the job's engines, before the first step and every few steps.

    The graph of a validation is the job's graph up to `until`, with any edit; see `flowrl.edits.edit`. Gates (`Filter`,
    `Collect`) are dropped, so that all held-out prompts count. Every node runs each time, and schedules have their
    value of the current step.

    Args:
        data: the held-out prompts; for a graph with several inputs up to `until`, a source for each, by its name.
        every: steps between two validations; there is always one after the last step.
        name: metrics are logged as ``<name>/<key>``.
        changes: ``"node.parameter"`` to value, as ``edit(set=...)``; by default one greedy response per prompt.
        until: the node that scores, or several nodes; ``"interact"`` if an environment scores.
        batch: prompts per batch.
        replace, drop, insert, wire: as those of `edit`: ``insert={"pass_at_k": After("reward", PassAtK(8))}``.
        bind: other backends by role, whose engines are built in addition to the job's. If the job syncs the role, the
            other engine gets the trained weights before each validation.
        goal: the mean reward at which the run ends early; None runs all steps. A goal that is reached before the first
            step does not end the run.
    """

    schedulable = False

    data: Data
    every: int = Field(default=10, ge=1)
    name: str = Field(default="val", min_length=1)
    changes: Mapping[str, Any] = Field(default_factory=lambda: {"repeat.n": 1, "generate.temperature": 0.0})
    until: str | tuple[str, ...] = "reward"
    batch: int = Field(default=256, ge=1)
    goal: float | None = Field(default=None, allow_inf_nan=False)
    replace: Mapping[str, Operator] = Field(default_factory=dict)
    drop: tuple[str, ...] = ()
    insert: Mapping[str, After] = Field(default_factory=dict)
    wire: Mapping[str, str] = Field(default_factory=dict)
    bind: Mapping[str, Backend] = Field(default_factory=dict)

    @field_validator("data", mode="before")
    @classmethod
    def _refuse_path(cls, data: Any) -> Any:
        return refuse_no_source(data)

    def graph(self, graph: Graph) -> Graph:
        """The graph of the validation, as an edit of `graph` without its gates.

        Raises:
            GraphError, PortError, BindError: the edit does not fit the graph.
        """
        self._refuse_no_end(graph)
        part = graph.subgraph(self.until)
        changed = edit(
            part,
            set=self.changes,
            replace=self.replace,
            drop=(*gates_of(part), *self.drop),
            insert=self.insert,
            wire=self.wire,
            bind=self.bind,
        )
        of_job = {r: graph.bindings[r] for r in changed.roles() if r in graph.bindings and r not in changed.bindings}
        always = {node.name: ALWAYS for node in changed.nodes.values() if node.when != ALWAYS}
        return edit(changed, when=always, bind=of_job)

    def pinned(self, commits: Commits) -> Self:
        """The same validation with the repositories of its data and backends resolved."""
        bind = {role: backend.pinned(commits) for role, backend in self.bind.items()}
        return dataclasses.replace(self, data=pinned_data(self.data, commits), bind=bind)

    def _refuse_no_end(self, graph: Graph) -> None:
        """Refuse end nodes that the graph lacks, such as the default if an environment scores."""
        until = (self.until,) if isinstance(self.until, str) else self.until
        if missing := [name for name in until if name not in graph]:
            scoring = [edge.node for edge, typed in graph.types.items() if getattr(typed.type, "kind", "") == "score"]
            fix = f": Validation(..., until={scoring[-1]!r})" if scoring else ""
            raise GraphError(
                f"The validation {self.name!r} ends at until={self.until!r}, but {graph.name} has no node "
                f"{missing[0]!r}; {offer(missing[0], graph.nodes)} Pass the name of the node that scores{fix}.",
                code="run.validation",
                validation=self.name,
                graph=graph.name,
                node=missing[0],
            )

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Whether these metrics, of this or another validation, reach the goal after the first step."""
        return self.goal is not None and metrics["step"] > 0 and metrics.get(self._mean, -math.inf) >= self.goal

    def refuse_goal_without(self, metrics: Mapping[str, float]) -> None:
        """Refuse a goal if the validation reports no mean reward."""
        if self.goal is not None and self._mean not in metrics:
            found = [key for key in metrics if key != "step"]
            raise ParameterError(
                f"Validation(goal={self.goal:g}) is a bound on {self._mean}, but this validation reports "
                f"{', '.join(found)}. Leave goal out, or add a Reward to the graph up to until={self.until!r}.",
                code="run.validation",
                validation=self.name,
                missing=self._mean,
                found=found,
            )

    @property
    def _mean(self) -> str:
        return f"{self.name}/reward/mean"

"""The engines of a recorded step with the weights that they had at its start, from a checkpoint of the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flowrl.core.graphs.graph import Graph, Node
from flowrl.errors import DataError
from flowrl.look.files import listed
from flowrl.look.steps.step_reader import StepReader
from flowrl.run.engine.build import EngineBuilder
from flowrl.run.training.checkpoint import Checkpoints
from flowrl.run.training.run_folder import CHECKPOINTS


@contextmanager
def loaded(step: StepReader, nodes: Iterable[Node]) -> Iterator[None]:
    """Within the block, the step has the engines of these nodes, as far as a checkpoint and the models that are not
    trained hold their weights.

    Raises:
        DataError: there is no checkpoint of the step's weights, or it is damaged.
    """
    asked = [node for node in nodes if node.roles]
    step.no_weights = {node.name: what for node in asked if (what := _lacks(step.graph, node)) is not None}
    found = [node for node in asked if node.name not in step.no_weights]
    builder = EngineBuilder(step.graph.bindings, step.seed)
    owners = {owner for node in found for role in node.roles for owner in _owners(step.graph, role)}
    trained = [role for role in step.graph.trained if role in owners]
    try:
        if trained and step.index:
            checkpoint = _checkpoint(step)
            for role in trained:
                builder.engine(role).load_checkpoint(str(checkpoint / role))
        step.engines = {node.name: {role: builder.engine(role) for role in node.roles} for node in found}
        yield
    finally:
        step.engines = {}
        builder.close()


def _lacks(graph: Graph, node: Node) -> str | None:
    """What of a node's weights a checkpoint does not hold, as a phrase; None if it holds all."""
    if node.writes:
        return f"a column to compare: it only updates {' and '.join(map(repr, node.writes))}"
    for role in [owner for used in node.roles for owner in _owners(graph, used)]:
        writers = [other.name for other in graph.nodes.values() if role in other.writes]
        if writers and role not in graph.trained:
            return f"the weights of {role!r} as {writers[0]} sent them"
        if writers and graph.lag.versions:
            return f"the weights of {role!r} as they were: with a lag, steps overlap"
        if writers and (node.prior_updates or graph.ancestors(node.name) & {*writers}):
            return f"the weights of {role!r} as they were within the step"
    return None


def _owners(graph: Graph, role: str | None) -> Iterator[str]:
    """A role, and those whose weights it uses."""
    while role is not None:
        yield role
        role = None if role not in graph.bindings else graph.bindings[role].shares


def _checkpoint(step: StepReader) -> Path:
    """The folder of the checkpoint after the step before."""
    checkpoints = Checkpoints(step.run.path / CHECKPOINTS, 1)
    known = checkpoints.steps()
    if step.index not in known:
        steps = step.run.metrics["step"].to_pylist()
        there = [number for number in (1, *(before + 1 for before in known)) if number in steps]
        raise DataError(
            f"{step.run.path} has no checkpoint after step {step.index}, so the weights of step {step.number} are not "
            f"there. Those of step {listed(there)} are. Write all with "
            f"Training(checkpoint_every=1, max_checkpoints={step.index + 1}).",
            code="look.no-checkpoint",
            path=step.run.path,
            step=step.number,
            known=there,
        )
    return checkpoints.intact(step.index)

"""Graphs for predictions: operators that compute nothing, backends that load nothing, and given costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flowrl import columns as c
from flowrl.core.graphs.graph import Input, Node
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import PortField
from flowrl.core.operators.roles import Reads, Role, Writes
from flowrl.core.operators.symbols import Edge
from flowrl.graph import Graph
from flowrl.protocols.backend import Backend
from flowrl.protocols.protocols import Rollout, Trainer
from flowrl.run.prediction.costs import Costs
from tests.support.kernel import RolloutEngine, TrainerEngine


class Start(NamedTuple):
    values: c.Values


class OnRows(Operator):
    def __call__(self, first: c.Values, second: c.Values) -> c.Values: ...


class OnBatch(OnRows):
    granularity = "batch"


class Score(Operator):
    granularity = "row"
    engine: Reads[Trainer] = Role("actor")

    def __call__(self, first: c.Values, second: c.Values) -> c.Values: ...


class Train(Operator):
    granularity = "row"
    engine: Writes[Trainer] = Role("actor")

    def __call__(self, first: c.Values, second: c.Values) -> c.Values: ...


class Generate(Operator):
    granularity = "row"
    engine: Reads[Rollout] = Role("rollout")

    def __call__(self, first: c.Values, second: c.Values) -> c.Values: ...


class SyncWeights(Operator):
    trainer: Reads[Trainer] = Role("actor")
    engine: Writes[Rollout] = Role("rollout")

    def __call__(self, first: c.Values, second: c.Values) -> c.Values: ...


class PlacedTrainer(Backend):
    """A trainer that loads nothing."""

    serves = (Trainer,)
    ranks: int = 1
    loses_weights_asleep: bool = False

    def build(self, context: Any) -> TrainerEngine:
        raise AssertionError("built")


class PlacedRollout(PlacedTrainer):
    serves = (Rollout,)

    def build(self, context: Any) -> RolloutEngine:
        raise AssertionError("built")


Wires = tuple[str, str]
Nodes = Mapping[str, tuple[Operator, Wires]]


def graph_of(nodes: Nodes, lag: int = 0, **backends: Any) -> Graph:
    """A graph of nodes that read two columns each, from ``"batch"`` or from other nodes; all are sinks."""
    made = {"batch": Node("batch", Input(Start).named("batch"), {})}
    for name, (operator, sources) in nodes.items():
        wires = zip(operator.signature.fields, sources, strict=True)
        edges = {field: Edge(source, next(iter(made[source].operator.signature.outputs))) for field, source in wires}
        made[name] = Node(name, operator.named(name), dict[PortField, Edge](edges))
    return Graph.build("toy", made, list(nodes), lag).bound(backends)


def fixed(**seconds: float) -> Costs:
    return Costs("given", {}).given(**seconds)


BATCH = ("batch", "batch")

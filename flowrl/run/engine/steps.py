"""`Steps`: runs the steps of a plan: draws batches, flies them, and goes back where something is lost.

`InFlightSteps` holds the steps in flight. Where nodes run is up to the runner: in this process, on Ray, or on a virtual
clock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flowrl.core.graphs.fusing import scorers
from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.plan import Plan
from flowrl.core.graphs.spans import swaps
from flowrl.core.operators.symbols import Edge
from flowrl.data.proto.dataproto import DataProto
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import GraphError
from flowrl.protocols.protocols import Rollout
from flowrl.run.engine.execution_graph import ExecutionGraph
from flowrl.run.engine.in_flight import Batches, Draw, InFlightSteps, OnNode
from flowrl.run.engine.nodes import NodeInfo, Region
from flowrl.run.engine.result import StepResult
from flowrl.run.engine.runner import Runner
from flowrl.run.engine.step_snapshot import StepSnapshot, load_snapshots, save_snapshots
from flowrl.run.engine.timeline import Timeline
from flowrl.run.engine.weights import TrainedWeights

AHEAD = "ahead"
"""The folder of a checkpoint with the steps that were under way."""

T = TypeVar("T")


class Steps:
    """Runs the steps of a plan.

    Args:
        plan: what to run.
        runner: where.
        seed: root of the keys.
        weights: of the job, which forks share; when something is lost, all trained roles go back to what they were
            after the last step, and what was in flight is repeated with the same batches and keys. So no row is lost,
            and none is trained on twice.
    """

    def __init__(self, plan: Plan, runner: Runner, seed: int, weights: TrainedWeights) -> None:
        self.plan, self.runner, self.seed = plan, runner, seed
        self._fused, self._swaps = scorers(plan.graph), bool(swaps(plan.graph))
        self.timeline = Timeline()
        self.state: dict[str, Any] = {}
        self.during: str | None = None  # for messages, where its steps are none of a training
        self._weights = weights
        self._infos: dict[int, dict[str, NodeInfo]] = {}  # by lag
        self._flight: InFlightSteps | None = None
        self._resumed: dict[int, StepSnapshot] = {}  # steps that a checkpoint holds as they were under way

    def fork(self, plan: Plan, seed: int) -> Steps:
        """Another plan on the same engines, with keys and state cells of its own."""
        return Steps(plan, self.runner, seed, self._weights)

    def step(
        self,
        batch: Batches,
        step: int,
        *,
        now: int | None = None,
        return_nodes: Sequence[str] = (),
        on_node: OnNode = lambda name: None,
    ) -> StepResult:
        """Run every node once.

        Args:
            batch: columns of the graph's inputs; where they stand on other rows, the batch of each, by its name.
            step: the step's number, from which keys are derived.
            now: the step of which parameters over time are taken, where it is another one, as in a validation.
            return_nodes: nodes whose outputs the result holds, besides the sinks.
            on_node: called with the name of each node as it starts; again, where a step is repeated.

        Raises:
            NodeError: a node raised, or a process died; names node and step, with the error as its cause.
            GraphError: `batch` lacks a column of an input, or `return_nodes` names a node that is not there.
        """
        [result] = self.run(
            lambda step: batch, range(step, step + 1), now=now, return_nodes=return_nodes, on_node=on_node
        )
        return result

    def run(
        self,
        draw: Draw,
        steps: range,
        *,
        lag: int = 0,
        now: int | None = None,
        return_nodes: Sequence[str] = (),
        on_node: OnNode = lambda name: None,
        more: Draw | None = None,
        tell: Callable[[int], Collection[Edge]] = lambda step: (),
    ) -> Iterator[StepResult]:
        """Run these steps, and give the result of each, in order.

        Nothing starts while the caller holds a result, so with ``lag=0`` the engines stand still between two steps.

        Args:
            draw: gives the batch of a step, or that of each input by its name; called once for each step, in order.
            steps: their numbers.
            lag: see `ExecutionGraph`.
            now, return_nodes, on_node: see `step`.
            more: gives the batch of so many further prompts, which a `Collect` asks for, or that of each input in front
                of it.
            tell: the columns that the result of a step holds besides what is kept in all; those of all rounds.

        Raises:
            NodeError, GraphError: see `step`; or the graph does not allow this lag.
        """
        kept = {*map(self._known, return_nodes), *self.plan.graph.sinks}

        def wanted(step: int) -> Mapping[str, Collection[str] | None]:
            edges = [edge for edge in tell(step) if edge.node not in kept]
            some = {edge.node: [other.output for other in edges if other.node == edge.node] for edge in edges}
            return {**dict.fromkeys(kept), **some}

        infos, region = self._known_nodes(lag), Region.of(self.plan)
        inputs = self.plan.graph.inputs
        again = [name for name in inputs if name in region.nodes]

        def further(prompts: int) -> Mapping[str, DataProto]:
            return self._complete((more or self._refuse_more)(prompts), infos, again)

        asked = wanted, on_node, self.during, now, region, further
        flight = self._flight = InFlightSteps(infos, lag, self.runner, self.seed, steps, self.state, *asked)
        for step in steps:
            self.runner.timeline = self.timeline
            for ahead in steps[steps.index(step) :][: lag + 1]:
                if ahead not in flight:
                    resumed = self._resumed.pop(ahead, None)
                    if resumed is None and self._swaps:
                        self._protected(functools.partial(flight.draw_before, ahead), flight)
                    flight.open(ahead, resumed or StepSnapshot([self._complete(draw(ahead), infos, inputs)]))
            result = self._protected(functools.partial(self._finish, flight, step), flight)
            flight.close(step)
            self.state = flight.kept_state
            yield result.under({name: self._fused[name] for name in return_nodes if name in self._fused})

    def _known_nodes(self, lag: int) -> dict[str, NodeInfo]:
        """What is known of the nodes where generation runs so far ahead; raises `GraphError` where it cannot."""
        if lag not in self._infos:
            instances = ExecutionGraph(self.plan, lag, self.runner.swaps)
            if lag:
                instances.refuse_deadlock()
            self._infos[lag] = NodeInfo.all(instances, self.runner)
        return self._infos[lag]

    def _protected(self, act: Callable[[], T], flight: InFlightSteps) -> T:
        """Do something; again, from after the last step, where a process is lost in it that can be mended."""
        return self._weights.protect(act, flight.restart) if self._weights.spare else act()

    def _complete(
        self, given: Batches, infos: Mapping[str, NodeInfo], inputs: Iterable[str]
    ) -> Mapping[str, DataProto]:
        """The batch of each of these inputs, which has its columns."""
        batches = dict.fromkeys(inputs, given) if isinstance(given, DataProto) else given
        for name in inputs:
            wanted = infos[name].columns
            found = batches[name].columns if name in batches else {}
            if missing := [column for column in wanted if column not in found]:
                raise GraphError(
                    f"the input {name!r} of {self.plan.graph.name} wants the columns {', '.join(wanted)}, and the "
                    f"batch lacks {', '.join(missing)}; pass a batch that has them, such as "
                    f"PromptData(...).load(...).next(n), or one for each input: {{{name!r}: ...}}."
                )
        return batches

    def _refuse_more(self, prompts: int) -> Batches:
        raise GraphError(
            f"{self.plan.collector} of {self.plan.graph.name} wants {prompts} further prompts, and nobody draws them; "
            f"say how: steps.run(draw, range(3), more=stream.next), or let Training draw."
        )

    def _known(self, name: str) -> str:
        return self.plan.graph[self._fused.get(name, name)].name

    def _finish(self, flight: InFlightSteps, step: int) -> StepResult:
        if self.runner.needs_sync:
            flight.rest()
            self._weights.sync()
        result = flight.finish(step)
        if self._weights.spare and self.plan.graph.trained:
            self._weights.snapshot()
        return result

    # ---- between steps

    def still(self) -> None:
        """Wait until nothing runs: with a lag, later steps are under way when one is done.

        Raises:
            NodeError: what ran has failed.
        """
        if self._flight is not None:
            self.runner.timeline = self.timeline
            self._protected(self._flight.rest, self._flight)

    def sync(self, syncs: Sequence[Node] | None = None) -> None:
        """Carry weights to the engines that generate, before the first step and after a restore; or by `syncs` alone.

        Raises:
            NodeError: they did not arrive; with a `SyncError` as its cause.
        """
        self.runner.timeline = self.timeline
        self._weights.protect(lambda: self._weights.sync(syncs))
        if syncs is None:
            self._weights.snapshot()

    def save(self, folder: Path) -> None:
        """Write the state of every trained role into a folder of its own, and with a lag the steps that are under way.

        Raises:
            DataError: machines that would write there do not share the folder; or JSON would not give back exactly what
                older weights have sampled.
        """
        self.still()
        self._weights.protect(lambda: self._weights.save(folder))
        if self._flight is not None:
            save_snapshots(self._flight.opened, self._flight.lag, self._flight.infos, self.runner, folder / AHEAD)

    def load(self, folder: Path, lag: int = 0) -> None:
        """Take every trained role back to what `save` wrote, and sync.

        Args:
            folder: where.
            lag: by which it goes on; see `flowrl.run.engine.step_snapshot.load_snapshots`.

        Raises:
            DataError: a role's folder is of another model or optimiser, or damaged.
        """
        self._weights.load(folder)
        self._weights.snapshot()
        self._resumed = load_snapshots(folder / AHEAD, lag, self._known_nodes(lag), self.runner)

    def save_pretrained(self, role: str, folder: str | Path) -> None:
        """Write the weights of a role as a Hugging Face folder."""
        self._weights.protect(lambda: self.runner.save_pretrained(role, Path(folder)))

    def tokenizer(self) -> ChatTokenizer | None:
        """The tokenizer of the engine that generates tokens; where none does, that of a model that is trained; None
        where there is neither."""
        graph = self.plan.graph
        if writers := writers_of_tokens(graph):
            return self.runner.tokenizer(writers[0])
        folder = folder_of_trained(graph)
        return None if folder is None else ChatTokenizer(folder)


def writers_of_tokens(graph: Graph) -> list[str]:
    """The roles that generate tokens, which have a tokeniser."""
    return [role for role in graph.generators if any(use.goes_through(Rollout) for use in graph.roles()[role])]


def folder_of_trained(graph: Graph) -> str | None:
    """The folder of a model that is trained, whose tokeniser data becomes tokens by; None where none is known."""
    return next((folder for role in graph.trained if (folder := graph.bindings[role].starts_from)), None)

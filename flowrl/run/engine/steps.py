"""`Steps`: runs the steps of a plan: draws batches, runs their nodes, and restarts steps when a process is lost."""

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
"""The folder of a checkpoint with the steps in flight."""

T = TypeVar("T")


class Steps:
    """Runs the steps of a plan.

    Args:
        weights: of the job, shared with forks. If a process is lost, all trained roles are restored to the snapshot
            after the last step, and the steps in flight restart with the same batches and keys.
    """

    def __init__(self, plan: Plan, runner: Runner, seed: int, weights: TrainedWeights) -> None:
        self.plan, self.runner, self.seed = plan, runner, seed
        self._fused, self._swaps = scorers(plan.graph), bool(swaps(plan.graph))
        self.timeline = Timeline()
        self.state: dict[str, Any] = {}
        self.during: str | None = None  # replaces the step in messages
        self._weights = weights
        self._infos: dict[int, dict[str, NodeInfo]] = {}  # by lag
        self._in_flight: InFlightSteps | None = None
        self._resumed: dict[int, StepSnapshot] = {}  # snapshots of a checkpoint

    def fork(self, plan: Plan, seed: int) -> Steps:
        """Another plan on the same engines, with its own keys and state cells."""
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
            batch: columns of the graph's inputs; if these have different rows, the batch of each by its name.
            now: the step that scheduled parameters use, if it differs, as in a validation.
            return_nodes: nodes whose outputs the result includes, in addition to the sinks.
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
        columns: Callable[[int], Collection[Edge]] = lambda step: (),
    ) -> Iterator[StepResult]:
        """Run these steps, and yield the result of each, in order.

        Nothing starts between a yield and the next iteration, so with ``lag=0`` the engines are idle then.

        Args:
            draw: returns the batch of a step, or that of each input by its name; called once per step, in order.
            more: returns a batch of this many further prompts for a `Collect`, or that of each of its inputs by name.
            columns: further columns that the result of a step includes, those of all rounds, by their names before
                fusing.
        """
        returned = {*map(self._known, return_nodes), *self.plan.graph.sinks}

        @functools.lru_cache(maxsize=lag + 1)
        def requested(step: int) -> Mapping[str, Collection[str] | None]:
            some: dict[str, list[str]] = {}
            for node, output in columns(step):
                some.setdefault(self._fused.get(node, node), []).append(output)
            return {**some, **dict.fromkeys(returned)}

        infos, region = self._known_nodes(lag), Region.of(self.plan)
        inputs = self.plan.graph.inputs
        again = [name for name in inputs if name in region.nodes]

        def further(prompts: int) -> Mapping[str, DataProto]:
            return self._complete((more or self._refuse_more)(prompts), infos, again)

        settings = requested, on_node, self.during, now, region, further
        in_flight = InFlightSteps(infos, lag, self.runner, self.seed, steps, self.state, *settings)
        self._in_flight = in_flight
        for step in steps:
            self.runner.timeline = self.timeline
            for ahead in steps[steps.index(step) :][: lag + 1]:
                if ahead not in in_flight:
                    resumed = self._resumed.pop(ahead, None)
                    if resumed is None and self._swaps:
                        self._protected(functools.partial(in_flight.draw_before, ahead), in_flight)
                    in_flight.open(ahead, resumed or StepSnapshot([self._complete(draw(ahead), infos, inputs)]))
            result = self._protected(functools.partial(self._finish, in_flight, step), in_flight)
            in_flight.close(step)
            self.state = in_flight.snapshot_state
            named = {*return_nodes, *(edge.node for edge in columns(step))}
            yield result.under({name: self._fused[name] for name in self._fused if name in named})

    def _known_nodes(self, lag: int) -> dict[str, NodeInfo]:
        """The nodes for a lag; raises `GraphError` if it would deadlock."""
        if lag not in self._infos:
            instances = ExecutionGraph(self.plan, lag, self.runner.swaps)
            if lag:
                instances.refuse_deadlock()
            self._infos[lag] = NodeInfo.all(instances, self.runner)
        return self._infos[lag]

    def _protected(self, act: Callable[[], T], in_flight: InFlightSteps) -> T:
        """Call `act`; if a process is lost, recover and restart the steps in flight."""
        return self._weights.protect(act, in_flight.restart) if self._weights.snapshot_folder else act()

    def _complete(
        self, given: Batches, infos: Mapping[str, NodeInfo], inputs: Iterable[str]
    ) -> Mapping[str, DataProto]:
        """The batch of each of these inputs; refuses missing columns."""
        batches = dict.fromkeys(inputs, given) if isinstance(given, DataProto) else given
        for name in inputs:
            required = infos[name].columns
            found = batches[name].columns if name in batches else {}
            if missing := [column for column in required if column not in found]:
                raise GraphError(
                    f"The batch for the input {name!r} of {self.plan.graph.name} lacks {', '.join(missing)}. Pass one "
                    f"with the columns {', '.join(required)}, such as PromptData(...).load(...).next(n), or a batch "
                    f"for each input: {{{name!r}: ...}}.",
                    code="step.missing-columns",
                    graph=self.plan.graph.name,
                    node=name,
                    missing=missing,
                )
        return batches

    def _refuse_more(self, prompts: int) -> Batches:
        raise GraphError(
            f"{self.plan.collector} of {self.plan.graph.name} needs {prompts} further prompts, but there is no source "
            f"for them. Pass `more=`: steps.run(draw, range(3), more=stream.next), or use Training.",
            code="step.no-further-prompts",
            graph=self.plan.graph.name,
            node=self.plan.collector,
            prompts=prompts,
        )

    def _known(self, name: str) -> str:
        return self.plan.graph[self._fused.get(name, name)].name

    def _finish(self, in_flight: InFlightSteps, step: int) -> StepResult:
        if self.runner.needs_sync:
            in_flight.drain()
            self._weights.sync()
        result = in_flight.finish(step)
        if self._weights.snapshot_folder and self.plan.graph.trained:
            self._weights.snapshot()
        return result

    # ---- between steps

    def drain(self) -> None:
        """Wait for all running nodes: with a lag, later steps are in flight when one is done."""
        if self._in_flight is not None:
            self.runner.timeline = self.timeline
            self._protected(self._in_flight.drain, self._in_flight)

    def sync(self, syncs: Sequence[Node] | None = None) -> None:
        """Sync weights to the engines that generate, before the first step and after a restore; or only by `syncs`."""
        self.runner.timeline = self.timeline
        self._weights.protect(lambda: self._weights.sync(syncs))
        if syncs is None:
            self._weights.snapshot()

    def save(self, folder: Path) -> None:
        """Checkpoint each trained role into its own folder, and with a lag the steps in flight."""
        self.drain()
        self._weights.protect(lambda: self._weights.save(folder))
        if (steps := self._in_flight) is not None:
            save_snapshots(steps.snapshots, steps.lag, steps.infos, self.runner, folder / AHEAD)

    def load(self, folder: Path, lag: int = 0) -> None:
        """Restore each trained role from what `save` wrote, and sync.

        `lag` is that of the resumed run; see `flowrl.run.engine.step_snapshot.load_snapshots`.
        """
        self._weights.load(folder)
        self._weights.snapshot()
        self._resumed = load_snapshots(folder / AHEAD, lag, self._known_nodes(lag), self.runner)

    def save_pretrained(self, role: str, folder: str | Path) -> None:
        """Write the weights of a role as a Hugging Face folder."""
        self._weights.protect(lambda: self.runner.save_pretrained(role, Path(folder)))

    def tokenizer(self) -> ChatTokenizer | None:
        """The tokenizer of the engine that generates tokens, else that of a trained model, else None."""
        graph = self.plan.graph
        if writers := writers_of_tokens(graph):
            return self.runner.tokenizer(writers[0])
        folder = folder_of_trained(graph)
        return None if folder is None else ChatTokenizer(folder)


def writers_of_tokens(graph: Graph) -> list[str]:
    """The roles that generate tokens, which have a tokenizer."""
    return [role for role in graph.generators if any(use.goes_through(Rollout) for use in graph.roles()[role])]


def folder_of_trained(graph: Graph) -> str | None:
    """The folder of a trained model, whose tokenizer encodes the data; None if none is known."""
    return next((folder for role in graph.trained if (folder := graph.bindings[role].starts_from)), None)

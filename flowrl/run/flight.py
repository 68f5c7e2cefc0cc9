"""`Flight`: the steps that are under way: which instances are ready, and what those that are done left.

Where a gate collects, a region of a step runs in rounds (`Region`): each is on prompts of its own, and what the gate
took in all of them is what it leaves.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from flowrl.core.gate import ROWS, Gate
from flowrl.core.ports import PortField
from flowrl.data.dataproto import DataProto
from flowrl.data.metrics import Metric, Metrics
from flowrl.data.rounds import ONLY, Collected, Round
from flowrl.errors import FlowrlError, NodeError
from flowrl.run.nodes import NodeInfo, Region, joined_lengths, lengths_of
from flowrl.run.runner import Done, Held, Lengths, Runner, Task

Batches = DataProto | Mapping[str, DataProto]
"""The batch of each input, by its name; or one that has the columns of all."""
Draw = Callable[[int], Batches]
OnNode = Callable[[str], None]


@dataclass(frozen=True)
class StepResult:
    """What one step left.

    Args:
        columns: the columns of the nodes that were asked for, by node; of those that ran in this step.
        values: their batchless values, by node.
        metrics: every number that was reported; a key that two nodes report is prefixed by the node.
        scores: of each node that told how groups scored, the scores by `uid`, over all rounds.
        seconds: how long each node took.
    """

    columns: Mapping[str, DataProto]
    values: Mapping[str, Mapping[str, Any]]
    metrics: Metrics
    seconds: Mapping[str, float]
    scores: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)


@dataclass
class _Step:
    """A step under way.

    Args:
        batches: by input, what it was opened with; and the further prompts of each round.
        waits: by node that has not started, how many instances it still waits for.
        outputs: what nodes left that is still read, or wanted in the end.
        readers: by node, how many of its readers are not done.
        lengths: of the rows of each batch axis.
        metrics, seconds: of the nodes that have run, over all rounds.
        over: the nodes that are done, or do not run in this step.
        round: in which its region is.
        rounds: what the collector took in each that is over.
    """

    batches: list[Mapping[str, DataProto]]
    round: Round = ONLY
    waits: dict[str, int] = field(default_factory=dict)
    readers: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, Mapping[str, Held]] = field(default_factory=dict)
    lengths: dict[str, Lengths] = field(default_factory=dict)
    metrics: dict[str, Metrics] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)
    rounds: list[Done] = field(default_factory=list)

    def report(self, done: Done) -> None:
        """Enter what an instance reported, and how long it took."""
        name = done.task.node.name
        merged = Metrics(self.metrics.get(name))
        merged.merge(done.metrics)
        self.metrics[name] = merged
        self.seconds[name] = self.seconds.get(name, 0.0) + done.seconds


class Flight:
    """Steps under way: their instances run in the schedule's order, as far as what they wait for allows.

    Args:
        infos: the nodes, by name.
        lag: see `Schedule`.
        runner: where they run.
        seed: root of the keys.
        steps: all steps of the run.
        state: the state cells of all operators.
        wanted: nodes whose outputs the results hold.
        on_node: called with the name of each node as it starts.
        during: see `Task`.
        now: the step by which numbers over time are taken; None is the step itself.
        region: what runs in rounds.
        more: gives the batches of so many further prompts, for the inputs of the region.
    """

    def __init__(
        self,
        infos: Mapping[str, NodeInfo],
        lag: int,
        runner: Runner,
        seed: int,
        steps: range,
        state: Mapping[str, Any],
        wanted: set[str],
        on_node: OnNode,
        during: str | None,
        now: int | None,
        region: Region,
        more: Callable[[int], Mapping[str, DataProto]],
    ) -> None:
        self._infos, self._lag, self._runner, self._seed, self._all = infos, lag, runner, seed, steps
        self._wanted, self._on_node, self._during, self._now = wanted, on_node, during, now
        self._region, self._more = region, more
        self._order = list(infos.values())
        self._count = sum(not info.is_input for info in self._order)
        self.state = dict(state)
        self._committed = dict(state)  # as it was when the last step was closed
        self._steps: dict[int, _Step] = {}
        self._ready: list[tuple[int, int]] = []  # a heap of (step, position)
        self._done: set[tuple[int, str]] = set()
        self._busy: set[int] = set()

    def __contains__(self, step: object) -> bool:
        return step in self._steps

    def open(self, step: int, batches: Mapping[str, DataProto]) -> None:
        """Take up a step with the batch of each input."""
        self._steps[step] = _Step([batches])
        self._begin(step)

    def restart(self) -> None:
        """Begin all open steps anew, from the state cells after the last one that was closed."""
        self.state = dict(self._committed)
        self._ready, self._busy = [], set()
        self._done = {instance for instance in self._done if instance[0] not in self._steps}
        for step, opened in self._steps.items():
            self._steps[step] = _Step(opened.batches)
        for step in self._steps:
            self._begin(step)

    def finish(self, step: int) -> StepResult:
        """Run until a step is done; what it left.

        Raises:
            NodeError: an instance failed, of this step or of one after it.
        """
        one = self._steps[step]
        while len(one.over) < self._count:
            self._launch()
            if len(one.over) < self._count:
                self._collect()
        return self._result(one)

    def close(self, step: int) -> None:
        """A step that is done will not be run again: from now on, others begin anew from after it."""
        del self._steps[step]
        self._done = {instance for instance in self._done if instance[0] >= step - self._lag}
        self._committed = dict(self.state)

    def _begin(self, step: int) -> None:
        """Put in the batch of a step, and see what its instances wait for."""
        one = self._steps[step]
        if self._region.collector is not None:
            one.round = Round(0, self._gate(step).missing(()))
        for name, info in self._infos.items():
            one.readers[name] = info.readers
            if not info.is_input:
                before = [(step - k, other) for other, k in info.waits if step - k in self._all]
                one.waits[name] = sum(instance not in self._done for instance in before)
                if not one.waits[name]:
                    heapq.heappush(self._ready, (step, info.position))
        for info in self._infos.values():
            if info.is_input:
                self._put(one, info)
                self._free(step, info)

    def _put(self, one: _Step, info: NodeInfo) -> None:
        """Put in what an input is in the newest batch."""
        batch = one.batches[one.round.number][info.node.name]
        given = {column: batch.columns[column] for column in info.columns}
        one.outputs[info.node.name] = self._runner.put(info.node, given)
        if (lengths := lengths_of(given)) is not None and info.written is not None:
            one.lengths[info.written] = lengths

    def _launch(self) -> None:
        """Start what is ready, as far as its slots are free; what comes first in the schedule's order goes first."""
        blocked = []
        while self._ready:
            step, position = entry = heapq.heappop(self._ready)
            info, one = self._order[position], self._steps[step]
            if not info.runs(self._moment(step)):
                self._read(one, info)
                self._leave(step, info)
                continue
            if info.slots & self._busy:
                blocked.append(entry)
                continue
            self._on_node(info.node.name)
            inputs = {place: one.outputs[node][output] for place, node, output in info.inputs}
            lengths = None if info.read is None else one.lengths.get(info.read)
            number = one.round if info.node.name in self._region.nodes else ONLY
            self._start(info, step, inputs, lengths, number)
        for entry in blocked:
            heapq.heappush(self._ready, entry)

    def _start(
        self, info: NodeInfo, step: int, inputs: Mapping[PortField, Held], lengths: Lengths | None, round: Round
    ) -> None:
        """Start an instance, with the numbers that its operator has in its step."""
        now = self._moment(step)
        node, state = info.node.in_step(now), self.state
        self._runner.launch(Task(node, step, self._seed, inputs, state, lengths, self._during, round, now))
        self._busy |= info.slots

    def _moment(self, step: int) -> int:
        """The step by which numbers over time are taken."""
        return step if self._now is None else self._now

    def _collect(self) -> None:
        """Wait, and enter what is done; in a frame of its own, so that nothing here holds on to it."""
        for done in self._runner.wait():
            self._accept(done)

    def _accept(self, done: Done) -> None:
        """Enter what an instance left, and let go of what nobody reads any more."""
        step, name = done.task.step, done.task.node.name
        assert step is not None
        info, one = self._infos[name], self._steps[step]
        one.report(done)
        self.state |= done.state
        self._busy -= info.slots
        if not done.task.round.sizes:
            self._read(one, info)
        if name == self._region.collector:
            whole = self._collected(step, one, done)
            if whole is None:  # there is more to do
                return
            done = whole
        if done.lengths is not None and info.written is not None:
            one.lengths[info.written] = done.lengths
        if info.readers or name in self._wanted:
            one.outputs[name] = done.outputs
        self._leave(step, info)

    def _read(self, one: _Step, info: NodeInfo) -> None:
        """An instance has read its inputs, or will not in this step: let go of what it was the last to read."""
        for source in info.node.sources:
            one.readers[source] -= 1
            if not one.readers[source] and source not in self._wanted:
                one.outputs.pop(source, None)  # what did not run left nothing

    def _leave(self, step: int, info: NodeInfo) -> None:
        """A node is done, or is none of this step's."""
        self._steps[step].over.add(info.node.name)
        self._free(step, info)

    def _free(self, step: int, info: NodeInfo) -> None:
        """An instance is done: those that waited for nothing else are ready. Outside of a region they wait until its
        collector is done with all rounds."""
        inside = self._region.nodes
        if info.node.name not in inside:
            self._release(step, info, lambda other, k: True)
        elif info.node.name != self._region.collector:
            self._release(step, info, lambda other, k: not k and other in inside)
            return
        for name in inside if info.node.name in inside else ():
            self._done.add((step, name))
            self._release(step, self._infos[name], lambda other, k: bool(k) or other not in inside)
        self._done.add((step, info.node.name))

    def _release(self, step: int, info: NodeInfo, whom: Callable[[str, int], bool]) -> None:
        for other, k in info.frees:
            if whom(other, k) and (one := self._steps.get(step + k)) is not None and other in one.waits:
                one.waits[other] -= 1
                if not one.waits[other]:
                    heapq.heappush(self._ready, (step + k, self._infos[other].position))

    # ---- rounds

    def _gate(self, step: int) -> Gate:
        """The collector, with the numbers that it has in a step."""
        assert self._region.collector is not None
        return cast(Gate, self._infos[self._region.collector].node.in_step(self._moment(step)).operator)

    def _collected(self, step: int, one: _Step, done: Done) -> Done | None:
        """All that the collector took in the step; None where it is not over, since something was started for it.

        Raises:
            NodeError: groups are missing, the rounds are over, and that is an error.
        """
        if done.task.round.sizes or not isinstance(done.outputs.get("collected"), Collected):
            return done  # it has repeated what was too few; or nothing was computed, as on a virtual clock
        gate = self._gate(step)
        one.rounds.append(done)
        sizes = tuple(size for part in one.rounds for size in part.outputs["collected"].sizes)
        missing = gate.missing(sizes)
        if missing and len(one.rounds) < gate.rounds_at_most:
            self._again(step, one, missing)
            return None
        try:
            short = gate.when_short(sizes)
        except FlowrlError as error:
            raise NodeError(f"{gate.name} failed {done.task.when}: {type(error).__name__}: {error}") from error
        whole = self._joined(one, sizes)
        if short != "repeat":
            return whole
        inputs = {PortField(ROWS, output): whole.outputs[output] for output in self._region.makers}
        self._start(self._infos[gate.name], step, inputs, whole.lengths, Round(len(one.rounds), 0, sizes))
        return None

    def _joined(self, one: _Step, sizes: tuple[int, ...]) -> Done:
        """What the collector took in all rounds, as if it had been in the last one."""
        parts = [part for part in one.rounds if part.outputs["collected"].sizes]
        if len(parts) == 1:
            return parts[0]
        last = one.rounds[-1]
        columns = self._runner.join(last.task.node, self._region.makers, [part.outputs for part in parts])
        lengths = [part.lengths for part in parts if part.lengths is not None]
        return dataclasses.replace(
            last,
            outputs={**columns, "collected": Collected(sizes)},
            lengths=joined_lengths(lengths) if len(lengths) == len(parts) else None,
        )

    def _again(self, step: int, one: _Step, missing: int) -> None:
        """Begin another round, on so many further prompts; a step that is begun anew has drawn them already."""
        one.round = Round(len(one.rounds), missing)
        if len(one.batches) == one.round.number:
            one.batches.append(self._more(missing))
        for name in self._region.nodes:
            info = self._infos[name]
            if info.is_input:
                self._put(one, info)
                one.readers[name] = info.readers
                continue
            inside = [other for other, k in info.waits if not k and other in self._region.nodes]
            one.waits[name] = sum(not self._infos[other].is_input for other in inside)
            if name != self._region.collector:
                one.readers[name] = info.readers
            if not one.waits[name]:
                heapq.heappush(self._ready, (step, info.position))

    def _result(self, one: _Step) -> StepResult:
        columns: dict[str, DataProto] = {}
        values: dict[str, dict[str, Any]] = {}
        for name in (name for name in self._infos if name in self._wanted and name in one.outputs):
            info, left = self._infos[name], one.outputs[name]
            fetched = {output: self._runner.fetch(info.node, output, left[output]) for output in info.columns}
            columns[name] = DataProto(fetched) if fetched else _EMPTY
            values[name] = {output: value for output, value in left.items() if output not in fetched}
        ordered = {name: one.metrics[name] for name in self._infos if name in one.metrics}
        told = {name: scores for name, metrics in ordered.items() if (scores := metrics.scores())}
        return StepResult(columns, values, merge_metrics(ordered), one.seconds, told)


_EMPTY = DataProto({})


def merge_metrics(reported: Mapping[str, Metrics]) -> Metrics:
    """All nodes' metrics; a key that two nodes report is prefixed by the node."""
    merged: dict[str, Metric] = {}
    times = Counter(key for metrics in reported.values() for key in metrics)
    for node, metrics in reported.items():
        for key, metric in metrics.items():
            merged[f"{node}/{key}" if times[key] > 1 else key] = metric
    return Metrics(merged)

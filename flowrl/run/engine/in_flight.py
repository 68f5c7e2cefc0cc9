"""`InFlightSteps`: the steps that are under way: which instances are ready, and what those that are done left.

Where a gate collects, a region of a step runs in rounds (`Region`): each is on prompts of its own, and what the gate
took in all of them is what it leaves.

With a lag, a step that is under way holds what older weights have sampled, which no later ones could sample again. So
that is kept (`StepSnapshot`) where the step is begun anew, or goes into a checkpoint; all else is computed again from
it.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from flowrl.core.graphs.gate import ROWS, Gate
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.ports import PortField
from flowrl.data.metrics import Metrics
from flowrl.data.now import ONLY, Collected, Now, Round
from flowrl.data.proto.dataproto import DataProto
from flowrl.errors import FlowrlError, NodeError
from flowrl.run.engine.nodes import NodeInfo, Region, ahead_of, joined_lengths, lengths_of
from flowrl.run.engine.result import StepResult, merge_metrics
from flowrl.run.engine.runner import Held, Lengths, Runner, Task, TaskResult
from flowrl.run.engine.step_snapshot import NodeOutputs, StepSnapshot

Batches = DataProto | Mapping[str, DataProto]
"""The batch of each input, by its name; or one that has the columns of all."""
Draw = Callable[[int], Batches]
OnNode = Callable[[str], None]
Wanted = Callable[[int], Mapping[str, Collection[str] | None]]


@dataclass
class _Step:
    """A step under way.

    Args:
        batches: by input, what it was opened with; and the further prompts of each round.
        waits: by node that has not started, how many instances it still waits for.
        outputs: what nodes left that is still read, or wanted in the end.
        past: what some nodes left in the rounds before, of which columns are wanted.
        readers: by node, how many of its readers are not done.
        lengths: of the rows of each batch axis.
        metrics, seconds: of the nodes that have run, over all rounds.
        over: the nodes that are done, or do not run in this step.
        round: in which its region is.
        rounds: what the collector took in each that is over.
        left: by node, what is kept where the step is begun anew.
        state: the state cells that it has changed.
        filled: see `StepResult`.
    """

    batches: list[Mapping[str, DataProto]]
    round: Round = ONLY
    waits: dict[str, int] = field(default_factory=dict)
    readers: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, Mapping[str, Held]] = field(default_factory=dict)
    past: list[Mapping[str, Mapping[str, Held]]] = field(default_factory=list)
    lengths: dict[str, Lengths] = field(default_factory=dict)
    metrics: dict[str, Metrics] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)
    rounds: list[TaskResult] = field(default_factory=list)
    left: dict[str, NodeOutputs] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    filled: int | None = None

    def report(self, done: TaskResult) -> None:
        """Enter what an instance reported, and how long it took."""
        name = done.task.node.name
        merged = Metrics(self.metrics.get(name))
        merged.merge(done.metrics)
        self.metrics[name] = merged
        self.seconds[name] = self.seconds.get(name, 0.0) + done.seconds


class InFlightSteps:
    """Steps under way: their instances run in the graph's order, as far as what they wait for allows.

    Args:
        infos: the nodes, by name.
        lag: see `ExecutionGraph`.
        runner: where they run.
        seed: root of the keys.
        steps: all steps of the run.
        state: the state cells of all operators.
        wanted: by step, the nodes whose outputs the result holds, and which columns of these, of all rounds; None is
            all that they left in the end.
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
        wanted: Wanted,
        on_node: OnNode,
        during: str | None,
        now: int | None,
        region: Region,
        more: Callable[[int], Mapping[str, DataProto]],
    ) -> None:
        self.infos, self.lag, self._runner, self._seed, self._all = infos, lag, runner, seed, steps
        self._wanted, self._on_node, self._during, self._now = wanted, on_node, during, now
        self._region, self._more = region, more
        self._order = list(infos.values())
        self._count = sum(not info.is_input for info in self._order)
        self._ahead = ahead_of(infos, region) if lag else frozenset()
        self.state = dict(state)
        self._committed = dict(state)  # of the steps that are closed
        self._steps: dict[int, _Step] = {}
        self._ready: list[tuple[int, int]] = []  # a heap of (step, position)
        self._done: set[tuple[int, str]] = set()
        self._busy: set[int] = set()
        self._swapped: set[int] = set()  # steps that are open whose weights may have sampled for later ones
        self._running = 0

    def __contains__(self, step: object) -> bool:
        return step in self._steps

    def open(self, step: int, opened: StepSnapshot) -> None:
        """Take up a step."""
        left, metrics, seconds, state = map(dict, (opened.left, opened.metrics, opened.seconds, opened.state))
        self._steps[step] = _Step(opened.batches, left=left, metrics=metrics, seconds=seconds, state=state)
        self._begin(step)

    @property
    def opened(self) -> Mapping[int, StepSnapshot]:
        """What the steps that are open could begin anew with. Not with what weights may have sampled that would be
        gone then."""
        first = min(self._swapped, default=None)
        gone = {step for step in self._steps if first is not None and step > first}
        return {step: self._kept(one, {} if step in gone else one.left) for step, one in self._steps.items()}

    @property
    def kept_state(self) -> dict[str, Any]:
        """The state cells after the last step that was closed, and of what is kept of those that are open."""
        state = dict(self._committed)
        for opened in self.opened.values():
            state |= opened.state
        return state

    def restart(self) -> None:
        """Begin all open steps anew, each with what is kept of it."""
        self.state, begun = self.kept_state, self.opened
        self._steps, self._ready, self._busy, self._swapped, self._running = {}, [], set(), set(), 0
        self._done = {instance for instance in self._done if instance[0] not in begun}
        for step, opened in begun.items():
            self.open(step, opened)

    def rest(self) -> None:
        """Wait for all that runs, and start nothing.

        Raises:
            NodeError: an instance failed.
        """
        while self._running:
            self._collect()

    def draw_before(self, step: int) -> None:
        """Run until all further prompts of the steps before this one are drawn. Without spans they are: a sync waits
        for what generates for them. So data are drawn in one order, whatever the clock says.

        Raises:
            NodeError: an instance failed.
        """
        if step > self.lag and self._runner.swaps and self._region.collector is not None:
            while self._collecting(step):
                self._launch()
                if self._collecting(step):
                    self._collect()

    def _collecting(self, step: int) -> bool:
        """Whether an open step before this one may still draw prompts."""
        return any(self._region.collector not in one.over for other, one in self._steps.items() if other < step)

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
        return self._result(step, one)

    def close(self, step: int) -> None:
        """A step that is done will not be run again: from now on, others begin anew from after it."""
        self._committed |= self._steps.pop(step).state
        self._swapped.discard(step)
        self._done = {instance for instance in self._done if instance[0] >= step - self.lag}

    def _begin(self, step: int) -> None:
        """Put in the batch of a step, and see what its instances wait for."""
        one = self._steps[step]
        settled = self._settled(one.left)
        if self._region.collector is not None:
            one.round = Round(0, self._gate(step).missing(()))
        for name, info in self.infos.items():
            one.readers[name] = info.readers
            if not info.is_input and name not in settled:
                before = [(step - k, other) for other, k in info.waits if step - k in self._all]
                one.waits[name] = sum(instance not in self._done for instance in before)
                if not one.waits[name]:
                    heapq.heappush(self._ready, (step, info.position))
        for info in self.infos.values():
            if info.is_input:
                self._put(one, info)
                self._free(step, info)
        for name in (name for name in self.infos if name in settled):
            self._read(step, one, self.infos[name])
            if name in one.left:
                self._enter(step, one, self.infos[name], one.left[name])
                self._free(step, self.infos[name])
        one.over |= settled

    def _kept(self, one: _Step, left: Mapping[str, NodeOutputs]) -> StepSnapshot:
        settled = self._settled(left)
        metrics = {name: metrics for name, metrics in one.metrics.items() if name in settled}
        seconds = {name: s for name, s in one.seconds.items() if name in settled}
        state = {cell: value for cell, value in one.state.items() if cell.rpartition(".")[0] in settled}
        return StepSnapshot(one.batches, dict(left), metrics, seconds, state)

    def _settled(self, left: Mapping[str, NodeOutputs]) -> set[str]:
        """The nodes of a step that need not run again, for what is kept of it; without inputs."""
        inside = self._region.nodes if self._region.collector in left else ()
        return {*left, *(name for name in inside if not self.infos[name].is_input)}

    def _put(self, one: _Step, info: NodeInfo) -> None:
        """Put in what an input is in the newest batch."""
        batch = one.batches[one.round.number][info.node.name]
        given = {column: batch.columns[column] for column in info.columns}
        one.outputs[info.node.name] = self._runner.put(info.node, given)
        if (lengths := lengths_of(given)) is not None and info.written is not None:
            one.lengths[info.written] = lengths

    def _launch(self) -> None:
        """Start what is ready, as far as its slots are free; what comes first in the graph's order goes first."""
        blocked = []
        while self._ready:
            step, position = entry = heapq.heappop(self._ready)
            info, one = self._order[position], self._steps[step]
            if not info.runs(self._moment(step)):
                self._read(step, one, info)
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
        now = Now(self._moment(step), round, ahead=info.ahead)
        node, state = info.node.in_step(now.step) if info.changes else info.node, self.state
        task = Task(node, step, self._seed, inputs, state, lengths, self._during, now)
        if info.ahead and (one := self._steps[step]).filled is None:
            one.filled = sum(self._ahead <= other.left.keys() for other in self._steps.values())
        if self._runner.swaps and Effect.SPANS in node.effects:
            self._swapped.add(step)
        self._runner.launch(task)
        self._running += 1
        self._busy |= info.slots

    def _moment(self, step: int) -> int:
        """The step by which numbers over time are taken."""
        return step if self._now is None else self._now

    def _collect(self) -> None:
        """Wait, and enter what is done; in a frame of its own, so that nothing here holds on to it."""
        for done in self._runner.wait():
            self._accept(done)

    def _accept(self, done: TaskResult) -> None:
        """Enter what an instance left, and let go of what nobody reads any more."""
        step, name = done.task.step, done.task.node.name
        assert step is not None
        info, one = self.infos[name], self._steps[step]
        one.report(done)
        one.state |= done.state
        self.state |= done.state
        self._running -= 1
        self._busy -= info.slots
        if not done.task.now.round.sizes:
            self._read(step, one, info)
        if name == self._region.collector:
            whole = self._collected(step, one, done)
            if whole is None:  # there is more to do
                return
            done = whole
        left = NodeOutputs(done.outputs, done.lengths)
        self._enter(step, one, info, left)
        if name in self._ahead:
            one.left[name] = NodeOutputs(self._runner.secure(info.node, left.outputs), left.lengths)
        self._leave(step, info)

    def _enter(self, step: int, one: _Step, info: NodeInfo, left: NodeOutputs) -> None:
        """Take up what a node left, for its readers."""
        if left.lengths is not None and info.written is not None:
            one.lengths[info.written] = left.lengths
        if info.readers or info.node.name in self._wanted(step):
            one.outputs[info.node.name] = left.outputs

    def _read(self, step: int, one: _Step, info: NodeInfo) -> None:
        """An instance has read its inputs, or will not in this step: let go of what it was the last to read."""
        for source in info.node.sources:
            one.readers[source] -= 1
            if not one.readers[source] and source not in self._wanted(step):
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
            self._release(step, self.infos[name], lambda other, k: bool(k) or other not in inside)
        self._done.add((step, info.node.name))

    def _release(self, step: int, info: NodeInfo, whom: Callable[[str, int], bool]) -> None:
        for other, k in info.frees:
            if whom(other, k) and (one := self._steps.get(step + k)) is not None and other in one.waits:
                one.waits[other] -= 1
                if not one.waits[other]:
                    heapq.heappush(self._ready, (step + k, self.infos[other].position))

    # ---- rounds

    def _gate(self, step: int) -> Gate:
        """The collector, with the numbers that it has in a step."""
        assert self._region.collector is not None
        return cast(Gate, self.infos[self._region.collector].node.in_step(self._moment(step)).operator)

    def _collected(self, step: int, one: _Step, done: TaskResult) -> TaskResult | None:
        """All that the collector took in the step; None where it is not over, since something was started for it.

        Raises:
            NodeError: groups are missing, the rounds are over, and that is an error.
        """
        if done.task.now.round.sizes or not isinstance(done.outputs.get("collected"), Collected):
            return done  # it has repeated what was too few; or nothing was computed, as on a virtual clock
        gate = self._gate(step)
        one.rounds.append(done)
        sizes = tuple(size for part in one.rounds for size in part.outputs["collected"].sizes)
        missing = gate.missing(sizes)
        if missing and len(one.rounds) < gate.rounds_at_most:
            self._again(step, one, missing)
            return None
        try:
            short = gate.underfill_action(sizes)
        except FlowrlError as error:
            raise NodeError(f"{gate.name} failed {done.task.when}: {type(error).__name__}: {error}") from error
        whole = self._joined(one, sizes)
        if short != "repeat":
            return whole
        inputs = {PortField(ROWS, output): whole.outputs[output] for output in self._region.makers}
        self._start(self.infos[gate.name], step, inputs, whole.lengths, Round(len(one.rounds), 0, sizes))
        return None

    def _joined(self, one: _Step, sizes: tuple[int, ...]) -> TaskResult:
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
        some = {name for name, columns in self._wanted(step).items() if columns is not None}
        one.past.append({name: one.outputs[name] for name in some & self._region.nodes})
        one.round = Round(len(one.rounds), missing)
        if len(one.batches) == one.round.number:
            one.batches.append(self._more(missing))
        for name in self._region.nodes:
            info = self.infos[name]
            if info.is_input:
                self._put(one, info)
                one.readers[name] = info.readers
                continue
            inside = [other for other, k in info.waits if not k and other in self._region.nodes]
            one.waits[name] = sum(not self.infos[other].is_input for other in inside)
            if name != self._region.collector:
                one.readers[name] = info.readers
            if not one.waits[name]:
                heapq.heappush(self._ready, (step, info.position))

    def _result(self, step: int, one: _Step) -> StepResult:
        columns: dict[str, DataProto] = {}
        values: dict[str, dict[str, Any]] = {}
        wanted = self._wanted(step)
        for name in (name for name in self.infos if name in wanted and name in one.outputs):
            info, left, some = self.infos[name], one.outputs[name], wanted[name]
            parts = [*(past[name] for past in one.past if name in past), left]
            fetched = [self._fetched(info, part, info.columns if some is None else some) for part in parts]
            columns[name] = fetched[0] if len(fetched) == 1 else DataProto.concat(fetched)
            values[name] = {output: value for output, value in left.items() if output not in info.columns}
        ordered = {name: one.metrics[name] for name in self.infos if name in one.metrics}
        told = {name: scores for name, metrics in ordered.items() if (scores := metrics.scores())}
        return StepResult(columns, values, merge_metrics(ordered), one.seconds, told, one.filled)

    def _fetched(self, info: NodeInfo, left: Mapping[str, Held], outputs: Iterable[str]) -> DataProto:
        """Some columns of what a node left."""
        fetched = {output: self._runner.fetch(info.node, output, left[output]) for output in outputs}
        return DataProto(fetched) if fetched else _EMPTY


_EMPTY = DataProto({})

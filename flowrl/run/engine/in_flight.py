"""`InFlightSteps`: the steps in flight: which instances are ready, and the outputs of those that are done.

If a gate collects, a region of a step runs in rounds (`Region`); the gate's output is what it passed in all rounds.

With a lag, a step in flight has samples of older weights, which newer weights could not reproduce. So a restart or a
checkpoint keeps them (`StepSnapshot`) and recomputes everything else.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

from flowrl.core.graphs.gate import ROWS, Gate, refuse_more_skips
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.ports import PortField
from flowrl.data.now import ONLY, Collected, Now, Round
from flowrl.data.proto.dataproto import DataProto
from flowrl.errors import FlowrlError, NodeError
from flowrl.run.engine.nodes import NodeInfo, Region, ahead_of, joined_lengths, lengths_of
from flowrl.run.engine.open_step import OpenStep
from flowrl.run.engine.result import StepResult, merge_metrics, reporting_nodes
from flowrl.run.engine.runner import Lengths, OutputHandle, Runner, Task, TaskResult, code_and_facts
from flowrl.run.engine.step_snapshot import NodeOutputs, StepSnapshot

Batches = DataProto | Mapping[str, DataProto]
"""The batch of each input by its name, or one batch with the columns of all."""
Draw = Callable[[int], Batches]
OnNode = Callable[[str], None]
RequestedOutputs = Callable[[int], Mapping[str, Collection[str] | None]]

SKIPS = "skipped_steps"
"""The state cell with the number of newest steps in a row whose update was skipped."""


class InFlightSteps:
    """Steps in flight, whose instances run in the graph's order once their dependencies are done.

    Args:
        requested: by step, the nodes whose outputs the result includes, and which of their columns, over all rounds;
            None for the final outputs.
        on_node: called with the name of each node as it starts.
        now: the step that scheduled parameters use; None for the step itself.
        more: returns batches of this many further prompts for the inputs of the region.
    """

    def __init__(
        self,
        infos: Mapping[str, NodeInfo],
        lag: int,
        runner: Runner,
        seed: int,
        steps: range,
        state: Mapping[str, Any],
        requested: RequestedOutputs,
        on_node: OnNode,
        during: str | None,
        now: int | None,
        region: Region,
        more: Callable[[int], Mapping[str, DataProto]],
    ) -> None:
        self.infos, self.lag, self._runner, self._seed, self._all_steps = infos, lag, runner, seed, steps
        self._requested, self._on_node, self._during, self._now = requested, on_node, during, now
        self._region, self._more = region, more
        self._order = list(infos.values())
        self._count = sum(not info.is_input for info in self._order)
        self._sampling_nodes = ahead_of(infos, region) if lag else frozenset()
        self._skipping = any(info.skipped_by for info in self._order)
        self.state = dict(state)
        self._committed = dict(state)  # of the steps that are closed
        self._steps: dict[int, OpenStep] = {}
        self._ready: list[tuple[int, int]] = []  # a heap of (step, position)
        self._done: set[tuple[int, str]] = set()
        self._busy: set[int] = set()
        self._swapped: set[int] = set()  # open steps whose weights may have sampled later ones
        self._running = 0

    def __contains__(self, step: object) -> bool:
        return step in self._steps

    def open(self, step: int, snapshot: StepSnapshot) -> None:
        """Start a step from a snapshot."""
        parts = snapshot.sampled, snapshot.metrics, snapshot.seconds, snapshot.state
        sampled, metrics, seconds, state = map(dict, parts)
        one = OpenStep(snapshot.batches, sampled=sampled, metrics=metrics, seconds=seconds, state=state)
        one.rounds, one.earlier_rounds = snapshot.rounds, [*snapshot.rounds[:-1]]
        one.skipped = set(snapshot.skipped)
        self._steps[step] = one
        self._begin(step)

    @property
    def snapshots(self) -> Mapping[int, StepSnapshot]:
        """The snapshots of the open steps, without samples of weights that a restart would lose."""
        first = min(self._swapped, default=None)
        lost = {step for step in self._steps if first is not None and step > first}
        return {step: self._snapshot(one, {} if step in lost else one.sampled) for step, one in self._steps.items()}

    @property
    def snapshot_state(self) -> dict[str, Any]:
        """The state cells after the last closed step, with those of the snapshots of open steps."""
        state = dict(self._committed)
        for snapshot in self.snapshots.values():
            state |= snapshot.state
        return state

    def restart(self) -> None:
        """Restart every open step from its snapshot."""
        self.state, snapshots = self.snapshot_state, self.snapshots
        self._steps, self._ready, self._busy, self._swapped, self._running = {}, [], set(), set(), 0
        self._done = {instance for instance in self._done if instance[0] not in snapshots}
        for step, snapshot in snapshots.items():
            self.open(step, snapshot)

    def drain(self) -> None:
        """Wait for all running instances without starting others."""
        while self._running:
            self._collect()

    def draw_before(self, step: int) -> None:
        """Run until all further prompts of earlier steps are sampled, so that the order of the data does not depend on
        timing. Without spans they are sampled already, because a sync waits for their generation."""
        if step > self.lag and self._runner.swaps and self._region.collector is not None:
            while self._collecting(step):
                self._launch()
                if self._collecting(step):
                    self._collect()

    def _collecting(self, step: int) -> bool:
        """Whether an earlier open step may still draw prompts."""
        return any(self._region.collector not in one.finished for other, one in self._steps.items() if other < step)

    def finish(self, step: int) -> StepResult:
        """Run until a step is done, and return its result; refuses more skipped steps in a row than its gate allows."""
        one = self._steps[step]
        while len(one.finished) < self._count:
            self._launch()
            if len(one.finished) < self._count:
                self._collect()
        for gate in sorted(one.skipped):
            refuse_more_skips(self._gate(gate, step), self._committed.get(SKIPS, 0) + 1, step)
        return self._result(step, one)

    def close(self, step: int) -> None:
        """Commit a step that is done: restarts begin after it."""
        one = self._steps.pop(step)
        self._committed |= one.state
        if self._skipping:
            self._committed[SKIPS] = self._committed.get(SKIPS, 0) + 1 if one.skipped else 0
        self._swapped.discard(step)
        self._done = {instance for instance in self._done if instance[0] >= step - self.lag}

    def _begin(self, step: int) -> None:
        """Put in the batch of a step, and count the dependencies of its instances."""
        one = self._steps[step]
        complete = self._complete_by(one.sampled)
        if self._region.collector is not None:
            one.round = Round(0, self._gate(self._region.collector, step).missing(()))
        for name, info in self.infos.items():
            one.readers[name] = info.readers
            if not info.is_input and name not in complete:
                before = [(step - k, other) for other, k in info.waits if step - k in self._all_steps]
                one.waits[name] = sum(instance not in self._done for instance in before)
                if not one.waits[name]:
                    heapq.heappush(self._ready, (step, info.position))
        for info in self.infos.values():
            if info.is_input:
                self._put(one, info)
                self._free(step, info)
        if one.rounds:
            one.outputs |= one.rounds[-1]
        for name in (name for name in self.infos if name in complete):
            self._mark_read(step, one, self.infos[name])
            if name in one.sampled:
                self._enter(step, one, self.infos[name], one.sampled[name])
                self._free(step, self.infos[name])
        one.finished |= complete

    def _snapshot(self, one: OpenStep, sampled: Mapping[str, NodeOutputs]) -> StepSnapshot:
        complete = self._complete_by(sampled)
        metrics = {name: metrics for name, metrics in one.metrics.items() if name in complete}
        seconds = {name: s for name, s in one.seconds.items() if name in complete}
        state = {cell: value for cell, value in one.state.items() if cell.rpartition(".")[0] in complete}
        rounds = one.rounds if self._region.collector in sampled else ()
        skipped = frozenset(one.skipped & complete)
        return StepSnapshot(one.batches, dict(sampled), metrics, seconds, state, rounds, skipped)

    def _complete_by(self, sampled: Mapping[str, NodeOutputs]) -> set[str]:
        """The nodes of a step, without inputs, that need not run again with these samples."""
        inside = self._region.nodes if self._region.collector in sampled else ()
        return {*sampled, *(name for name in inside if not self.infos[name].is_input)}

    def _put(self, one: OpenStep, info: NodeInfo) -> None:
        """Put in the columns of an input from the current round's batch."""
        batch = one.batches[one.round.number][info.node.name]
        given = {column: batch.columns[column] for column in info.columns}
        one.outputs[info.node.name] = self._runner.put(info.node, given)
        if (lengths := lengths_of(given)) is not None and info.written is not None:
            one.lengths[info.written] = lengths

    def _launch(self) -> None:
        """Start ready instances whose slots are free, in the graph's order."""
        blocked = []
        while self._ready:
            step, position = entry = heapq.heappop(self._ready)
            info, one = self._order[position], self._steps[step]
            if not info.runs(self._schedule_step(step)) or info.skipped_by & one.skipped:
                self._mark_read(step, one, info)
                self._end(step, info)
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
        self, info: NodeInfo, step: int, inputs: Mapping[PortField, OutputHandle], lengths: Lengths | None, round: Round
    ) -> None:
        """Start an instance, with the scheduled parameters of its step."""
        now = Now(self._schedule_step(step), round, lag=info.lag)
        node, state = info.node.in_step(now.step) if info.changes else info.node, self.state
        task = Task(node, step, self._seed, inputs, state, lengths, self._during, now)
        if info.lag and (one := self._steps[step]).filled is None:
            one.filled = sum(self._sampling_nodes <= other.sampled.keys() for other in self._steps.values())
        if self._runner.swaps and Effect.SPANS in node.effects:
            self._swapped.add(step)
        with self._explained():
            self._runner.launch(task)
        self._running += 1
        self._busy |= info.slots

    def _schedule_step(self, step: int) -> int:
        """The step that scheduled parameters use."""
        return step if self._now is None else self._now

    def _collect(self) -> None:
        """Wait, and accept what is done; a separate frame, so that no local variable keeps the results alive."""
        for done in self._wait():
            self._accept(done)

    def _wait(self) -> Sequence[TaskResult]:
        with self._explained():
            return self._runner.wait()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Add to the error of a node the first output that is not finite, unless a process is lost."""
        try:
            yield
        except NodeError as error:
            node, step = error.facts.get("node"), error.facts.get("step")
            one = self._steps.get(step - 1 if isinstance(step, int) else min(self._steps))
            if one is not None and isinstance(node, str) and node in self.infos and not self._runner.can_recover(error):
                failed, when = self.infos[node].node, self._during or f"in step {step}"
                number = one.round.number if node in self._region.nodes else None
                with suppress(NodeError):  # a column is lost; the error remains as it is
                    one.not_finite.explain(error, failed, when, number, self.infos, one.outputs, self._runner.fetch)
            raise

    def _accept(self, done: TaskResult) -> None:
        """Enter the result of an instance, and release outputs that are no longer needed."""
        step, name = done.task.step, done.task.node.name
        assert step is not None
        info, one = self.infos[name], self._steps[step]
        one.report(done)
        if not one.skipped:
            one.state |= done.state
            self.state |= done.state
        self._running -= 1
        self._busy -= info.slots
        if not done.task.now.round.sizes:
            self._mark_read(step, one, info)
        if name == self._region.collector:
            collected = self._finish_round(step, one, done)
            if collected is None:  # another round has started
                return
            done = collected
        if isinstance(gate := info.node.operator, Gate) and gate.skips:
            self._skip_if_underfilled(step, one, done)
        if done.not_finite:
            one.not_finite.add(done, info, one.outputs)
        outputs = NodeOutputs(done.outputs, done.lengths)
        self._enter(step, one, info, outputs)
        if name in self._sampling_nodes:
            one.sampled[name] = NodeOutputs(self._runner.secure(info.node, outputs.outputs), outputs.lengths)
            if name == self._region.collector:
                one.rounds = [self._secured(part) for part in (*one.earlier_rounds, self._of_round(step, one))]
        self._end(step, info)

    def _of_round(self, step: int, one: OpenStep) -> Mapping[str, Mapping[str, OutputHandle]]:
        """The outputs of the current round that the result includes."""
        some = {name for name, columns in self._requested(step).items() if columns is not None}
        return {name: one.outputs[name] for name in some & self._region.nodes if name in one.outputs}

    def _secured(self, part: Mapping[str, Mapping[str, OutputHandle]]) -> Mapping[str, Mapping[str, OutputHandle]]:
        """Outputs of a round that survive a restart of the processes that wrote them, without the collector's own."""
        others = {name: outputs for name, outputs in part.items() if name != self._region.collector}
        return {name: self._runner.secure(self.infos[name].node, outputs) for name, outputs in others.items()}

    def _enter(self, step: int, one: OpenStep, info: NodeInfo, outputs: NodeOutputs) -> None:
        """Enter the outputs of a node, for its readers."""
        if outputs.lengths is not None and info.written is not None:
            one.lengths[info.written] = outputs.lengths
        if info.readers or info.node.name in self._requested(step):
            one.outputs[info.node.name] = outputs.outputs

    def _mark_read(self, step: int, one: OpenStep, info: NodeInfo) -> None:
        """An instance has read its inputs, or does not run in this step: release those that it was the last to read."""
        for source in info.node.sources:
            one.readers[source] -= 1
            if not one.readers[source] and source not in self._requested(step):
                one.outputs.pop(source, None)  # none if it did not run

    def _end(self, step: int, info: NodeInfo) -> None:
        """A node is done, or does not run in this step."""
        self._steps[step].finished.add(info.node.name)
        self._free(step, info)

    def _free(self, step: int, info: NodeInfo) -> None:
        """An instance is done: unblock its dependents. Those outside its region wait until the collector has finished
        all rounds."""
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

    def _gate(self, name: str, step: int) -> Gate:
        """A gate, with the scheduled parameters of a step."""
        return cast(Gate, self.infos[name].node.in_step(self._schedule_step(step)).operator)

    def _skip_if_underfilled(self, step: int, one: OpenStep, done: TaskResult) -> None:
        """If too few rows passed a gate, skip the update of the step: state cells have their values from before it."""
        gate, collected = self._gate(done.task.node.name, step), done.outputs.get("collected")
        if isinstance(collected, Collected) and gate.underfill_action(collected.sizes) == "skip":
            one.skipped.add(gate.name)
            one.state = {}
            self.state = self._committed.copy()
            for other in self._steps.values():
                self.state |= other.state

    def _finish_round(self, step: int, one: OpenStep, done: TaskResult) -> TaskResult | None:
        """The collector's result over all rounds of the step; None if another round, or a repetition, has started."""
        if done.task.now.round.sizes or not isinstance(done.outputs.get("collected"), Collected):
            return done  # it has repeated groups; or nothing was computed, as on a virtual clock
        gate = self._gate(done.task.node.name, step)
        one.round_results.append(done)
        sizes = tuple(size for part in one.round_results for size in part.outputs["collected"].sizes)
        missing = gate.missing(sizes)
        if missing and len(one.round_results) < gate.rounds_at_most:
            self._start_round(step, one, missing)
            return None
        try:
            action = gate.underfill_action(sizes)
        except FlowrlError as error:
            code, facts = code_and_facts(error, **done.task.facts)
            message = f"{gate.name} failed {done.task.when}: {type(error).__name__}: {error.message}"
            raise NodeError(message, code=code, **facts) from error
        collected = self._join_rounds(one, sizes)
        if action != "repeat":
            return collected
        inputs = {PortField(ROWS, output): collected.outputs[output] for output in self._region.makers}
        self._start(self.infos[gate.name], step, inputs, collected.lengths, Round(len(one.round_results), 0, sizes))
        return None

    def _join_rounds(self, one: OpenStep, sizes: tuple[int, ...]) -> TaskResult:
        """The collector's results of all rounds, joined into one."""
        parts = [part for part in one.round_results if part.outputs["collected"].sizes] or one.round_results[-1:]
        if len(parts) == 1:
            return parts[0]
        last = one.round_results[-1]
        columns = self._runner.join(last.task.node, self._region.makers, [part.outputs for part in parts])
        lengths = [part.lengths for part in parts if part.lengths is not None]
        return dataclasses.replace(
            last,
            outputs={**columns, "collected": Collected(sizes)},
            lengths=joined_lengths(lengths) if len(lengths) == len(parts) else None,
            not_finite=tuple(dict.fromkeys(name for part in parts for name in part.not_finite)),
        )

    def _start_round(self, step: int, one: OpenStep, missing: int) -> None:
        """Start another round on this many further prompts; a restarted step has sampled them already."""
        one.earlier_rounds.append(self._of_round(step, one))
        one.round = Round(len(one.round_results), missing)
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

    def _result(self, step: int, one: OpenStep) -> StepResult:
        columns: dict[str, DataProto] = {}
        values: dict[str, dict[str, Any]] = {}
        sizes: dict[str, tuple[int, ...]] = {}
        requested = self._requested(step)
        for name in (name for name in self.infos if name in requested and name in one.outputs):
            info, outputs, some = self.infos[name], one.outputs[name], requested[name]
            parts = [*(earlier[name] for earlier in one.earlier_rounds if name in earlier), outputs]
            fetched = [self._fetched(info, part, info.columns if some is None else some) for part in parts]
            columns[name] = fetched[0] if len(fetched) == 1 else DataProto.concat(fetched)
            if len(fetched) > 1:
                sizes[name] = tuple(map(len, fetched))
            values[name] = {output: value for output, value in outputs.items() if output not in info.columns}
        ordered = {name: one.metrics[name] for name in self.infos if name in one.metrics}
        scores = {name: found for name, metrics in ordered.items() if (found := metrics.scores())}
        merged, reported_by = merge_metrics(ordered), reporting_nodes(ordered)
        of_step = one.filled, reported_by, sizes, sorted(one.skipped)
        return StepResult(columns, values, merged, one.seconds, scores, *of_step)

    def _fetched(self, info: NodeInfo, outputs: Mapping[str, OutputHandle], names: Iterable[str]) -> DataProto:
        """Some columns of a node's outputs."""
        fetched = {name: self._runner.fetch(info.node, name, outputs[name]) for name in names}
        return DataProto(fetched) if fetched else _EMPTY


_EMPTY = DataProto({})

"""`LocalRunner`: runs one instance at a time, in this process.

It uses neither threads nor Ray, so breakpoints work in every operator. Its numbers are the reference for other runners.
"""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from flowrl.core.graphs.graph import Node
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.session import Call, Session
from flowrl.data.proto.dataproto import DataProto
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import FlowrlError, NodeError, is_of_a_user
from flowrl.run.engine.nodes import lengths_of
from flowrl.run.engine.not_finite import not_finite
from flowrl.run.engine.runner import Lengths, Task, TaskResult, code_and_facts, load_of, pairs
from flowrl.run.engine.steps import Steps
from flowrl.run.engine.timeline import Span, Timeline
from flowrl.run.engine.weights import TrainedWeights

Column = Tensor | np.ndarray[Any, Any]

_HERE = frozenset({0})


class LocalRunner:
    """Runs instances on engines of this process; a `flowrl.run.engine.runner.Runner`."""

    def __init__(self, engines: Mapping[str, Any]) -> None:
        self.engines = engines
        self.swaps = False
        self.timeline = Timeline()
        self._calls: dict[str, tuple[Operator, Call]] = {}  # by node
        self._done: list[TaskResult] = []

    def slots(self, node: Node) -> frozenset[int]:
        """Slot 0, which all nodes share."""
        return _HERE

    def put(self, node: Node, columns: Mapping[str, Column]) -> Mapping[str, Column]:
        """The columns themselves."""
        return columns

    def launch(self, task: Task) -> None:
        """Run the instance."""
        name, operator = task.node.name, task.node.operator
        made_for, call = self._calls.get(name, (None, None))
        if call is None or made_for is not operator:
            call = Call(operator, self._engine)
            self._calls[name] = operator, call
        session = Session(self.engines, task.seed, task.state)
        session.begin_step(task.step or 0, task.now)
        start = time.time()
        try:
            with session.active():
                _, outputs = call.run_in(session, task.inputs)
        except Exception as error:
            self.timeline.spans.append(span_of(task, "this process", start, time.time(), None))
            code, facts = code_and_facts(error, **task.facts)
            message = failure(operator, task.when, error, task.inputs)
            raise NodeError(message, code=code, **facts) from error
        end = time.time()
        lengths = lengths_of(outputs)
        self.timeline.spans.append(span_of(task, "this process", start, end, lengths))
        self.timeline.add_waits(name, "this process", task.step, task.now.waits)
        reported = session.all_metrics(), session.changed()
        self._done.append(TaskResult(task, outputs, *reported, lengths, end - start, not_finite(outputs)))

    def wait(self) -> Sequence[TaskResult]:
        """The results of `launch`."""
        done, self._done = self._done, []
        return done

    def fetch(self, node: Node, output: str, held: Column) -> Column:
        """The column itself."""
        return held

    def secure(self, node: Node, outputs: Mapping[str, Column]) -> Mapping[str, Column]:
        """The same outputs: nothing outlives this process."""
        return outputs

    def join(self, node: Node, makers: Mapping[str, str], parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
        """The columns of all rounds, padded to the widest."""
        types = node.signature.outputs
        together: dict[tuple[str, int], dict[str, str]] = {}  # by maker, the outputs by the names of their columns
        for output, maker in makers.items():
            column = getattr(types[output], "name", output)
            number = sum(column in known for (other, _), known in together.items() if other == maker)
            together.setdefault((maker, number), {})[column] = output
        joined: dict[str, Column] = {}
        for columns in together.values():
            whole = DataProto.concat([DataProto({name: part[o] for name, o in columns.items()}) for part in parts])
            joined |= {output: whole.columns[name] for name, output in columns.items()}
        return joined

    def _engine(self, role: str, asked_by: str) -> Any:
        return self.engines[role]

    # ---- engines

    @property
    def needs_sync(self) -> bool:
        """False: engines of this process do not lose their weights."""
        return False

    def can_recover(self, error: NodeError) -> bool:
        """False: an error of this process ends the run."""
        return False

    def recover(self, error: NodeError) -> None:
        raise error

    def version(self, role: str) -> int:
        return int(self.engines[role].version)

    def tokenizer(self, role: str) -> ChatTokenizer:
        found: ChatTokenizer = self.engines[role].tokenizer
        return found

    def save(self, role: str, folder: Path) -> None:
        self.engines[role].save_checkpoint(str(folder))

    def load(self, role: str, folder: Path) -> None:
        self.engines[role].load_checkpoint(str(folder))

    def save_pretrained(self, role: str, folder: Path) -> None:
        self.engines[role].save_pretrained(str(folder))


def local_steps(plan: Plan, engines: Mapping[str, Any], seed: int) -> Steps:
    """The steps of a plan on live engines of this process, by role."""
    runner = LocalRunner(engines)
    return Steps(plan, runner, seed, TrainedWeights(plan, runner, seed))


def failure(operator: Operator, where: str, error: Exception, inputs: Mapping[Any, Any]) -> str:
    """The message of a `NodeError`: what an operator raised, in which step, at which line, with which inputs."""
    frames = traceback.extract_tb(error.__traceback__)
    file = inspect.unwrap(type(operator).__call__).__code__.co_filename
    # the user's line, in the operator or in a loss passed to an operator of flowrl
    own = [f for f in frames if is_of_a_user(f.filename)] or [f for f in frames if f.filename == file]
    # flowrl's own errors name the place
    line = f"\n  at {own[-1].filename}:{own[-1].lineno}" if own and not isinstance(error, FlowrlError) else ""
    text = error.message if isinstance(error, FlowrlError) else error
    return (
        f"{operator.name} failed {where}: {type(error).__name__}: {text}{line}\n"
        f"  operator: {operator!r}\n"
        f"  inputs: {shapes(inputs)}"
    )


def shapes(inputs: Mapping[Any, Any]) -> str:
    """Dtype and shape of each input, or the value."""

    def shape(value: Any) -> str:
        if isinstance(value, Tensor | np.ndarray):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return repr(value)

    return ", ".join(f"{place}: {shape(value)}" for place, value in inputs.items())


def span_of(task: Task, place: str, start: float, end: float, written: Lengths | None) -> Span:
    """The span of a task that ran on all its rows."""
    load = load_of(written or task.lengths)
    return Span(task.node.name, place, start, end, 0, "node", task.step, *load, pairs(written))

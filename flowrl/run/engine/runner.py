"""`Runner`: where the instances of an execution graph run. It puts, launches, waits and fetches; `Steps` decides what
and when.

What an instance leaves stays where it ran: between two nodes travels what the runner *holds* a column by (the tensor
itself, or pieces in an object store), and only the runner looks into that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from flowrl.core.graphs.graph import Node
from flowrl.core.operators.ports import PortField
from flowrl.data.metrics import Metrics
from flowrl.data.now import Now
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import NodeError
from flowrl.run.engine.timeline import Timeline

Held = Any
"""What a runner holds a column by."""

Counts = np.ndarray[Any, np.dtype[np.int64]]


class Lengths(NamedTuple):
    """How long rows are, which says what they cost.

    Args:
        tokens: int64 ``[rows]``, attended tokens, prompt and response together.
        response: int64 ``[rows]``, those of the response; None before there is one.
    """

    tokens: Counts
    response: Counts | None = None

    def of(self, rows: Counts | None) -> Lengths:
        """Those of some rows; None is all."""
        if rows is None:
            return self
        return Lengths(self.tokens[rows], None if self.response is None else self.response[rows])


def load_of(lengths: Lengths | None) -> tuple[int, int, int]:
    """Rows; tokens; and tokens if every row were padded to the longest; zeros where nothing is known."""
    if lengths is None:
        return 0, 0, 0
    rows = len(lengths.tokens)
    return rows, int(lengths.tokens.sum()), rows * int(lengths.tokens.max(initial=0))


def pairs(lengths: Lengths | None) -> tuple[tuple[int, int], ...]:
    """Both lengths of each row, as a span holds them; none of rows without a response."""
    if lengths is None or lengths.response is None:
        return ()
    return tuple(zip(lengths.tokens.tolist(), lengths.response.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Task:
    """An instance that is to run.

    Args:
        node: which; its operator bears the node's name.
        step: None is between steps, where nothing is drawn.
        seed: root of its keys.
        inputs: what its columns are held by, and its batchless values.
        state: all state cells, as ``{"node.field": value}``.
        lengths: of its rows, where they are known.
        during: when it runs, for messages, where the step is none of a training.
        now: what is injected; the numbers of the operator were taken by its step.
    """

    node: Node
    step: int | None
    seed: int
    inputs: Mapping[PortField, Held]
    state: Mapping[str, Any] = field(default_factory=dict)
    lengths: Lengths | None = None
    during: str | None = None
    now: Now = field(default_factory=lambda: Now(0))

    @property
    def when(self) -> str:
        """When it runs, for messages; people count steps from 1, as the metrics do."""
        return self.during or ("between steps" if self.step is None else f"in step {self.step + 1}")

    def __str__(self) -> str:
        return f"{self.node.name} {self.when}"


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What an instance left.

    Args:
        task: which it was.
        outputs: by output, what a column is held by, or the batchless value.
        metrics: what it reported.
        state: the state cells that it changed.
        lengths: of the rows that it wrote, where it wrote tokens.
        seconds: how long it took, over all its ranks.
    """

    task: Task
    outputs: Mapping[str, Held]
    metrics: Metrics
    state: Mapping[str, Any]
    lengths: Lengths | None
    seconds: float


class Runner(Protocol):
    """Where instances run. Runners differ in where, never in what is computed."""

    timeline: Timeline
    """Of whoever steps now; what the runner does is entered there."""

    @property
    def swaps(self) -> bool:
        """Whether weights may change under answers that are under way: a sync with `Effect.SPANS`
        then runs beside what generates."""
        ...

    @property
    def engines(self) -> Mapping[str, Any]:
        """The live engines that are in this process, by role."""
        ...

    def slots(self, node: Node) -> frozenset[int]:
        """The slots that a node takes while it runs; nodes that share one do not run at once."""
        ...

    def put(self, node: Node, columns: Mapping[str, Tensor | np.ndarray[Any, Any]]) -> Mapping[str, Held]:
        """Take in the columns of an input, by output."""
        ...

    def launch(self, task: Task) -> None:
        """Start an instance, whose slots are free.

        Raises:
            NodeError: it could not be started.
        """
        ...

    def wait(self) -> Sequence[TaskResult]:
        """The next of those launched that are done, at least one.

        Raises:
            NodeError: an instance failed; names node and step, with the error as its cause. What else runs is given up.
        """
        ...

    def fetch(self, node: Node, output: str, held: Held) -> Tensor | np.ndarray[Any, Any]:
        """A column in this process."""
        ...

    def secure(self, node: Node, outputs: Mapping[str, Held]) -> Mapping[str, Held]:
        """What a node left, held so that it outlives the processes that wrote it, where these would be started anew.

        Raises:
            NodeError: they have died before.
        """
        ...

    def join(self, node: Node, makers: Mapping[str, str], parts: Sequence[Mapping[str, Held]]) -> Mapping[str, Held]:
        """What a node left in several rounds, one behind the other.

        Args:
            node: which.
            makers: by output, which node made its responses; columns of one are equally wide.
            parts: its columns by output, of each round.
        """
        ...

    # ---- engines, between steps

    @property
    def needs_sync(self) -> bool:
        """Whether an engine has lost its weights, in its sleep, so that it must be synced before it generates."""
        ...

    def can_recover(self, error: NodeError) -> bool:
        """Whether `recover` can bring back what `error` says is lost."""
        ...

    def recover(self, error: NodeError) -> None:
        """Bring it back; weights are to be loaded and synced afterwards."""
        ...

    def version(self, role: str) -> int:
        """The version of a trained role's weights."""
        ...

    def tokenizer(self, role: str) -> ChatTokenizer:
        """The tokenizer of a role that generates."""
        ...

    def save(self, role: str, folder: Path) -> None:
        """Write all that a trained role needs to go on into a new folder."""
        ...

    def load(self, role: str, folder: Path) -> None:
        """Take a trained role back to what `save` wrote."""
        ...

    def save_pretrained(self, role: str, folder: Path) -> None:
        """Write a role's weights as a Hugging Face folder."""
        ...

"""`Runner`: runs the instances of an execution graph; `Steps` decides which, and when.

Outputs stay where an instance ran. Nodes exchange handles of columns (the tensor itself, or pieces in an object store),
which only the runner opens.
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
from flowrl.errors import FlowrlError, NodeError
from flowrl.run.engine.timeline import Timeline

OutputHandle = Any
"""A runner's handle of a column."""

Counts = np.ndarray[Any, np.dtype[np.int64]]


class Lengths(NamedTuple):
    """The lengths of rows, which determine their cost.

    Args:
        tokens: int64 ``[rows]``, attended tokens of prompt and response.
        response: int64 ``[rows]``, tokens of the response; None before there is one.
    """

    tokens: Counts
    response: Counts | None = None

    def of(self, rows: Counts | None) -> Lengths:
        """The lengths of some rows; None for all."""
        if rows is None:
            return self
        return Lengths(self.tokens[rows], None if self.response is None else self.response[rows])


def load_of(lengths: Lengths | None) -> tuple[int, int, int]:
    """Rows, tokens, and tokens if every row were padded to the longest; zeros if unknown."""
    if lengths is None:
        return 0, 0, 0
    rows = len(lengths.tokens)
    return rows, int(lengths.tokens.sum()), rows * int(lengths.tokens.max(initial=0))


def pairs(lengths: Lengths | None) -> tuple[tuple[int, int], ...]:
    """Both lengths of each row, for a span; empty without responses."""
    if lengths is None or lengths.response is None:
        return ()
    return tuple(zip(lengths.tokens.tolist(), lengths.response.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Task:
    """An instance to run.

    Args:
        step: None between steps, where no random numbers are used.
        lengths: of its rows, if known.
        during: replaces the step in messages, for steps outside a training.
        now: the step whose values scheduled parameters have.
    """

    node: Node
    step: int | None
    seed: int
    inputs: Mapping[PortField, OutputHandle]
    state: Mapping[str, Any] = field(default_factory=dict)
    lengths: Lengths | None = None
    during: str | None = None
    now: Now = field(default_factory=lambda: Now(0))

    @property
    def when(self) -> str:
        """When it runs, for messages, which count steps from 1 as the metrics do."""
        return self.during or ("between steps" if self.step is None else f"in step {self.step + 1}")

    @property
    def facts(self) -> dict[str, Any]:
        """Node and step, for errors."""
        return {"node": self.node.name, "step": None if self.step is None or self.during else self.step + 1}

    def __str__(self) -> str:
        return f"{self.node.name} {self.when}"


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The result of an instance; `seconds` are from the first start to the last end over its ranks.

    Args:
        not_finite: the columns with NaN or infinity.
    """

    task: Task
    outputs: Mapping[str, OutputHandle]
    metrics: Metrics
    state: Mapping[str, Any]
    lengths: Lengths | None
    seconds: float
    not_finite: tuple[str, ...] = ()


def code_and_facts(error: BaseException, **facts: object) -> tuple[str, dict[str, Any]]:
    """Code and facts of a `NodeError` that wraps an error: the error's own if it has a code, with these facts added."""
    own: Mapping[str, Any] = error.facts if isinstance(error, FlowrlError) else {}
    code = error.code if isinstance(error, FlowrlError) else ""
    return code or "step.node-failed", {**facts, "error": type(error).__name__, **own}


class Runner(Protocol):
    """Runs instances. Runners differ in where they run, not in what they compute."""

    timeline: Timeline
    """The timeline of the current `Steps`, to which the runner adds spans."""

    @property
    def swaps(self) -> bool:
        """Whether weights may change while requests are in flight: a sync with `Effect.SPANS` then runs concurrently
        with generation."""
        ...

    @property
    def engines(self) -> Mapping[str, Any]:
        """The live engines of this process, by role."""
        ...

    def slots(self, node: Node) -> frozenset[int]:
        """The slots that a node occupies; nodes with a common slot do not run concurrently."""
        ...

    def put(self, node: Node, columns: Mapping[str, Tensor | np.ndarray[Any, Any]]) -> Mapping[str, OutputHandle]:
        """Handles of the columns of an input, by output."""
        ...

    def launch(self, task: Task) -> None:
        """Start an instance whose slots are free."""
        ...

    def wait(self) -> Sequence[TaskResult]:
        """Wait until at least one launched instance is done. If one fails, abandon all others and raise a
        `NodeError`."""
        ...

    def fetch(self, node: Node, output: str, held: OutputHandle) -> Tensor | np.ndarray[Any, Any]:
        """The column of a handle."""
        ...

    def secure(self, node: Node, outputs: Mapping[str, OutputHandle]) -> Mapping[str, OutputHandle]:
        """The outputs of a node, copied if needed so that they survive a restart of the processes that wrote them."""
        ...

    def join(
        self, node: Node, makers: Mapping[str, str], parts: Sequence[Mapping[str, OutputHandle]]
    ) -> Mapping[str, OutputHandle]:
        """Concatenate the columns of a node over several rounds."""
        ...

    # ---- engines, between steps

    @property
    def needs_sync(self) -> bool:
        """Whether an engine lost its weights while asleep and must be synced before it generates."""
        ...

    def can_recover(self, error: NodeError) -> bool:
        """Whether `recover` can restore the processes that an error reports lost."""
        ...

    def recover(self, error: NodeError) -> None:
        """Restart them; the caller then loads and syncs weights."""
        ...

    def version(self, role: str) -> int:
        """The version of a trained role's weights."""
        ...

    def tokenizer(self, role: str) -> ChatTokenizer:
        """The tokenizer of a role that generates."""
        ...

    def save(self, role: str, folder: Path) -> None:
        """Checkpoint a trained role into a new folder."""
        ...

    def load(self, role: str, folder: Path) -> None:
        """Restore a trained role from what `save` wrote."""
        ...

    def save_pretrained(self, role: str, folder: Path) -> None:
        """Write a role's weights as a Hugging Face folder."""
        ...

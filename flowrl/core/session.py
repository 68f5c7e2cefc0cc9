"""A session: what operators have around them while they run on tensors.

It resolves roles to live engines, derives keys, holds the state cells and collects the metrics. An executor runs a
graph inside one; ``with job.eager():`` opens one for code that calls operators by hand. Both run the same operators the
same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.errors import BindError

_active: ContextVar[Session | None] = ContextVar("flowrl_session", default=None)


class Session:
    """Engines, seed, step, state and metrics of running operators.

    Args:
        engines: live engines by role.
        seed: root of all keys.
        state: state cells as a checkpoint left them: ``{"node.field": value}``.
    """

    def __init__(self, engines: Mapping[str, Any], seed: int, state: Mapping[str, Any] | None = None) -> None:
        self.engines = dict(engines)
        self.seed = seed
        self.step = 0
        self._given = state or {}
        self.state: dict[str, Any] = dict(self._given)
        self.metrics: dict[str, Metrics] = {}

    def engine(self, role: str, asked_by: str) -> Any:
        """The live engine of `role`.

        Raises:
            BindError: the role is not bound.
        """
        if role not in self.engines:
            raise BindError(
                f"{asked_by} is the role {role!r}, which is not bound; bound are {sorted(self.engines) or 'none'}. "
                f"Bind it: graph.bind({role}=...)."
            )
        return self.engines[role]

    def cell(self, operator: Any, field: str) -> Any:
        """What a state cell of an operator holds."""
        name = f"{operator.name}.{field}"
        return self.state[name] if name in self.state else operator.states[field].initial(operator)

    def key(self, node: str) -> Key:
        """The key of a node in this step."""
        return Key.of(self.seed).derive("step", self.step, node)

    def report(self, node: str, metrics: Metrics) -> None:
        """Keep what a node reported in this step."""
        if node in self.metrics:
            self.metrics[node].merge(metrics)
        else:
            self.metrics[node] = metrics

    def changed(self) -> dict[str, Any]:
        """The state cells that hold something else than what was given."""
        return {cell: value for cell, value in self.state.items() if self._given.get(cell, self) is not value}

    def all_metrics(self) -> Metrics:
        """What all nodes reported in this step."""
        first, *others = self.metrics.values() or [Metrics()]
        for other in others:
            first.merge(other)
        return first

    def begin_step(self, step: int) -> None:
        """Go to `step`: keys change, metrics start empty."""
        self.step = step
        self.metrics = {}

    @contextmanager
    def active(self) -> Iterator[Session]:
        """Make this the session of the operators that are called inside the block."""
        token = _active.set(self)
        try:
            yield self
        finally:
            _active.reset(token)


def current() -> Session | None:
    """The active session, or None."""
    return _active.get()

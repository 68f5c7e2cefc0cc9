"""The possible causes of a bias, and the audit without each.

- Length: forced tokens extend ended responses until all are equally long.
- Group spread: each prompt's gradient is multiplied by the standard deviation of its responses' rewards.
- Off-policy age, and the mismatch of the engine: set to 0.
- Clip: clips and bounds on ratios are too wide to have an effect; on-policy they have none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flowrl.auditing.task import AuditTask
from flowrl.core.graphs.graph import Graph
from flowrl.edits.edit import edit
from flowrl.operators import RolloutCorrection
from flowrl.spec import parameters

_WIDE = 1e6
_WIDEST = {"clip_low": 1 - 1e-9, "clip_high": _WIDE, "clip": 19.0, "dual_clip": None, "within": _WIDE}
"""The clip parameters of losses, and values without effect."""


@dataclass(frozen=True)
class Without:
    """An audit without a cause.

    Args:
        by_spread: whether each prompt's gradient is multiplied by the spread of its rewards.
    """

    name: str
    task: Callable[[AuditTask], AuditTask] = lambda task: task
    graph: Callable[[Graph], Graph] = lambda graph: graph
    by_spread: bool = False


def possible(graph: Graph, task: AuditTask) -> Iterator[Without]:
    """The possible causes of a bias of this graph in this task."""
    if task.ends and task.steps > 1:
        yield Without("length", task=lambda task: dataclasses.replace(task, even=True))
    yield Without("group spread", by_spread=True)
    if task.age:
        yield Without("off-policy age", task=lambda task: dataclasses.replace(task, age=0.0))
    if task.mismatch:
        yield Without("engine mismatch", task=lambda task: dataclasses.replace(task, mismatch=0.0))
    if (task.age or task.mismatch) and unclipped(graph) is not graph:
        yield Without("clip", graph=unclipped)


def unclipped(graph: Graph) -> Graph:
    """The graph without clips and bounds; itself if it has none."""
    changed: dict[str, Any] = {}
    for node in graph.nodes.values():
        loss = getattr(node.initial_operator, "loss", None)
        for name in parameters(loss) if loss is not None else ():
            if name in _WIDEST:
                changed[f"{node.name}.loss.{name}"] = _WIDEST[name]
        if isinstance(node.initial_operator, RolloutCorrection):
            changed[f"{node.name}.high"] = _WIDE
            if node.initial_operator.low is not None:
                changed[f"{node.name}.low"] = 1 / _WIDE
    return edit(graph, set=changed) if changed else graph

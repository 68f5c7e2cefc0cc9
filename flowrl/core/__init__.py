"""The language: operators with typed ports, graphs, lineage, lag and plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.lazy import lazy

if TYPE_CHECKING:
    from flowrl.core.graphs.plan import Plan
    from flowrl.core.operators.loss import Unit
    from flowrl.core.operators.operator import Granularity
    from flowrl.core.operators.ports import PortField

__all__ = [
    "Granularity",
    "Plan",
    "PortField",
    "Unit",
]

__getattr__ = lazy(
    __name__,
    {
        "Granularity": "operators.operator",
        "Plan": "graphs.plan",
        "PortField": "operators.ports",
        "Unit": "operators.loss",
    },
)

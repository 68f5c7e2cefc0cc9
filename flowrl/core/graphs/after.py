"""`After`: where an edit inserts an operator."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.core.operators.operator import Operator


@dataclass(frozen=True)
class After:
    """Where ``edit(insert=...)`` inserts an operator: after `node`."""

    node: str
    operator: Operator

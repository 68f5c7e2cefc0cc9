"""`Repeat`: several rows for every prompt."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from flowrl.core.operator import Granularity, Operator
from flowrl.records import PromptBatch


class Repeat(Operator):
    """Every prompt `n` times in a row, under one `uid` (GRPO's group) and with a `row_id` of its own.

    ``[batch ...]`` becomes ``[batch * n ...]``; the copies of a prompt stand next to each other.

    Args:
        n: answers a prompt.
    """

    granularity: ClassVar[Granularity] = "row"
    changes_rows: ClassVar[bool] = True
    n: int = Field(default=1, ge=1)

    @property
    def rows_factor(self) -> int:
        """`n`."""
        return self.n

    def __call__(self, prompts: PromptBatch) -> PromptBatch:
        def repeated(column: Any) -> Any:
            return np.repeat(column, self.n) if isinstance(column, np.ndarray) else column.repeat_interleave(self.n, 0)

        row_id = np.array([f"{row}#{k}" for row in prompts.row_id for k in range(self.n)], dtype=object)
        return PromptBatch(*map(repeated, prompts))._replace(row_id=row_id)

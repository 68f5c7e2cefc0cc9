"""`Address`: names a part of a recorded run, such as ``runs/grpo-003@17/gae.advantages[0/516/0#1]``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from flowrl.core.operators.symbols import Edge
from flowrl.errors import ParameterError

_PARTS = re.compile(
    r"(?:(?P<run>.+)@)?(?P<step>\d+)?(?:/(?P<node>[^\[\].@]+)(?:\.(?P<column>[^\[\]]+))?)?(?:\[(?P<row>.+)\])?"
)


@dataclass(frozen=True)
class Address:
    """A run, step, node, column and row, each of which may be missing.

    Args:
        run: the folder of the run; None if it is known from elsewhere.
        step: counted from 1, as in ``metrics.jsonl``.
        node: a node of the graph.
        column: an output of the node.
        row: a `row_id`.
    """

    run: str | None = None
    step: int | None = None
    node: str | None = None
    column: str | None = None
    row: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """The address of ``RUN@17/gae.advantages[0/516/0#1]``, or of a part of it: ``17``, ``17/gae``, ``17[ROW]``.

        Raises:
            ParameterError: the text is no address.
        """
        found = re.fullmatch(_PARTS, text.strip())
        if found is None or not any(found.groupdict().values()) or (found["node"] and not found["step"]):
            raise ParameterError(
                f"{text!r} is not an address. Write RUN@STEP/NODE.COLUMN[ROW] or a part of it, such as "
                f"17/gae.advantages[0/516/0#1], 17/gae or 17.",
                code="look.invalid-address",
                found=text,
            )
        step = found["step"]
        return cls(found["run"], None if step is None else int(step), found["node"], found["column"], found["row"])

    @property
    def edge(self) -> Edge | None:
        """Node and column; None without a column."""
        return None if self.node is None or self.column is None else Edge(self.node, self.column)

    def __str__(self) -> str:
        run = "" if self.run is None else f"{self.run}@"
        node = "" if self.node is None else f"/{self.node}"
        column = "" if self.column is None else f".{self.column}"
        row = "" if self.row is None else f"[{self.row}]"
        return f"{run}{'' if self.step is None else self.step}{node}{column}{row}"


def address_of(given: str | int | Address) -> Address:
    """The address that a caller gave: an `Address`, its text, or a step."""
    if isinstance(given, Address):
        return given
    return Address(step=given) if isinstance(given, int) else Address.parse(given)

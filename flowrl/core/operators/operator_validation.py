"""What an operator says of itself, where rules look for it; it is the same in all steps, whatever changes over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrl.core.operators.operator import Operator
from flowrl.errors import GraphError
from flowrl.spec import schedules


def sample_steps(operator: Operator) -> list[Operator]:
    """The operator as it is at the moments that tell of its numbers over time; of one without these, itself."""
    over_time = schedules(operator).values()
    return [
        operator.in_step(step) for step in sorted({step for one in over_time for step in one.sample_steps()} or {0})
    ]


def refuse_misdeclared(name: str, operator: Operator) -> None:
    """Raise a `GraphError` for what an operator says of itself and rules could not read, or that changes over time."""
    first, *others = sample_steps(operator)
    _refuse_misdeclared(name, first)
    for said in others:
        _refuse_misdeclared(name, said)
        for what in ("rows_factor", "row_divisors", "prior_updates", "target_groups", "rounds_at_most", "wants()"):
            before, after = (_said(one, what) for one in (first, said))
            if before != after:
                over_time = ", ".join(f"{path}={schedule!r}" for path, schedule in schedules(operator).items())
                raise GraphError(
                    f"{name} says that its {what} is {before!r} in one step and {after!r} in another, by {over_time}; "
                    f"expected the same in all, since a graph is checked by it: give a number there."
                )


def _said(operator: Operator, what: str) -> Any:
    return operator.wants() if what == "wants()" else getattr(operator, what, None)  # gates alone fill and repeat


def _refuse_misdeclared(name: str, said: Operator) -> None:
    optional = [port.name for port in said.signature.ports.values() if port.optional]
    wants, divisors = said.wants(), said.row_divisors
    are_counts = isinstance(divisors, Mapping) and all(map(_is_count, divisors.values()))
    are_ports = isinstance(wants, Mapping) and wants.keys() <= set(optional)
    for what, value, holds, expected in (
        ("rows_factor", said.rows_factor, _is_count(said.rows_factor), "a count: 1, 2, ..."),
        ("row_divisors", divisors, are_counts, "counts by parameter"),
        (
            "prior_updates",
            said.prior_updates,
            _is_count(said.prior_updates) or said.prior_updates == 0,
            "a count: 0, 1, 2, ...",
        ),
        ("wants()", wants, are_ports, f"True or False by optional port, of which it has {optional or 'none'}"),
    ):
        if not holds:
            raise GraphError(f"{name} says that its {what} is {value!r}; expected {expected}.")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1

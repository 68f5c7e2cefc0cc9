"""Validation of what an operator declares by its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import RoleRef
from flowrl.errors import GraphError
from flowrl.spec import schedules


def sample_steps(operator: Operator) -> list[Operator]:
    """The operator in the sample steps of its schedules; without schedules, the operator itself."""
    steps = {step for schedule in schedules(operator).values() for step in schedule.sample_steps()}
    return [operator.in_step(step) for step in sorted(steps or {0})]


def refuse_misdeclared(name: str, operator: Operator) -> None:
    """Raise a `GraphError` for declarations of the wrong type, or that change over steps."""
    first, *others = sample_steps(operator)
    _refuse_misdeclared(name, first)
    for other in others:
        _refuse_misdeclared(name, other)
        for what in (
            "rows_factor",
            "row_divisors",
            "prior_updates",
            "target_groups",
            "rounds_at_most",
            "optional_ports",
        ):
            before, after = (_declared(one, what) for one in (first, other))
            if before != after:
                over_time = ", ".join(f"{path}={schedule!r}" for path, schedule in schedules(operator).items())
                raise GraphError(
                    f"{name}.{what} is {before!r} in one step and {after!r} in another, by {over_time}, but a graph is "
                    f"checked once for all steps. Pass a number instead of the schedule.",
                    code="operator.invalid-attribute",
                    where=name,
                    attribute=what,
                    found=[repr(before), repr(after)],
                )


def refuse_live_engines(name: str, operator: Operator) -> None:
    """Raise a `GraphError` if a role field contains an engine instead of a role."""
    for field, use in operator.role_uses.items():
        for path, engine in use.of(operator, field).items():
            if not isinstance(engine, RoleRef):
                role = path.rpartition(".")[2]
                named = f"{{{role!r}: Role({role!r})}}" if use.several else f"Role({role!r})"
                raise GraphError(
                    f"{name}.{path} is a live engine ({type(engine).__name__}), but the nodes of a graph only name "
                    f"roles. Write {type(operator).__name__}({field}={named}), and bind the role: "
                    f"graph.bind({role}=...). An operator with a live engine can be called on tensors.",
                    code="graph.live-engine",
                    node=name,
                    field=path,
                )


def _declared(operator: Operator, what: str) -> Any:
    value = getattr(operator, what, None)  # only gates have groups and rounds
    return value() if callable(value) else value


def _refuse_misdeclared(name: str, operator: Operator) -> None:
    optional = [port.name for port in operator.signature.ports.values() if port.optional]
    factor, prior, required, divisors = (
        operator.rows_factor,
        operator.prior_updates,
        operator.optional_ports(),
        operator.row_divisors,
    )
    are_counts = isinstance(divisors, Mapping) and all(map(_is_count, divisors.values()))
    are_ports = isinstance(required, Mapping) and required.keys() <= set(optional)
    for what, found, valid, expected in (
        ("rows_factor", factor, _is_count(factor), "a count: 1, 2, ..."),
        ("row_divisors", divisors, are_counts, "counts by parameter"),
        ("prior_updates", prior, _is_count(prior) or prior == 0, "a count: 0, 1, 2, ..."),
        (
            "optional_ports()",
            required,
            are_ports,
            f"True or False by optional port, of which it has {optional or 'none'}",
        ),
    ):
        if not valid:
            raise GraphError(
                f"{name}.{what} is {found!r}. Expected {expected}.",
                code="operator.invalid-attribute",
                where=name,
                attribute=what,
                found=repr(found),
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1

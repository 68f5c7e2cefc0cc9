"""Validation of an operator's declarations: those of its class, and those that depend on its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from flowrl.columns import ColumnType
from flowrl.core.operators.ports import snake_case
from flowrl.errors import DefinitionError, GraphError
from flowrl.spec import schedules

if TYPE_CHECKING:
    from flowrl.core.operators.operator import Operator

Granularity = Literal["row", "group", "batch"]


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
        for what in ("rows_factor", "row_divisors", "prior_updates", "target_groups", "rounds_at_most", "wants()"):
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


def _declared(operator: Operator, what: str) -> Any:
    return operator.wants() if what == "wants()" else getattr(operator, what, None)  # only gates have groups and rounds


def _refuse_misdeclared(name: str, operator: Operator) -> None:
    optional = [port.name for port in operator.signature.ports.values() if port.optional]
    factor, prior, wants, divisors = (
        operator.rows_factor,
        operator.prior_updates,
        operator.wants(),
        operator.row_divisors,
    )
    are_counts = isinstance(divisors, Mapping) and all(map(_is_count, divisors.values()))
    are_ports = isinstance(wants, Mapping) and wants.keys() <= set(optional)
    for what, found, valid, expected in (
        ("rows_factor", factor, _is_count(factor), "a count: 1, 2, ..."),
        ("row_divisors", divisors, are_counts, "counts by parameter"),
        ("prior_updates", prior, _is_count(prior) or prior == 0, "a count: 0, 1, 2, ..."),
        ("wants()", wants, are_ports, f"True or False by optional port, of which it has {optional or 'none'}"),
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


def refuse_misdeclared_class(cls: type[Operator], base: type[Operator], fields: Mapping[str, Any], where: str) -> None:
    """Raise a `DefinitionError` for class attributes of the wrong type, and for names that are taken.

    Args:
        cls: a subclass of `base`, which is `Operator`.
        base: `Operator`, whose module imports this one.
        fields: the parameters by name.
        where: ``file:line: Class`` for messages.
    """
    ports = cls._signature.ports if hasattr(cls, "_signature") else {}
    _refuse_taken_names(cls, base, fields, where)
    if cls.__call__ is not base.__call__ and not hasattr(cls.__call__, "__wrapped__"):
        raise DefinitionError(
            f"{where} inherits __call__ from a class that is not an Operator, so it has no ports. Define __call__ in "
            f"the class itself, or derive the other class from Operator.",
            code="operator.no-call",
            where=where,
        )
    _refuse_attributes(cls, where)
    has_more = cls.more_ports is not base.more_ports or hasattr(cls, "loss") or "loss" in fields
    if ports and cls._signature.takes_more and not has_more:
        raise DefinitionError(
            f"{where}.__call__ takes the columns of its loss, but the class has no field `loss`. Declare one: "
            f"`loss: Loss = PPOClip()`.",
            code="loss.missing-field",
            where=where,
        )


def _refuse_taken_names(cls: type[Operator], base: type[Operator], fields: Mapping[str, Any], where: str) -> None:
    names = {*fields, *cls.states} - {"prior_updates"}  # which a subclass may make a parameter
    ports = cls._signature.ports if hasattr(cls, "_signature") else {}
    if taken := next((name for name in sorted(names) if hasattr(base, name)), None):
        raise DefinitionError(
            f"{where}.{taken} is a parameter or state, but all operators have a member of that name. Rename it, or "
            f"write `{taken}: ClassVar[...] = ...` to set that member.",
            code="operator.name-taken",
            where=where,
            name=taken,
        )
    if both := next((name for name in ports if name in fields or name in cls.states), None):
        raise DefinitionError(
            f"{where}.{both} is both a port and a parameter or state. Rename one of them, so that "
            f"'{snake_case(cls.__name__)}.{both}' is unique.",
            code="operator.name-taken",
            where=where,
            name=both,
        )


def _refuse_attributes(cls: type[Operator], where: str) -> None:
    """Check granularity, new axes and replicated columns."""
    ports = cls._signature.ports if hasattr(cls, "_signature") else {}
    outputs = cls._signature.outputs.values() if ports else ()
    axes = {axis for output in outputs if isinstance(output, ColumnType) for axis in output.axes}
    columns = {place.name for port in ports.values() for place in port.fields}
    are_axes = isinstance(cls.new_axes, tuple) and all(isinstance(axis, str) for axis in cls.new_axes)
    are_columns = isinstance(cls.replicated, frozenset) and (not ports or cls.replicated <= columns)
    granularities = get_args(Granularity)
    for what, found, valid, expected in (
        ("granularity", cls.granularity, cls.granularity in granularities, ", ".join(map(repr, granularities))),
        ("new_axes", cls.new_axes, are_axes, "a tuple of axes, such as ('batch',)"),
        (
            "new_axes",
            cls.new_axes,
            not ports or not are_axes or set(cls.new_axes) <= axes,
            f"a tuple of axes of its outputs: {', '.join(sorted(axes)) or 'none'}",
        ),
        (
            "replicated",
            cls.replicated,
            are_columns,
            f"a frozenset of columns that it reads: {', '.join(sorted(columns))}",
        ),
    ):
        if not valid:
            raise DefinitionError(
                f"{where}.{what} is {found!r}. Expected {expected}.",
                code="operator.invalid-attribute",
                where=where,
                attribute=what,
                found=repr(found),
            )

"""Roles: fields that declare the weights an operator needs, and their errors; also `operator_validation.py`."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import pytest
from pydantic import Field

from flowrl.columns import Values
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.operator_validation import refuse_live_engines
from flowrl.core.operators.roles import Reads, Role, RoleRef, Writes
from flowrl.core.operators.session import Call
from flowrl.protocols.protocols import Rollout, Scorer, Trainer
from tests.support.errors import raises
from tests.support.kernel import TrainerEngine


class Unchecked(Protocol):
    """Not decorated with @runtime_checkable."""

    def log_probs(self) -> None: ...


class Plain:
    """No Protocol."""


@pytest.mark.parametrize("name", [3, None, "", "two words", "1st", "a.b", "class", ["actor"], {"a": 1}])
def test_a_role_name_that_is_not_an_identifier_is_refused(name: Any) -> None:
    for make in (Role, RoleRef):
        with raises("role.name"):
            make(name)


def test_a_reserved_name_of_a_role_is_refused() -> None:
    with raises("role.name", role="place"):
        Role("place")


def test_roles_copy_and_pickle() -> None:
    role = Role("actor")
    assert role == copy.deepcopy(role) == pickle.loads(pickle.dumps(role))


def define(annotation: Any) -> type[Operator]:
    def call(self: Any, values: Values) -> Values: ...

    body = {"__annotations__": {"actor": annotation}, "actor": Role("actor"), "__call__": call, "__module__": __name__}
    return type("Faulty", (Operator,), body)


@pytest.mark.parametrize(
    "annotation",
    [
        Reads[int],
        Writes[Plain],
        Reads[Unchecked],
        Reads[Any],
        Reads[Scorer] | None,
        tuple[Writes[Trainer], ...],
        Scorer,
        Any,
        Reads[Writes[Trainer]],
    ],
)
def test_a_role_field_needs_an_access_mode_and_a_runtime_checkable_protocol(annotation: Any) -> None:
    with raises("role.annotation", annotation=str(annotation)) as error:
        define(annotation)
    assert re.fullmatch(r".*test_roles\.py:\d+: Faulty\.actor", str(error.value.facts["where"]))


@pytest.mark.parametrize("annotation", [Reads[Scorer], Writes[Trainer], Reads[Rollout]])
def test_a_role_field_accepts_roles_and_engines(annotation: Any) -> None:
    operator: Callable[..., Any] = define(annotation)
    assert operator().actor == Role("actor")
    if annotation is not Reads[Rollout]:
        engine = TrainerEngine()
        assert operator(actor=engine).actor is engine
    with raises("parameter.invalid", parameter="actor", given="3"):
        operator(actor=3)


class Several(Operator):
    """Reads one role, and any others by name."""

    main: Reads[Scorer] = Role("main")
    others: Reads[Mapping[str, Scorer]] = Field(default_factory=dict)

    def __call__(self, values: Values) -> Values: ...


def test_a_field_of_several_roles_has_each_by_its_name() -> None:
    assert Several().others == {} and Several.role_uses["others"].several
    operator = Several(others={"a": Role("x"), "b": Role("x")})
    uses = Several.role_uses["others"].of(operator, "others")
    assert uses == {"others.a": Role("x"), "others.b": Role("x")}
    bound = Call(operator, lambda role, field: f"{role} for {field}")._bound
    assert bound.main == "main for several.main"
    assert bound.others == {"a": "x for several.others.a", "b": "x for several.others.b"}


@pytest.mark.parametrize("given", [Role("x"), {"a": 3}, {"a b": Role("x")}, {1: Role("x")}, ["x"]])
def test_a_field_of_several_roles_refuses_anything_else(given: Any) -> None:
    with raises("parameter.invalid", parameter="others"):
        Several(others=given)


def test_a_live_engine_among_several_roles_is_refused_in_a_graph() -> None:
    with raises("graph.live-engine", field="others.a") as error:
        refuse_live_engines("several", Several(others={"a": TrainerEngine()}))
    assert "Write Several(others={'a': Role('a')})" in error.value.message

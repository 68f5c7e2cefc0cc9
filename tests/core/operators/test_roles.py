"""Roles: what a field says of the weights that it needs, and what it must not say."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, Protocol

import pytest

from flowrl.columns import Values
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.roles import Reads, Role, RoleRef, Writes
from flowrl.errors import DefinitionError, ParameterError
from flowrl.protocols.protocols import Rollout, Scorer, Trainer
from tests.support.kernel import TrainerEngine


class Unchecked(Protocol):
    """Not decorated with @runtime_checkable."""

    def log_probs(self) -> None: ...


class Plain:
    """No Protocol."""


@pytest.mark.parametrize("name", [3, None, "", "two words", "1st", "a.b", "class", ["actor"], {"a": 1}])
def test_a_role_is_named_by_what_bind_takes(name: Any) -> None:
    for make in (Role, RoleRef):
        with pytest.raises(
            ParameterError, match=r"Role\(.*\) does not name a role; expected an identifier such as Role"
        ):
            make(name)


def test_a_role_that_bind_could_not_take_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"Role\('place'\) could not be bound, since graph\.bind\(place="):
        Role("place")


def test_roles_copy_and_pickle() -> None:
    role = Role("actor")
    assert role == copy.deepcopy(role) == pickle.loads(pickle.dumps(role))


def define(annotation: Any) -> type[Operator]:
    def call(self: Any, values: Values) -> Values: ...

    body = {"__annotations__": {"actor": annotation}, "actor": Role("actor"), "__call__": call, "__module__": __name__}
    return type("Faulty", (Operator,), body)


@pytest.mark.parametrize(
    ("annotation", "said"),
    [
        (
            Reads[int],
            r"takes int for what the engine must have; expected a Protocol that is decorated with @runtime_ch",
        ),
        (Writes[Plain], r"takes Plain for what the engine must have"),
        (Reads[Unchecked], r"takes Unchecked for what the engine must have; .* decorated with @runtime_checkable"),
        (Reads[Any], r"for what the engine must have"),
        (
            Reads[Scorer] | None,
            r"does not say what is done with the role; expected Reads\[\.\.\.\] or Writes\[\.\.\.\]",
        ),
        (tuple[Writes[Trainer], ...], r"does not say what is done with the role"),
        (Scorer, r"does not say what is done with the role"),
        (Any, r"does not say what is done with the role"),
        (
            Reads[Writes[Trainer]],
            r"says twice what is done with the role; expected Writes\[\.\.\.\] where its weights are",
        ),
    ],
)
def test_a_role_field_says_what_is_done_with_which_protocol(annotation: Any, said: str) -> None:
    with pytest.raises(DefinitionError, match=rf"test_roles\.py:\d+: Faulty\.actor: the annotation .*{said}"):
        define(annotation)


@pytest.mark.parametrize("annotation", [Reads[Scorer], Writes[Trainer], Reads[Rollout]])
def test_what_may_stand_in_a_role_field(annotation: Any) -> None:
    operator: Callable[..., Any] = define(annotation)
    assert operator().actor == Role("actor")
    if annotation is not Reads[Rollout]:
        engine = TrainerEngine()
        assert operator(actor=engine).actor is engine
    with pytest.raises(ParameterError, match=r"actor=3: wants a Role, or a live engine that is a \w+, not int"):
        operator(actor=3)

"""Inputs of models: tokens, or the columns of a custom record.

See also `tests/examples/test_cartpole.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, Protocol

import pytest
import torch
from jaxtyping import Float32
from torch import Tensor

from flowrl import columns as c
from flowrl.core.operators.ports import PortField
from flowrl.errors import ParameterError
from flowrl.operators import OldLogProb, PPOClip, RefLogProb, UpdateActor, UpdateCritic, Value
from flowrl.protocols.protocols import Critic
from tests.support.errors import raises

Seen = Annotated[Float32[Tensor, "batch response features"], c.Column("seen", "what was seen")]


class Steps(NamedTuple):
    seen: Seen
    response_mask: c.ResponseMask
    policy_version: c.PolicyVersion


class Glances(Protocol):
    @property
    def seen(self) -> Seen: ...
    @property
    def response_mask(self) -> c.ResponseMask: ...


class Unversioned(NamedTuple):
    seen: Seen
    response_mask: c.ResponseMask


class Misversioned(NamedTuple):
    response_mask: c.ResponseMask
    policy_version: c.Turns


class Means:
    """A critic that values a state by its mean."""

    version = 0

    def values(self, batch: Any) -> Tensor:
        assert batch._fields == ("seen", "response_mask")
        means: Tensor = batch.seen.mean(-1) * batch.response_mask
        return means

    def update(self, batch: Any, mini_batches: Any, objective: Any) -> Any: ...


@pytest.mark.parametrize("made", [OldLogProb, RefLogProb, Value, UpdateActor, UpdateCritic])
def test_a_custom_record_replaces_token_inputs(made: Any) -> None:
    operator, plain = made(reads=Steps), made()
    fields = {str(f) for f in operator.signature.fields if f.port == "rollout"}
    assert fields == {"rollout.seen", "rollout.response_mask", "rollout.policy_version"}
    assert operator.signature is operator.signature is made(reads=Steps).signature  # calls are laid out by it
    assert PortField("rollout", "input_ids") in plain.signature.fields
    others = [{f for f in one.signature.fields if f.port != "rollout"} for one in (operator, plain)]
    assert others[0] == others[1] and operator.signature.outputs == plain.signature.outputs


def test_the_model_gets_only_the_columns_of_the_record() -> None:
    assert isinstance(Means(), Critic)
    steps = Steps(torch.ones(2, 3, 4), torch.tensor([[True] * 3, [True, False, False]]), torch.zeros(2).long())
    values = Value(reads=Glances, critic=Means())(steps)
    assert values.tolist() == [[1, 1, 1], [1, 0, 0]]
    with raises("call.type", node="value", port="rollout", expected=("seen", "response_mask")):
        Value(reads=Glances, critic=Means())(Unversioned(steps.seen, steps.response_mask)[1:])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Value(reads=int), r"reads=<class 'int'>: expected a record of columns, such as a NamedTuple"),
        (lambda: UpdateActor(reads=Unversioned), r"UpdateActor itself reads policy_version, which Unversioned lacks"),
        (lambda: UpdateActor(reads=Misversioned), r"UpdateActor itself reads policy_version, which Misversioned lacks"),
        (lambda: Value("record"), r"Value\(\.\.\.\).*Role"),
    ],
)
def test_an_invalid_record_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        make()


def test_reads_is_keyword_only() -> None:
    assert UpdateActor(PPOClip(0.1), 2).loss == PPOClip(0.1)
    assert UpdateCritic(reads=Unversioned).reads is Unversioned  # a critic has no version to look at

"""Operators: roles, states and names of the class, and calls on tensors."""

from __future__ import annotations

import copy
import pickle
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl import columns as c
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import INJECTED, PortField
from flowrl.core.operators.roles import Reads, Role, Writes
from flowrl.core.operators.session import Session, State
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.errors import PortError
from flowrl.operators import GAE, Generate, KLShape, OldLogProb, Reward, UpdateActor
from flowrl.records import Tokens, Updated
from flowrl.spec import Schedule
from tests.support.errors import raises
from tests.support.kernel import Clip, Impure, LengthPenalty, Split, TrainerEngine, TwoHeads, answers, exact


@runtime_checkable
class Scale(Protocol):
    """What `Scaled` needs."""

    def factor(self) -> float: ...


class Twice:
    """An engine that is a `Scale`."""

    def factor(self) -> float:
        return 2.0


class Scaled(Operator):
    """Reads a role."""

    scale: Reads[Scale] = Role("scale")

    def __call__(self, values: c.Values) -> c.Values:
        return values * self.scale.factor()


class Running(Operator):
    """Counts its calls in a state and reports the count; fails on negative values, after counting."""

    start: int = 0
    calls = State(lambda self: self.start)

    def __call__(self, values: c.Values, metrics: Metrics = INJECTED) -> c.Values:
        self.calls.value += 1
        metrics.max("calls", self.calls.value)
        if bool((values < 0).any()):
            raise RuntimeError("negative")
        return values + self.calls.value


class Noise(Operator):
    """Samples random numbers."""

    def __call__(self, values: c.Values, key: Key = INJECTED) -> c.Values:
        return torch.rand(values.shape, generator=key.generator())


# -------------------------------------------------------------------------------------------------------------- classes


def test_roles_and_states_are_known_of_the_class() -> None:
    assert {name: (use.mode, use.protocol) for name, use in Scaled.role_uses.items()} == {"scale": ("reads", Scale)}
    assert UpdateActor.role_uses["actor"].mode == "writes"
    assert list(Running.states) == ["calls"]
    assert list(KLShape.states) == ["beta"]
    assert "calls" not in {f for f in Running.__dataclass_fields__}  # type: ignore[attr-defined]


def test_class_constants_may_be_set_without_annotation() -> None:
    class RowWise(Operator):
        granularity = "row"
        new_axes: ClassVar[tuple[str, ...]] = ("batch",)

        def __call__(self, values: c.Values) -> c.Values:
            return values

    class Child(RowWise):
        new_axes = ()

    assert (Operator.granularity, RowWise.granularity, Child.granularity) == ("batch", "row", "row")
    assert (RowWise.new_axes, Child.new_axes) == (("batch",), ())
    assert Child().signature is RowWise().signature


# ---------------------------------------------------------------------------------------------------------- on tensors


def test_inputs_are_passed_by_position_or_name() -> None:
    scores, mask = torch.ones(2, 3), torch.tensor([[True, True, False], [True, False, False]])
    expected = torch.tensor([[0.5, 0.5, 1.0], [0.5, 1.0, 1.0]])
    penalty = LengthPenalty(0.5)
    assert torch.equal(penalty(scores, mask), expected)
    assert torch.equal(penalty(response_mask=mask, token_level_scores=scores), expected)
    out = TwoHeads()(scores)
    assert torch.equal(out.values, scores)
    assert torch.equal(out.returns, 2 * scores)


def test_a_record_port_takes_any_record_with_its_columns_and_sees_no_others() -> None:
    seen: dict[str, Any] = {}

    class Look(Operator):
        def __call__(self, tokens: Tokens) -> c.ResponseMask:
            seen["fields"] = tokens._fields  # type: ignore[attr-defined]
            return tokens.response_mask

    assert Look()(answers()).shape == (2, 4)
    assert seen["fields"] == ("input_ids", "attention_mask", "position_ids", "response_mask")


F32, BOOL = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("arguments", "keywords", "code", "facts"),
    [
        (
            (F32,),
            {},
            "call.arguments",
            {"port": "response_mask", "expected": "mask[batch response] bool"},
        ),
        ((F32, None), {}, "call.arguments", {"port": "response_mask"}),
        (
            (F32, F32),
            {},
            "call.type",
            {"port": "response_mask", "expected": "mask[batch response] bool", "found": "float32"},
        ),
        ((F32.double(), BOOL), {}, "call.type", {"port": "token_level_scores", "found": "float64"}),
        ((F32.numpy(), BOOL), {}, "call.type", {"port": "token_level_scores", "found": "an ndarray"}),
        ((F32[0], BOOL), {}, "call.type", {"port": "token_level_scores", "found": "the shape (3,)"}),
        (
            (F32, BOOL[:1]),
            {},
            "call.type",
            {"port": "response_mask", "axis": "batch", "expected": 2, "found": 1},
        ),
        ((F32, BOOL[:, :2]), {}, "call.type", {"axis": "response", "expected": 3, "found": 2}),
        ((F32, BOOL, F32), {}, "call.arguments", {"known": ("token_level_scores", "response_mask")}),
        ((F32, BOOL), {"mask": BOOL}, "call.arguments", {"reason": "got an unexpected keyword argument 'mask'"}),
    ],
)
def test_inputs_of_direct_calls_are_checked(
    arguments: tuple[Any, ...], keywords: dict[str, Any], code: str, facts: dict[str, Any]
) -> None:
    with raises(code, node="length_penalty", **facts) as error:
        LengthPenalty()(*arguments, **keywords)
    assert isinstance(error.value, PortError)


def test_columns_of_records_in_direct_calls_are_checked() -> None:
    old = OldLogProb(actor=TrainerEngine())
    with raises("call.type", node="old_log_prob", port="rollout", found="a Tensor"):
        old(torch.zeros(2, 3))
    with raises("call.type", port="rollout.temperature", found="float64"):
        old(answers()._replace(temperature=torch.ones(2, dtype=torch.float64)))
    rollout = answers()._replace(response_text=np.array(["a", "b"]))
    with raises("call.type", port="rollout.response_text", found="<U1"):
        Reward(exact).run({PortField("rollout", "response_text"): rollout.response_text})


@pytest.mark.parametrize(
    ("returned", "code", "facts"),
    [
        (torch.zeros(2, 3), "call.return", {"expected": "Split", "found": "a Tensor"}),
        (None, "call.return", {"found": "a NoneType"}),
        ((torch.zeros(2, 3), torch.zeros(2, 3)), "call.return", {"found": "a tuple"}),
        ("double", "call.type", {"port": "returns", "found": "float64"}),
        ("short", "call.type", {"port": "returns", "axis": "batch", "expected": 2, "found": 1}),
    ],
)
def test_the_outputs_of_an_operator_are_checked(returned: Any, code: str, facts: dict[str, Any]) -> None:
    made = {"double": torch.zeros(2, 3, dtype=torch.float64), "short": torch.zeros(1, 3)}

    class Broken(Operator):
        def __call__(self, values: c.Values) -> Split:
            return Split(values, made[returned]) if isinstance(returned, str) else returned

    with raises(code, node="broken", **facts):
        Broken()(torch.zeros(2, 3))


def test_values_without_batch_are_checked() -> None:
    class Wait(Operator):
        def __call__(self, updated: Updated) -> Updated:
            return updated

    assert Wait()(Updated(3)) == Updated(3)
    with raises("call.type", node="wait", port="updated", expected="Updated", found="an int"):
        Wait()(3)  # type: ignore[arg-type]


def test_new_axes_declares_a_change_of_rows() -> None:
    class Half(Operator):
        new_axes: ClassVar[tuple[str, ...]] = ("batch",)

        def __call__(self, values: c.Values) -> c.Values:
            return values[::2]

    class Sneaky(Operator):
        def __call__(self, values: c.Values) -> c.Values:
            return values[::2]

    assert Half()(torch.zeros(4, 3)).shape == (2, 3)
    with raises("call.type", node="sneaky", port="values", expected=4, found=2):
        Sneaky()(torch.zeros(4, 3))


# ---------------------------------------------------------------------------------------------- roles, keys and states


def test_the_field_of_a_role_may_contain_a_live_engine() -> None:
    assert torch.equal(Scaled(Twice())(torch.ones(1, 2)), torch.full((1, 2), 2.0))
    assert torch.equal(Scaled(scale=Twice())(torch.ones(1, 2)), torch.full((1, 2), 2.0))
    with raises("parameter.invalid", parameter="scale", given="3"):
        Scaled(3)  # type: ignore[arg-type]
    with raises("parameter.invalid", parameter="scale"):
        Scaled(TrainerEngine())  # type: ignore[arg-type]


def test_a_role_needs_a_session_with_its_engine() -> None:
    ones = torch.ones(1, 2)
    with raises("session.no-job", node="scaled", missing="role", role="scale") as error:
        Scaled()(ones)
    assert "Scaled(scale=engine)" in error.value.message
    with Session({"scale": Twice(), "other": Twice()}, seed=0).active():
        assert torch.equal(Scaled()(ones), 2 * ones)
        assert torch.equal(Scaled(Role("other"))(ones), 2 * ones)
        with raises("job.unbound-role", role="third", field="scaled.scale", known=("other", "scale")):
            Scaled(Role("third"))(ones)
    with pytest.raises(AttributeError, match="is only a name here"):
        Scaled().scale.factor()


def test_keys_depend_on_seed_step_and_node() -> None:
    values = torch.zeros(2, 3)
    with raises("session.no-job", node="noise", missing="key"):
        Noise()(values)
    assert torch.equal(Noise()(values, key=Key.of(1)), Noise()(values, key=Key.of(1)))

    def sample(seed: int, step: int, node: str) -> Tensor:
        session = Session({}, seed)
        session.begin_step(step)
        with session.active():
            return Noise().named(node)(values)

    samples = [sample(0, 0, "noise"), sample(1, 0, "noise"), sample(0, 1, "noise"), sample(0, 0, "other")]
    assert torch.equal(samples[0], sample(0, 0, "noise"))
    assert all(not torch.equal(a, b) for i, a in enumerate(samples) for b in samples[:i])


def test_state_is_owned_by_the_session() -> None:
    session, running, ones = Session({}, seed=0), Running(5), torch.ones(1, 1)
    with session.active():
        assert [float(running(ones)), float(running(ones))] == [7.0, 8.0]
        assert float(Running(100).named("other")(ones)) == 102.0
        assert session.state == {"running.calls": 7, "other.calls": 101}
        with pytest.raises(RuntimeError, match="negative"):
            running(-ones)
        assert session.state["running.calls"] == 7, "a failed call must not change the state"
    with Session({}, seed=0, state={"running.calls": 40}).active():
        assert float(running(ones)) == 42.0
    assert running.calls.value == 5, "the operator itself does not change"


def test_state_outside_a_session_belongs_to_the_instance() -> None:
    running, ones = Running(), torch.ones(1, 1)
    assert [float(running(ones)), float(running(ones))] == [2.0, 3.0]
    with pytest.raises(RuntimeError, match="negative"):
        running(-ones)
    assert running.calls.value == 2
    assert running.named("other").calls.value == Running().calls.value == 0
    assert running == Running()


def test_metrics_are_collected_by_node() -> None:
    session, ones = Session({}, seed=0), torch.ones(1, 1)
    with session.active():
        Running()(ones)
        Running(10).named("other")(ones)
        assert {n: m.compute() for n, m in session.metrics.items()} == {"running": {"calls": 1}, "other": {"calls": 11}}
        mine = Metrics()
        Running(20)(ones, metrics=mine)
        assert mine.compute() == {"calls": 2.0}  # the state is the node's
        session.begin_step(1)
        assert session.metrics == {}


# ------------------------------------------------------------------------------------------------------ names and form


def test_the_base_of_operators_cannot_be_constructed() -> None:
    with raises("operator.no-call"):
        Operator()


def test_columns_in_place_of_parameters_are_refused() -> None:
    for column in (torch.zeros(2), np.zeros(2), Impure(torch.zeros(2), 1)):
        with raises("operator.mixed-call", operator="Scaled"):
            Scaled(column)  # type: ignore[arg-type]


def test_a_state_needs_a_function() -> None:
    with raises("operator.state", found="3.0"):
        State(3.0)  # type: ignore[arg-type]


class Growing(Schedule):
    """A schedule with state."""

    calls = State(lambda self: 0)

    def at(self, step: int) -> float:
        self.calls.value += 1
        return float(self.calls.value)


def test_state_of_a_schedule_is_refused() -> None:
    """Nothing would save that of another spec, and a training resumes to other numbers."""
    with raises("operator.state", state="calls", owner="Growing"):
        Growing().at(0)


def test_operators_have_default_and_given_names() -> None:
    gae = GAE(0.9)
    assert (gae.name, gae.named("gae_long").name, gae.name) == ("gae", "gae_long", "gae")
    assert gae.named("gae_long").gamma == 0.9
    for wrong in ("gae-long", "a.b", "", "1st"):
        with raises("operator.node-name", given=wrong):
            gae.named(wrong)


@pytest.mark.parametrize("op", [GAE(0.9), Generate(), UpdateActor(), KLShape(), Clip().named("clip_2")])
def test_operators_copy_and_pickle(op: Operator) -> None:
    for other in (copy.copy(op), copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert other == op
        assert other.name == op.name


def test_role_uses_distinguish_reading_from_writing() -> None:
    class Both(Operator):
        actor: Writes[Scale] = Role("actor")
        ref: Reads[Scale] = Role("ref")

        def __call__(self, values: c.Values) -> c.Values:
            return values

    assert {name: use.mode for name, use in Both.role_uses.items()} == {"actor": "writes", "ref": "reads"}
    assert repr(Both()).endswith("Both(actor=Role('actor'), ref=Role('ref'))")

"""Operators: ports from annotations, faults told where the class is defined, and calls on tensors."""

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
from flowrl.errors import BindError, DefinitionError, ParameterError, PortError
from flowrl.operators import GAE, Generate, KLShape, OldLogProb, Reward, UpdateActor
from flowrl.records import Tokens, Updated
from tests.support.kernel import Clip, Impure, LengthPenalty, TrainerEngine, TwoHeads, answers, exact


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
    """Counts its calls in a state and reports what it counted; fails on negative values, after it has counted."""

    start: int = 0
    calls = State(lambda self: self.start)

    def __call__(self, values: c.Values, metrics: Metrics = INJECTED) -> c.Values:
        self.calls.value += 1
        metrics.max("calls", self.calls.value)
        if bool((values < 0).any()):
            raise RuntimeError("negative")
        return values + self.calls.value


class Noise(Operator):
    """Draws random numbers."""

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


def test_computes_on_tensors_by_position_and_name() -> None:
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
    ("arguments", "keywords", "said"),
    [
        ((F32,), {}, r"length_penalty\.response_mask wants mask\[batch response\] bool, but was not given; pass resp"),
        ((F32, None), {}, r"length_penalty\.response_mask wants .* but was not given"),
        (
            (F32, F32),
            {},
            r"response_mask wants mask\[batch response\] bool, but is float32; convert it: \.to\(torch\.bool\)",
        ),
        ((F32.double(), BOOL), {}, r"token_level_scores wants score\[batch response\] float32, but is float64"),
        ((F32.numpy(), BOOL), {}, r"scores wants .*, but is an ndarray; pass a torch\.Tensor of dtype float32"),
        ((F32[0], BOOL), {}, r"but is of the shape \(3,\); expected 2 axes: batch response"),
        (
            (F32, BOOL[:1]),
            {},
            r"response_mask has the shape \(1, 3\), so its batch axis is 1 long.* have 2; expected one",
        ),
        ((F32, BOOL[:, :2]), {}, r"its response axis is 2 long, but other columns of this call have 3"),
        (
            (F32, BOOL, F32),
            {},
            r"cannot be called like this: too many.* Its ports are \(token_level_scores, response_mask\)",
        ),
        ((F32, BOOL), {"mask": BOOL}, r"cannot be called like this: got an unexpected keyword argument 'mask'"),
    ],
)
def test_eager_calls_are_checked(arguments: tuple[Any, ...], keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(PortError, match=said):
        LengthPenalty()(*arguments, **keywords)


def test_record_ports_are_checked_too() -> None:
    old = OldLogProb(actor=TrainerEngine())
    with pytest.raises(PortError, match=r"old_log_prob\.rollout wants a record with .*, but was given a Tensor, which"):
        old(torch.zeros(2, 3))
    with pytest.raises(PortError, match=r"old_log_prob\.rollout\.temperature wants .* but is float64; convert it"):
        old(answers()._replace(temperature=torch.ones(2, dtype=torch.float64)))
    rollout = answers()._replace(response_text=np.array(["a", "b"]))
    with pytest.raises(PortError, match=r"response_text wants text\[batch\] object, but is <U1; .*astype\(object\)"):
        Reward(exact).run({PortField("rollout", "response_text"): rollout.response_text})


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (
            torch.zeros(2, 3),
            r"broken returned a Tensor; expected the record that its __call__ declares: return Split\(",
        ),
        (None, r"broken returned a NoneType; expected the record"),
        ((torch.zeros(2, 3), torch.zeros(2, 3)), r"broken returned a tuple; expected the record"),
        ("double", r"broken\.returns declares return\[batch response\] float32, but is float64; convert it"),
        ("short", r"broken\.returns has the shape \(1, 3\), so its batch axis is 1 long"),
    ],
)
def test_what_an_operator_returns_is_checked(returned: Any, said: str) -> None:
    from tests.support.kernel import Split

    made = {"double": torch.zeros(2, 3, dtype=torch.float64), "short": torch.zeros(1, 3)}

    class Broken(Operator):
        def __call__(self, values: c.Values) -> Split:
            return Split(values, made[returned]) if isinstance(returned, str) else returned

    with pytest.raises(PortError, match=said):
        Broken()(torch.zeros(2, 3))


def test_values_without_batch_are_checked() -> None:
    class Wait(Operator):
        def __call__(self, updated: Updated) -> Updated:
            return updated

    assert Wait()(Updated(3)) == Updated(3)
    with pytest.raises(PortError, match=r"wait\.updated wants Updated, but is an int; pass an Updated"):
        Wait()(3)  # type: ignore[arg-type]


def test_rows_may_change_where_the_class_says_so() -> None:
    class Half(Operator):
        new_axes: ClassVar[tuple[str, ...]] = ("batch",)

        def __call__(self, values: c.Values) -> c.Values:
            return values[::2]

    class Sneaky(Operator):
        def __call__(self, values: c.Values) -> c.Values:
            return values[::2]

    assert Half()(torch.zeros(4, 3)).shape == (2, 3)
    with pytest.raises(PortError, match=r"sneaky\.values has the shape \(2, 3\)"):
        Sneaky()(torch.zeros(4, 3))


# ---------------------------------------------------------------------------------------------- roles, keys and states


def test_a_live_engine_may_stand_in_the_field() -> None:
    assert torch.equal(Scaled(Twice())(torch.ones(1, 2)), torch.full((1, 2), 2.0))
    assert torch.equal(Scaled(scale=Twice())(torch.ones(1, 2)), torch.full((1, 2), 2.0))
    with pytest.raises(ParameterError, match=r"wants a Role, or a live engine that is a Scale, not int"):
        Scaled(3)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="not TrainerEngine"):
        Scaled(TrainerEngine())  # type: ignore[arg-type]


def test_a_role_is_resolved_by_the_session_and_only_there() -> None:
    ones = torch.ones(1, 2)
    with pytest.raises(
        BindError, match=r"scaled\.scale is the role 'scale', and no job is active.*Scaled\(scale=engine\)"
    ):
        Scaled()(ones)
    with Session({"scale": Twice(), "other": Twice()}, seed=0).active():
        assert torch.equal(Scaled()(ones), 2 * ones)
        assert torch.equal(Scaled(Role("other"))(ones), 2 * ones)
        with pytest.raises(BindError, match=r"is the role 'third', which is not bound; bound are \['other', 'scale'\]"):
            Scaled(Role("third"))(ones)
    with pytest.raises(AttributeError, match="is a name here, not an engine"):
        Scaled().scale.factor()


def test_keys_depend_on_seed_step_and_node() -> None:
    values = torch.zeros(2, 3)
    with pytest.raises(BindError, match=r"noise draws random numbers.*pass key=Key\.of\(seed\)"):
        Noise()(values)
    assert torch.equal(Noise()(values, key=Key.of(1)), Noise()(values, key=Key.of(1)))

    def drawn(seed: int, step: int, node: str) -> Tensor:
        session = Session({}, seed)
        session.begin_step(step)
        with session.active():
            return Noise().named(node)(values)

    draws = [drawn(0, 0, "noise"), drawn(1, 0, "noise"), drawn(0, 1, "noise"), drawn(0, 0, "other")]
    assert torch.equal(draws[0], drawn(0, 0, "noise"))
    assert all(not torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])


def test_state_is_owned_by_the_session() -> None:
    session, running, ones = Session({}, seed=0), Running(5), torch.ones(1, 1)
    with session.active():
        assert [float(running(ones)), float(running(ones))] == [7.0, 8.0]
        assert float(Running(100).named("other")(ones)) == 102.0
        assert session.state == {"running.calls": 7, "other.calls": 101}
        with pytest.raises(RuntimeError, match="negative"):
            running(-ones)
        assert session.state["running.calls"] == 7, "a call that failed must leave the state as it was"
    with Session({}, seed=0, state={"running.calls": 40}).active():
        assert float(running(ones)) == 42.0
    assert running.calls.value == 5, "the operator itself stays as it was"


def test_state_outside_a_session_is_the_instances() -> None:
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


def test_the_base_of_operators_is_none() -> None:
    with pytest.raises(ParameterError, match=r"Operator is the base of operators and computes nothing; make one of a"):
        Operator()


def test_columns_are_no_parameters() -> None:
    said = r"Scaled takes parameters, and was given columns; call it on columns: Scaled\(\)\(\.\.\.\)"
    for column in (torch.zeros(2), np.zeros(2), Impure(torch.zeros(2), 1)):
        with pytest.raises(ParameterError, match=said):
            Scaled(column)  # type: ignore[arg-type]


def test_a_state_wants_a_function() -> None:
    with pytest.raises(DefinitionError, match=r"test_operator.py:\d+: State\(3.0\).*State\(lambda self: 3.0\)"):
        State(3.0)  # type: ignore[arg-type]


def test_names() -> None:
    gae = GAE(0.9)
    assert (gae.name, gae.named("gae_long").name, gae.name) == ("gae", "gae_long", "gae")
    assert gae.named("gae_long").gamma == 0.9
    for wrong in ("gae-long", "a.b", "", "1st"):
        with pytest.raises(ParameterError, match="is not a node name; expected an identifier"):
            gae.named(wrong)


@pytest.mark.parametrize("op", [GAE(0.9), Generate(), UpdateActor(), KLShape(), Clip().named("clip_2")])
def test_operators_copy_and_pickle(op: Operator) -> None:
    for other in (copy.copy(op), copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert other == op
        assert other.name == op.name


def test_an_engine_that_writes_is_told_from_one_that_reads() -> None:
    class Both(Operator):
        actor: Writes[Scale] = Role("actor")
        ref: Reads[Scale] = Role("ref")

        def __call__(self, values: c.Values) -> c.Values:
            return values

    assert {name: use.mode for name, use in Both.role_uses.items()} == {"actor": "writes", "ref": "reads"}
    assert repr(Both()).endswith("Both(actor=Role('actor'), ref=Role('ref'))")

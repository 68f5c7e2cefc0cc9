"""Calls of operators: ``super().__call__`` and decorators of `__call__`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl import columns as c
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.core.operators.roles import Reads, Role
from flowrl.core.operators.session import Session, State
from flowrl.data.keys import Key
from flowrl.data.metrics import Metrics
from flowrl.data.now import Now
from flowrl.graph import algorithm
from flowrl.operators import GAE, Generate, GroupAdvantage, KLShape, Repeat, Reward, Whiten
from flowrl.operators.advantages.gae import GAEOutput
from flowrl.records import PromptBatch
from tests.core.operators.test_operator import Scale, Twice
from tests.support.errors import raises
from tests.support.kernel import LengthPenalty, exact

ONES = torch.ones(2, 3)


class Base(Operator):
    """Uses a parameter, a role, a state, a key, metrics and `Now`."""

    factor: float = 2.0
    scale: Reads[Scale] = Role("scale")
    calls = State(lambda self: 0)

    def __call__(
        self,
        values: c.Values,
        key: Key = INJECTED,
        metrics: Metrics = INJECTED,
        now: Now = INJECTED,
    ) -> c.Values:
        self.calls.value += 1
        metrics.max("calls", self.calls.value)
        noise = torch.rand(values.shape, generator=key.generator())
        return values * self.factor * self.scale.factor() + noise


class Bare(Base):
    """Declares no injected parameter of its base."""

    def __call__(self, values: c.Values) -> c.Values:
        return super().__call__(values) + 1


class Passing(Base):
    """Declares some of them and passes them on."""

    def __call__(self, values: c.Values, key: Key = INJECTED, metrics: Metrics = INJECTED) -> c.Values:
        metrics.max("own", 7)
        return super().__call__(values, key=key, metrics=metrics) + 1


class Deeper(Bare):
    """By two steps."""

    def __call__(self, values: c.Values) -> c.Values:
        return super().__call__(values=values) + 1


class Silent(Base):
    """Has no `__call__` of its own."""

    factor: float = 3.0


@contextmanager
def session(**state: Any) -> Iterator[Session]:
    with Session({"scale": Twice()}, seed=5, state=state).active() as active:
        yield active


def noise(node: str) -> Tensor:
    with session() as active:
        return torch.rand(ONES.shape, generator=active.key(node).generator())


@pytest.mark.parametrize(
    ("operator", "plus"), [(Base(), 4.0), (Bare(), 5.0), (Passing(), 5.0), (Deeper(), 6.0), (Silent(), 6.0)]
)
def test_super_computes_with_the_session_of_the_call(operator: Operator, plus: float) -> None:
    with session() as active:
        for call in (1, 2):
            assert torch.equal(operator(ONES) - plus, plus + noise(operator.name) - plus)
            assert active.state == {f"{operator.name}.calls": call}
            metrics = active.metrics[operator.name].compute()
            assert metrics == {"calls": call} | ({"own": 7} if isinstance(operator, Passing) else {})


def test_a_call_of_a_class_that_is_not_an_operator_is_refused() -> None:
    class Mixin:
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    with raises("operator.no-call"):

        class Both(Mixin, Base):
            pass


@pytest.mark.parametrize("operator", [Bare(scale=Twice()), Passing(scale=Twice()), Deeper(scale=Twice())])
def test_super_computes_without_a_session(operator: Any) -> None:
    """Then a key must be passed."""
    if isinstance(operator, Passing):
        assert operator(ONES, key=Key.of(1)).shape == (2, 3)
        assert operator.calls.value == 1
    with raises("session.no-job", node=operator.name, missing="key"):
        operator(ONES)


def test_a_subclass_of_a_standard_operator() -> None:
    class Penalized(LengthPenalty):
        more: float = 0.5

        def __call__(self, token_level_scores: c.TokenLevelScores, response_mask: c.ResponseMask) -> c.TokenLevelScores:
            return super().__call__(token_level_scores, response_mask) - self.more

    class Both(GAE):
        def __call__(
            self, token_level_rewards: c.TokenLevelRewards, values: c.Values, response_mask: c.ResponseMask
        ) -> GAEOutput:
            found = super().__call__(token_level_rewards, values, response_mask)
            return found._replace(advantages=-found.advantages)

    class Shaped(KLShape):
        def __call__(
            self,
            token_level_scores: c.TokenLevelScores,
            old_log_probs: c.OldLogProbs,
            ref_log_prob: c.RefLogProbs,
            response_mask: c.ResponseMask,
        ) -> c.TokenLevelRewards:
            return super().__call__(token_level_scores, old_log_probs, ref_log_prob, response_mask) * 2

    mask = torch.ones(2, 3, dtype=torch.bool)
    assert torch.equal(Penalized(0.25)(ONES, mask), ONES - 0.75)
    own, base = Both()(ONES, 0 * ONES, mask), GAE()(ONES, 0 * ONES, mask)
    assert torch.equal(own.advantages, -base.advantages) and torch.equal(own.returns, base.returns)
    assert torch.equal(Shaped()(ONES, ONES, 0 * ONES, mask), 2 * KLShape()(ONES, ONES, 0 * ONES, mask))
    with session() as active:
        Shaped().named("shaped")(ONES, ONES, 0 * ONES, mask)
        assert active.metrics["shaped"].compute()["kl/ref"] == pytest.approx(1.0)


def test_a_subclass_that_calls_super_is_traced_as_one_node() -> None:
    class Halved(Whiten):
        def __call__(self, advantages: c.Advantages, response_mask: c.ResponseMask) -> c.Advantages:
            return super().__call__(advantages, response_mask) / 2

    @algorithm
    def whitened(batch: PromptBatch) -> Any:
        prompts = Repeat(2)(batch)
        rollout = Generate()(prompts)
        advantages = GroupAdvantage()(Reward(exact)(rollout, prompts), rollout.response_mask, prompts.uid)
        return Halved()(advantages, rollout.response_mask)

    graph = whitened()
    assert list(graph.nodes)[-2:] == ["group_advantage", "halved"]
    assert graph["halved"].inputs.keys() == whitened().edit(replace={"halved": Whiten()})["whiten"].inputs.keys()
    values, mask = torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert torch.equal(Halved()(values, mask), Whiten()(values, mask) / 2)


def test_super_refuses_unknown_ports() -> None:
    class Wrong(Base):
        def __call__(self, values: c.Values) -> c.Values:
            return super().__call__(values, returns=values)

    with session(), raises("call.arguments", node="wrong", known=("values",)):
        Wrong()(ONES)


def test_super_needs_all_required_ports() -> None:
    class Short(LengthPenalty):
        def __call__(self, token_level_scores: c.TokenLevelScores) -> c.TokenLevelScores:
            return super().__call__(token_level_scores)

    with raises("call.arguments", node="short", reason="missing a required argument: 'response_mask'"):
        Short()(ONES)


@pytest.mark.parametrize("initial", [lambda: 0, lambda self, other: 0])
def test_the_initial_value_of_a_state_is_a_function_of_the_operator(initial: Any) -> None:
    with raises("operator.state"):
        State(initial)


def test_the_initial_value_of_a_state_may_be_a_getter() -> None:
    assert State(attrgetter("coef")).initial(KLShape(0.5)) == 0.5


def test_decorators_of_call_apply() -> None:
    """A `__call__` under ``@torch.no_grad()`` computes without a gradient."""

    class Still(Operator):
        @torch.no_grad()
        def __call__(self, values: c.Values) -> c.Values:
            return values * 2

    class Moving(Operator):
        def __call__(self, values: c.Values) -> c.Values:
            return values * 2

    leaf = ONES.clone().requires_grad_()
    assert not Still()(leaf).requires_grad
    assert Moving()(leaf).requires_grad

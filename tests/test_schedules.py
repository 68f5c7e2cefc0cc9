"""Schedules: their values in each step, the parameters that accept them, and the checks of all steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

import flowrl
from flowrl import Operator, PromptData, operator
from flowrl import columns as c
from flowrl.backends import SGD, AdamW, TorchTrainer
from flowrl.core.operators.session import Session
from flowrl.errors import ParameterError
from flowrl.graphs import grpo, ppo
from flowrl.operators import GAE, AdaptiveKL, Generate, KLLoss, KLShape, PPOClip, RolloutCorrection, UpdateActor, Whiten
from flowrl.schedules import WSD, Constant, Cosine, Linear, Schedule
from flowrl.spec import in_step, schedules
from tests.support.errors import raises
from tests.support.kernel import exact


class Halving(Schedule):
    """A user's own."""

    start: float
    every: int = 10

    def at(self, step: int) -> float:
        return self.start * 0.5 ** (step // self.every)


class Sine(Schedule):
    """Up and down, for ever; its greatest and least are nowhere near its ends."""

    size: float = 1.0

    def at(self, step: int) -> float:
        return self.size * math.sin(step / 50)


def test_values_of_schedules_equal_worked_examples() -> None:
    line = Linear(0.1, 0.01, steps=100)
    assert [line.at(step) for step in (0, 50, 100, 1000)] == pytest.approx([0.1, 0.055, 0.01, 0.01], abs=1e-15)
    assert (line.at(0), line.at(100)) == (0.1, 0.01)
    assert [Linear(2, 4, steps=4, warmup=2).at(step) for step in range(6)] == [0, 1, 2, 3, 4, 4]
    assert [Constant(3, warmup=3).at(step) for step in range(5)] == [0, 1, 2, 3, 3]
    cosine = Cosine(1.2, 0.8, steps=200)
    assert [cosine.at(step) for step in (0, 50, 100, 200, 201)] == pytest.approx(
        [1.2, 1 + 0.2 / 2**0.5, 1.0, 0.8, 0.8], abs=1e-12
    )
    held = WSD(1.0, 0.2, steps=10, decay=4, warmup=2)
    assert [held.at(step) for step in range(12)] == pytest.approx(
        [0, 0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2], abs=1e-12
    )


@given(st.integers(1, 60), st.integers(0, 60), st.floats(0, 1), st.integers(0, 80))
def test_learning_rate_factors_are_bit_equal_to_the_usual_formula(
    steps: int, warmup: int, least: float, step: int
) -> None:
    """Warm-up times (least + (1 - least) * what is left), as trainers have always computed it."""
    warmup = min(warmup, steps)
    warm = min(1.0, step / warmup) if warmup else 1.0
    left = 1.0 - min(1.0, max(0, step - warmup) / max(1, steps - warmup))
    cosine = 0.5 * (1 + math.cos(math.pi * (1 - left)))
    assert Linear(1.0, least, steps=steps, warmup=warmup).at(step) == warm * (least + (1 - least) * left)
    assert Cosine(1.0, least, steps=steps, warmup=warmup).at(step) == warm * (least + (1 - least) * cosine)
    assert Constant(1.0, warmup=warmup).at(step) == warm


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9), st.integers(1, 60))
def test_linear_and_cosine_hit_both_ends_exactly_and_stay_between(start: float, end: float, steps: int) -> None:
    for schedule in (Linear(start, end, steps=steps), Cosine(start, end, steps=steps)):
        assert (schedule.at(0), schedule.at(steps)) == (start, end)
        least, most = min(start, end), max(start, end)
        room = 1e-15 * max(abs(least), abs(most))
        assert all(least - room <= schedule.at(step) <= most + room for step in range(steps))
    assert Linear(start, start, steps=steps).at(steps // 2) == start


def test_in_step_replaces_schedules_by_numbers() -> None:
    shaped = KLShape(coef=Linear(0.1, 0.01, steps=100)).named("shaped")
    assert shaped.in_step(50) == KLShape(coef=shaped.in_step(50).coef) and shaped.in_step(50).name == "shaped"
    assert shaped.in_step(50).coef == pytest.approx(0.055) and shaped.in_step(100).coef == 0.01
    assert shaped == KLShape(coef=Linear(0.1, 0.01, steps=100)) != KLShape(coef=Linear(0.1, 0.02, steps=100))
    plain = KLShape(0.1)
    assert plain.in_step(7) is plain
    assert Generate(max_new_tokens=Linear(10, 100, steps=9)).in_step(1).max_new_tokens == 20
    rising = Generate(max_new_tokens=Linear(1, 2, steps=3))  # 1, 1.33, 1.67, 2: the nearest
    assert [rising.in_step(step).max_new_tokens for step in range(4)] == [1, 1, 2, 2]


def test_in_step_replaces_schedules_of_nested_specs() -> None:
    update = UpdateActor(PPOClip(Linear(0.2, 0.1, steps=10)), kl=KLLoss("k3", Cosine(0.01, 0.002, steps=10)))
    assert set(schedules(update)) == {"loss.clip_low", "kl.coef"}
    assert update.in_step(5).loss.clip_low == pytest.approx(0.15)
    assert update.in_step(5).kl.coef == pytest.approx(0.006)
    assert update.in_step(10).kl == KLLoss("k3", 0.002)
    target = KLShape(AdaptiveKL(target=Linear(0.1, 0.2, steps=2)))
    assert target.in_step(1).coef.target == pytest.approx(0.15)
    assert in_step(update, 3).loss.clip_low == pytest.approx(0.17)


def test_in_step_replaces_schedules_of_specs_in_tuples() -> None:
    class Many(Operator):
        terms: tuple[KLLoss, ...]

        def __call__(self, advantages: c.Advantages) -> c.Advantages:
            return advantages

    many = Many((KLLoss("k1", 0.1), KLLoss("k3", Linear(0.4, 0.2, steps=2))))
    assert list(schedules(many)) == ["terms.coef"] and many.in_step(2).terms == (KLLoss("k1", 0.1), KLLoss("k3", 0.2))
    assert (plain := Many((KLLoss("k1", 0.1),))).in_step(2) is plain


def test_custom_operators_and_schedules_work_without_extra_code() -> None:
    class Shrink(Operator):
        by: float = Field(0.5, gt=0)

        def __call__(self, advantages: c.Advantages) -> c.Advantages:
            return advantages * self.by

    @operator
    def shrink(advantages: c.Advantages, *, by: float = 0.5) -> c.Advantages:
        return advantages * by

    for one in (Shrink(by=Halving(8.0)), shrink(by=Halving(8.0))):
        assert one.in_step(25)(torch.ones(1, 1)).item() == 2.0
        session = Session({}, seed=0)
        session.begin_step(10)
        with session.active():
            assert one(torch.ones(1, 1)).item() == 4.0
        with raises("session.no-job", node="shrink", missing="step"):
            one(torch.ones(1, 1))


@pytest.mark.parametrize(
    ("make", "code", "facts"),
    [
        (
            lambda: KLShape(coef=Linear(0.1, -0.1, steps=10)),
            "invalid",
            {"parameter": "coef", "given": "-0.1", "step": 10},
        ),
        (lambda: GAE(gamma=Sine()), "invalid", {"parameter": "gamma"}),
        (lambda: GAE(gamma=Linear(0.9, 1.1, steps=3)), "invalid", {"parameter": "gamma", "given": "1.1", "step": 3}),
        (lambda: GAE(gamma=WSD(0.9, 1.1, steps=9, decay=3)), "invalid", {"parameter": "gamma", "step": 9}),
        (
            lambda: GAE(gamma=Constant(0.9), lam=7),
            "invalid",
            {"parameter": "lam", "given": "7"},
        ),
        (lambda: Whiten(shift_mean=Linear(0, 1, steps=2)), "invalid", {"parameter": "shift_mean"}),
        (lambda: KLShape(estimator=Linear(0, 1, steps=2)), "invalid", {"parameter": "estimator"}),
        (lambda: Linear(0, 1, steps=2, warmup=3), "invalid", {"spec": "Linear"}),
        (lambda: WSD(0, 1, steps=5, decay=3, warmup=3), "invalid", {"spec": "WSD"}),
        (lambda: Linear(0.1, steps=3), "missing", {"parameter": "end"}),
        (lambda: KLShape(coef=Linear(0.1, 0.01)), "unknown-length", {"schedule": repr(Linear(0.1, 0.01))}),
        (lambda: GAE(Linear(0.9, 1, steps=3), 0.9, 5), "unknown", {"spec": "GAE", "given": "5"}),
        (lambda: GAE(0.9, gamma=Linear(0.9, 1, steps=3)), "invalid", {"parameter": "gamma"}),
        (lambda: GAE(lambd=Linear(0.9, 1, steps=3)), "unknown", {"parameter": "lambd"}),
        (lambda: Linear(0.1, Linear(0, 1, steps=2), steps=3), "constant", {"parameter": "end"}),
        (lambda: KLShape(coef=Schedule()), "schedule", {"schedule": "Schedule()", "step": 0}),
        (lambda: TorchTrainer("m", AdamW(lr=Linear(1e-5, 1e-6, steps=4))), "constant", {"parameter": "lr"}),
        (lambda: SGD(lr=Linear(1.0, 0.0, steps=4)), "constant", {"spec": "SGD"}),  # not that 0 is no learning rate
        (lambda: TorchTrainer("m", max_tokens=Linear(1, 9, steps=4)), "constant", {"parameter": "max_tokens"}),
        (lambda: PromptData("x.jsonl", max_prompt_length=Linear(1, 9, steps=4)), "constant", {"spec": "PromptData"}),
        (lambda: TorchTrainer("m", schedule=Linear(1, -1, steps=3)), "invalid", {"spec": "TorchTrainer"}),
        (lambda: TorchTrainer("m", schedule=Constant(0.0)), "invalid", {"parameter": "schedule"}),
        (lambda: TorchTrainer("m", schedule=Cosine(0, 0, steps=3, warmup=1)), "invalid", {"parameter": "schedule"}),
        (lambda: AdamW(lr=0), "invalid", {"spec": "AdamW", "parameter": "lr", "given": "0"}),
        (lambda: SGD(lr=0.0), "invalid", {"spec": "SGD", "parameter": "lr", "given": "0.0"}),
    ],
)
def test_a_schedule_with_an_invalid_value_in_any_step_is_refused(
    make: Callable[[], Any], code: str, facts: dict[str, Any]
) -> None:
    with raises(f"parameter.{code}", **facts):
        make()


@pytest.mark.parametrize(
    "schedule",
    [Linear(1.0, 0.0, steps=9), Cosine(1, 0, steps=9, warmup=9), WSD(1, 0, steps=9, decay=9), Constant(1.0, warmup=3)],
)
def test_a_learning_rate_may_start_or_end_at_0(schedule: Schedule) -> None:
    assert TorchTrainer("m", AdamW(lr=0.1), schedule=schedule).schedule == schedule


def test_constraints_between_parameters_are_checked_in_all_steps() -> None:
    with raises("correction.invalid-settings", low=3.0, high=2.0, step=4) as error:
        RolloutCorrection("token", "mask", low=Linear(0.5, 3.0, steps=4), high=2.0)
    assert "That is step 5, in which low is 3, by Linear" in error.value.message


def test_an_error_of_a_schedule_names_step_and_value() -> None:
    with pytest.raises(ParameterError, match=r"That is step 11, in which coef is -0\.1, by Linear"):
        KLShape(coef=Linear(0.1, -0.1, steps=10))


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "0.1", True, torch.tensor(0.1)])
def test_a_schedule_with_a_non_finite_value_is_refused(value: Any) -> None:
    class Odd(Schedule):
        def at(self, step: int) -> Any:
            return value if step == 7 else 0.5

    with raises("parameter.schedule", step=7, found=repr(value)):
        GAE(lam=Odd())


def test_values_of_later_steps_are_checked_in_their_step() -> None:
    class Late(Schedule):
        def at(self, step: int) -> float:
            return 0.5 if step < 20_000 else 1.5

    assert GAE(lam=Late()).in_step(19_999).lam == 0.5
    with raises("parameter.invalid", spec="GAE", parameter="lam", given="1.5"):
        GAE(lam=Late()).in_step(20_000)


def test_learning_rates_take_any_schedule() -> None:
    assert TorchTrainer("m", schedule=WSD(1.0, 0.1, steps=100, decay=10, warmup=5)).schedule.at(100) == 0.1
    assert TorchTrainer("m", schedule=Halving(1.0)).schedule.at(10) == 0.5


def test_diffs_and_files_contain_schedules() -> None:
    graph = ppo("tests.support.kernel:exact")
    falling = graph.edit(set={"kl_shape.coef": Linear(0.1, 0.01, steps=100)})
    assert str(graph.diff(falling)).splitlines()[1:] == [
        "~ kl_shape.coef: 0.001 -> Linear(start=0.1, end=0.01, steps=100, warmup=0)"
    ]
    lower = falling.edit(set={"kl_shape.coef.end": 0.0})
    assert str(falling.diff(lower)).splitlines()[1:] == ["~ kl_shape.coef.end: 0.01 -> 0.0"]
    other = falling.edit(set={"kl_shape.coef": Halving(0.1)})
    assert "-> Halving(start=0.1, every=10)" in str(falling.diff(other))
    assert "Linear(start=0.1" in falling.mermaid()
    again = flowrl.Graph.from_dict(falling.to_dict())
    assert again["kl_shape"].operator == falling["kl_shape"].operator and again.fingerprint() == falling.fingerprint()
    assert flowrl.Graph.from_dict(falling.to_dict(), imports=False).fingerprint() == falling.fingerprint()
    assert len({graph.fingerprint(), falling.fingerprint(), lower.fingerprint()}) == 3
    assert flowrl.Graph.from_dict(other.to_dict())["kl_shape"].operator.in_step(10).coef == 0.05


def test_rules_check_every_value_of_a_schedule() -> None:
    cooling = grpo(exact).edit(set={"generate.temperature": Linear(1.0, 0.0, steps=3)})
    assert [finding.rule for finding in cooling.check()] == ["FR007"]
    fading = ppo(exact).edit(
        set={"kl_shape.coef": Linear(0.1, 0.0, steps=9), "update_actor.kl": KLLoss()},
        wire={"update_actor.ref_log_prob": "ref_log_prob.ref_log_prob"},
    )
    assert [finding.rule for finding in fading.check()] == ["FR001"]


@pytest.mark.parametrize("path", ["repeat.n", "update_actor.mini_batch"])
def test_parameters_that_define_row_counts_cannot_be_scheduled(path: str) -> None:
    with raises("operator.invalid-attribute", where=path.partition(".")[0]):
        ppo(exact).edit(set={path: Linear(1, 8, steps=4)})


def test_properties_of_operators_are_evaluated_with_numbers() -> None:
    """A property that compares the parameter would otherwise meet a schedule there."""

    class Picky(Operator):
        coef: float = 0.0

        @property
        def effects(self) -> frozenset[str]:
            return frozenset({"kl"} if self.coef > 0.5 else ())

        def optional_ports(self) -> dict[str, bool]:
            return {"response_mask": self.coef >= 0}

        def __call__(self, advantages: c.Advantages, response_mask: c.ResponseMask | None = None) -> c.Advantages:
            return advantages

    graph = ppo(exact).edit(replace={"whiten": Picky(Linear(0.0, 1.0, steps=4))})
    assert graph["picky"].effects == {"kl"} and "generate" in graph["picky"].sources
    assert dataclasses.replace(graph["picky"].operator, coef=0.0).effects == frozenset()

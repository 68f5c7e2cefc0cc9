"""Effects: an operator or a loss with an unknown one cannot be constructed; users' own have a namespace."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from torch import Tensor

from flowrl import After, Loss, Operator
from flowrl import columns as c
from flowrl.core.operators.effects import Effect
from flowrl.graphs import ppo
from flowrl.operators import KLShape
from flowrl.schedules import Linear
from tests.support.errors import raises
from tests.support.kernel import exact


def shaping(effects: Any) -> type[KLShape]:
    """A class that declares these effects."""

    class Shaping(KLShape):
        @property
        def effects(self) -> frozenset[str]:
            return effects  # type: ignore[no-any-return]

    return Shaping


def test_an_effect_in_another_spelling_is_refused_with_the_nearest_name() -> None:
    with raises("operator.unknown-effect", where="Shaping", effect="KL") as error:
        shaping({"KL"})(coef=0.1)
    assert error.value.message.endswith("did you mean 'kl'?")


@pytest.mark.parametrize("effect", ["", "scale", "group_baseline", ".", "kl.", ".kl"])
def test_an_effect_without_a_namespace_is_unknown(effect: str) -> None:
    with raises("operator.unknown-effect", effect=effect):
        shaping({"kl", effect})()


@pytest.mark.parametrize("effects", ["kl", {1}, ["kl"], None])
def test_effects_are_a_set_of_strings(effects: Any) -> None:
    with raises("operator.invalid-attribute", where="Shaping", attribute="effects", found=repr(effects)):
        shaping(effects)()


@pytest.mark.parametrize("effects", [set(), {"kl"}, {Effect.KL, "scaled"}, {"kl", "lab.sparse"}])
def test_known_and_namespaced_effects_are_fine(effects: set[str]) -> None:
    assert shaping(effects)().effects == effects


def test_effects_are_strings() -> None:
    assert Effect.KL == "kl" and "kl" in {Effect.KL} and f"{Effect.KL}" == "kl"


def test_a_loss_is_refused_as_an_operator_is() -> None:
    class Odd(Loss):
        effects: ClassVar[frozenset[str]] = frozenset({"held to reference"})  # type: ignore[misc]

        def __call__(self, log_probs: c.LogProbs, advantages: c.Advantages) -> Tensor: ...

    with raises("operator.unknown-effect", where="Odd", effect="held to reference"):
        Odd()


def test_effects_that_change_over_time_are_refused_in_a_graph() -> None:
    class Late(Operator):
        coef: float = 0.0

        @property
        def effects(self) -> frozenset[str]:
            return frozenset({"KL"} if self.coef > 0.5 else ())

        def __call__(self, advantages: c.Advantages) -> c.Advantages:
            return advantages

    late = Late(coef=Linear(0.0, 1.0, steps=4))
    with raises("operator.unknown-effect", where="Late", effect="KL"):
        ppo(exact).edit(insert={"late": After("gae", late)})

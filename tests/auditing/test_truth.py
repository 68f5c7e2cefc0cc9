"""True gradients against independent sums and finite differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from flowrl import AuditTask
from flowrl.auditing.objective import KL, StatedObjective
from flowrl.auditing.task import Policy
from flowrl.auditing.truth import TrueGradient, gradient
from flowrl.core.operators.symbols import Edge
from tests.auditing.listed import Listed, listed

WORLD = AuditTask(prompts=1, tokens=2, steps=2, seed=3)
REF = WORLD.near("ref")


def truth(temperature: float = 1.0) -> TrueGradient:
    one = listed(WORLD)
    rewards = torch.zeros(1, len(one.responses), WORLD.steps, dtype=torch.float64)
    for response, paid in zip(one.responses, one.rewards, strict=True):
        rewards[0, WORLD.responses.index[response], len(response) - 1] = paid
    stated = StatedObjective(
        "actor", ("update",), "generate", temperature, (Edge("reward", "scores"),), (KL(0.3, "ref", False),), 0.2, 0, ()
    )
    return TrueGradient(stated, rewards, {"ref": REF})


def numbers() -> dict[str, Callable[[Listed, Listed], float]]:
    """Each number that has a gradient, over the responses as they are listed."""

    def over(each: Callable[[Listed, Listed, tuple[int, ...]], float]) -> Callable[[Listed, Listed], float]:
        return lambda one, ref: sum(p * each(one, ref, y) for y, p in zip(one.responses, one.probability, strict=True))

    def entropy(one: Listed, ref: Listed, y: tuple[int, ...]) -> float:
        rows = [one.policy[one.state(y[:t])] for t in range(len(y))]
        return float(-sum((row * np.log(row)).sum() for row in rows))

    return {
        "reward": over(lambda one, ref, y: one.rewards[one.responses.index(y)]),
        "divergence": over(lambda one, ref, y: sum(one.log_probs(y)) - sum(ref.log_probs(y))),
        "entropy": over(entropy),
        "length": over(lambda one, ref, y: float(len(y))),
    }


@pytest.mark.parametrize("name", ["reward", "divergence", "entropy", "length"])
def test_gradients_match_finite_differences(name: str) -> None:
    own, step = truth(), 1e-5
    of = {
        "reward": own.reward,
        "divergence": lambda policy: own.divergence(policy, "ref"),
        "entropy": own.entropy,
        "length": own.length,
    }[name]
    found, rewards = (
        gradient(of, WORLD.policy)[0],
        dict(zip(listed(WORLD).responses, listed(WORLD).rewards, strict=True)),
    )
    ref = Listed(WORLD, REF.logits[0], rewards.__getitem__)
    for state, token in np.ndindex(*found.shape):
        sides = []
        for sign in (1, -1):
            logits = WORLD.policy.logits[0].clone()
            logits[state, token] += sign * step
            sides.append(numbers()[name](Listed(WORLD, logits, rewards.__getitem__), ref))
        assert float(found[state, token]) == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=1e-7)


@pytest.mark.parametrize("forward", [True, False])
def test_token_level_divergences_do_not_differentiate_the_visited_states(forward: bool) -> None:
    """Only the last step depends on the sampled tokens there; with one token both are KL."""
    task = AuditTask(prompts=1, tokens=2, steps=1)
    own = TrueGradient(truth().stated, torch.zeros(1, 3, 1, dtype=torch.float64), {"ref": task.near("ref")})
    p, q = (one.by_state().exp()[0, 0].numpy() for one in (task.policy, task.near("ref")))
    wanted = (q * np.log(q / p)).sum() if forward else (p * np.log(p / q)).sum()
    assert float(own.divergence_by_state(task.policy, "ref", forward)) == pytest.approx(float(wanted))


def test_values_are_expected_future_rewards() -> None:
    own, one = truth(), listed(WORLD)
    ref = Listed(WORLD, REF.logits[0], lambda response: 0.0)
    found = own.values(WORLD.policy)[0]
    for prefix in {y[:t] for y in one.responses for t in range(len(y))}:
        total = weight = 0.0
        for y, p, paid in zip(one.responses, one.probability, one.rewards, strict=True):
            if y[: len(prefix)] == prefix and len(y) > len(prefix):
                late = sum(one.log_probs(y)[len(prefix) :]) - sum(ref.log_probs(y)[len(prefix) :])
                total, weight = total + p * (paid - 0.3 * late), weight + p
        assert float(found[one.state(prefix)]) == pytest.approx(total / weight)


def test_a_temperature_scales_the_logits_of_the_policy() -> None:
    cold = Policy(WORLD.policy.logits / 0.5, WORLD.responses)
    assert float(truth(0.5).reward(WORLD.policy)) == pytest.approx(float(truth().reward(cold)))

"""`AuditTask`: its enumerated responses and their probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flowrl import AuditTask
from flowrl.auditing.draws import Draws
from flowrl.errors import ParameterError
from tests.auditing.listed import listed


@pytest.mark.parametrize(
    ("task", "number"),
    [
        (AuditTask(), 4),
        (AuditTask(tokens=2, steps=2), 7),
        (AuditTask(tokens=2, steps=2, ends=False), 4),
        (AuditTask(tokens=1, steps=1), 2),
        (AuditTask(even=True), 4),
    ],
)
def test_all_responses_are_enumerated_once_and_their_probabilities_sum_to_1(task: AuditTask, number: int) -> None:
    found = task.responses
    assert len(found) == len(found.index) == number
    assert torch.equal(found.number_of(found.tokens, found.mask), torch.arange(number))
    for temperature in (0.5, 1.0):
        total = task.policy.by_response(temperature).exp().sum(-1)
        assert torch.allclose(total, torch.ones_like(total))


def test_log_probs_of_a_policy_match_an_independent_enumeration() -> None:
    task = AuditTask(tokens=2, steps=3, prompts=2, seed=4)
    for prompt in range(2):
        one = listed(task, prompt)
        assert set(one.responses) == task.responses.index.keys()
        for response in one.responses:
            log_probs = task.policy.by_token()[prompt, task.responses.index[response]].numpy()
            np.testing.assert_allclose(log_probs[: len(response)], one.log_probs(response))
            np.testing.assert_array_equal(log_probs[len(response) :], 0.0)


def test_an_even_task_differs_only_in_its_equal_lengths() -> None:
    task, even = AuditTask(seed=2), AuditTask(seed=2, even=True)
    assert torch.allclose(task.policy.by_response(), even.policy.by_response())
    assert torch.allclose(task.near("ref").by_response(0.7), even.near("ref").by_response(0.7))
    assert even.responses.mask.all()
    assert not task.responses.mask.all()


def test_batches_cycle_through_the_prompts_with_unique_ids() -> None:
    task = AuditTask(prompts=2)
    first, again = task.batch(), task.batch(3, draw=1)
    assert task.number_of(first.columns["prompts"]).tolist() == [0, 1]  # type: ignore[arg-type]
    assert task.number_of(again.columns["prompts"]).tolist() == [0, 1, 0]  # type: ignore[arg-type]
    assert len({*first.columns["uid"], *again.columns["uid"]}) == 5


@pytest.mark.parametrize("given", [{"tokens": 0}, {"steps": 9}, {"age": -1.0}, {"seed": -1}])
def test_invalid_tasks_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(ParameterError):
        AuditTask(**given)  # type: ignore[arg-type]


def test_scripts_enumerate_all_runs_even_with_different_numbers_of_draws() -> None:
    draws, seen = Draws(0), {}
    script: list[int] | None = []
    while script is not None:
        draws.begin(script)
        first = draws.one([0.2, 0.0, 0.8])
        run = (first, draws.one([0.5, 0.5])) if first == 2 else (first,)
        seen[run] = draws.probability
        script = draws.next()
    assert seen == pytest.approx({(0,): 0.2, (2, 0): 0.4, (2, 1): 0.4})


def test_sampled_draws_have_the_given_probabilities() -> None:
    draws = Draws(0)
    draws.begin(None)
    drawn = np.bincount([draws.one([0.2, 0.0, 0.8]) for _ in range(2000)], minlength=3) / 2000
    np.testing.assert_allclose(drawn, [0.2, 0.0, 0.8], atol=0.03)

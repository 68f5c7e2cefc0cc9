"""Tests of `trial.py`: runs continue one stream of prompts, as the steps of a training do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flowrl import After, AuditTask, audit
from flowrl.graphs import grpo, rloo
from flowrl.operators import Collect, Filter, Spread
from tests.auditing.listed import Listed, listed, unread
from tests.support.errors import raises
from tests.support.kernel import exact

pytestmark = pytest.mark.runs

TASK = AuditTask(steps=2)
LEAST = 0.05


def group(one: Listed) -> tuple[float, np.ndarray]:
    """For two responses to a prompt: the probability that they pass, and RLOO's expected gradient of those that do."""
    passes, expected = 0.0, np.zeros_like(one.policy)
    rows = list(zip(one.responses, one.rewards, one.probability, strict=True))
    for (first, paid, p), (other, got, q) in itertools.product(rows, repeat=2):
        if np.std([paid, got], ddof=1) > LEAST:
            passes += p * q
            expected += p * q * (paid - got) * (one.pull(first) - one.pull(other)) / 2
    return passes, expected


def collected(passes: list[float], start: int, rewinds: bool) -> tuple[np.ndarray, np.ndarray]:
    """The expected groups of each prompt in a step of two groups that starts at this prompt, and the distribution of
    the prompt at which the next step starts. Rounds refill from there on, or from the first prompt if it `rewinds`."""
    groups, ends, open_steps = np.zeros(2), np.zeros(2), {(start, 2): 1.0}
    while sum(open_steps.values()) > 1e-13:
        further: dict[tuple[int, int], float] = {}
        for (position, missing), probability in open_steps.items():
            prompts = [(position + i) % 2 for i in range(missing)]
            for passed in itertools.product([True, False], repeat=missing):
                chance = probability * float(
                    np.prod([passes[x] if yes else 1 - passes[x] for x, yes in zip(prompts, passed, strict=True)])
                )
                np.add.at(groups, [x for x, yes in zip(prompts, passed, strict=True) if yes], chance)
                at = 0 if rewinds else (position + missing) % 2
                if all(passed):
                    ends[at] += chance
                else:
                    state = at, missing - sum(passed)
                    further[state] = further.get(state, 0.0) + chance
        open_steps = further
    return groups, ends


def over_the_stream(passes: list[float]) -> np.ndarray:
    """The expected groups of each prompt in a step, over the stationary distribution of the starts."""
    (first, from_first), (second, from_second) = (collected(passes, start, rewinds=False) for start in (0, 1))
    values, vectors = np.linalg.eig(np.stack([from_first, from_second]).T)
    stationary = np.real(vectors[:, np.argmax(np.real(values))])
    found: np.ndarray = stationary / stationary.sum() @ np.stack([first, second])
    return found


def test_dynamic_sampling_is_unbiased_over_a_stream_of_prompts_by_enumeration() -> None:
    """A prompt counts as often as its groups pass, and the others have no gradient. If each step refilled from the
    first prompt, that one would count more."""
    passes, gradients = zip(*(group(listed(TASK, prompt)) for prompt in range(2)), strict=True)
    groups = over_the_stream(list(passes))
    np.testing.assert_allclose(groups / groups.sum(), np.array(passes) / sum(passes), rtol=1e-9)
    rewound, _ = collected(list(passes), 0, rewinds=True)
    assert rewound[0] / passes[0] > 1.5 * rewound[1] / passes[1]

    graph = rloo(unread, kl_coef=0.0).edit(insert={"collect": After("reward", Collect(Spread(least=LEAST), groups=8))})
    found = audit(graph, TASK, n=2, samples=400, explain=False)
    exact = np.stack([groups[x] * gradients[x] / passes[x] / 2 for x in range(2)])
    assert not found.biased
    assert np.linalg.norm(found.expected.numpy() - exact) < 0.1 * np.linalg.norm(exact)
    scales = [
        float((one * true).sum() / true.square().sum()) for one, true in zip(found.expected, found.true, strict=True)
    ]
    assert scales == pytest.approx([1 / np.mean(passes)] * 2, rel=0.15)


def test_graphs_without_refills_see_each_prompt_once_a_step() -> None:
    whole = audit(rloo(unread), AuditTask(steps=1), n=2)
    assert whole.exact
    assert not whole.biased


def test_a_skipped_update_counts_as_none() -> None:
    """A group without spread has no gradient, so with one prompt a step, GRPO's audit is that of GRPO with a filter."""
    task, graph = AuditTask(prompts=1), grpo(exact, kl_coef=0.0)
    skipping = graph.edit(insert={"filter": After("reward", Filter(Spread(), on_underfill="skip"))})
    plain, skipped = audit(graph, task, n=2), audit(skipping, task, n=2)
    assert str(plain) == str(skipped) and plain.biased
    never = skipping.edit(set={"filter.predicate.least": 9.0})
    with raises("audit.node-failed", graph="grpo"):
        audit(never, task, n=2)

"""Tabular engines of audits: sampling, scoring, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flowrl import AuditTask, Key
from flowrl.auditing.draws import Draws
from flowrl.auditing.engines import TabularRollout, TabularScorer, TabularTrainer
from flowrl.data.text.tokenizer import assemble
from flowrl.protocols.protocols import Rollout, Sampled, Sampling, Scorer, Trainer
from flowrl.records import RolloutBatch
from tests.support.errors import raises

WORLD = AuditTask(prompts=1, tokens=2, steps=2)


def engines() -> tuple[TabularTrainer, TabularRollout, Draws]:
    draws = Draws(0)
    trainer = TabularTrainer(WORLD, WORLD.policy, WORLD.near("age", 0.5))
    rollout = TabularRollout(WORLD, WORLD.policy, draws)
    rollout.sync(trainer)
    return trainer, rollout, draws


def sampled(sampling: Sampling) -> dict[tuple[int, ...], tuple[float, Sampled]]:
    """Each response that may be sampled, with its probability."""
    _, rollout, draws = engines()
    found: dict[tuple[int, ...], tuple[float, Sampled]] = {}
    script: list[int] | None = []
    while script is not None:
        draws.begin(script)
        batch = WORLD.batch()
        one = rollout.generate(batch.columns["prompts"], batch.columns["prompt_mask"], ["a"], sampling, Key.of(0))  # type: ignore[arg-type]
        found[tuple(one.responses[0].tolist())] = draws.probability, one
        script = draws.next()
    return found


def test_tabular_engines_implement_the_engine_protocols() -> None:
    trainer, rollout, _ = engines()
    assert isinstance(trainer, Trainer)
    assert isinstance(rollout, Rollout)
    assert isinstance(TabularScorer(WORLD, WORLD.policy), Scorer)


def test_responses_are_sampled_with_the_probabilities_of_the_policy() -> None:
    found = sampled(Sampling(1.0, 0, 1.0, 2))
    assert len(found) == len(WORLD.responses)
    assert sum(probability for probability, _ in found.values()) == pytest.approx(1.0)
    for probability, one in found.values():
        assert float(one.log_probs.sum().exp()) == pytest.approx(probability, abs=1e-6)
        assert one.response_mask.all()  # as wide as the longest, and there is one


def test_greedy_and_top_k_sampling_exclude_the_other_responses() -> None:
    [(greedy, _)] = sampled(Sampling(0.0, 0, 1.0, 2)).items()
    first = WORLD.policy.by_state()[0]
    assert greedy[0] == int(first[0].argmax())
    two = sampled(Sampling(1.0, 2, 1.0, 2))
    assert {response[0] for response in two} == set(first[0].topk(2).indices.tolist())
    probabilities = np.sort(first[0].exp().numpy())[::-1]
    nucleus = sampled(Sampling(1.0, 0, float(probabilities[:2].sum()) - 1e-6, 2))
    assert {response[0] for response in nucleus} == {response[0] for response in two}
    assert sum(probability for probability, _ in nucleus.values()) == pytest.approx(1.0)


def test_penalties_and_min_p_change_the_probabilities_of_responses() -> None:
    sampling = Sampling(0.8, 0, 1.0, 2, min_p=0.2, repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.4)
    found, responses, logits = sampled(sampling), WORLD.responses, WORLD.policy.logits[0]
    for tokens, (probability, _) in found.items():
        expected, row = 1.0, responses.index[tokens]
        for t, token in enumerate(tokens):
            now = [float(x) for x in logits[responses.states[row, t]]]
            for before in {*tokens[:t]}:
                now[before] = now[before] / 1.5 if now[before] > 0 else now[before] * 1.5
                now[before] -= 0.3 + 0.4 * tokens[:t].count(before)
            weights = [np.exp(x / 0.8) for x in now]
            kept = [w for w in weights if w >= 0.2 * max(weights)]
            expected *= weights[token] / sum(kept)
        assert probability == pytest.approx(expected, abs=1e-6)
    assert sum(probability for probability, _ in found.values()) == pytest.approx(1.0)
    assert len(found) < len(responses)


def test_the_trainer_scores_with_the_old_policy_and_updates_the_current_one() -> None:
    trainer, rollout, draws = engines()
    draws.begin(None)
    batch = WORLD.batch(6)
    prompts, mask = batch.columns["prompts"], batch.columns["prompt_mask"]
    one = rollout.generate(prompts, mask, list("abcdef"), Sampling(1.0, 0, 1.0, 2), Key.of(0))  # type: ignore[arg-type]
    ids, attended, positions = assemble(prompts, mask, one.responses, one.response_mask)  # type: ignore[arg-type]
    text, version = np.array(["."] * 6, dtype=object), torch.zeros(6, dtype=torch.int64)
    rows = RolloutBatch(
        prompts,
        one.responses,
        ids,
        attended,
        positions,
        one.response_mask,
        one.log_probs,
        text,
        torch.ones(6),
        version,  # type: ignore[arg-type]
        one.versions,
    )
    assert torch.allclose(trainer.log_probs(rows), one.log_probs, atol=1e-6)
    cold = rows._replace(temperature=torch.full((6,), 0.5))
    assert not torch.allclose(trainer.log_probs(cold), one.log_probs, atol=1e-3)
    pulled = WORLD.policy.logits.clone().requires_grad_()
    last = torch.log_softmax(pulled[0, 0], -1)[one.responses[0, 0]]
    norm = torch.autograd.grad(last, pulled)[0].square().sum()
    assert float(trainer.logit_norms(rows)[0, 0]) == pytest.approx(float(norm), abs=1e-6)
    masked = rows._replace(response_mask=torch.zeros_like(one.response_mask))
    assert trainer.log_probs(masked).eq(0).all()


def test_unsynced_generation_and_saving_a_model_are_refused() -> None:
    rollout = TabularRollout(WORLD, WORLD.policy, Draws(0))
    batch = WORLD.batch()
    with raises("audit.unsupported-graph"):
        rollout.generate(batch.columns["prompts"], batch.columns["prompt_mask"], ["a"], Sampling(1, 0, 1, 2), Key.of(0))  # type: ignore[arg-type]
    with raises("audit.unsupported-graph", path="folder"):
        engines()[0].save_pretrained("folder")

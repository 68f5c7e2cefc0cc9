"""Tests of `operators/engines/engines.py` (`Repeat`, `Generate`, log-probs, values) and `operators/updates/update.py`,
called by hand on live engines."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl import INJECTED, Key, Metrics
from flowrl import columns as c
from flowrl.backends import SGD, TorchCritic, TorchRollout, TorchScorer, TorchTrainer
from flowrl.columns import lookup
from flowrl.errors import DataError, ParameterError
from flowrl.operators import (
    Generate,
    KLLoss,
    OldLogProb,
    PPOClip,
    RefLogProb,
    Repeat,
    UpdateActor,
    UpdateCritic,
    Value,
)
from flowrl.operators.losses.objective import TokenObjective
from flowrl.operators.updates.mini_batches import mini_batch_rows, rank_parts
from flowrl.protocols.protocols import Sampling
from flowrl.records import RolloutBatch
from tests.support.errors import raises
from tests.support.jobs import Rows, prompt_batch, rollout_batch, weights_of

CONTEXT: Any = SimpleNamespace(seed=0)
PROMPTS: Rows = ([10, 11, 12], [13], [14, 15])
KEY = Key.of(0)


def trainer(folder: str, **settings: Any) -> Any:
    settings = {"optimizer": SGD(lr=0.1), "device": "cpu"} | settings
    return TorchTrainer(folder, **settings).build(CONTEXT)


def critic(folder: str) -> Any:
    return TorchCritic(folder, optimizer=SGD(lr=0.1), device="cpu").build(CONTEXT)


def count_steps(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one with every real optimizer step."""
    steps: list[None] = []
    step = torch.optim.SGD.step

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(None)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    return steps


def answers(rows: int) -> RolloutBatch:
    """Answers of unequal length, one of a single token, as version 0 would have sampled them."""
    prompts = prompt_batch([[10 + i, 20 + i, 30][: 1 + i % 3] for i in range(rows)])
    return rollout_batch(prompts, [[40 + i, 41, 42, 43 + i][: 1 + (3 * i + 3) % 4] for i in range(rows)])


# ---- Repeat


def test_repeat_keeps_copies_together_under_one_uid_and_gives_each_a_row_id() -> None:
    repeated = Repeat(2)(prompt_batch(PROMPTS))
    assert repeated.prompts.tolist() == [
        [10, 11, 12],
        [10, 11, 12],
        [0, 0, 13],
        [0, 0, 13],
        [0, 14, 15],
        [0, 14, 15],
    ]
    assert repeated.prompt_mask.sum(-1).tolist() == [3, 3, 1, 1, 2, 2]
    assert repeated.uid.tolist() == ["0/0/0", "0/0/0", "0/1/0", "0/1/0", "0/2/0", "0/2/0"]
    assert len(set(repeated.row_id)) == 6
    assert repeated.row_id.tolist()[:3] == ["0/0/0#0", "0/0/0#1", "0/1/0#0"]
    assert repeated.ground_truth.tolist() == repeated.uid.tolist()


def test_repeat_by_one_changes_no_column_but_the_row_id() -> None:
    batch = prompt_batch(PROMPTS)
    once = Repeat(1)(batch)
    assert torch.equal(once.prompts, batch.prompts)
    assert once.uid.tolist() == batch.uid.tolist()


@pytest.mark.parametrize("n", [0, -1, True, 1.5, math.inf])
def test_repeat_refuses_invalid_counts(n: Any) -> None:
    with pytest.raises(ParameterError, match="n="):
        Repeat(n)


# ---- Generate


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        (Generate(max_new_tokens=2), Sampling(1.0, 0, 1.0, 2, (), (), ignore_eos=False)),
        (Generate(0.5, 3, 0.9, 2, (7,), ("x",), True), Sampling(0.5, 3, 0.9, 2, (7,), ("x",), ignore_eos=True)),
    ],
)
def test_generate_passes_its_sampling_to_the_engine(
    synced: Any, monkeypatch: pytest.MonkeyPatch, operator: Generate, expected: Sampling
) -> None:
    seen, generate = [], synced.generate
    monkeypatch.setattr(synced, "generate", lambda *given: seen.append(given[3]) or generate(*given))
    replace(operator, rollout=synced)(prompt_batch(PROMPTS), key=KEY)
    assert seen == [expected]


@pytest.fixture(scope="module")
def synced(tiny: str) -> Any:
    """A rollout engine with weights of its own, in sync with an untrained actor (version 0)."""
    engine = TorchRollout(tiny, device="cpu").build(CONTEXT)
    engine.sync(trainer(tiny))
    return engine


def test_generate_concatenates_prompts_and_responses(synced: Any) -> None:
    batch = prompt_batch(PROMPTS)
    out = Generate(max_new_tokens=5, rollout=synced)(batch, key=KEY)
    rows, prompt, response = 3, 3, out.responses.shape[1]
    for row in range(rows):
        length = int(out.response_mask[row].sum())
        assert out.response_mask[row].tolist() == [True] * length + [False] * (response - length)
        expected = [*PROMPTS[row], *out.responses[row, :length].tolist()]
        assert out.input_ids[row][out.attention_mask[row]].tolist() == expected
        assert out.position_ids[row][out.attention_mask[row]].tolist() == list(range(len(expected)))
        assert out.input_ids.shape[1] == prompt + response
        text = synced.tokenizer.decode(out.responses[row, :length].tolist())
        assert out.response_text[row] == text
    assert out.policy_version.tolist() == [0, 0, 0]
    assert out.policy_version.dtype == torch.int64
    assert out.temperature.tolist() == [1.0, 1.0, 1.0]


def test_generate_records_the_version_of_the_receipt(tiny: str) -> None:
    actor, engine = trainer(tiny), TorchRollout(tiny, device="cpu").build(CONTEXT)
    rollout = answers(4)
    UpdateActor(actor=actor)(rollout, torch.zeros(rollout.response_mask.shape), rollout.rollout_log_probs, key=KEY)
    engine.sync(actor)
    out = Generate(max_new_tokens=2, rollout=engine)(prompt_batch(PROMPTS), key=KEY)
    assert out.policy_version.tolist() == [1, 1, 1]


def test_generate_reports_lengths(synced: Any) -> None:
    metrics = Metrics()
    out = Generate(max_new_tokens=4, rollout=synced)(prompt_batch(PROMPTS), key=KEY, metrics=metrics)
    lengths = out.response_mask.sum(-1).double()
    found = metrics.compute()
    assert found["response_length/mean"] == float(lengths.mean())
    assert found["response_length/total"] == float(lengths.sum())
    assert found["response_length/max"] == float(lengths.max())
    assert found["response_length/clip_ratio"] == float((lengths == 4).double().mean())


def test_generate_reports_cached_context_tokens(synced: Any) -> None:
    """Here the copies of a prompt, which are computed once."""
    for n, share in ((4, 3 / 4), (4, 3 / 4), (1, 0)):  # of each call alone
        metrics = Metrics()
        Generate(max_new_tokens=4, rollout=synced)(Repeat(n)(prompt_batch(PROMPTS)), key=KEY, metrics=metrics)
        assert metrics["throughput/context_tokens"].compute() == n * sum(map(len, PROMPTS))
        assert metrics["throughput/cached_share"].compute() == share


def test_greedy_is_an_effect_and_ignores_the_key(synced: Any) -> None:
    assert Generate(temperature=0.0).effects == {"greedy"}
    assert Generate(temperature=0.1).effects == frozenset()
    greedy = Generate(temperature=0.0, max_new_tokens=5, rollout=synced)
    batch = prompt_batch(PROMPTS)
    assert torch.equal(greedy(batch, key=Key.of(1)).responses, greedy(batch, key=Key.of(2)).responses)


def test_the_stop_token_ends_a_response_and_is_not_in_its_text(synced: Any) -> None:
    batch = prompt_batch(PROMPTS)
    plain = Generate(temperature=0.0, max_new_tokens=5, rollout=synced)(batch, key=KEY)
    stop = int(plain.responses[0, 0])
    stopped = Generate(temperature=0.0, max_new_tokens=5, stop_token_ids=(stop,), rollout=synced)(batch, key=KEY)
    assert stopped.response_mask[0].sum() == 1
    assert stopped.response_text[0] == ""


def test_generation_before_the_first_sync_is_refused(tiny: str) -> None:
    engine = TorchRollout(tiny, device="cpu").build(CONTEXT)
    with raises("engine.no-receipt", node="generate"):
        Generate(max_new_tokens=2, rollout=engine)(prompt_batch(PROMPTS), key=KEY)


@pytest.mark.parametrize("value", [-3, True, math.inf, math.nan])
@pytest.mark.parametrize("field", [each.name for each in fields(Sampling) if each.type in ("float", "int")])
def test_sampling_parameters_out_of_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=field):
        Generate(**{field: value})


@pytest.mark.parametrize("ids", [(-1,), (5, -7), (True,), (1.5,)])
def test_invalid_stop_ids_are_refused(ids: Any) -> None:
    with pytest.raises(ParameterError, match="stop_token_ids"):
        Generate(stop_token_ids=ids)


def test_stop_ids_out_of_the_vocabulary_are_refused_by_the_engine(synced: Any) -> None:
    vocabulary = synced.tokenizer.vocab_size
    with raises("model.unknown-token", token_id=vocabulary, vocabulary=vocabulary):
        Generate(stop_token_ids=(5, vocabulary), rollout=synced)(prompt_batch(PROMPTS), key=KEY)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_trainer_scores_at_the_sampling_temperature(tiny: str, temperature: float) -> None:
    actor, engine = trainer(tiny), TorchRollout(tiny, device="cpu").build(CONTEXT)
    engine.sync(actor)
    out = Generate(temperature=temperature, max_new_tokens=6, rollout=engine)(prompt_batch(PROMPTS), key=KEY)
    assert out.temperature.tolist() == [temperature] * 3
    old, mask = OldLogProb(actor=actor)(out), out.response_mask
    torch.testing.assert_close(old[mask], out.rollout_log_probs[mask], atol=1e-5, rtol=1e-5)
    plain = actor.log_probs(out._replace(temperature=torch.ones(3)))
    assert (plain - old)[mask].abs().max() > 0.1
    metrics = Metrics()
    UpdateActor(actor=actor)(out, old, torch.ones(mask.shape), key=KEY, metrics=metrics)
    assert metrics.compute()["actor/approx_kl"] == 0.0  # the update scores at that temperature too


# ---- OldLogProb, RefLogProb, Value


def test_old_and_reference_log_probs_agree_before_training(tiny: str) -> None:
    rollout = answers(5)
    old = OldLogProb(actor=trainer(tiny))(rollout)
    ref = RefLogProb(ref=TorchScorer(tiny, device="cpu").build(CONTEXT))(rollout)
    assert torch.equal(old, ref)
    assert (old[rollout.response_mask] < 0).all()
    assert (old[~rollout.response_mask] == 0).all()


def test_an_untrained_critic_returns_zero_values(tiny: str) -> None:
    rollout = answers(5)
    assert torch.equal(Value(critic=critic(tiny))(rollout), torch.zeros(rollout.response_mask.shape))


# ---- mini-batches


@given(
    size=st.integers(1, 6),
    batches=st.integers(1, 5),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_every_epoch_has_every_row_once(size: int, batches: int, epochs: int, seed: int) -> None:
    rows = size * batches
    batches_of_rows = mini_batch_rows(rows, size, epochs, Key.of(seed))
    assert [len(index) for index in batches_of_rows] == [size] * (batches * epochs)
    for epoch in range(epochs):
        of_epoch = torch.cat(batches_of_rows[epoch * batches : (epoch + 1) * batches])
        assert sorted(of_epoch.tolist()) == list(range(rows))


def test_mini_batch_orders_depend_on_key_and_epoch() -> None:
    def order(seed: int) -> list[list[int]]:
        return [index.tolist() for index in mini_batch_rows(12, 4, 2, Key.of(seed))]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1)[:3] != order(1)[3:]


def test_a_single_mini_batch_keeps_row_order() -> None:
    (index,) = mini_batch_rows(5, None, 1, KEY)
    assert index.tolist() == [0, 1, 2, 3, 4]


def test_token_weights_are_normalized_per_mini_batch() -> None:
    mask = torch.tensor([[True, True], [True, False], [True, True], [False, False]])
    weigh = TokenObjective(PPOClip()).weights
    for batch in rank_parts(mini_batch_rows(4, 2, 1, KEY), weigh, mask, mask, None):
        tokens = mask[batch.rows]
        expected = torch.where(tokens, 1.0 / tokens.sum(), torch.zeros(()))
        assert torch.equal(batch.weights, expected)


@pytest.mark.parametrize(("rows", "mini_batch"), [(6, 4), (4, 8), (0, None), (0, 2)])
def test_indivisible_mini_batches_are_refused(rows: int, mini_batch: int | None) -> None:
    with raises("update.invalid-mini-batch", given=mini_batch, rows=rows):
        mini_batch_rows(rows, mini_batch, 1, KEY)


# ---- UpdateActor and UpdateCritic


@pytest.mark.parametrize(("epochs", "mini_batch", "steps"), [(1, None, 1), (1, 2, 4), (3, 4, 6), (2, 8, 2)])
def test_one_optimizer_step_per_mini_batch(
    tiny: str, monkeypatch: pytest.MonkeyPatch, epochs: int, mini_batch: int | None, steps: int
) -> None:
    rollout = answers(8)
    actor = trainer(tiny, max_tokens=12)  # several micro-batches each, which must not count
    old, taken = OldLogProb(actor=actor)(rollout), count_steps(monkeypatch)
    advantages = torch.ones(rollout.response_mask.shape)
    updated = UpdateActor(ppo_epochs=epochs, mini_batch=mini_batch, actor=actor)(rollout, old, advantages, key=KEY)
    assert len(taken) == steps
    assert updated.version == actor.version == 1

    taken.clear()
    values = torch.zeros(rollout.response_mask.shape)
    learner = critic(tiny)
    update = UpdateCritic(ppo_epochs=epochs, mini_batch=mini_batch, critic=learner)
    assert update(rollout, values, advantages, key=KEY).version == learner.version == 1
    assert len(taken) == steps


def test_an_indivisible_mini_batch_is_refused_before_any_step(tiny: str) -> None:
    rollout, actor = answers(6), trainer(tiny)
    before = weights_of(actor)
    zeros = torch.zeros(rollout.response_mask.shape)
    with raises("update.invalid-mini-batch", given=4, rows=6):
        UpdateActor(mini_batch=4, actor=actor)(rollout, zeros, zeros + 1, key=KEY)
    assert actor.version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in actor.weights())


def test_the_ratio_is_exactly_one_at_the_first_and_only_step(tiny: str) -> None:
    rollout, actor, metrics = answers(8), trainer(tiny, max_tokens=12), Metrics()
    old, seen = OldLogProb(actor=actor)(rollout), []

    class Watching(PPOClip):
        def __call__(
            self,
            log_probs: c.LogProbs,
            old_log_probs: c.OldLogProbs,
            advantages: c.Advantages,
            response_mask: c.ResponseMask,
            metrics: Metrics = INJECTED,
        ) -> Tensor:
            seen.append((log_probs.detach() - old_log_probs)[response_mask])
            return super().__call__(log_probs, old_log_probs, advantages, response_mask, metrics)

    UpdateActor(Watching(), actor=actor)(rollout, old, torch.randn(old.shape), key=KEY, metrics=metrics)
    log_ratio = torch.cat(seen)
    assert len(seen) > 1  # micro-batches
    assert len(log_ratio) == rollout.response_mask.sum()
    assert (log_ratio == 0).all()
    assert metrics.compute()["actor/approx_kl"] == 0
    assert metrics.compute()["actor/pg_clipfrac"] == 0


def test_the_ratio_to_the_rollout_matches_its_formula(tiny: str) -> None:
    """In float64, from the log-probs of the engine and of the trainer."""
    rollout, actor, metrics = answers(8), trainer(tiny), Metrics()
    mask, draw = rollout.response_mask, torch.Generator().manual_seed(2)
    new = OldLogProb(actor=actor)(rollout)
    engine = torch.where(mask, new + 0.3 * torch.randn(mask.shape, generator=draw), 0.0)
    advantages = torch.randn(mask.shape, generator=draw)
    UpdateActor(PPOClip(0.2, ratio_to="rollout"), actor=actor)(rollout, engine, advantages, key=KEY, metrics=metrics)
    ratio, a = (new.double() - engine.double()).exp()[mask], advantages.double()[mask]
    surrogate = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    found = metrics.compute()
    assert found["actor/pg_loss"] == pytest.approx(-float(surrogate.mean()), rel=1e-5)
    assert found["actor/approx_kl"] == pytest.approx(float((engine - new)[mask].mean()), rel=1e-4)
    assert 0 < found["actor/pg_clipfrac"] < 1


def test_another_micro_batch_layout_changes_the_ratio_by_rounding_only(tiny: str) -> None:
    rollout, seen = answers(8), []
    old = OldLogProb(actor=trainer(tiny))(rollout)

    class Watching(PPOClip):
        def __call__(
            self,
            log_probs: c.LogProbs,
            old_log_probs: c.OldLogProbs,
            advantages: c.Advantages,
            response_mask: c.ResponseMask,
            metrics: Metrics = INJECTED,
        ) -> Tensor:
            seen.append((log_probs.detach() - old_log_probs)[response_mask].abs().max())
            return super().__call__(log_probs, old_log_probs, advantages, response_mask, metrics)

    UpdateActor(Watching(), actor=trainer(tiny, max_tokens=8))(rollout, old, torch.ones(old.shape), key=KEY)
    assert len(seen) > 1
    assert max(seen) <= 1e-5


def test_micro_batches_do_not_change_the_weights_after_a_step(tiny: str) -> None:
    rollout = answers(8)
    advantages = torch.randn(rollout.response_mask.shape, generator=torch.Generator().manual_seed(1))
    ends = []
    for max_tokens in (16384, 16, 7):
        actor = trainer(tiny, max_tokens=max_tokens, grad_clip=None)
        old = OldLogProb(actor=actor)(rollout)
        UpdateActor(mini_batch=4, actor=actor)(rollout, old, advantages, key=KEY)
        ends.append(weights_of(actor))
    start = weights_of(trainer(tiny))
    assert any(not torch.equal(start[name], ends[0][name]) for name in start)
    for other in ends[1:]:
        for name, weight in ends[0].items():
            assert (other[name] - weight).norm() <= 1e-6 * weight.norm(), name


def test_a_reference_for_the_kl_loss_is_used_and_reported(tiny: str) -> None:
    rollout, actor, metrics = answers(4), trainer(tiny), Metrics()
    old = OldLogProb(actor=actor)(rollout)
    mask = rollout.response_mask
    ref = torch.where(mask, old - 0.25, old)
    update = UpdateActor(kl=KLLoss("k1", 0.1), actor=actor)
    update(rollout, old, torch.zeros(old.shape), ref, key=KEY, metrics=metrics)
    assert metrics.compute()["kl/ref"] == pytest.approx(0.25, abs=1e-6)  # log(p/q) where p = e^0.25 q at every token
    assert update.effects == {"kl", "kl without a gradient"} and UpdateActor(kl=KLLoss("k2")).effects == {"kl"}
    assert UpdateActor().effects == frozenset()


def test_non_finite_gradients_do_not_change_the_weights(tiny: str) -> None:
    rollout, actor = answers(4), trainer(tiny)
    before, old = weights_of(actor), OldLogProb(actor=actor)(rollout)
    advantages = torch.ones(old.shape)
    advantages[2, 0] = float("nan")
    with pytest.raises(DataError, match="gradient norm is nan"):
        UpdateActor(actor=actor)(rollout, old, advantages, key=KEY)
    assert actor.version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in actor.weights())


def test_values_off_the_mask_do_not_change_the_update(tiny: str) -> None:
    rollout = answers(4)
    ends = []
    for junk in (0.0, float("nan")):
        actor = trainer(tiny)
        old = OldLogProb(actor=actor)(rollout)
        off = torch.full(old.shape, junk)
        mask = rollout.response_mask
        UpdateActor(actor=actor)(rollout, torch.where(mask, old, off), torch.where(mask, 1.0, off), key=KEY)
        ends.append(weights_of(actor))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_rollout_columns_are_registered() -> None:
    assert all(lookup(name) is not None for name in RolloutBatch._fields)

"""`TorchRollout` against `model.generate`, full forward passes, and a sampler written in float64 NumPy."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from flowrl.backends import TorchRollout, TorchTrainer
from flowrl.backends.torch.generate.rollout import TorchRolloutEngine
from flowrl.backends.torch.generate.sampler import next_token, penalized
from flowrl.backends.torch.score.engine import TorchTrainerEngine
from flowrl.data.keys import Key
from flowrl.data.text.tokenizer import assemble
from flowrl.protocols.protocols import Sampling
from tests.backends.torch.generate.rollouts import (
    GREEDY,
    KEY,
    SAMPLED,
    Actor,
    as_lists,
    full_log_probs,
    names,
    ragged,
    synced,
)
from tests.engines.contract.answers import CONTEXT, GenerationTests
from tests.nightly import examples
from tests.support.errors import raises
from tests.support.models import EOS, KINDS, PAD, VOCAB


@pytest.fixture(scope="module")
def folder(folders: dict[str, str]) -> str:
    return folders["llama"]


@pytest.fixture(scope="module")
def trainer(folder: str) -> TorchTrainerEngine:
    return TorchTrainer(folder, device="cpu").build(CONTEXT)


# The contract of all rollout engines


class TestContract(GenerationTests):
    """The contract tests with `TorchRollout`."""

    @pytest.fixture
    def engine(self, folder: str, trainer: TorchTrainerEngine) -> TorchRolloutEngine:
        engine = TorchRollout(folder, device="cpu").build(CONTEXT)
        engine.sync(trainer)
        return engine


# Agreement with transformers


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_transformers_generate(folders: dict[str, str], kind: str) -> None:
    actor = Actor(folders[kind])
    engine = synced(actor)
    prompts, mask = ragged(engine, [1, 5, 9, 5, 70, 2])  # 70 is past gemma2's sliding window of 64
    sampling = replace(GREEDY, max_new_tokens=24)
    got = engine.generate(prompts, mask, names(6), sampling, KEY)
    actor.model.eval()
    whole = actor.model.generate(
        prompts, attention_mask=mask.long(), do_sample=False, max_new_tokens=24, eos_token_id=EOS, pad_token_id=PAD
    )
    expected = whole[:, prompts.shape[1] :]
    assert torch.equal(got.responses, expected)
    assert torch.allclose(
        got.log_probs[got.response_mask].double(), full_log_probs(actor.model, prompts, mask, got, 1.0), atol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_log_probs_equal_a_full_forward(folders: dict[str, str], kind: str, temperature: float) -> None:
    actor = Actor(folders[kind])
    engine = synced(actor)
    prompts, mask = ragged(engine, [3, 8, 1, 66, 8])
    got = engine.generate(prompts, mask, names(5), replace(SAMPLED, temperature=temperature), KEY)
    expected = full_log_probs(actor.model.eval(), prompts, mask, got, temperature)
    assert got.log_probs.dtype == torch.float32
    assert (got.log_probs[got.response_mask].double() - expected).abs().max() < 1e-5
    assert (got.log_probs[~got.response_mask] == 0).all()


def test_assembled_sequences_have_the_sampled_log_probs(engine: TorchRolloutEngine) -> None:
    """One forward pass over the padded batch, with the positions of `assemble`."""
    prompts, mask = ragged(engine, [3, 8, 1, 5])
    got = engine.generate(prompts, mask, names(4), replace(SAMPLED, temperature=1.0, max_new_tokens=40), KEY)
    input_ids, attention, position = assemble(prompts, mask, got.responses, got.response_mask)
    with torch.no_grad():
        logits = engine.model(input_ids=input_ids, attention_mask=attention, position_ids=position).logits
    log_probs = logits[:, prompts.shape[1] - 1 : -1].log_softmax(-1).gather(2, got.responses[..., None]).squeeze(2)
    assert ((log_probs - got.log_probs)[got.response_mask]).abs().max() < 1e-5


# The sampler


def reference_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Temperature, then top-k, then top-p on the remaining tokens, each renormalized: one row, float64, plain loops."""
    weight = np.exp(logits / temperature - np.max(logits / temperature))
    ranked = sorted(range(len(weight)), key=lambda i: (-weight[i], i))
    ranked = ranked[:top_k] if top_k else ranked
    total, reached, selected = sum(weight[i] for i in ranked), 0.0, []
    for i in ranked:
        selected.append(i)
        reached += weight[i] / total
        assume(abs(reached - top_p) > 1e-6)  # where rounding in float32 decides
        if reached >= top_p:
            break
    probability = np.zeros(len(weight))
    probability[selected] = weight[selected] / weight[selected].sum()
    return probability


@examples(60)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.integers(2, 40),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 10, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.93, 1.0]),
)
def test_next_token_samples_the_reference_distribution(
    seed: int, vocabulary: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, vocabulary).astype(np.float32)
    expected = reference_distribution(logits.astype(np.float64), temperature, top_k, top_p)
    grid = 4000  # evenly spaced uniforms hit an interval of length p about p * grid times, up to one
    uniforms = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    sampling = Sampling(temperature, top_k, top_p, max_new_tokens=1)
    tokens, log_probs = next_token(torch.from_numpy(logits).expand(grid, -1), uniforms, sampling)
    assert set(tokens.tolist()) <= set(np.flatnonzero(expected))
    counts = np.bincount(tokens.numpy(), minlength=vocabulary)
    assert np.abs(counts - expected * grid).max() <= 1.01
    np.testing.assert_allclose(log_probs.numpy(), np.log(expected[tokens.numpy()]), atol=2e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(("min_p", "top_k", "top_p"), [(0.1, 0, 1.0), (0.02, 5, 1.0), (0.05, 0, 0.8), (1.0, 0, 1.0)])
def test_min_p_equals_the_warpers_of_transformers(temperature: float, min_p: float, top_k: int, top_p: float) -> None:
    """They run in the order of vLLM: min-p before top-k and top-p."""
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 2, (50, 40)).astype(np.float32))
    uniforms = torch.linspace(0, 0.999, 50, dtype=torch.float64)
    scores = logits / temperature
    for warper in (MinPLogitsWarper(min_p), TopKLogitsWarper(top_k or 40), TopPLogitsWarper(top_p)):
        scores = warper(None, scores)  # type: ignore[arg-type]
    expected = scores.double().log_softmax(-1)
    tokens, log_probs = next_token(logits, uniforms, Sampling(temperature, top_k, top_p, 1, min_p=min_p))
    found = expected.gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(log_probs.double(), found, atol=1e-5, rtol=0)
    assert found.isfinite().all() and (min_p < 1 or (log_probs == 0).all())


def test_a_nan_under_min_p_makes_its_row_nan() -> None:
    logits = torch.tensor([[0.0, torch.nan, 1.0], [0.0, 1.0, torch.inf], [0.0, 1.0, -torch.inf]])
    _, log_probs = next_token(logits, torch.full((3,), 0.5).double(), Sampling(1.0, 0, 1.0, 1, min_p=0.1))
    assert log_probs.isnan().tolist() == [True, True, False]


def test_penalties_equal_transformers_and_the_formula_of_openai() -> None:
    numbers = np.random.default_rng(2)
    logits = torch.from_numpy(numbers.normal(0, 2, (6, 30)).astype(np.float32))
    prompts, responses = (torch.from_numpy(numbers.integers(0, 30, (6, n))) for n in (4, 9))
    in_prompt = torch.zeros(6, 30, dtype=torch.bool).scatter_(1, prompts, True)
    counts = torch.stack([torch.bincount(row, minlength=30) for row in responses])
    expected = RepetitionPenaltyLogitsProcessor(1.4)(torch.cat([prompts, responses], 1), logits.clone())
    sampling = Sampling(1.0, 0, 1.0, 1, repetition_penalty=1.4)
    assert torch.equal(penalized(logits, sampling, in_prompt, counts), expected)
    both = replace(sampling, presence_penalty=0.3, frequency_penalty=-0.2)
    for row in range(6):
        for token in range(30):
            n = responses[row].tolist().count(token)
            expected[row, token] -= -0.2 * n + 0.3 * (n > 0)
    torch.testing.assert_close(penalized(logits, both, in_prompt, counts), expected)


def test_extreme_uniforms_never_sample_impossible_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(2, -1)
    uniforms = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    for top_k in (0, 4):
        tokens, log_probs = next_token(logits, uniforms, Sampling(1.0, top_k, 1.0, 1))
        assert tokens.tolist() == [1, 3]
        assert log_probs.tolist() == pytest.approx([np.log(0.5)] * 2)


def test_top_k_breaks_ties_by_the_lowest_ids() -> None:
    uniforms = (torch.arange(30, dtype=torch.float64) + 0.5) / 30
    tokens, _ = next_token(torch.zeros(30, 6), uniforms, Sampling(1.0, 3, 1.0, 1))
    assert torch.bincount(tokens).tolist() == [10, 10, 10]


def test_greedy_sampling_returns_the_mode_for_any_top_k_and_top_p() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    for sampling in (GREEDY, replace(GREEDY, top_k=1, top_p=0.1)):
        tokens, log_probs = next_token(logits, torch.tensor([0.99], dtype=torch.float64), sampling)
        assert tokens.tolist() == [1]
        assert log_probs.item() == pytest.approx(2 - np.log(1 + np.e + np.e**2))


def test_nan_logits_are_refused(actor: Actor, engine: TorchRolloutEngine) -> None:
    with torch.no_grad():
        actor.model.lm_head.weight[5, 0] = torch.nan
    prompts, mask = ragged(engine, [3])
    for sampling in (GREEDY, SAMPLED):
        with raises("engine.not-finite"):
            engine.generate(prompts, mask, names(1), sampling, KEY)


def test_frequencies_of_first_tokens_match_the_model(actor: Actor) -> None:
    engine = synced(actor, max_rows=4096)
    count = 4000
    prompts, mask = ragged(engine, [6])
    sampling = replace(SAMPLED, max_new_tokens=1)
    got = engine.generate(prompts.repeat(count, 1), mask.repeat(count, 1), names(count), sampling, KEY)
    with torch.no_grad():
        logits = actor.model(input_ids=prompts).logits[0, -1].double()
    expected = count * (logits / 0.8).softmax(-1).numpy()
    counts = np.bincount(got.responses[:, 0].numpy(), minlength=VOCAB)
    often = expected >= 5
    observed = np.append(counts[often], counts[~often].sum())
    expected_counts = np.append(expected[often], expected[~often].sum())
    degrees = len(observed) - 1
    assert degrees >= 5
    assert ((observed - expected_counts) ** 2 / expected_counts).sum() < degrees + 4 * np.sqrt(2 * degrees)


# Rows are independent of each other


def test_a_row_does_not_depend_on_order_batch_or_chunks(actor: Actor, engine: TorchRolloutEngine) -> None:
    lengths = [4, 9, 2, 4, 7, 1, 9, 3]
    prompts, mask = ragged(engine, lengths)
    rows = names(len(lengths))
    whole = engine.generate(prompts, mask, rows, SAMPLED, KEY)

    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    shuffled = engine.generate(prompts[order], mask[order], [rows[i] for i in order], SAMPLED, KEY)
    assert as_lists(shuffled) == [as_lists(whole)[i] for i in order]

    parts = [slice(0, 3), slice(3, 4), slice(4, 8)]
    split = [engine.generate(prompts[p], mask[p], rows[p], SAMPLED, KEY) for p in parts]
    assert [row for part in split for row in as_lists(part)] == as_lists(whole)

    chunked = synced(actor, max_rows=3).generate(prompts, mask, rows, SAMPLED, KEY)
    assert as_lists(chunked) == as_lists(whole)
    assert torch.allclose(chunked.log_probs, whole.log_probs, atol=1e-5)

    wider = torch.nn.functional.pad(prompts, (6, 0), value=PAD), torch.nn.functional.pad(mask, (6, 0))
    assert as_lists(engine.generate(*wider, rows, SAMPLED, KEY)) == as_lists(whole)


def test_rows_and_keys_have_different_random_numbers(engine: TorchRolloutEngine) -> None:
    prompts, mask = ragged(engine, [5])
    prompts, mask = prompts.repeat(4, 1), mask.repeat(4, 1)
    one = as_lists(engine.generate(prompts, mask, names(4), SAMPLED, KEY))
    assert len({tuple(row) for row in one}) == 4
    assert one != as_lists(engine.generate(prompts, mask, names(4), SAMPLED, Key.of(4)))
    assert one == as_lists(engine.generate(prompts, mask, names(4), SAMPLED, KEY))


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_prompt_is_prefilled_once_and_changes_no_sample(folders: dict[str, str], kind: str) -> None:
    engine = synced(Actor(folders[kind]))
    prompts, mask = ragged(engine, [4, 7, 5])
    copies = torch.tensor([0, 1, 0, 2, 2, 0, 1])
    fed: list[tuple[int, ...]] = []
    handle = engine.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    shared = engine.generate(prompts[copies], mask[copies], names(7), SAMPLED, KEY)
    handle.remove()
    assert fed[0] == (3, prompts.shape[1])
    assert fed[1][1] == 1 and max(rows for rows, _ in fed) <= 7
    alone = [
        engine.generate(prompts[copies[i : i + 1]], mask[copies[i : i + 1]], [name], SAMPLED, KEY)
        for i, name in enumerate(names(7))
    ]
    assert [as_lists(one)[0] for one in alone] == as_lists(shared)


def test_equal_ids_with_different_masks_are_different_prompts(engine: TorchRolloutEngine) -> None:
    """The pad id may be an ordinary token to a prompt, so the mask is part of a prompt's identity."""
    prompts = torch.tensor([[PAD, 9, 10], [PAD, 9, 10]])
    mask = torch.tensor([[False, True, True], [True, True, True]])
    got = engine.generate(prompts, mask, names(2), GREEDY, KEY)
    expected = full_log_probs(engine.model, prompts, mask, got, 1.0)
    assert torch.allclose(got.log_probs[got.response_mask].double(), expected, atol=1e-5)


def test_max_rows_bounds_every_forward(actor: Actor) -> None:
    engine = synced(actor, max_rows=3)
    fed: list[int] = []
    engine.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    prompts, mask = ragged(engine, [4] * 8)
    engine.generate(prompts, mask, names(8), SAMPLED, KEY)
    assert max(fed) == 3


# Where responses end


def test_responses_end_at_eos_and_finished_rows_leave_the_batch(engine: TorchRolloutEngine) -> None:
    prompts, mask = ragged(engine, [5] * 48)
    fed: list[int] = []
    engine.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    sampling = replace(SAMPLED, temperature=2.0, max_new_tokens=60)
    got = engine.generate(prompts, mask, names(48), sampling, KEY)
    lengths = got.response_mask.sum(1)
    assert got.responses.shape[1] == lengths.max() <= 60
    assert 1 < (lengths < 60).sum() < 48  # some ended by EOS, some by max_new_tokens
    for row, present, log_probs, versions, n in zip(*got, lengths.tolist(), strict=True):
        assert present.tolist() == [True] * n + [False] * (len(row) - n)
        assert EOS not in row[: n - 1]
        assert n == 60 or row[n - 1] == EOS
        assert (row[n:] == PAD).all() and (log_probs[n:] == 0).all() and (log_probs[:n] < 0).all()
        assert (versions[n:] == -1).all() and (versions[:n] == 0).all()
    # After the prefill, one forward pass per further column, over the unfinished rows.
    assert fed[1:] == [int((lengths > t).sum()) for t in range(1, int(lengths.max()))]


def test_stop_token_ids_end_rows_and_are_part_of_the_response(engine: TorchRolloutEngine) -> None:
    prompts, mask = ragged(engine, [5, 3])
    free = as_lists(engine.generate(prompts, mask, names(2), GREEDY, KEY))
    stop = free[0][4]
    got = engine.generate(prompts, mask, names(2), replace(GREEDY, stop_token_ids=(stop, VOCAB - 1)), KEY)
    ended = [row[: next((i + 1 for i, t in enumerate(row) if t in (stop, VOCAB - 1)), len(row))] for row in free]
    assert len(ended[0]) <= 5
    assert as_lists(got) == ended
    assert got.responses.shape[1] == max(map(len, ended))


def test_columns_are_as_wide_as_the_longest_response(engine: TorchRolloutEngine) -> None:
    prompts, mask = ragged(engine, [5, 3])
    everything = tuple(range(VOCAB))
    got = engine.generate(prompts, mask, names(2), replace(SAMPLED, stop_token_ids=everything), KEY)
    assert got.responses.shape == got.response_mask.shape == got.log_probs.shape == (2, 1)
    assert (got.responses.dtype, got.response_mask.dtype) == (torch.int64, torch.bool)
    none = engine.generate(prompts[:0], mask[:0], [], SAMPLED, KEY)
    assert none.responses.shape == (0, 0)


def test_generation_disables_dropout_and_restores_training_mode(folders: dict[str, str]) -> None:
    actor = Actor(folders["gpt2"])
    engine = synced(actor)
    prompts, mask = ragged(engine, [5, 3])
    quiet = engine.generate(prompts, mask, names(2), SAMPLED, KEY)
    actor.model.train()
    assert torch.equal(engine.generate(prompts, mask, names(2), SAMPLED, KEY).log_probs, quiet.log_probs)
    assert actor.model.training and not quiet.log_probs.requires_grad and not quiet.log_probs.is_inference()


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_a_response_ends_at_end_of_turn_tokens_of_the_folder(folder: str, tmp_path: Path, where: str) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    engine = synced(Actor(str(tmp_path)))
    prompts, mask = ragged(engine, [5])
    plain = as_lists(engine.generate(prompts, mask, names(1), GREEDY, KEY))[0]
    stop = plain[3]
    assert EOS not in plain and len(plain) == 12
    path = tmp_path / where
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | {"eos_token_id": [EOS, stop]}))
    ending = synced(Actor(str(tmp_path)))
    assert as_lists(ending.generate(prompts, mask, names(1), GREEDY, KEY))[0] == plain[: plain.index(stop) + 1]
    ignoring_eos = replace(GREEDY, ignore_eos=True)
    assert as_lists(ending.generate(prompts, mask, names(1), ignoring_eos, KEY))[0] == plain


# Refused prompts


def test_malformed_prompts_are_refused(engine: TorchRolloutEngine) -> None:
    prompts, mask = ragged(engine, [5, 3])

    def refused(prompts: Tensor, mask: Tensor, code: str, rows: int = 2, tokens: int = 12, **facts: Any) -> None:
        with raises(code, **facts):
            engine.generate(prompts, mask, names(rows), replace(SAMPLED, max_new_tokens=tokens), KEY)

    refused(prompts, mask[:, :-1], "engine.invalid-prompts", found=(2, 5))
    refused(prompts, mask.long(), "engine.invalid-prompts")
    refused(prompts, mask, "engine.invalid-prompts", rows=3)
    refused(prompts.flip(1), mask.flip(1), "engine.invalid-prompts", row=1)
    refused(prompts, torch.zeros_like(mask), "engine.invalid-prompts", row=0)
    hole = mask.clone()
    hole[0, 2] = False
    refused(prompts, hole, "engine.invalid-prompts", row=0)
    outside = prompts.clone()
    outside[0, 0] = VOCAB
    refused(outside, mask, "model.unknown-token", token_id=VOCAB, vocabulary=VOCAB)
    refused(prompts, mask, "model.too-long", tokens=252, row="row-0", found=257, expected=256)
    # Padding counts towards neither length nor vocabulary.
    padded = torch.nn.functional.pad(prompts, (200, 0), value=10**6), torch.nn.functional.pad(mask, (200, 0))
    same = engine.generate(prompts, mask, names(2), replace(GREEDY, max_new_tokens=100), KEY)
    assert as_lists(engine.generate(*padded, names(2), replace(GREEDY, max_new_tokens=100), KEY)) == as_lists(same)

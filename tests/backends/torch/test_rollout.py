"""`TorchRollout` against `model.generate`, full forward passes, and a sampler written in float64 NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig

from flowrl.backends import LoRA, TorchRollout, TorchTrainer
from flowrl.backends.torch.engine import TorchTrainerEngine
from flowrl.backends.torch.rollout import TorchRolloutEngine, next_token
from flowrl.core.protocols import Rollout, Sampled, Sampling
from flowrl.data.keys import Key
from flowrl.data.tokenizer import assemble
from flowrl.errors import AsleepError, BindError, DataError, ParameterError, SyncError
from flowrl.sync.digest import named_weights, tensor_digest, weights_digest
from tests.engines.answers import CONTEXT, AnswerTests
from tests.models import EOS, PAD, VOCAB, char_tokenizer, tiny_folder

KINDS = ["llama", "qwen2", "gpt2", "gemma2"]
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, max_new_tokens=12)
SAMPLED = Sampling(temperature=0.8, top_k=0, top_p=1.0, max_new_tokens=12)
KEY = Key.of(3)


class Actor:
    """What a rollout needs of a trainer: a model, its folder, a version, and weights to send."""

    sharded = False

    def __init__(self, folder: str, version: int = 0) -> None:
        self.folder = folder
        self.version = version
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.model)


class Context:
    """A build context that knows one actor."""

    seed = 0

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def engine(self, role: str) -> Any:
        assert role == "actor"
        return self.actor


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("models")
    return {kind: tiny_folder(path, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def folder(folders: dict[str, str]) -> str:
    return folders["llama"]


@pytest.fixture(scope="module")
def trainer(folder: str) -> TorchTrainerEngine:
    return TorchTrainer(folder, device="cpu").build(CONTEXT)


@pytest.fixture
def actor(folders: dict[str, str]) -> Actor:
    return Actor(folders["llama"])


@pytest.fixture
def engine(actor: Actor) -> TorchRolloutEngine:
    return synced(actor)


def synced(actor: Actor, **options: Any) -> TorchRolloutEngine:
    engine = TorchRollout(**options).build(Context(actor))
    engine.sync(actor)  # type: ignore[arg-type]
    return engine


def ragged(engine: TorchRolloutEngine, lengths: Sequence[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    numbers = np.random.default_rng(seed)
    return engine.tokenizer.pad_left([numbers.integers(EOS + 1, VOCAB, n).tolist() for n in lengths])


def names(count: int) -> list[str]:
    return [f"row-{i}" for i in range(count)]


def full_log_probs(model: Any, prompts: Tensor, mask: Tensor, sampled: Sampled, temperature: float) -> Tensor:
    """Log-probs of the responses by one forward pass without a cache, each row alone and without padding."""
    rows = []
    for i in range(len(prompts)):
        response = sampled.responses[i][sampled.response_mask[i]]
        ids = torch.cat([prompts[i][mask[i]], response])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, -len(response) - 1 : -1].double() / temperature
        rows.append(logits.log_softmax(-1).gather(1, response[:, None]).squeeze(1))
    return torch.cat(rows)


def as_lists(sampled: Sampled) -> list[list[int]]:
    return [row[mask].tolist() for row, mask in zip(sampled.responses, sampled.response_mask, strict=True)]


# What every rollout engine must do


class TestAnswers(AnswerTests):
    """On PyTorch."""

    @pytest.fixture
    def engine(self, folder: str, trainer: TorchTrainerEngine) -> TorchRolloutEngine:
        engine = TorchRollout(folder, device="cpu").build(CONTEXT)
        engine.sync(trainer)
        return engine


# Agreement with transformers


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate(folders: dict[str, str], kind: str) -> None:
    actor = Actor(folders[kind])
    engine = synced(actor)
    prompts, mask = ragged(engine, [1, 5, 9, 5, 70, 2])  # 70 is past gemma2's sliding window of 64
    sampling = replace(GREEDY, max_new_tokens=24)
    got = engine.generate(prompts, mask, names(6), sampling, KEY)
    actor.model.eval()
    whole = actor.model.generate(
        prompts, attention_mask=mask.long(), do_sample=False, max_new_tokens=24, eos_token_id=EOS, pad_token_id=PAD
    )
    theirs = whole[:, prompts.shape[1] :]
    assert torch.equal(got.responses, theirs)
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


def test_assembled_sequences_score_as_they_were_sampled(engine: TorchRolloutEngine) -> None:
    """The whole padded batch in one forward pass, with the positions that `assemble` gives."""
    prompts, mask = ragged(engine, [3, 8, 1, 5])
    got = engine.generate(prompts, mask, names(4), replace(SAMPLED, temperature=1.0, max_new_tokens=40), KEY)
    input_ids, attention, position = assemble(prompts, mask, got.responses, got.response_mask)
    with torch.no_grad():
        logits = engine.model(input_ids=input_ids, attention_mask=attention, position_ids=position).logits
    log_probs = logits[:, prompts.shape[1] - 1 : -1].log_softmax(-1).gather(2, got.responses[..., None]).squeeze(2)
    assert ((log_probs - got.log_probs)[got.response_mask]).abs().max() < 1e-5


# The sampler


def reference_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Temperature, then top-k, then top-p on what is left, each renormalised: one row, float64, plain loops."""
    weight = np.exp(logits / temperature - np.max(logits / temperature))
    ranked = sorted(range(len(weight)), key=lambda i: (-weight[i], i))
    ranked = ranked[:top_k] if top_k else ranked
    total, reached, kept = sum(weight[i] for i in ranked), 0.0, []
    for i in ranked:
        kept.append(i)
        reached += weight[i] / total
        assume(abs(reached - top_p) > 1e-6)  # where float32 may decide either way
        if reached >= top_p:
            break
    probability = np.zeros(len(weight))
    probability[kept] = weight[kept] / weight[kept].sum()
    return probability


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.integers(2, 40),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 10, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.93, 1.0]),
)
def test_next_token_draws_from_the_filtered_distribution(
    seed: int, vocabulary: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, vocabulary).astype(np.float32)
    expected = reference_distribution(logits.astype(np.float64), temperature, top_k, top_p)
    grid = 4000  # evenly spaced numbers hit an interval of length p in p * grid places, give or take one
    uniforms = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    sampling = Sampling(temperature, top_k, top_p, max_new_tokens=1)
    tokens, log_probs = next_token(torch.from_numpy(logits).expand(grid, -1), uniforms, sampling)
    assert set(tokens.tolist()) <= set(np.flatnonzero(expected))
    counts = np.bincount(tokens.numpy(), minlength=vocabulary)
    assert np.abs(counts - expected * grid).max() <= 1.01
    np.testing.assert_allclose(log_probs.numpy(), np.log(expected[tokens.numpy()]), atol=2e-5)


def test_the_ends_of_the_unit_interval_stay_on_the_support() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(2, -1)
    uniforms = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    for top_k in (0, 4):
        tokens, log_probs = next_token(logits, uniforms, Sampling(1.0, top_k, 1.0, 1))
        assert tokens.tolist() == [1, 3]
        assert log_probs.tolist() == pytest.approx([np.log(0.5)] * 2)


def test_of_equals_top_k_keeps_the_lowest_ids() -> None:
    uniforms = (torch.arange(30, dtype=torch.float64) + 0.5) / 30
    tokens, _ = next_token(torch.zeros(30, 6), uniforms, Sampling(1.0, 3, 1.0, 1))
    assert torch.bincount(tokens).tolist() == [10, 10, 10]


def test_greedy_takes_the_mode_whatever_top_k_and_top_p() -> None:
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
        with pytest.raises(DataError, match="NaN or infinite"):
            engine.generate(prompts, mask, names(1), sampling, KEY)


def test_first_tokens_have_the_frequencies_of_the_model(actor: Actor) -> None:
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
    wanted = np.append(expected[often], expected[~often].sum())
    degrees = len(observed) - 1
    assert degrees >= 5
    assert ((observed - wanted) ** 2 / wanted).sum() < degrees + 4 * np.sqrt(2 * degrees)


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


def test_other_keys_and_rows_draw_other_numbers(engine: TorchRolloutEngine) -> None:
    prompts, mask = ragged(engine, [5])
    prompts, mask = prompts.repeat(4, 1), mask.repeat(4, 1)
    one = as_lists(engine.generate(prompts, mask, names(4), SAMPLED, KEY))
    assert len({tuple(row) for row in one}) == 4
    assert one != as_lists(engine.generate(prompts, mask, names(4), SAMPLED, Key.of(4)))
    assert one == as_lists(engine.generate(prompts, mask, names(4), SAMPLED, KEY))


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_prompt_is_prefilled_once_and_samples_the_same(folders: dict[str, str], kind: str) -> None:
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


def test_equal_ids_under_unequal_masks_are_not_one_prompt(engine: TorchRolloutEngine) -> None:
    """The pad id may be an ordinary token to a prompt, so rows are told apart by their masks too."""
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
    assert 1 < (lengths < 60).sum() < 48  # some ended, some were cut
    for row, present, log_probs, n in zip(*got, lengths.tolist(), strict=True):
        assert present.tolist() == [True] * n + [False] * (len(row) - n)
        assert EOS not in row[: n - 1]
        assert n == 60 or row[n - 1] == EOS
        assert (row[n:] == PAD).all() and (log_probs[n:] == 0).all() and (log_probs[:n] < 0).all()
    # After the prefill one forward per further column, over the rows that have not ended by then.
    assert fed[1:] == [int((lengths > t).sum()) for t in range(1, int(lengths.max()))]


def test_stop_ids_end_rows_and_are_kept(engine: TorchRolloutEngine) -> None:
    prompts, mask = ragged(engine, [5, 3])
    free = as_lists(engine.generate(prompts, mask, names(2), GREEDY, KEY))
    stop = free[0][4]
    got = engine.generate(prompts, mask, names(2), replace(GREEDY, stop_token_ids=(stop, VOCAB - 1)), KEY)
    ended = [row[: next((i + 1 for i, t in enumerate(row) if t in (stop, VOCAB - 1)), len(row))] for row in free]
    assert len(ended[0]) <= 5
    assert as_lists(got) == ended
    assert got.responses.shape[1] == max(map(len, ended))


def test_the_width_is_that_of_the_longest_response(engine: TorchRolloutEngine) -> None:
    prompts, mask = ragged(engine, [5, 3])
    everything = tuple(range(VOCAB))
    got = engine.generate(prompts, mask, names(2), replace(SAMPLED, stop_token_ids=everything), KEY)
    assert got.responses.shape == got.response_mask.shape == got.log_probs.shape == (2, 1)
    assert (got.responses.dtype, got.response_mask.dtype) == (torch.int64, torch.bool)
    none = engine.generate(prompts[:0], mask[:0], [], SAMPLED, KEY)
    assert none.responses.shape == (0, 0)


def test_dropout_is_off_and_training_mode_comes_back(folders: dict[str, str]) -> None:
    actor = Actor(folders["gpt2"])
    engine = synced(actor)
    prompts, mask = ragged(engine, [5, 3])
    quiet = engine.generate(prompts, mask, names(2), SAMPLED, KEY)
    actor.model.train()
    assert torch.equal(engine.generate(prompts, mask, names(2), SAMPLED, KEY).log_probs, quiet.log_probs)
    assert actor.model.training and not quiet.log_probs.requires_grad and not quiet.log_probs.is_inference()


# What prompts are refused


def test_prompts_that_the_model_cannot_take(engine: TorchRolloutEngine) -> None:
    prompts, mask = ragged(engine, [5, 3])

    def refused(prompts: Tensor, mask: Tensor, found: str, sampling: Sampling = SAMPLED, rows: int = 2) -> None:
        with pytest.raises(DataError, match=found):
            engine.generate(prompts, mask, names(rows), sampling, KEY)

    refused(prompts, mask[:, :-1], r"mask \(2, 4\)")
    refused(prompts, mask.long(), r"int64 mask")
    refused(prompts, mask, "3 row ids", rows=3)
    refused(prompts.flip(1), mask.flip(1), "prompt 1 is empty, padded on the right")
    refused(prompts, torch.zeros_like(mask), "prompt 0 is empty")
    hole = mask.clone()
    hole[0, 2] = False
    refused(prompts, hole, "prompt 0 .* hole")
    outside = prompts.clone()
    outside[0, 0] = VOCAB
    refused(outside, mask, rf"to {VOCAB}, but the model's vocabulary is 0 to {VOCAB - 1}")
    refused(prompts, mask, r"5 \+ max_new_tokens=252 .* the 256 tokens that", replace(SAMPLED, max_new_tokens=252))
    # Padding counts neither as length nor as vocabulary.
    padded = torch.nn.functional.pad(prompts, (200, 0), value=10**6), torch.nn.functional.pad(mask, (200, 0))
    same = engine.generate(prompts, mask, names(2), replace(GREEDY, max_new_tokens=100), KEY)
    assert as_lists(engine.generate(*padded, names(2), replace(GREEDY, max_new_tokens=100), KEY)) == as_lists(same)


# Weights: sharing


def test_a_shared_engine_is_a_rollout_and_its_sync_is_an_alias(actor: Actor) -> None:
    engine = TorchRollout().build(Context(actor))
    assert isinstance(engine, Rollout)
    assert engine.receipt is None and engine.model is actor.model
    receipt = engine.sync(actor)  # type: ignore[arg-type]
    assert receipt == engine.receipt == (0, "alias", 0, 0.0, "alias")


def test_an_engine_without_receipt_does_not_generate(actor: Actor) -> None:
    prompts, mask = torch.tensor([[5]]), torch.tensor([[True]])
    for engine in (TorchRollout().build(Context(actor)), TorchRollout(actor.folder).build(Context(None))):
        with pytest.raises(SyncError, match=r"holds no receipt.*engine\.sync\(trainer\)"):
            engine.generate(prompts, mask, ["a"], GREEDY, KEY)


def test_shared_weights_that_were_trained_since_are_not_sampled(actor: Actor, engine: TorchRolloutEngine) -> None:
    prompts, mask = ragged(engine, [3])
    actor.version = 1
    with pytest.raises(SyncError, match=r"at version 1, but its receipt is of version 0"):
        engine.generate(prompts, mask, names(1), GREEDY, KEY)
    assert engine.sync(actor).version == 1  # type: ignore[arg-type]
    engine.generate(prompts, mask, names(1), GREEDY, KEY)


def test_a_shared_engine_refuses_another_trainer(actor: Actor, engine: TorchRolloutEngine) -> None:
    with pytest.raises(SyncError, match="shares the weights of one trainer"):
        engine.sync(Actor(actor.folder))  # type: ignore[arg-type]
    assert engine.receipt is None


def test_specs_that_cannot_be_built(actor: Actor) -> None:
    with pytest.raises(ParameterError, match="max_rows"):
        TorchRollout(max_rows=0)
    for unused in ({"dtype": "bfloat16"}, {"device": "cpu"}, {"ranks": 2}, {"lora": LoRA()}):
        with pytest.raises(ParameterError, match=f"shares the actor's.*; drop {next(iter(unused))}, or name a folder"):
            TorchRollout(**unused)  # type: ignore[arg-type]
    with pytest.raises(BindError, match="holds no Hugging Face model"):
        TorchRollout().build(Context(object()))


# Weights: copying


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_samples_as_the_trainer_does(folders: dict[str, str], tmp_path: Path, kind: str) -> None:
    actor = Actor(tiny_folder(tmp_path, kind, seed=1), version=7)
    engine = TorchRollout(folders[kind]).build(Context(None))
    receipt = engine.sync(actor)  # type: ignore[arg-type]
    assert (receipt.version, receipt.transport) == (7, "copy")
    assert receipt.digest == weights_digest(actor.weights()) == weights_digest(named_weights(engine.model))
    assert receipt.bytes == sum(4 * p.numel() for p in actor.model.parameters())  # torch counts tied ones once
    prompts, mask = ragged(engine, [4, 6])
    ours, theirs = (e.generate(prompts, mask, names(2), SAMPLED, KEY) for e in (engine, synced(actor)))
    assert as_lists(ours) == as_lists(theirs)
    with torch.no_grad():
        actor.model.get_input_embeddings().weight.zero_()
    assert as_lists(engine.generate(prompts, mask, names(2), SAMPLED, KEY)) == as_lists(ours)  # a copy, no alias


def test_fused_experts_arrive(tmp_path: Path) -> None:
    """Transformers stores the experts of a layer fused, but names them one by one in files, and so on the way."""
    sizes: Any = dict(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_local_experts=2
    )
    config = MixtralConfig(vocab_size=VOCAB, num_key_value_heads=1, **sizes)
    for name in "ab":
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        char_tokenizer().save_pretrained(tmp_path / name)
    actor = Actor(str(tmp_path / "a"))
    engine = TorchRollout(str(tmp_path / "b")).build(Context(None))
    engine.sync(actor)  # type: ignore[arg-type]
    for name, tensor in actor.model.state_dict().items():
        assert torch.equal(engine.model.state_dict()[name], tensor)


def test_an_engine_of_another_dtype_holds_the_cast_weights(folders: dict[str, str], actor: Actor) -> None:
    engine = TorchRollout(folders["llama"], dtype="bfloat16").build(Context(None))
    receipt = engine.sync(actor)  # type: ignore[arg-type]
    assert receipt.digest == weights_digest(actor.weights())  # over the tensors as sent
    for name, tensor in actor.model.named_parameters():
        assert torch.equal(engine.model.get_parameter(name), tensor.bfloat16())
    prompts, mask = ragged(engine, [4, 6])
    got = engine.generate(prompts, mask, names(2), GREEDY, KEY)
    assert got.log_probs.dtype == torch.float32


def test_planted_stale_weights_are_found(actor: Actor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchRollout(tiny_folder(tmp_path, "llama", seed=1)).build(Context(None))
    engine.sync(actor)  # type: ignore[arg-type]
    stale = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        actor.model.get_parameter(stale).mul_(1.001)
    actor.version = 1
    load = TorchRolloutEngine._load
    monkeypatch.setattr(
        TorchRolloutEngine,
        "_load",
        lambda self, received: load(self, {name: tensor for name, tensor in received.items() if name != stale}),
    )
    with pytest.raises(SyncError, match=rf"version 1 did not arrive .*: {stale} is not what was sent; .*engine\.sync"):
        engine.sync(actor)  # type: ignore[arg-type]
    assert engine.receipt is None
    with pytest.raises(SyncError, match="holds no receipt"):
        engine.generate(*ragged(engine, [3]), names(1), GREEDY, KEY)
    monkeypatch.undo()
    assert engine.sync(actor).version == 1  # type: ignore[arg-type]


def test_weights_that_do_not_fit_are_named(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchRollout(actor.folder).build(Context(None))
    sent = dict(actor.weights())

    def refused(weights: dict[str, Tensor], found: str) -> None:
        engine.sync(actor)  # type: ignore[arg-type]
        with monkeypatch.context() as patch, pytest.raises(SyncError, match=found):
            patch.setattr(actor, "weights", lambda: iter(weights.items()))
            engine.sync(actor)  # type: ignore[arg-type]
        assert engine.receipt is None

    refused({n: t for n, t in sent.items() if n != "model.norm.weight"}, r": model\.norm\.weight is missing; expected")
    refused(sent | {"extra.bias": torch.zeros(2)}, r": extra\.bias is unexpected; expected all")
    refused(sent | {"model.norm.weight": torch.ones(63)}, r": model\.norm\.weight has shape \(63,\), not \(64,\); exp")
    refused({}, r"lm_head\.weight is missing, .*, and \d+ more; expected all")


# Digests


def test_tied_weights_count_once(folders: dict[str, str]) -> None:
    tied = dict(Actor(folders["qwen2"]).weights())
    assert "model.embed_tokens.weight" in tied and "lm_head.weight" not in tied
    assert list(tied) == sorted(tied)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= dict(Actor(folders["llama"]).weights()).keys()


def test_a_digest_covers_name_dtype_shape_and_bytes() -> None:
    tensor = torch.arange(6, dtype=torch.float32)
    variants = [
        ("a", tensor),
        ("b", tensor),
        ("a", tensor.view(torch.int32)),
        ("a", tensor.view(2, 3)),
        ("a", tensor.view(3, 2)),
        ("a", tensor + torch.tensor([0, 0, 0, 0, 0, 1e-6])),
        ("a", tensor.bfloat16()),
        ("a", tensor[:5]),
    ]
    assert len({tensor_digest(name, value) for name, value in variants}) == len(variants)
    assert tensor_digest("a", tensor.view(2, 3)) == tensor_digest("a", tensor.view(2, 3).T.contiguous().T)
    assert len(tensor_digest("a", torch.tensor(1.0))) == 32


def test_a_digest_does_not_depend_on_order() -> None:
    one, two = ("a", torch.ones(2)), ("b", torch.zeros(2))
    assert weights_digest([one, two]) == weights_digest([two, one])
    assert weights_digest([one, two]) != weights_digest([one]) != weights_digest([])
    assert weights_digest([("a", two[1]), ("b", one[1])]) != weights_digest([one, two])


# Turns


def test_an_engine_that_sleeps_does_not_generate(folders: dict[str, str]) -> None:
    trainer = TorchTrainer(folders["llama"], device="cpu").build(Context(None))  # type: ignore[arg-type]
    shared, own = (TorchRollout(model).build(Context(trainer)) for model in (None, folders["llama"]))  # type: ignore[arg-type]
    for engine, sleeper in ((shared, trainer), (shared, shared), (own, own)):
        engine.sync(trainer)
        prompts, mask = ragged(engine, [3, 2])
        before = engine.generate(prompts, mask, names(2), Sampling(1.0, 0, 1.0, 4), Key.of(0))
        sleeper.sleep()
        with pytest.raises(AsleepError, match=r"generate was called while the engine sleeps.*engine\.wake\(\)"):
            engine.generate(prompts, mask, names(2), Sampling(1.0, 0, 1.0, 4), Key.of(0))
        sleeper.wake()
        after = engine.generate(prompts, mask, names(2), Sampling(1.0, 0, 1.0, 4), Key.of(0))
        assert as_lists(before) == as_lists(after)

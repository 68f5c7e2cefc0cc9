"""`VLLM` with the real engine, against full forward passes of transformers, `TorchRollout` and `TorchTrainer`.

The engine is shared; a test that ends it leaves it to the next sync to start it anew.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.backends import TorchRollout, TorchTrainer
from flowrl.backends.arrival import weight_shapes
from flowrl.backends.torch_trainer import TorchTrainerEngine
from flowrl.backends.vllm import VLLM, VLLMEngine
from flowrl.digest import weights_digest
from flowrl.engines import Rollout, Sampled, Sampling, Sleeper
from flowrl.errors import AsleepError, BindError, DataError, ParameterError, SyncError
from flowrl.job import Engines
from flowrl.keys import Key
from flowrl.records import Receipt
from flowrl.text import assemble
from tests.engines.sources import Altered
from tests.models import EOS, SPECIALS, VOCAB, tiny_folder

needs_vllm = pytest.mark.engines("vllm")

CONTEXT = Engines({}, seed=0)
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, max_new_tokens=24)
KEY = Key.of(3)
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 64 << 20, "max_num_seqs": 64}
BLOCK = 128  # tokens of a block of vLLM's KV cache on a CPU: nothing shorter is ever found in it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def trainer(folder: str) -> TorchTrainerEngine:
    return TorchTrainer(folder, device="cpu").build(CONTEXT)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> TorchTrainerEngine:
    """A trainer of the same architecture with other weights."""
    return TorchTrainer(tiny_folder(tmp_path_factory.mktemp("other"), seed=1), device="cpu").build(CONTEXT)


@pytest.fixture(scope="module")
def running(folder: str) -> Iterator[VLLMEngine]:
    engine = VLLM(folder, **SETTINGS).build(CONTEXT)
    yield engine
    engine.close()


@pytest.fixture
def engine(running: VLLMEngine, trainer: TorchTrainerEngine) -> VLLMEngine:
    """The shared engine with the trainer's weights."""
    running.sync(trainer)
    return running


def ragged(engine: Rollout, lengths: Sequence[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    numbers = np.random.default_rng(seed)
    return engine.tokenizer.pad_left([numbers.integers(len(SPECIALS), VOCAB, n).tolist() for n in lengths])


def names(count: int) -> list[str]:
    return [f"row-{i}" for i in range(count)]


def rows(sampled: Sampled) -> list[list[int]]:
    return [ids[mask].tolist() for ids, mask in zip(sampled.responses, sampled.response_mask, strict=True)]


def by_torch(source: Any, folder: str, prompts: Tensor, mask: Tensor, sampling: Sampling = GREEDY) -> list[list[int]]:
    """What a fresh `TorchRollout` answers with the weights of `source`."""
    engine = TorchRollout(folder, device="cpu").build(CONTEXT)
    engine.sync(source)
    return rows(engine.generate(prompts, mask, names(len(prompts)), sampling, KEY))


def logits_of(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """float64 ``[response vocab]`` by one forward pass, without cache or padding."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([prompt + response])).logits[0]
    return logits[len(prompt) - 1 : -1].double()


# Tokens and log-probs


@needs_vllm
def test_it_is_a_rollout_that_sleeps(engine: VLLMEngine) -> None:
    assert isinstance(engine, Rollout)
    assert isinstance(engine, Sleeper)


@needs_vllm
def test_greedy_tokens_are_those_of_transformers(engine: VLLMEngine, trainer: TorchTrainerEngine, folder: str) -> None:
    prompts, mask = ragged(engine, [1, 7, 3, 40, 12, 130])
    sampled = engine.generate(prompts, mask, names(6), GREEDY, KEY)
    assert rows(sampled) == by_torch(trainer, folder, prompts, mask)
    for ids, kept, answer in zip(prompts, mask, rows(sampled), strict=True):
        generated = trainer.model.generate(
            ids[kept][None], do_sample=False, max_new_tokens=24, pad_token_id=0, eos_token_id=EOS
        )
        assert answer == generated[0, int(kept.sum()) :].tolist()


@needs_vllm
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_log_probs_are_those_of_the_trainer(
    engine: VLLMEngine, trainer: TorchTrainerEngine, temperature: float
) -> None:
    prompts, mask = ragged(engine, [3, 1, 25, 131, 9, 2, 60, 4])
    sampling = Sampling(temperature, top_k=0, top_p=1.0, max_new_tokens=40)
    sampled = engine.generate(prompts, mask, names(8), sampling, KEY)
    ids, attention, positions = assemble(prompts, mask, sampled.responses, sampled.response_mask)
    batch = Altered.batch(ids, attention, positions, sampled.response_mask, temperature)
    assert sampled.log_probs.dtype == torch.float32
    assert (sampled.log_probs - trainer.log_probs(batch)).abs().max() < 1e-4
    assert not sampled.log_probs[~sampled.response_mask].any()


@needs_vllm
@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.7), (12, 0.8)])
def test_log_probs_are_of_the_truncated_distribution(
    engine: VLLMEngine, trainer: TorchTrainerEngine, top_k: int, top_p: float
) -> None:
    prompts, mask = ragged(engine, [3, 1, 9, 14])
    sampled = engine.generate(prompts, mask, names(4), Sampling(0.9, top_k, top_p, 24), KEY)
    for ids, kept, response, log_probs in zip(prompts, mask, rows(sampled), sampled.log_probs, strict=True):
        for t, logits in enumerate(logits_of(trainer.model, ids[kept].tolist(), response)):
            order = logits.argsort(descending=True)[: top_k or None]
            probabilities = (logits[order] / 0.9).softmax(-1)
            within = probabilities.cumsum(-1) - probabilities < top_p  # what came before has not reached it
            nucleus = dict(zip(order[within].tolist(), probabilities[within].tolist(), strict=True))
            expected = np.log(nucleus[response[t]] / sum(nucleus.values()))
            assert log_probs[t].item() == pytest.approx(expected, abs=1e-4)


@needs_vllm
def test_tokens_are_drawn_by_their_probability(engine: VLLMEngine, trainer: TorchTrainerEngine) -> None:
    prompts, mask = ragged(engine, [6])
    count = 2000
    sampled = engine.generate(prompts.repeat(count, 1), mask.repeat(count, 1), names(count), one_token(1.0), KEY)
    expected = logits_of(trainer.model, prompts[0].tolist(), [0])[0].softmax(-1)
    seen = torch.bincount(sampled.responses[:, 0], minlength=VOCAB) / count
    deviation = (seen - expected).abs() / (expected * (1 - expected) / count).sqrt()
    assert deviation[expected > 0.01].max() < 4.5


def one_token(temperature: float) -> Sampling:
    return Sampling(temperature, top_k=0, top_p=1.0, max_new_tokens=1)


@needs_vllm
def test_a_row_is_drawn_from_its_key_alone(engine: VLLMEngine) -> None:
    prompts, mask = ragged(engine, [5, 2, 9, 130, 1, 17, 3, 8])
    sampling = Sampling(1.0, top_k=0, top_p=1.0, max_new_tokens=20)
    first = rows(engine.generate(prompts, mask, names(8), sampling, KEY))
    assert rows(engine.generate(prompts, mask, names(8), sampling, KEY)) == first
    backwards = engine.generate(prompts.flip(0), mask.flip(0), names(8)[::-1], sampling, KEY)
    assert rows(backwards)[::-1] == first
    assert rows(engine.generate(prompts[3:4], mask[3:4], names(8)[3:4], sampling, KEY)) == first[3:4]
    assert rows(engine.generate(prompts, mask, names(8), sampling, Key.of(4))) != first
    twins = engine.generate(prompts[[0, 0]], mask[[0, 0]], names(2), sampling, KEY)
    assert rows(twins)[0] != rows(twins)[1]


@needs_vllm
def test_padding_never_reaches_the_model(engine: VLLMEngine) -> None:
    prompts, mask = ragged(engine, [4, 2, 6])
    expected = engine.generate(prompts, mask, names(3), GREEDY, KEY)
    wide = torch.cat([torch.full((3, 5), 10**9), prompts.masked_fill(~mask, -1)], dim=1)
    padded = engine.generate(wide, torch.cat([torch.zeros(3, 5, dtype=torch.bool), mask], 1), names(3), GREEDY, KEY)
    assert all(torch.equal(a, b) for a, b in zip(padded, expected, strict=True))


@needs_vllm
def test_a_response_ends_with_eos_or_a_stop_token(engine: VLLMEngine) -> None:
    prompts, mask = ragged(engine, [3] * 64)
    free = Sampling(1.5, top_k=0, top_p=1.0, max_new_tokens=60)
    answers = rows(engine.generate(prompts, mask, names(64), free, KEY))
    ended = [row for row in answers if len(row) < 60]
    assert ended and len(ended) < 64
    assert all(row[-1] == EOS and EOS not in row[:-1] for row in ended)
    stop = answers[0][2]
    stopping = Sampling(1.5, top_k=0, top_p=1.0, max_new_tokens=60, stop_token_ids=(stop,))
    for row, long in zip(rows(engine.generate(prompts, mask, names(64), stopping, KEY)), answers, strict=True):
        assert row == (long[: long.index(stop) + 1] if stop in long else long)


@needs_vllm
def test_no_rows_are_answered_by_none(engine: VLLMEngine) -> None:
    none = torch.zeros(0, 3, dtype=torch.int64)
    assert [column.shape for column in engine.generate(none, none.bool(), [], GREEDY, KEY)] == [(0, 0)] * 3


@needs_vllm
def test_prompts_that_the_model_cannot_take_are_refused_and_leave_it_well(engine: VLLMEngine) -> None:
    prompts, mask = ragged(engine, [4, 4])
    expected = rows(engine.generate(prompts, mask, names(2), GREEDY, KEY))
    long, long_mask = ragged(engine, [240])
    faults = [
        (long, long_mask, "more than the 256 tokens"),
        (prompts.index_fill(1, torch.tensor([3]), VOCAB), mask, "vocabulary"),
        (prompts.index_fill(1, torch.tensor([3]), -2), mask, "vocabulary"),
        (prompts, mask.flip(1).index_fill(1, torch.tensor([3]), False), "padded on the left"),
        (prompts, mask.long(), "mask a bool"),
    ]
    for ids, kept, words in faults:
        with pytest.raises(DataError, match=words):
            engine.generate(ids, kept, names(len(ids)), GREEDY, KEY)
    assert rows(engine.generate(prompts, mask, names(2), GREEDY, KEY)) == expected


# Sync


@needs_vllm
def test_a_sync_brings_the_new_weights_and_a_receipt(
    engine: VLLMEngine, trainer: TorchTrainerEngine, other: TorchTrainerEngine, folder: str
) -> None:
    prompts, mask = ragged(engine, [4, 9, 1])
    old = rows(engine.generate(prompts, mask, names(3), GREEDY, KEY))
    receipt = engine.sync(Altered(other, version=7))
    assert receipt == engine.receipt
    assert receipt._replace(seconds=0) == Receipt(
        7, weights_digest(other.weights()), sum(t.nbytes for _, t in other.weights()), 0, "in process"
    )
    assert engine._llm.get_weight_version() == "7"
    new = rows(engine.generate(prompts, mask, names(3), GREEDY, KEY))
    assert new == by_torch(other, folder, prompts, mask) != old
    engine.sync(trainer)
    assert rows(engine.generate(prompts, mask, names(3), GREEDY, KEY)) == old


@needs_vllm
@pytest.mark.parametrize("forgets", [True, False])
def test_what_was_computed_with_old_weights_is_forgotten(
    engine: VLLMEngine,
    other: TorchTrainerEngine,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    forgets: bool,
) -> None:
    prompts, mask = ragged(engine, [BLOCK + 20] * 4)
    engine.generate(prompts, mask, names(4), GREEDY, KEY)
    if not forgets:  # to see that the prompts are long enough to show it
        monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda: True)
    engine.sync(other)
    answers = rows(engine.generate(prompts, mask, names(4), GREEDY, KEY))
    assert (answers == by_torch(other, folder, prompts, mask)) == forgets


@needs_vllm
def test_the_engine_keeps_weights_of_its_own(engine: VLLMEngine, other: TorchTrainerEngine) -> None:
    engine.sync(other)
    prompts, mask = ragged(engine, [4, 9, 1])
    before = engine.generate(prompts, mask, names(3), GREEDY, KEY)
    weights = {name: tensor.detach().clone() for name, tensor in other.weights()}
    with torch.no_grad():
        for _, tensor in other.weights():
            tensor.zero_()
        after = engine.generate(prompts, mask, names(3), GREEDY, KEY)
        for name, tensor in other.weights():
            tensor.copy_(weights[name])
    assert torch.equal(before.log_probs, after.log_probs)


@needs_vllm
@pytest.mark.parametrize("fault", ["missing", "unknown", "twice", "shape", "raises"])
def test_an_update_that_fails_leaves_no_receipt_and_the_next_one_mends_it(
    engine: VLLMEngine, trainer: TorchTrainerEngine, other: TorchTrainerEngine, folder: str, fault: str
) -> None:
    prompts, mask = ragged(engine, [4, 9])
    with pytest.raises(SyncError, match={"raises": "the link broke"}.get(fault, "not those of")):
        engine.sync(Altered(other, fault=fault))
    assert engine.receipt is None
    with pytest.raises(SyncError, match="no receipt"):
        engine.generate(prompts, mask, names(2), GREEDY, KEY)
    engine.sync(trainer)
    assert rows(engine.generate(prompts, mask, names(2), GREEDY, KEY)) == by_torch(trainer, folder, prompts, mask)


@needs_vllm
def test_an_engine_that_keeps_old_weights_is_found_by_the_probe(
    engine: VLLMEngine, other: TorchTrainerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pretend(method: str, kwargs: Any) -> None:
        list(kwargs["weights_iterator"])

    monkeypatch.setattr(engine._llm, "collective_rpc", pretend)
    with pytest.raises(SyncError, match="score the same 15 tokens differently"):
        engine.sync(other)
    assert engine.receipt is None


@needs_vllm
def test_weights_that_others_updated_are_not_sampled_from(engine: VLLMEngine) -> None:
    prompts, mask = ragged(engine, [4])
    engine._llm.update_weight_version("13")
    with pytest.raises(SyncError, match="weights of version 13"):
        engine.generate(prompts, mask, names(1), GREEDY, KEY)
    assert engine.receipt is None


@needs_vllm
def test_an_engine_that_was_interrupted_starts_anew(
    engine: VLLMEngine, trainer: TorchTrainerEngine, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, mask = ragged(engine, [4, 2])

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine._llm.llm_engine, "step", interrupted)
        engine.generate(prompts, mask, names(2), GREEDY, KEY)
    with pytest.raises(SyncError, match="no receipt"):
        engine.generate(prompts, mask, names(2), GREEDY, KEY)
    engine.sync(trainer)
    assert rows(engine.generate(prompts, mask, names(2), GREEDY, KEY)) == by_torch(trainer, folder, prompts, mask)


# Sleep


@needs_vllm
def test_asleep_it_computes_nothing_and_awake_it_goes_on(engine: VLLMEngine, trainer: TorchTrainerEngine) -> None:
    prompts, mask = ragged(engine, [4, 2])
    before = rows(engine.generate(prompts, mask, names(2), GREEDY, KEY))
    engine.sleep()
    engine.sleep()
    with pytest.raises(AsleepError, match="generate"):
        engine.generate(prompts, mask, names(2), GREEDY, KEY)
    with pytest.raises(AsleepError, match="sync"):
        engine.sync(trainer)
    engine.wake()
    engine.wake()
    assert rows(engine.generate(prompts, mask, names(2), GREEDY, KEY)) == before


# Other engines than the shared one: they run last, since one process holds one vLLM at a time.


@needs_vllm
def test_tied_weights_arrive_in_both_places_and_the_deeper_sleep_drops_them(running: VLLMEngine, tmp_path: Any) -> None:
    running.close()
    folder = tiny_folder(tmp_path, "qwen2")
    trainer = TorchTrainer(folder, device="cpu").build(CONTEXT)
    engine = VLLM(folder, sleep_level=2, **SETTINGS).build(CONTEXT)
    with torch.no_grad():
        for _, tensor in trainer.weights():
            tensor.mul_(1.2)
    engine.sync(trainer)
    prompts, mask = ragged(engine, [4, 9, 1])
    assert rows(engine.generate(prompts, mask, names(3), GREEDY, KEY)) == by_torch(trainer, folder, prompts, mask)
    engine.sleep()
    engine.wake()
    with pytest.raises(SyncError, match="no receipt"):
        engine.generate(prompts, mask, names(3), GREEDY, KEY)
    engine.close()


@needs_vllm
def test_bfloat16_is_near(running: VLLMEngine, trainer: TorchTrainerEngine, folder: str) -> None:
    running.close()
    engine = VLLM(folder, kv_cache_bytes=64 << 20).build(CONTEXT)  # "auto" is bfloat16 for a float32 folder
    engine.sync(trainer)
    prompts, mask = ragged(engine, [4, 9, 1])
    sampled = engine.generate(prompts, mask, names(3), Sampling(1.0, 0, 1.0, 40), KEY)
    ids, attention, positions = assemble(prompts, mask, sampled.responses, sampled.response_mask)
    batch = Altered.batch(ids, attention, positions, sampled.response_mask, 1.0)
    difference = (sampled.log_probs - trainer.log_probs(batch)).abs()[sampled.response_mask]
    assert 1e-4 < difference.mean() < 0.05
    engine.close()


@needs_vllm
def test_an_engine_that_nobody_holds_ends(running: VLLMEngine, folder: str) -> None:
    running.close()
    engine = VLLM(folder, **SETTINGS).build(CONTEXT)
    end = engine._end
    del engine
    gc.collect()
    assert not end.alive


@needs_vllm
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine_args": {"no_such_argument": 1}}, "no_such_argument"),
        ({"max_model_len": 10**6}, "max_model_len"),
        ({"kv_cache_bytes": 1000}, "cache blocks"),
    ],
)
def test_a_start_that_fails_says_why(running: VLLMEngine, folder: str, settings: Any, words: str) -> None:
    running.close()
    with pytest.raises(BindError, match=words):
        VLLM(folder, **SETTINGS | settings).build(CONTEXT)


# Without the engine


def test_without_vllm_it_says_how_to_get_it(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(BindError, match=r"flowrl\[vllm\]"):
        VLLM(folder).build(CONTEXT)


@pytest.mark.parametrize(
    ("name", "words"),
    [("dtype", "set dtype="), ("max_num_seqs", "set max_num_seqs="), ("logprobs_mode", "leave it out")],
)
def test_arguments_that_flowrl_sets_are_refused(name: str, words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        VLLM("somewhere", engine_args={name: 1})


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gemma2"])
def test_the_weights_that_are_due_are_those_that_a_trainer_sends(tmp_path: Any, kind: str) -> None:
    folder = tiny_folder(tmp_path, kind)
    sent = TorchTrainer(folder, device="cpu").build(CONTEXT).weights()
    assert weight_shapes(folder) == {name: tensor.shape for name, tensor in sent}

"""Tests of `backends/hosted/arrival.py` and of every rollout engine, which the test file of each engine inherits.

The file provides the fixtures `engine` (with the weights of `trainer`), `trainer`, `folder` (of both), and for
`SyncTests` also `other`, a trainer of the same architecture with other weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.backends import LoRA, TorchRollout, TorchTrainer
from flowrl.backends.torch.score.engine import LoRATrainerEngine, TorchTrainerEngine
from flowrl.data.keys import Key
from flowrl.data.text.tokenizer import assemble
from flowrl.distributed import export
from flowrl.protocols.protocols import Rollout, Sampled, Sampling, Sleeper
from flowrl.records import Receipt
from flowrl.run.engine.build import EngineBuilder
from flowrl.sync.digest import weights_digest
from flowrl.sync.received import Origin
from tests.engines.contract.sources import Altered, Batch, SendsOtherWeights
from tests.support.errors import raises
from tests.support.hashes import hashes
from tests.support.models import EOS, SPECIALS, VOCAB
from tests.sync.test_shadow import Link

CONTEXT = EngineBuilder({}, seed=0)
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, max_new_tokens=24)
KEY = Key.of(3)
ADAPTER = LoRA(r=6, alpha=12.0)


def ragged(engine: Rollout, lengths: Sequence[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random prompts of these lengths, padded on the left, with their mask."""
    numbers = np.random.default_rng(seed)
    return engine.tokenizer.pad_left([numbers.integers(len(SPECIALS), VOCAB, n).tolist() for n in lengths])


def names(count: int) -> list[str]:
    """Row ids."""
    return [f"row-{i}" for i in range(count)]


def rows(sampled: Sampled) -> list[list[int]]:
    """The responses, without padding."""
    return [ids[mask].tolist() for ids, mask in zip(sampled.responses, sampled.response_mask, strict=True)]


def by_torch(source: Any, folder: str, prompts: Tensor, mask: Tensor, sampling: Sampling = GREEDY) -> list[list[int]]:
    """Greedy responses of a new `TorchRollout` with the weights of `source`."""
    engine = TorchRollout(folder, device="cpu").build(CONTEXT)
    engine.sync(source)
    return rows(engine.generate(prompts, mask, names(len(prompts)), sampling, KEY))


def assert_log_probs_of(
    trainer: TorchTrainerEngine, prompts: Tensor, mask: Tensor, sampled: Sampled, temperature: float
) -> None:
    """Assert that log-probs of the engine equal the trainer's, and are 0 off the mask."""
    expected = trainer.log_probs(to_score(prompts, mask, sampled, temperature))
    assert sampled.log_probs.dtype == torch.float32
    assert (sampled.log_probs - expected).abs().max() < 1e-4
    assert not sampled.log_probs[~sampled.response_mask].any()


def to_score(prompts: Tensor, mask: Tensor, sampled: Sampled, temperature: float) -> Batch:
    """Prompts and responses as a batch for `Scorer.log_probs`."""
    ids, attention, positions = assemble(prompts, mask, sampled.responses, sampled.response_mask)
    return Batch(ids, attention, positions, sampled.response_mask, torch.full((len(ids),), temperature))


def logits_of(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """Float64 logits ``[response vocab]`` of one forward pass, without cache or padding."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([prompt + response])).logits[0]
    return logits[len(prompt) - 1 : -1].double()


def penalized(logits: Tensor, sampling: Sampling, prompt: list[int], response: list[int]) -> Tensor:
    """The logits of a token after the penalties, by plain loops."""
    logits = logits.clone()
    for token in {*prompt, *response}:
        factor = sampling.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in {*response}:
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * response.count(token)
    return logits


def assert_sampled_after(engine: Rollout, trainer: TorchTrainerEngine, changes: dict[str, float]) -> None:
    """Assert that greedy tokens and all log-probs are those after these penalties and min-p."""
    prompts, mask = ragged(engine, [3, 1, 9, 14])
    for temperature in (0.0, 0.9):
        sampling = replace(GREEDY, temperature=temperature, ignore_eos=True, **changes)  # type: ignore[arg-type]
        sampled = engine.generate(prompts, mask, names(4), sampling, KEY)
        for ids, attended, response, log_probs in zip(prompts, mask, rows(sampled), sampled.log_probs, strict=True):
            prompt = ids[attended].tolist()
            for t, logits in enumerate(logits_of(trainer.model, prompt, response)):
                logits = penalized(logits, sampling, prompt, response[:t]) / (temperature or 1.0)
                if temperature:
                    least = logits.max() + np.log(max(sampling.min_p, 1e-30))
                    logits = logits.masked_fill(logits < least, -torch.inf)
                else:
                    assert logits[response[t]] > logits.max() - 1e-4
                expected = logits.log_softmax(-1)[response[t]].item()
                assert log_probs[t].item() == pytest.approx(expected, abs=2e-4)


class GenerationTests:
    """Tokens and log-probs."""

    top_p_before_top_k: ClassVar[bool] = False  # whether top-p filters the distribution before top-k
    penalizes: ClassVar[bool] = True  # whether it takes penalties

    def test_the_engine_is_a_rollout_and_a_sleeper(self, engine: Rollout) -> None:
        assert isinstance(engine, Rollout)
        assert isinstance(engine, Sleeper)

    def test_greedy_tokens_equal_transformers(self, engine: Rollout, trainer: TorchTrainerEngine, folder: str) -> None:
        prompts, mask = ragged(engine, [1, 7, 3, 40, 12, 130])
        responses = rows(engine.generate(prompts, mask, names(6), GREEDY, KEY))
        for ids, attended, response in zip(prompts, mask, responses, strict=True):
            generated = trainer.model.generate(
                ids[attended][None], do_sample=False, max_new_tokens=24, pad_token_id=0, eos_token_id=EOS
            )
            assert response == generated[0, int(attended.sum()) :].tolist()

    @pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.4])
    def test_log_probs_match_the_trainer(
        self, engine: Rollout, trainer: TorchTrainerEngine, temperature: float
    ) -> None:
        prompts, mask = ragged(engine, [3, 1, 25, 131, 9, 2, 60, 4])
        sampled = engine.generate(prompts, mask, names(8), Sampling(temperature, 0, 1.0, 40), KEY)
        assert_log_probs_of(trainer, prompts, mask, sampled, temperature or 1.0)

    @pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.7), (12, 0.8), (1, 1.0)])
    def test_log_probs_are_renormalized_after_top_k_and_top_p(
        self, engine: Rollout, trainer: TorchTrainerEngine, top_k: int, top_p: float
    ) -> None:
        prompts, mask = ragged(engine, [3, 1, 9, 14])
        sampled = engine.generate(prompts, mask, names(4), Sampling(0.9, top_k, top_p, 24), KEY)
        for ids, attended, response, log_probs in zip(prompts, mask, rows(sampled), sampled.log_probs, strict=True):
            for t, logits in enumerate(logits_of(trainer.model, ids[attended].tolist(), response)):
                probabilities, order = (logits / 0.9).softmax(-1).sort(descending=True)
                first = torch.arange(VOCAB) < (top_k or VOCAB)
                reached = probabilities if self.top_p_before_top_k else probabilities / probabilities[first].sum()
                within = first & (reached.cumsum(-1) - reached < top_p)  # what came before has not reached it
                nucleus = dict(zip(order[within].tolist(), probabilities[within].tolist(), strict=True))
                expected = np.log(nucleus[response[t]] / sum(nucleus.values()))
                assert log_probs[t].item() == pytest.approx(expected, abs=1e-4)

    @pytest.mark.parametrize(
        "changes",
        [
            {"min_p": 0.3},
            {"repetition_penalty": 1.5},
            {"presence_penalty": 0.6, "frequency_penalty": 0.3},
            {"min_p": 0.1, "repetition_penalty": 1.2, "frequency_penalty": -0.1},
        ],
    )
    def test_log_probs_and_greedy_tokens_are_those_after_penalties_and_min_p(
        self, engine: Rollout, trainer: TorchTrainerEngine, changes: dict[str, float]
    ) -> None:
        if not self.penalizes and {*changes} - {"min_p"}:
            with raises("engine.unsupported-sampling"):
                assert_sampled_after(engine, trainer, changes)
            return
        assert_sampled_after(engine, trainer, changes)

    def test_token_frequencies_match_the_model(self, engine: Rollout, trainer: TorchTrainerEngine) -> None:
        prompts, mask = ragged(engine, [6])
        count = 2000
        once = Sampling(1.0, 0, 1.0, max_new_tokens=1)
        sampled = engine.generate(prompts.repeat(count, 1), mask.repeat(count, 1), names(count), once, KEY)
        expected = logits_of(trainer.model, prompts[0].tolist(), [0])[0].softmax(-1)
        seen = torch.bincount(sampled.responses[:, 0], minlength=VOCAB) / count
        deviation = (seen - expected).abs() / (expected * (1 - expected) / count).sqrt()
        assert deviation[expected > 0.01].max() < 6

    def test_padding_does_not_reach_the_model(self, engine: Rollout) -> None:
        prompts, mask = ragged(engine, [4, 2, 6])
        expected = rows(engine.generate(prompts, mask, names(3), GREEDY, KEY))
        wide = torch.cat([torch.full((3, 5), 10**9), prompts.masked_fill(~mask, -1)], dim=1)
        wide_mask = torch.cat([torch.zeros(3, 5, dtype=torch.bool), mask], 1)
        assert rows(engine.generate(wide, wide_mask, names(3), GREEDY, KEY)) == expected

    def test_only_eos_and_stop_tokens_end_a_response(self, engine: Rollout) -> None:
        prompts, mask = ragged(engine, [3] * 64)
        stop = 20  # not the other tokens, whatever the folder's generation config contains
        sampling = Sampling(1.5, 0, 1.0, max_new_tokens=60, stop_token_ids=(stop,))
        responses = rows(engine.generate(prompts, mask, names(64), sampling, KEY))
        assert {row[-1] for row in responses if len(row) < 60} == {EOS, stop}
        assert all({EOS, stop}.isdisjoint(row[:-1]) for row in responses)
        assert {token for row in responses for token in row[:-1]} >= {11, 15, 25}

    @pytest.mark.parametrize("top_k", [0, 40])
    def test_ignore_eos_continues_after_eos(self, engine: Rollout, trainer: TorchTrainerEngine, top_k: int) -> None:
        prompts, mask = ragged(engine, [3] * 64)
        stop = 20
        sampling = Sampling(1.5, top_k, 1.0, max_new_tokens=60, stop_token_ids=(stop,), ignore_eos=True)
        sampled = engine.generate(prompts, mask, names(64), sampling, KEY)
        responses = rows(sampled)
        assert {row[-1] for row in responses if len(row) < 60} == {stop}
        assert all(stop not in row[:-1] for row in responses)
        assert any(EOS in row[:-1] for row in responses)
        if top_k == 0:
            assert_log_probs_of(trainer, prompts, mask, sampled, 1.5)

    @pytest.mark.parametrize("ignore_eos", [False, True])
    def test_a_response_ends_with_the_token_that_completes_a_stop_string(
        self, engine: Rollout, trainer: TorchTrainerEngine, ignore_eos: bool
    ) -> None:
        prompts, mask = ragged(engine, [4, 7, 3, 12, 9, 30])
        free = replace(GREEDY, max_new_tokens=60, ignore_eos=ignore_eos)
        long = rows(engine.generate(prompts, mask, names(6), free, KEY))
        texts = [engine.tokenizer.text(row) for row in long]
        strings = (texts[0][8:11], texts[1][20:22], texts[2][30:31], "no such text")
        sampled = engine.generate(prompts, mask, names(6), replace(free, stop=strings), KEY)
        for row, whole in zip(rows(sampled), long, strict=True):
            prefixes = (whole[:n] for n in range(1, len(whole) + 1))
            ended = (p for p in prefixes if any(string in engine.tokenizer.text(p) for string in strings))
            assert row == next(ended, whole)
        assert sum(map(len, rows(sampled))) < sum(map(len, long)) / 2
        assert_log_probs_of(trainer, prompts, mask, sampled, 1.0)

    def test_stop_strings_work_with_top_k_and_top_p(self, engine: Rollout, trainer: TorchTrainerEngine) -> None:
        prompts, mask = ragged(engine, [4, 7, 3, 12])
        sampling = Sampling(1.0, 8, 0.9, 60, stop=("e", "a", "3", "T"))
        sampled = engine.generate(prompts, mask, names(4), sampling, KEY)
        for row, log_probs in zip(rows(sampled), sampled.log_probs, strict=True):
            text = engine.tokenizer.text(row)
            assert not any(string in text[:-1] for string in sampling.stop)
            assert len(row) == 60 or row[-1] == EOS or text[-1] in sampling.stop
            assert log_probs[: len(row)].max() <= 1e-6

    def test_a_sequence_may_be_as_long_as_the_model_allows(self, engine: Rollout, trainer: Any, folder: str) -> None:
        prompts, mask = ragged(engine, [200])
        whole = Sampling(0.0, 0, 1.0, max_new_tokens=56)
        responses = rows(engine.generate(prompts, mask, names(1), whole, KEY))
        assert responses == by_torch(trainer, folder, prompts, mask, whole)

    def test_generating_zero_rows_returns_empty_columns(self, engine: Rollout) -> None:
        none = torch.zeros(0, 3, dtype=torch.int64)
        assert [column.shape for column in engine.generate(none, none.bool(), [], GREEDY, KEY)] == [(0, 0)] * 4

    def test_invalid_prompts_are_refused_without_ending_the_engine(self, engine: Rollout) -> None:
        prompts, mask = ragged(engine, [4, 4])
        expected = rows(engine.generate(prompts, mask, names(2), GREEDY, KEY))
        long, long_mask = ragged(engine, [240])
        faults = [
            (long, long_mask, "model.too-long"),
            (prompts.index_fill(1, torch.tensor([3]), VOCAB), mask, "model.unknown-token"),
            (prompts.index_fill(1, torch.tensor([3]), -2), mask, "model.unknown-token"),
            (prompts, mask.flip(1).index_fill(1, torch.tensor([3]), False), "engine.invalid-prompts"),
            (prompts, mask.long(), "engine.invalid-prompts"),
        ]
        for ids, attended, code in faults:
            with raises(code):
                engine.generate(ids, attended, names(len(ids)), GREEDY, KEY)
        assert rows(engine.generate(prompts, mask, names(2), GREEDY, KEY)) == expected


def adapted_trainer(folder: str, alpha: float = 12.0, seed: int = 0) -> LoRATrainerEngine:
    """A trainer with a nonzero adapter on the weights of `folder`."""
    trainer = TorchTrainer(folder, device="cpu", lora=replace(ADAPTER, alpha=alpha)).build(CONTEXT)
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in trainer.adapter_weights():
        tensor.normal_(0.0, 0.2, generator=generator)
    assert isinstance(trainer, LoRATrainerEngine)
    return trainer


class AdapterTests:
    """Engines that load a folder and sync only an adapter; `adapted` is the engine."""

    def test_only_the_adapter_is_synced(self, adapted: Any, folder: str) -> None:
        prompts, mask = ragged(adapted, [3, 150, 9])  # one is long enough for the prefix cache
        responses = []
        for seed in (0, 1):
            trainer = adapted_trainer(folder, seed=seed)
            receipt = adapted.sync(Altered(trainer, version=4 + seed))
            assert receipt.version == 4 + seed
            assert receipt.digest == weights_digest(trainer.adapter_weights())
            assert receipt.bytes == sum(tensor.nbytes for _, tensor in trainer.adapter_weights())
            assert receipt.bytes < 0.5 * sum(tensor.nbytes for _, tensor in trainer.weights())
            sampled = adapted.generate(prompts, mask, names(3), Sampling(1.0, 0, 1.0, 40), KEY)
            assert_log_probs_of(trainer, prompts, mask, sampled, 1.0)
            responses.append(rows(adapted.generate(prompts, mask, names(3), GREEDY, KEY)))
            assert responses[-1] == by_torch(trainer, folder, prompts, mask)
        assert responses[0] != responses[1]

    def test_an_adapter_of_another_base_is_refused(self, adapted: Any, folder: str, trainer: Any) -> None:
        with raises("checkpoint.mismatch", found=None):
            adapted.sync(trainer)
        with raises("checkpoint.mismatch"):
            adapted.sync(adapted_trainer(folder, alpha=24.0))
        assert adapted.receipt is None

    def test_a_closed_engine_restarts_from_the_folder(self, adapted: Any, folder: str) -> None:
        trainer = adapted_trainer(folder)
        adapted.sync(trainer)
        adapted.close()
        adapted.sync(trainer)
        prompts, mask = ragged(adapted, [3, 9])
        responses = rows(adapted.generate(prompts, mask, names(2), GREEDY, KEY))
        assert responses == by_torch(trainer, folder, prompts, mask)


class SyncTests:
    """Weight transfer from a trainer to an engine with its own copy."""

    transport: ClassVar[str]

    def set_version(self, engine: Any, version: str) -> None:
        """Set the version of weights inside the engine, bypassing flowrl."""
        raise NotImplementedError

    def test_sync_loads_new_weights_and_returns_a_receipt(
        self, engine: Any, trainer: Any, other: Any, folder: str
    ) -> None:
        prompts, mask = ragged(engine, [4, 9, 1])
        old = rows(engine.generate(prompts, mask, names(3), GREEDY, KEY))
        with hashes() as hashed:
            receipt = engine.sync(Altered(other, version=7))
        assert hashed == {("MainThread", name): 1 for name, _ in other.weights()}
        assert receipt == engine.receipt
        size = sum(tensor.nbytes for _, tensor in other.weights())
        assert receipt._replace(seconds=0) == Receipt(7, weights_digest(other.weights()), size, 0, self.transport)
        new = rows(engine.generate(prompts, mask, names(3), GREEDY, KEY))
        assert new == by_torch(other, folder, prompts, mask) != old
        engine.sync(trainer)
        assert rows(engine.generate(prompts, mask, names(3), GREEDY, KEY)) == old

    def test_changes_that_arrive_from_another_process_load_as_all_weights_do(
        self, engine: Any, trainer: Any, folder: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two of its fused tensors change; the engine's own layout does not matter."""
        monkeypatch.setattr(export, "ray", SimpleNamespace(put=lambda bucket: bucket, get=lambda bucket: bucket))
        link, prompts, mask = Link(), *ragged(engine, [4, 9, 1])
        layer = trainer.model.model.layers[1]
        matrices = (layer.self_attn.k_proj.weight, layer.mlp.up_proj.weight)
        kept = [matrix.detach().clone() for matrix in matrices]

        def arrive() -> tuple[int, float | None, Receipt]:
            probe = engine.probe
            origin = Origin("actor", trainer.version, probe=probe, scores=probe.score(trainer))
            return link.sync(trainer, engine, origin)

        full, *_ = arrive()
        before = rows(engine.generate(prompts, mask, names(3), GREEDY, KEY))
        with torch.no_grad():
            for matrix in matrices:
                matrix.view(-1)[::9] *= -4
        try:
            nbytes, share, receipt = arrive()
            assert nbytes < full / 8 and share is not None and 0 < share < 1 / 9
            assert receipt.digest == weights_digest(trainer.weights())
            after = rows(engine.generate(prompts, mask, names(3), GREEDY, KEY))
            assert before != after == by_torch(trainer, folder, prompts, mask)
        finally:
            with torch.no_grad():
                for matrix, values in zip(matrices, kept, strict=True):
                    matrix.copy_(values)
        arrive()
        assert rows(engine.generate(prompts, mask, names(3), GREEDY, KEY)) == before

    @pytest.mark.engines("peft")
    def test_a_full_sync_contains_the_merged_adapter(self, engine: Any, folder: str) -> None:
        trainer = adapted_trainer(folder)
        receipt = engine.sync(trainer)
        assert receipt.digest == weights_digest(trainer.weights())
        prompts, mask = ragged(engine, [3, 9])
        responses = rows(engine.generate(prompts, mask, names(2), GREEDY, KEY))
        assert responses == by_torch(trainer, folder, prompts, mask)

    def test_the_engine_has_its_own_copy_of_the_weights(self, engine: Any, other: Any) -> None:
        engine.sync(other)
        prompts, mask = ragged(engine, [4, 9, 1])
        before = rows(engine.generate(prompts, mask, names(3), GREEDY, KEY))
        weights = {name: tensor.detach().clone() for name, tensor in other.weights()}
        with torch.no_grad():
            for _, tensor in other.weights():
                tensor.zero_()
            after = rows(engine.generate(prompts, mask, names(3), GREEDY, KEY))
            for name, tensor in other.weights():
                tensor.copy_(weights[name])
        assert before == after

    def test_a_failed_sync_ends_the_engine_and_the_next_sync_recovers(
        self, engine: Any, trainer: Any, other: Any, folder: str
    ) -> None:
        prompts, mask = ragged(engine, [4, 9])
        with raises("engine.sync-failed", engine=engine.name):
            engine.sync(Altered(other, fault="raises"))
        engine.close()  # idempotent
        assert engine.receipt is None
        with raises("engine.no-receipt"):
            engine.generate(prompts, mask, names(2), GREEDY, KEY)
        assert engine.sync(trainer).digest == weights_digest(trainer.weights())
        responses = rows(engine.generate(prompts, mask, names(2), GREEDY, KEY))
        assert responses == by_torch(trainer, folder, prompts, mask)

    def test_the_probe_detects_an_engine_with_old_weights(self, surviving: Any, other: Any, trainer: Any) -> None:
        with raises("sync.scores-differ", engine=surviving.name):
            surviving.sync(SendsOtherWeights(other, trainer.weights()))
        assert surviving.receipt is None

    def test_generation_with_externally_updated_weights_is_refused(self, engine: Any) -> None:
        prompts, mask = ragged(engine, [4])
        self.set_version(engine, "13")
        with raises("engine.version-mismatch", engine=engine.name, found=("13",)):
            engine.generate(prompts, mask, names(1), GREEDY, KEY)
        assert engine.receipt is None

    def test_a_sleeping_engine_refuses_calls_and_wakes_unchanged(self, engine: Any, trainer: Any) -> None:
        prompts, mask = ragged(engine, [4, 2])
        before = rows(engine.generate(prompts, mask, names(2), GREEDY, KEY))
        engine.sleep()
        engine.sleep()
        with raises("engine.asleep", call="generate"):
            engine.generate(prompts, mask, names(2), GREEDY, KEY)
        with raises("engine.asleep", call="sync"):
            engine.sync(trainer)
        engine.wake()
        engine.wake()
        assert rows(engine.generate(prompts, mask, names(2), GREEDY, KEY)) == before


def assert_frozen_engine_generates(frozen: Any, folder: str, trainer: TorchTrainerEngine) -> None:
    """Assert that a frozen engine generates without a sync, with the weights of its folder, equal to the trainer's."""
    assert frozen.receipt.frozen
    assert frozen.receipt.digest == weights_digest(trainer.weights())
    prompts, mask = ragged(frozen, [5, 2, 9])
    sampled = frozen.generate(prompts, mask, names(3), GREEDY, KEY)
    assert rows(sampled) == by_torch(trainer, folder, prompts, mask)
    assert_log_probs_of(trainer, prompts, mask, sampled, 1.0)

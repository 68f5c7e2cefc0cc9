"""Tests of `backends/vllm/engine.py` with the real engine.

The references are full forward passes of transformers, `TorchRollout` and `TorchTrainer`. The tests share the session's
engine; after a test that ends it, the next sync restarts it. tests/backends/hosted/test_faults.py tests the faults
that hosted engines share, with a toy.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from flowrl.backends import VLLM, TorchTrainer
from flowrl.backends.hosted.arrival import expected_weights
from flowrl.backends.torch.score.engine import TorchTrainerEngine
from flowrl.backends.vllm.engine import VLLMEngine
from flowrl.data.keys import Key
from flowrl.errors import BindError
from flowrl.protocols.protocols import Request, Sampling
from flowrl.run.engine.build import EngineBuilder
from flowrl.sync.digest import weights_digest
from tests import ROOT
from tests.engines.contract.answers import (
    ADAPTER,
    CONTEXT,
    GREEDY,
    KEY,
    AdapterTests,
    GenerationTests,
    SyncTests,
    adapted_trainer,
    assert_frozen_engine_generates,
    by_torch,
    names,
    ragged,
    rows,
    to_score,
)
from tests.engines.contract.requests import FREE, RequestTests, assert_turns_use_synced_weights, tokens
from tests.engines.contract.sources import Altered
from tests.engines.contract.swaps import SwapTests, assert_tokens_of_their_versions
from tests.engines.vllm.vllm_slot import VLLM_SETTINGS, VLLMSlot
from tests.support.errors import raises
from tests.support.hub import Hub
from tests.support.hub import hub as hub  # a fixture
from tests.support.models import tiny_folder

needs_vllm = pytest.mark.engines("vllm")

BLOCK = 128  # tokens of a block of vLLM's KV cache on a CPU: shorter prefixes are not cached


@pytest.fixture
def engine(vllm: VLLMEngine, vllm_slot: VLLMSlot, trainer: TorchTrainerEngine) -> VLLMEngine:
    """The engine of the session, with the weights of `trainer`."""
    vllm_slot.claim(vllm).sync(trainer)
    return vllm


@pytest.fixture(scope="module")
def overlapping(vllm_slot: VLLMSlot, folder: str) -> VLLMEngine:
    """An engine that schedules a step while another is computed, as vLLM does on a GPU."""
    from vllm.platforms.cpu import CpuPlatform

    plain = CpuPlatform.check_and_update_config

    def check_and_update_config(config: Any) -> None:
        plain(config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_update_config))
        engine = vllm_slot.start(VLLM(folder, **VLLM_SETTINGS))
    assert engine._llm.llm_engine.engine_core.engine_core.batch_queue is not None
    return engine


@needs_vllm
class TestGeneration(GenerationTests):
    """On vLLM."""


@needs_vllm
class TestSync(SyncTests):
    """On vLLM."""

    transport = "copy"

    def set_version(self, engine: VLLMEngine, version: str) -> None:
        engine._llm.update_weight_version(version)


@needs_vllm
class TestRequests(RequestTests):
    """On vLLM."""


@needs_vllm
class TestSwaps(SwapTests):
    """On vLLM."""


@needs_vllm
def test_vllm_gets_the_local_folder_of_a_repository(hub: Hub, vllm_slot: VLLMSlot, folder: str) -> None:
    hub.add("org/tiny", folder)
    vllm_slot.free()
    builder = EngineBuilder({"rollout": VLLM("org/tiny", frozen=True, **VLLM_SETTINGS)}, seed=0)
    with builder.live() as engines:
        assert engines["rollout"].receipt is not None  # its log-probs are those of transformers
        assert engines["rollout"].tokenizer.folder.startswith(constants.HF_HUB_CACHE)
    assert hub.downloads().count("model.safetensors") == 1


@needs_vllm
def test_generate_equals_vllm_with_the_same_seeds(engine: VLLMEngine) -> None:
    from vllm import SamplingParams

    prompts, mask = ragged(engine, [5, 2, 140, 9])
    sampling = Sampling(0.9, top_k=12, top_p=0.9, max_new_tokens=20, ignore_eos=True)
    seeds = [KEY.derive(row).bits & (2**63 - 1) for row in names(4)]
    settings: dict[str, Any] = dict(temperature=0.9, top_k=12, top_p=0.9, max_tokens=20, ignore_eos=True, logprobs=0)
    outputs = engine._llm.generate(
        [{"prompt_token_ids": ids[attended].tolist()} for ids, attended in zip(prompts, mask, strict=True)],
        [SamplingParams(**settings, seed=seed, detokenize=False) for seed in seeds],
        use_tqdm=False,
    )
    answers = [output.outputs[0] for output in outputs]
    sampled = engine.generate(prompts, mask, names(4), sampling, KEY)
    assert rows(sampled) == [[*answer.token_ids] for answer in answers]
    log_probs = [[at[token].logprob for token, at in zip(a.token_ids, a.logprobs, strict=True)] for a in answers]
    torch.testing.assert_close(sampled.log_probs, torch.tensor(log_probs), atol=2e-5, rtol=0)


@needs_vllm
@pytest.mark.parametrize("sampling", [Sampling(-1.0, 0, 1.0, 4), Sampling(1.0, 0, 1.5, 4), Sampling(1.0, 0, 1.0, 0)])
def test_unsupported_samplings_are_refused_without_ending_the_engine(engine: VLLMEngine, sampling: Sampling) -> None:
    prompts, mask = ragged(engine, [4])
    with raises("engine.unsupported-sampling", engine="vLLM"):
        engine.generate(prompts, mask, names(1), sampling, KEY)
    assert len(rows(engine.generate(prompts, mask, names(1), GREEDY, KEY))[0]) > 0


@needs_vllm
def test_a_row_depends_only_on_its_key(engine: VLLMEngine) -> None:
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
@pytest.mark.parametrize("clears", [True, False])
def test_a_sync_clears_the_prefix_cache(
    engine: VLLMEngine,
    other: TorchTrainerEngine,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    clears: bool,
) -> None:
    prompts, mask = ragged(engine, [BLOCK + 20] * 4)
    engine.generate(prompts, mask, names(4), GREEDY, KEY)
    if not clears:  # to see that the prompts are long enough to show it
        monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda **_: True)
    engine.sync(other)
    answers = rows(engine.generate(prompts, mask, names(4), GREEDY, KEY))
    assert (answers == by_torch(other, folder, prompts, mask)) == clears


def nudge(trainer: TorchTrainerEngine) -> None:
    """Change all weights by less than the tolerance of the probe."""
    with torch.no_grad():
        for _, tensor in trainer.weights():
            tensor.mul_(1 + 1e-4)


@contextmanager
def ignoring_weights(engine: VLLMEngine) -> Iterator[None]:
    """Within the block, vLLM reports success for new weights, but ignores them."""
    llm = engine._llm
    rpc = llm.collective_rpc

    def idle(method: Any, **how: Any) -> Any:
        if method == "reload_weights":
            return list(how["kwargs"]["weights_iterator"])
        return rpc(method, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "collective_rpc", idle)
        yield


@needs_vllm
def test_an_undelivered_small_update_is_detected(surviving: VLLMEngine, folder: str) -> None:
    """The update is within the tolerance, and the digest and vLLM's reply are correct."""
    engine, trainer = surviving, TorchTrainer(folder, device="cpu").build(CONTEXT)
    engine.sync(trainer)
    before = torch.tensor(engine.probe.score(trainer))
    nudge(trainer)
    assert 1e-5 < (torch.tensor(engine.probe.score(trainer)) - before).abs().mean() < 1e-3
    with ignoring_weights(engine), raises("sync.old-weights", engine="vLLM", followed=0.0):
        engine.sync(trainer)
    assert engine.receipt is None
    assert engine.sync(trainer).digest == weights_digest(trainer.weights())


@needs_vllm
@pytest.mark.nightly
def test_an_interrupted_engine_restarts(
    engine: VLLMEngine, trainer: TorchTrainerEngine, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, mask = ragged(engine, [4, 2])

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine._llm.llm_engine, "step", interrupted)
        engine.generate(prompts, mask, names(2), GREEDY, KEY)
    with raises("engine.no-receipt"):
        engine.generate(prompts, mask, names(2), GREEDY, KEY)
    engine.sync(trainer)
    assert rows(engine.generate(prompts, mask, names(2), GREEDY, KEY)) == by_torch(trainer, folder, prompts, mask)


@needs_vllm
def test_an_undelivered_swap_with_requests_in_flight_is_detected(engine: VLLMEngine, folder: str) -> None:
    """A small update. With concurrent requests, scores differ by rounding, so they are not bit-equal."""
    trainer = TorchTrainer(folder, device="cpu").build(CONTEXT)
    engine.sync(trainer)
    for i in range(9):
        engine.submit(Request(f"{i}", tokens(20 + i, i), replace(FREE, max_new_tokens=100), KEY.response(f"{i}")))
    engine.step()
    nudge(trainer)
    engine.swap(Altered(trainer, version=1), "reuse")
    nudge(trainer)
    with ignoring_weights(engine), raises("sync.old-weights", engine="vLLM"):
        engine.swap(Altered(trainer, version=2), "reuse")
    assert engine.receipt is None


# Other engines than the shared one: they run last, since each ends it.


@needs_vllm
def test_tied_weights_are_loaded_twice_and_dropped_by_sleep_level_2(vllm_slot: VLLMSlot, tmp_path: Any) -> None:
    folder = tiny_folder(tmp_path, "qwen2")
    trainer = TorchTrainer(folder, device="cpu").build(CONTEXT)
    engine = vllm_slot.start(VLLM(folder, sleep_level=2, **VLLM_SETTINGS))
    with torch.no_grad():
        for _, tensor in trainer.weights():
            tensor.mul_(1.2)
    engine.sync(trainer)
    prompts, mask = ragged(engine, [4, 9, 1])
    assert rows(engine.generate(prompts, mask, names(3), GREEDY, KEY)) == by_torch(trainer, folder, prompts, mask)
    engine.sleep()
    engine.wake()
    with raises("engine.no-receipt"):
        engine.generate(prompts, mask, names(3), GREEDY, KEY)


@needs_vllm
@pytest.mark.parametrize("caches", ["recompute", "reuse"])
def test_a_running_step_ends_before_weights_change(
    overlapping: VLLMEngine, vllm_slot: VLLMSlot, trainer: TorchTrainerEngine, other: TorchTrainerEngine, caches: Any
) -> None:
    vllm_slot.claim(overlapping).sync(trainer)
    assert_tokens_of_their_versions(overlapping, trainer, other, caches)


@needs_vllm
def test_bfloat16_log_probs_are_close_to_the_trainer(
    vllm_slot: VLLMSlot, trainer: TorchTrainerEngine, folder: str
) -> None:
    engine = vllm_slot.start(VLLM(folder, kv_cache_bytes=64 << 20))  # "auto" is bfloat16 for a float32 folder
    engine.sync(trainer)
    prompts, mask = ragged(engine, [4, 9, 1])
    sampled = engine.generate(prompts, mask, names(3), Sampling(1.0, 0, 1.0, 40), KEY)
    difference = (sampled.log_probs - trainer.log_probs(to_score(prompts, mask, sampled, 1.0))).abs()
    assert 1e-4 < difference[sampled.response_mask].mean() < 0.05


@needs_vllm
def test_a_frozen_engine_uses_its_folder_and_ends_with_its_last_reference(
    vllm_slot: VLLMSlot, trainer: TorchTrainerEngine, folder: str
) -> None:
    engine = vllm_slot.start(VLLM(folder, frozen=True, **VLLM_SETTINGS))
    assert_frozen_engine_generates(engine, folder, trainer)
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
def test_a_failed_start_is_explained(vllm_slot: VLLMSlot, folder: str, settings: Any, words: str) -> None:
    with pytest.raises(BindError, match=words):
        vllm_slot.start(VLLM(folder, **VLLM_SETTINGS | settings))


WITH_GROUP = """if True:
    import sys, torch
    from flowrl.backends import VLLM, TorchTrainer
    from flowrl.errors import BindError
    from flowrl.sync.probe import Probe
    from tests.engines.contract.answers import CONTEXT
    trainer = TorchTrainer(sys.argv[1], device="cpu", offload=True).build(CONTEXT)
    try:
        VLLM(sys.argv[1]).build(CONTEXT)
    except BindError as error:
        print(error)
    assert torch.isfinite(trainer.log_probs(Probe([[9, 20]], [[33, 41]]).batch())).all()
"""


@needs_vllm
def test_starting_with_an_existing_process_group_is_refused(folder: str) -> None:
    """vLLM would destroy the existing group, such as that of a trainer with offload. Runs in a separate process, since
    other tests started vLLM in this one."""
    command, root = [sys.executable, "-c", WITH_GROUP, folder], ROOT
    done = subprocess.run(command, cwd=root, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "[vllm.process-group]" in done.stdout and "place=Colocate(1)" in done.stdout


@pytest.fixture(scope="module")
def lora_engine(vllm_slot: VLLMSlot, folder: str) -> VLLMEngine:
    return vllm_slot.start(VLLM(folder, lora=ADAPTER, **VLLM_SETTINGS))


@pytest.fixture
def adapted(lora_engine: VLLMEngine, vllm_slot: VLLMSlot) -> VLLMEngine:
    return vllm_slot.claim(lora_engine)


@pytest.mark.engines("vllm", "peft")
class TestAdapters(AdapterTests):
    """On vLLM."""

    def test_turns_use_the_latest_adapter(self, adapted: VLLMEngine, folder: str) -> None:
        first, second = (adapted_trainer(folder, seed=seed) for seed in (0, 1))
        adapted.sync(Altered(first, version=2))
        assert_turns_use_synced_weights(adapted, first, second)


# Without the engine


def test_a_missing_vllm_is_named_with_its_extra(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with raises("package.not-installed", package="vllm", extra="vllm"):
        VLLM(folder).build(CONTEXT)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("dtype", {"field": "dtype"}),
        ("gpu_memory_utilization", {"field": "memory_fraction"}),
        ("logprobs_mode", {}),
        ("worker_extension_cls", {}),
        ("weight_transfer_config", {}),
        ("distributed_executor_backend", {}),
    ],
)
def test_arguments_set_by_flowrl_are_refused(name: str, facts: dict[str, str]) -> None:
    with raises("engine.reserved-argument", argument=name, **facts):
        VLLM("somewhere", engine_args={name: 1})


def test_sleep_level_2_drops_the_weights() -> None:
    assert VLLM("somewhere", sleep_level=2).loses_weights_asleep
    assert not VLLM("somewhere").loses_weights_asleep


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"lora": ADAPTER, "sleep_level": 2}, ("lora", "sleep_level")),
        ({"frozen": True, "sleep_level": 2}, ("frozen", "sleep_level")),
        ({"frozen": True, "lora": ADAPTER}, ("frozen", "lora")),
    ],
)
def test_conflicting_settings_are_refused(settings: dict[str, Any], names: tuple[str, str]) -> None:
    with raises("engine.conflicting-settings", settings=names):
        VLLM("somewhere", **settings)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gemma2"])
def test_expected_weights_are_those_that_a_trainer_sends(tmp_path: Any, kind: str) -> None:
    folder = tiny_folder(tmp_path, kind)
    sent = TorchTrainer(folder, device="cpu").build(CONTEXT).weights()
    assert {name: due.shape for name, due in expected_weights(folder).items()} == {name: w.shape for name, w in sent}

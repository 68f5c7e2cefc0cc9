"""Tests of `backends/sglang/engine.py` and `backends/sglang/server.py` with the real engine.

The references are full forward passes of transformers, `TorchRollout` and `TorchTrainer`. The tests share the engine;
after a test that ends it, the next sync restarts it, which takes 15 seconds or more. Most faults are therefore
nightly here; every commit runs them in tests/backends/sglang/test_faults.py, with a toy.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from flowrl.backends import SGLang, TorchTrainer
from flowrl.backends.hosted.process import EngineProcess
from flowrl.backends.hosted.reaper import members, shared_memory
from flowrl.backends.sglang.engine import SGLangEngine
from flowrl.backends.torch.score.engine import TorchTrainerEngine
from flowrl.protocols.protocols import Sampling
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
    by_torch,
    names,
    ragged,
    rows,
    to_score,
)
from tests.engines.contract.sources import shared_by_name
from tests.engines.contract.swaps import assert_tokens_of_their_versions
from tests.engines.sglang.process_leaks import eventually, leaks_of_sglang
from tests.support.errors import raises
from tests.support.models import tiny_folder

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 64}


@pytest.fixture(scope="module")
def running(folder: str) -> Iterator[SGLangEngine]:
    engine = SGLang(folder, **SETTINGS).build(CONTEXT)
    yield engine
    engine.close()


@pytest.fixture
def engine(running: SGLangEngine, trainer: TorchTrainerEngine) -> SGLangEngine:
    """The engine of this file, with the weights of `trainer`."""
    running.sync(trainer)
    return running


def process_of(engine: SGLangEngine) -> EngineProcess:
    assert engine._process is not None
    return engine._process


def scheduler_of(engine: SGLangEngine) -> int:
    found = [
        path for path in members(process_of(engine).pid) if (path / "comm").read_text().startswith("sglang::sched")
    ]
    return int(found[0].name)


@pytest.fixture
def leaks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], set[str]]:
    """A function that lists the leaks of engines that this test started."""
    monkeypatch.setenv("FLOWRL_TEST", str(tmp_path))
    before = leaks_of_sglang(str(tmp_path))
    return lambda: leaks_of_sglang(str(tmp_path)) - before


@pytest.mark.engines("sglang")
@pytest.mark.timeout(600)
class TestGeneration(GenerationTests):
    """On SGLang."""

    top_p_before_top_k = True
    penalizes = False

    def test_generation_stops_early_at_a_stop_string(self, engine: SGLangEngine) -> None:
        prompts, mask = ragged(engine, [4, 7])
        requests = [ids[attended].tolist() for ids, attended in zip(prompts, mask, strict=True)]
        sampling = Sampling(0.0, 0, 1.0, 200, ignore_eos=True)
        long = rows(engine.generate(prompts, mask, names(2), sampling, KEY))
        sampling = replace(sampling, stop=(engine.tokenizer.text(long[0])[5:8],))
        lengths = [len(answer.ids) for answer in engine._respond(requests, sampling)]
        assert 8 <= lengths[0] < 100
        assert lengths[1] == len(long[1]) or sampling.stop[0] in engine.tokenizer.text(long[1])

    def test_top_p_with_too_large_a_support_is_refused(
        self, engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(engine._about, "support", 50)
        prompts, mask = ragged(engine, [4])
        with raises("engine.unsupported-sampling", found=85, expected=50):
            engine.generate(prompts, mask, names(1), Sampling(1.0, 0, 0.9, 4), KEY)
        engine.generate(prompts, mask, names(1), Sampling(1.0, 50, 0.9, 4), KEY)


@pytest.mark.engines("sglang")
@pytest.mark.timeout(600)
class TestSync(SyncTests):
    """On SGLang."""

    transport = "pipe"

    def set_version(self, engine: SGLangEngine, version: str) -> None:
        engine._ask("begin")
        engine._ask("end", version=version)

    @pytest.mark.nightly
    def test_a_failed_sync_ends_the_engine_and_the_next_sync_recovers(
        self, engine: Any, trainer: Any, other: Any, folder: str
    ) -> None:
        super().test_a_failed_sync_ends_the_engine_and_the_next_sync_recovers(engine, trainer, other, folder)

    @pytest.mark.nightly
    def test_generation_with_externally_updated_weights_is_refused(self, engine: Any) -> None:
        super().test_generation_with_externally_updated_weights_is_refused(engine)

    def test_a_swap_changes_weights_between_two_tokens(
        self, engine: SGLangEngine, trainer: TorchTrainerEngine, other: TorchTrainerEngine
    ) -> None:
        """By default SGLang computes one step ahead of its outputs; tokens still have the correct version."""
        assert_tokens_of_their_versions(engine, trainer, other, "recompute")

    def test_a_sync_in_many_buckets(
        self, engine: SGLangEngine, other: TorchTrainerEngine, folder: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("flowrl.backends.sglang.engine.BUCKET_BYTES", 20_000)
        assert engine.sync(other).digest == weights_digest(other.weights())
        prompts, mask = ragged(engine, [4, 9, 1])
        answers = rows(engine.generate(prompts, mask, names(3), GREEDY, KEY))
        assert answers == by_torch(other, folder, prompts, mask)

    def test_the_process_opens_shared_tensors(
        self, engine: SGLangEngine, other: TorchTrainerEngine, folder: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With shared memory, as CUDA IPC does with tensors on a GPU."""
        monkeypatch.setattr("flowrl.backends.sglang.engine.can_share", lambda tensors: True)
        with shared_by_name():
            receipt = engine.sync(other)
        assert (receipt.digest, receipt.transport) == (weights_digest(other.weights()), "cuda ipc")
        prompts, mask = ragged(engine, [4, 9, 1])
        answers = rows(engine.generate(prompts, mask, names(3), GREEDY, KEY))
        assert answers == by_torch(other, folder, prompts, mask)

    def test_a_sync_clears_the_prefix_cache(self, engine: SGLangEngine, other: TorchTrainerEngine, folder: str) -> None:
        prompts, mask = ragged(engine, [150] * 4)
        engine.generate(prompts, mask, names(4), GREEDY, KEY)
        process = process_of(engine)
        process.ask("begin")
        weights = {name: tensor.detach().contiguous() for name, tensor in other.weights()}
        process.ask("take", save(weights), algorithms=dict.fromkeys(weights, "xxh3"))
        # Before the end of an update, SGLang still has the prefix cache of older weights.
        stale = rows(engine.generate(prompts, mask, names(4), GREEDY, KEY))
        process.ask("end", version="0")
        expected = by_torch(other, folder, prompts, mask)
        assert stale != expected
        assert rows(engine.generate(prompts, mask, names(4), GREEDY, KEY)) == expected

    def test_the_digest_detects_weights_damaged_in_transit(
        self, surviving: SGLangEngine, trainer: TorchTrainerEngine, folder: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = surviving

        def damaged(bucket: dict[str, torch.Tensor]) -> bytes:
            return save({name: tensor * (1 + 1e-7) for name, tensor in load(save(bucket)).items()})

        with monkeypatch.context() as patch, raises("sync.damaged"):
            patch.setattr("flowrl.backends.sglang.engine.save", damaged)
            engine.sync(trainer)
        assert engine.receipt is None
        prompts, mask = ragged(engine, [4, 9])
        with raises("engine.no-receipt"):
            engine.generate(prompts, mask, names(2), GREEDY, KEY)
        engine.sync(trainer)
        answers = rows(engine.generate(prompts, mask, names(2), GREEDY, KEY))
        assert answers == by_torch(trainer, folder, prompts, mask)


OWNER = """if True:
    import os, signal, sys
    from flowrl.backends import SGLang, TorchTrainer
    from flowrl.backends.hosted.reaper import shared_memory
    from tests.engines.contract.answers import CONTEXT, assert_frozen_engine_generates
    engine = SGLang(sys.argv[1], frozen=True, dtype="float32", max_num_seqs=4).build(CONTEXT)
    assert_frozen_engine_generates(engine, sys.argv[1], TorchTrainer(sys.argv[1], device="cpu").build(CONTEXT))
    pid = engine._process.pid
    print(pid, *shared_memory(pid), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def assert_death_is_reported(engine: SGLangEngine, victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a process of the engine during generation; assert that the error names it and that nothing leaks."""
    process = process_of(engine)
    group, segments = process.pid, shared_memory(process.pid)
    assert segments
    answer = process.reply

    def killed(call: str) -> dict[str, Any]:  # the request is in flight
        monkeypatch.setattr(process, "reply", answer)  # after the death of the scheduler some replies still arrive
        os.kill(victim, signal.SIGKILL)
        return answer(call)

    monkeypatch.setattr(process, "reply", killed)
    prompts, mask = ragged(engine, [4] * 64)
    with raises("engine.process-died", engine="SGLang"):
        engine.generate(prompts, mask, names(64), Sampling(1.0, 0, 1.0, 200), KEY)
    assert not members(group)
    assert not any(path.exists() for path in segments)
    with raises("engine.no-receipt"):
        engine.generate(prompts, mask, names(64), GREEDY, KEY)


@pytest.mark.engines("sglang")
@pytest.mark.timeout(600)
class TestProcess:
    def test_a_process_killed_during_generation_is_reported_and_leaves_no_resources(
        self, engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert_death_is_reported(engine, process_of(engine).pid, monkeypatch)

    @pytest.mark.nightly
    @pytest.mark.parametrize("victim", ["the process", "its scheduler"])
    def test_the_next_sync_restarts_a_process_killed_during_generation(
        self,
        engine: SGLangEngine,
        trainer: TorchTrainerEngine,
        folder: str,
        monkeypatch: pytest.MonkeyPatch,
        victim: str,
    ) -> None:
        pid = process_of(engine).pid if victim == "the process" else scheduler_of(engine)
        assert_death_is_reported(engine, pid, monkeypatch)
        assert engine.sync(trainer).digest == weights_digest(trainer.weights())
        prompts, mask = ragged(engine, [4] * 2)
        answers = rows(engine.generate(prompts, mask, names(2), GREEDY, KEY))
        assert answers == by_torch(trainer, folder, prompts, mask)

    @pytest.mark.nightly
    def test_a_process_killed_during_a_sync_is_not_reported_as_damaged_weights(
        self, engine: SGLangEngine, trainer: TorchTrainerEngine
    ) -> None:
        os.kill(process_of(engine).pid, signal.SIGKILL)
        with raises("engine.process-died", how="was killed by SIGKILL"):
            engine.sync(trainer)
        assert engine.receipt is None
        assert engine.sync(trainer).digest == weights_digest(trainer.weights())

    @pytest.mark.nightly
    def test_a_frozen_engine_uses_its_folder_and_ends_with_its_owner_process(self, folder: str) -> None:
        """The owner is killed, so it cannot end the engine itself."""
        done = subprocess.run([sys.executable, "-c", OWNER, folder], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == -signal.SIGKILL, done.stderr
        group, *segments = done.stdout.split()
        eventually(lambda: not members(int(group)))
        assert segments
        assert not any(Path(segment).exists() for segment in segments)


@pytest.mark.engines("sglang")
@pytest.mark.nightly
@pytest.mark.timeout(600)
class TestOtherSettings:
    """Engines with other settings, after the shared one has ended, to save memory."""

    def test_tied_weights_are_loaded_on_two_devices(self, running: SGLangEngine, tmp_path: Path) -> None:
        running.close()
        folder = tiny_folder(tmp_path, "qwen2")
        engine = SGLang(folder, tensor_parallel=2, **SETTINGS).build(CONTEXT)
        prompts, mask = ragged(engine, [4, 9, 1])
        for seed in (0, 1):
            trainer = TorchTrainer(tiny_folder(tmp_path, "qwen2", seed), device="cpu").build(CONTEXT)
            assert engine.sync(trainer).digest == weights_digest(trainer.weights())
            answers = rows(engine.generate(prompts, mask, names(3), GREEDY, KEY))
            assert answers == by_torch(trainer, folder, prompts, mask)
        group = process_of(engine).pid
        del engine
        gc.collect()
        assert not members(group)

    def test_bfloat16_log_probs_are_close_to_the_trainer(
        self, running: SGLangEngine, trainer: TorchTrainerEngine, folder: str
    ) -> None:
        running.close()
        engine = SGLang(folder, max_num_seqs=8).build(CONTEXT)  # "auto" is bfloat16 for a float32 folder
        engine.sync(trainer)
        prompts, mask = ragged(engine, [4, 9, 1])
        sampled = engine.generate(prompts, mask, names(3), Sampling(1.0, 0, 1.0, 40), KEY)
        difference = (sampled.log_probs - trainer.log_probs(to_score(prompts, mask, sampled, 1.0))).abs()
        assert 1e-4 < difference[sampled.response_mask].mean() < 0.05
        engine.close()

    @pytest.mark.parametrize(
        ("settings", "code", "words"),
        [
            ({"engine_args": {"no_such_argument": 1}}, "engine.does-not-start", "no_such_argument"),
            ({"cache_tokens": 100}, "sglang.cache-too-small", "room for"),
        ],
    )
    def test_a_failed_start_is_explained_and_leaves_no_resources(
        self, folder: str, settings: dict[str, Any], code: str, words: str, leaks: Callable[[], set[str]]
    ) -> None:
        with raises(code) as caught:
            SGLang(folder, **SETTINGS | settings).build(CONTEXT)
        assert words in caught.value.message
        eventually(lambda: not leaks())


@pytest.fixture(scope="module")
def adapted(running: SGLangEngine, folder: str) -> Iterator[SGLangEngine]:
    running.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).with_name("unpinned")), prepend=os.pathsep)
        engine = SGLang(folder, lora=ADAPTER, **SETTINGS).build(CONTEXT)
        yield engine
        engine.close()


@pytest.mark.engines("sglang", "peft")
@pytest.mark.timeout(600)
class TestAdapters(AdapterTests):
    """On SGLang."""

    @pytest.mark.nightly
    def test_a_closed_engine_restarts_from_the_folder(self, adapted: Any, folder: str) -> None:
        super().test_a_closed_engine_restarts_from_the_folder(adapted, folder)


class TestWithoutTheEngine:
    def test_a_missing_sglang_is_named_with_its_extra(self, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with raises("package.not-installed", package="sglang", extra="sglang"):
            SGLang(folder).build(CONTEXT)

    def test_max_model_len_beyond_the_model_is_refused(self, folder: str) -> None:
        with raises("sglang.max-model-len", found=300, expected=256):
            SGLang(folder, max_model_len=300).build(CONTEXT)

    @pytest.mark.parametrize("name", ["tp_size", "context_length", "skip_tokenizer_init"])
    def test_reserved_engine_arguments_are_refused(self, folder: str, name: str) -> None:
        with raises("engine.reserved-argument", argument=name):
            SGLang(folder, engine_args={name: 1})

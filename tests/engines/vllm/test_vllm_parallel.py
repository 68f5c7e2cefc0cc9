"""Tests of `backends/vllm/worker.py`: tensor parallel 2, with two worker processes on a CPU and weights over gloo.

Every commit runs the tests that need one start: weights on both workers by either transport, and a killed worker.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flowrl.backends import VLLM, TorchRollout, TorchTrainer
from flowrl.backends.torch.score.engine import TorchTrainerEngine
from flowrl.backends.vllm.engine import VLLMEngine
from flowrl.data.keys import Key
from flowrl.protocols.protocols import Sampled, Sampling
from flowrl.run.engine.build import EngineBuilder
from flowrl.sync.digest import weights_digest
from tests.engines.contract.requests import assert_turns_use_synced_weights
from tests.engines.contract.sources import Altered, shared_by_name
from tests.engines.contract.swaps import assert_tokens_of_their_versions
from tests.engines.vllm.vllm_slot import VLLMSlot
from tests.support.errors import raises
from tests.support.hashes import hashes
from tests.support.models import tiny_folder

pytestmark = [pytest.mark.engines("vllm"), pytest.mark.timeout(480)]

CONTEXT = EngineBuilder({}, seed=0)
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, max_new_tokens=24)
KEY = Key.of(3)
NAMES = ["a", "b", "c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("parallel"), "qwen2")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> TorchTrainerEngine:
    other = tiny_folder(tmp_path_factory.mktemp("other"), "qwen2", seed=1)
    return TorchTrainer(other, device="cpu").build(CONTEXT)


@pytest.fixture(scope="module")
def engine(folder: str, vllm_slot: VLLMSlot) -> VLLMEngine:
    return vllm_slot.start(VLLM(folder, tensor_parallel=2, dtype="float32", kv_cache_bytes=64 << 20))


def children(of: int | None = None) -> set[int]:
    """vLLM's workers under a process, this one by default; without zombies."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = status.read_text().partition("(")[2].rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        state, parent = rest.split()[:2]
        if int(parent) == (of or os.getpid()) and state != "Z" and name.startswith("VLLM"):
            found.add(int(status.parent.name))
    return found


def shared_memory(processes: set[int]) -> set[Path]:
    """The shared memory that processes have mapped."""
    lines = [line for number in processes for line in Path(f"/proc/{number}/maps").read_text().splitlines()]
    return {path for line in lines if (path := Path("/", line.partition(" /")[2])).parent == Path("/dev/shm")}


def prompts(engine: Any) -> Any:
    return engine.tokenizer.pad_left([[9, 20, 33, 41], [12], [*range(7, 67)] * 3])


def rows(sampled: Sampled) -> list[list[int]]:
    return [ids[mask].tolist() for ids, mask in zip(sampled.responses, sampled.response_mask, strict=True)]


def by_torch(source: Any, folder: str) -> list[list[int]]:
    engine = TorchRollout(folder, device="cpu").build(CONTEXT)
    engine.sync(source)
    return rows(engine.generate(*prompts(engine), NAMES, GREEDY, KEY))


def count_hashes(worker: Any) -> None:
    """In a worker of vLLM: record each tensor that it hashes."""
    from flowrl.backends.vllm import worker as module

    honest, worker.hashed = module.tensor_digest, []

    def counted(name: str, tensor: Any, algorithm: Any) -> str:
        worker.hashed.append(name)
        return honest(name, tensor, algorithm)

    module.tensor_digest = counted  # type: ignore[assignment]


def hashed_so_far(worker: Any) -> list[str]:
    return list(worker.hashed)


def test_weights_reach_both_tensor_parallel_workers(
    engine: VLLMEngine, trainer: TorchTrainerEngine, other: TorchTrainerEngine, folder: str
) -> None:
    """Each worker hashes each tensor once, as this process does."""
    engine._llm.collective_rpc(count_hashes)
    for version, source in enumerate([trainer, other, trainer]):
        with hashes() as hashed:
            receipt = engine.sync(Altered(source, version=version))
        assert hashed == {("MainThread", name): 1 for name, _ in source.weights()}
        names = [name for name, _ in source.weights()]
        assert engine._llm.collective_rpc(hashed_so_far) == [names * (version + 1)] * 2
        assert (receipt.version, receipt.transport) == (version, "gloo")
        assert receipt.digest == weights_digest(source.weights())
        answers = rows(engine.generate(*prompts(engine), NAMES, GREEDY, KEY))
        assert answers == by_torch(source, folder)


@pytest.mark.nightly
def test_close_leaves_no_process_or_shared_memory(engine: VLLMEngine, trainer: TorchTrainerEngine) -> None:
    engine.sync(trainer)
    workers = children()
    segments = shared_memory(workers)
    assert len(workers) == 2
    assert segments
    engine.close()
    assert not children()
    assert not any(segment.exists() for segment in segments)


@pytest.mark.nightly
def test_turns_use_the_latest_weights(
    engine: VLLMEngine, trainer: TorchTrainerEngine, other: TorchTrainerEngine
) -> None:
    engine.sync(trainer)
    assert_turns_use_synced_weights(engine, trainer, other)


@pytest.mark.nightly
@pytest.mark.parametrize("caches", ["recompute", "reuse"])
def test_a_swap_changes_weights_between_two_tokens(
    engine: VLLMEngine, trainer: TorchTrainerEngine, other: TorchTrainerEngine, caches: Any
) -> None:
    engine.sync(trainer)
    assert_tokens_of_their_versions(engine, trainer, other, caches)


def test_workers_open_shared_tensors(
    engine: VLLMEngine, other: TorchTrainerEngine, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With shared memory, as CUDA IPC does with tensors on a GPU."""
    monkeypatch.setattr("flowrl.backends.vllm.worker.can_share", lambda tensors: True)
    with shared_by_name():
        receipt = engine.sync(other)
    assert (receipt.digest, receipt.transport) == (weights_digest(other.weights()), "cuda ipc")
    assert rows(engine.generate(*prompts(engine), NAMES, GREEDY, KEY)) == by_torch(other, folder)


@pytest.mark.nightly
def test_the_next_sync_recovers_from_a_failed_one(
    engine: VLLMEngine, trainer: TorchTrainerEngine, other: TorchTrainerEngine, folder: str
) -> None:
    with raises("engine.weights-mismatch"):
        engine.sync(Altered(other, fault="missing"))
    assert engine.receipt is None
    assert not children()
    engine.sync(trainer)
    assert rows(engine.generate(*prompts(engine), NAMES, GREEDY, KEY)) == by_torch(trainer, folder)


def test_a_worker_killed_during_generation_is_reported_and_leaves_no_resources(
    engine: VLLMEngine, trainer: TorchTrainerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.sync(trainer)
    segments = shared_memory(children())
    assert any(segment.exists() for segment in segments)
    step, steps = engine._llm.llm_engine.step, 0

    def killing() -> Any:
        nonlocal steps
        steps += 1
        if steps == 5:  # some tokens are there
            os.kill(min(children()), signal.SIGKILL)
        return step()

    monkeypatch.setattr(engine._llm.llm_engine, "step", killing)
    started = time.monotonic()
    with raises("engine.process-died", engine="vLLM") as caught:
        engine.generate(*prompts(engine), NAMES, GREEDY, KEY)
    assert re.search(r"3 requests in flight \(Worker \d of 2 of vLLM was killed by SIGKILL; ", caught.value.message)
    assert time.monotonic() - started < 60
    assert steps == 5
    assert engine.receipt is None
    assert not children()
    assert not any(segment.exists() for segment in segments)


def on_worker(engine: VLLMEngine, act: str) -> None:
    """Let the worker of rank 1 fail or die when it loads the third tensor."""

    def plant(worker: Any) -> None:
        model, loaded = worker.weight_transfer_engine.model, 0
        load_weights = model.load_weights

        def failing(weights: Any) -> Any:
            nonlocal loaded
            loaded += 1
            if loaded == 3:
                if act == "die":
                    os._exit(7)
                if act == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("planted")
            return load_weights(weights)

        if worker.rank == 1:
            model.load_weights = failing

    engine._llm.collective_rpc(plant)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("act", "code", "facts"),
    [
        ("fail", "engine.sync-failed", {"version": 1}),
        ("die", "engine.process-died", {"how": "Worker 1 of 2 of vLLM exited with 7"}),
        ("killed", "engine.process-died", {"how": "Worker 1 of 2 of vLLM was killed by SIGKILL"}),
    ],
)
def test_a_worker_that_fails_in_a_sync_does_not_block_the_others(
    engine: VLLMEngine,
    trainer: TorchTrainerEngine,
    other: TorchTrainerEngine,
    folder: str,
    act: str,
    code: str,
    facts: dict[str, Any],
) -> None:
    """`restart="role"` recovers from a dead process, but not from weights that it cannot load."""
    engine.sync(trainer)
    on_worker(engine, act)
    started = time.monotonic()
    with raises(code, **facts):
        engine.sync(Altered(other))
    assert time.monotonic() - started < 100  # and not until gloo has lost its patience, 120 s
    assert engine.receipt is None
    assert not children()
    assert engine.sync(other).digest == weights_digest(other.weights())
    assert rows(engine.generate(*prompts(engine), NAMES, GREEDY, KEY)) == by_torch(other, folder)


@pytest.mark.nightly
def test_a_late_start_failure_leaves_no_resources(
    folder: str, vllm_slot: VLLMSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start fails after the workers have started, and shutting down vLLM raises, too."""
    vllm_slot.free()
    before = children()
    segments: set[Path] = set()

    class Failing:
        def __init__(self, llm: Any) -> None:
            segments.update(shared_memory(children() - before))
            core = llm.llm_engine.engine_core
            shutdown = core.shutdown

            def failing() -> None:
                shutdown()
                raise OSError("no end")

            core.shutdown = failing
            raise ConnectionError("no meeting")

    monkeypatch.setattr("flowrl.backends.vllm.worker.Sender", Failing)
    with raises("engine.does-not-start", engine="vLLM", error="ConnectionError") as caught:
        VLLM(folder, tensor_parallel=2, dtype="float32", kv_cache_bytes=64 << 20).build(CONTEXT)
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.__notes__ == ["Ending it failed too (OSError: no end)."]
    assert segments
    assert children() == before
    assert not any(segment.exists() for segment in segments)


OWNER = """
import sys, time
from flowrl.backends.vllm.engine import VLLM
from flowrl.run.engine.build import EngineBuilder

if __name__ == "__main__":  # vLLM's workers import this file
    spec = VLLM(sys.argv[1], tensor_parallel=2, dtype="float32", kv_cache_bytes=64 << 20)
    engine = spec.build(EngineBuilder({}, seed=0))
    print("ready", flush=True)
    time.sleep(200)
"""


@pytest.mark.nightly
def test_workers_end_with_the_process_that_started_them(folder: str, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    with subprocess.Popen(
        [sys.executable, str(script), folder], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as owner:
        assert owner.stdout is not None
        assert any(line.strip() == "ready" for line in owner.stdout)
        workers = children(owner.pid)
        assert len(workers) == 2
        segments = shared_memory(workers)
        owner.kill()
    deadline = time.monotonic() + 60
    while (alive(workers) or any(segment.exists() for segment in segments)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(workers)
    assert not any(segment.exists() for segment in segments)


def alive(processes: set[int]) -> set[int]:
    """The processes that are alive; zombies are not."""
    found = set()
    for number in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(number)
    return found

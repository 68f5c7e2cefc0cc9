"""Tests of `memory.py`, `fitting.py`, `hardware.py` and `flowrl/protocols/footprint.py`: which processes are alive on a
slot, and changes that fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from flowrl import Colocate, PromptData, Split
from flowrl.backends import VLLM, LoRA, Mesh, TorchRollout, TorchScorer, TorchTrainer
from flowrl.backends.torch.optimizers import streamed
from flowrl.backends.torch.sizing import training
from flowrl.backends.torch.sizing.sending import sending_bytes
from flowrl.backends.torch.sizing.weights import Model
from flowrl.graphs import grpo
from flowrl.protocols.footprint import CUDA_BYTES, GIB
from flowrl.run.prediction.fitting import cheapest
from flowrl.run.prediction.hardware import HARDWARE, Hardware, hardware_of
from flowrl.run.prediction.memory import Memory, RowLimits, Stage, limits_of, memory_of
from flowrl.sync.buckets import BUCKET_BYTES
from tests.backends.torch.sizing.counting import folder_of
from tests.support.errors import raises
from tests.support.rewards import digits

LIMITS = RowLimits(64, 192)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(tmp_path_factory.mktemp("model"), "llama")


def job_of(folder: str, place: Any = None, rollout: Any = None, **settings: Any) -> Any:
    graph = grpo(digits, n=4, max_new_tokens=192)
    ref, own = TorchScorer(folder), TorchRollout() if rollout is None else rollout
    return graph.bind(actor=TorchTrainer(folder, **settings), ref=ref, rollout=own, place=place)


def small_job(folder: str, **settings: Any) -> Any:
    """One in which an update takes more than other passes."""
    job = job_of(folder, rollout=TorchRollout(folder, max_rows=1), max_tokens=256, **settings)
    return job.edit(bind={"ref": TorchScorer(folder, max_tokens=256)})


def stage(memory: Memory, node: str, slot: int = 0) -> Stage:
    return next(stage for stage in memory.stages if (stage.node, stage.slot) == (node, slot))


def test_in_one_process_all_engines_are_alive_at_all_times(folder: str) -> None:
    memory = memory_of(job_of(folder), Hardware(80), LIMITS, prompts=8)
    for one in memory.stages:
        (process,) = one.alive
        assert not process.asleep and process.parts["CUDA"] == CUDA_BYTES
        assert process.parts["weights"] == process.parts["optimizer states"]  # actor and reference, and two states
    assert memory.worst.node == "update_actor" and memory.fits
    assert "gradients" not in stage(memory, "generate").alive[0].parts
    assert stage(memory, "generate").alive[0].parts["KV cache"] > 0


def test_processes_of_a_slot_take_turns_on_a_gpu_and_both_sides_of_a_sync_are_awake(folder: str) -> None:
    job = job_of(folder, Colocate(gpus=1), VLLM(folder, memory_fraction=0.5))
    memory = memory_of(job, Hardware(8), LIMITS, prompts=8)
    asleep = {node: {one.process: one.asleep for one in stage(memory, node).alive} for node in ("generate", "sync")}
    assert asleep["generate"] == {"actor": True, "ref": True, "rollout": False}
    assert asleep["sync"] == {"actor": False, "ref": True, "rollout": False}
    assert stage(memory, "generate").alive[0].parts == {"CUDA": CUDA_BYTES}
    on_cpu = memory_of(job, Hardware(8, device="cpu"), LIMITS, prompts=8)
    assert not any(one.asleep for each in on_cpu.stages for one in each.alive)


def test_sides_of_a_sync_that_do_not_fit_together_by_what_they_declare_take_turns(folder: str) -> None:
    for room, together in ((6.0, True), (5.0, False)):
        job = job_of(folder, Colocate(gpus=1, memory=room), VLLM(folder, memory_fraction=0.5), memory=3.0)
        syncs = [one for one in memory_of(job, Hardware(8), LIMITS, 8).stages if one.node == "sync"]
        awake = [{one.process for one in each.alive if not one.asleep} for each in syncs]
        assert awake == [{"actor", "rollout"}] if together else [{"actor"}, {"rollout"}]


def test_an_adapter_is_sent_alone(folder: str) -> None:
    lora = LoRA(r=8)
    numbers = 4 * 8 * sum((256 + 256, 256 + 128, 256 + 128, 256 + 256, *2 * (256 + 768,), 768 + 256))
    for engine in (VLLM(folder, lora=lora), TorchRollout(folder, lora=lora)):
        memory = memory_of(job_of(folder, Colocate(gpus=1), engine, lora=lora), Hardware(80), LIMITS, 8)
        parts = {one.process: one.parts["sync buckets"] for one in stage(memory, "sync").alive if not one.asleep}
        assert parts == {"actor": BUCKET_BYTES, "rollout": 4 * numbers}  # a stream packs them into a bucket
    full = memory_of(job_of(folder, Colocate(gpus=1), VLLM(folder), lora=lora), Hardware(80), LIMITS, 8)
    assert stage(full, "sync").alive[0].parts["sync buckets"] >= BUCKET_BYTES


def test_split_slots_are_their_own(folder: str) -> None:
    memory = memory_of(job_of(folder, Split(train=2, rollout=1), VLLM(folder), ranks=2), Hardware(8), LIMITS, 8)
    assert memory.peaks.keys() == {0, 1, 2}
    assert memory.peaks[2].alive[0].process == "rollout"
    assert "rollout" not in [one.process for one in memory.peaks[0].alive]


def test_a_sync_to_an_engine_in_bfloat16_gathers_rounded_shards(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "BUCKET_BYTES", 1 << 16)

    def sent(engine: Any) -> int:
        job = job_of(folder, Split(train=2, rollout=1), engine, ranks=2)
        return stage(memory_of(job, Hardware(8), LIMITS, 8), "sync").alive[0].parts["sync buckets"]

    one, half = (sent(TorchRollout(folder, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert 0.5 * one <= half < 0.7 * one  # vectors are not rounded, and shards are there twice
    assert sent(VLLM(folder)) == half


def test_neighbors_send_all_weights_and_other_processes_a_share(folder: str) -> None:
    """By CUDA IPC, each process of a trainer sends to the engine on its device."""
    for place, transport in ((Colocate(gpus=2), "cuda ipc"), (Split(train=2, rollout=2), "nccl")):
        job = job_of(folder, place, VLLM(folder, ranks=2, memory_fraction=0.5), ranks=2)
        found = stage(memory_of(job, Hardware(80), LIMITS, 8), "sync").alive[0].parts["sync buckets"]
        assert found == sending_bytes(Model(folder), Mesh(fsdp=2), BUCKET_BYTES, "bfloat16", transport)


def test_stated_memory_stands_for_the_prediction_and_an_unknown_backend_is_named(folder: str) -> None:
    class Mine(TorchScorer):
        def footprint(self, demand: Any) -> Any:
            return None

    job = job_of(folder)
    stated = job.edit(bind={"ref": TorchScorer(folder, memory=3.0)})
    assert stage(memory_of(stated, Hardware(80), LIMITS), "generate").alive[0].parts["as stated"] == 3 * GIB
    assert memory_of(job.edit(bind={"ref": Mine(folder)}), Hardware(80), LIMITS).unknown == ["ref"]


def test_the_cheapest_change_fits_and_a_cheaper_one_does_not(folder: str) -> None:
    job = job_of(folder, Colocate(gpus=1), TorchRollout(folder), max_tokens=1024)
    base = memory_of(job, Hardware(80, device="cpu"), LIMITS, 8)

    def found(gib: float) -> Any:
        hardware = Hardware(gib, device="cpu")

        def predict(changed: Any) -> Memory:
            return memory_of(changed, hardware, LIMITS, 8)

        change = cheapest(job, predict(job), predict)
        if change is not None:
            assert change.memory.fits and not predict(job).fits
            assert change.memory == predict(change.job)  # the same predictor, applied
        return change

    peak = base.worst.bytes / GIB
    assert found(peak * 0.99).settings == {"actor.max_tokens": 512, "ref.max_tokens": 1024}
    parts = {name: size for one in base.worst.alive for name, size in one.parts.items()}
    fewer = found(peak - 0.4 * parts["activations"] / GIB)
    assert fewer.settings["actor.max_tokens"] == 512
    smaller = found(peak - 0.85 * parts["activations"] / GIB)
    assert smaller.settings["actor.gradient_checkpointing"] == 2
    assert found(0.001) is None


def test_states_move_to_the_cpu_before_weights_do(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each suggestion fits where it is applied; a room between both has the smaller one."""
    monkeypatch.setattr(streamed, "BUCKET_BYTES", 1 << 20)
    job = small_job(folder, gradient_checkpointing="offload")

    def peak(**settings: Any) -> int:
        actor = dataclasses.replace(job.graph.bindings["actor"], **settings)
        return memory_of(job.edit(bind={"actor": actor}), Hardware(80), LIMITS, 8).worst.bytes

    sizes = peak(), peak(offload="optimizer"), peak(offload=True)
    assert sizes[0] > sizes[1] > sizes[2]
    for size, offload in zip(sizes[1:], ("optimizer", True), strict=True):
        hardware = Hardware((size + (1 << 20)) / GIB)

        def predict(changed: Any, hardware: Hardware = hardware) -> Memory:
            return memory_of(changed, hardware, LIMITS, 8)

        change = cheapest(job, predict(job), predict)
        assert change is not None and change.settings["actor.offload"] == offload
        assert predict(change.job).fits and f"--set actor.offload={str(offload).lower()}" in change.options


def test_layers_are_recomputed_by_and_by(folder: str) -> None:
    job = small_job(folder)
    ladder = [False, 2, True, "offload"]

    def peak(value: Any) -> int:
        actor = dataclasses.replace(job.graph.bindings["actor"], gradient_checkpointing=value)
        return memory_of(job.edit(bind={"actor": actor}), Hardware(80), LIMITS, 8).worst.bytes

    sizes = [peak(value) for value in ladder]
    assert sizes == sorted(sizes, reverse=True)
    for size, value in zip(sizes[1:3], ladder[1:3], strict=True):
        hardware = Hardware((size + 1) / GIB)
        change = cheapest(job, memory_of(job, hardware, LIMITS, 8), lambda x, on=hardware: memory_of(x, on, LIMITS, 8))
        assert change is not None and change.settings == {"actor.gradient_checkpointing": value}


def test_more_ranks_come_with_a_place_for_them(folder: str) -> None:
    least = {"gradient_checkpointing": True, "max_tokens": 256}
    job = job_of(folder, Split(), VLLM(folder, kv_cache_bytes=1 << 20, memory_fraction=0.1), **least)
    memory = memory_of(job, Hardware(80), LIMITS, 8)
    hardware = Hardware((stage(memory, "update_actor").bytes - 1) / GIB)

    def predict(changed: Any) -> Memory:
        found = memory_of(changed, hardware, LIMITS, 8)
        return dataclasses.replace(found, stages=[one for one in found.stages if one.node == "update_actor"])

    change = cheapest(job, predict(job), predict)
    assert change is not None
    assert change.settings == {"actor.ranks": 2, "place": Split(train=2)}
    assert change.options == "--set actor.ranks=2 --set 'place=Split(train=2)'"


def test_the_longest_rows_are_those_of_data_and_nodes_or_as_given(tmp_path: Path) -> None:
    graph = grpo(digits, max_new_tokens=100)
    data = PromptData("train.jsonl", max_prompt_length=30)
    assert limits_of(graph, [data], {}) == (30, 100)
    assert limits_of(graph, [data], {"response": 50}) == (30, 50)
    with raises("memory.unknown-length", missing="prompt"):
        limits_of(graph, [], {})


def test_hardware_is_known_by_name_in_any_case_or_stated() -> None:
    assert hardware_of("h100") is HARDWARE["H100"]
    assert 79 < HARDWARE["H100"].memory < 80
    with raises("memory.unknown-hardware", found="H1000"):
        hardware_of("H1000")

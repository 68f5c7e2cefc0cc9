"""Tests of `sampling.py`: the KV cache of `TorchRollout` against a real generation, that of engines by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.backends import VLLM, SGLang, TorchRollout, TorchTrainer
from flowrl.backends.torch.generate.slots import Slots
from flowrl.data.keys import Key
from flowrl.protocols.footprint import GIB, Demand
from flowrl.protocols.protocols import Sampling
from tests.backends.torch.generate.rollouts import Actor, names, synced
from tests.backends.torch.sizing.counting import Allocations, folder_of

PROMPT, RESPONSE, ROWS = 60, 100, 4
CPU = Demand(PROMPT, RESPONSE, ROWS, ROWS, "cpu", 80 * GIB)
GPU = replace(CPU, device="cuda")


def test_a_generation_takes_what_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, "llama")
    engine = synced(Actor(folder))
    counter = Allocations()
    counter.ignore(*engine.model.parameters(), *engine.model.buffers())
    made = Slots._buffer

    def tagged(self: Slots, *given: Any) -> Any:
        counter.tag = "KV cache"
        try:
            return made(self, *given)
        finally:
            counter.tag = "activations"

    monkeypatch.setattr(Slots, "_buffer", tagged)
    prompts = torch.randint(10, 500, (ROWS, PROMPT), generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=RESPONSE, ignore_eos=True)
    with counter:
        engine.generate(prompts, torch.ones_like(prompts).bool(), names(ROWS), sampling, Key.of(0))
    owner = TorchTrainer(folder)
    footprint = TorchRollout().footprint(replace(CPU, owner=owner))
    assert footprint.awake == {}  # the trainer's
    assert footprint.calls["generate"]["KV cache"] == pytest.approx(counter.peak["KV cache"], rel=0.1)
    assert sum(footprint.calls["generate"].values()) == pytest.approx(sum(counter.peak.values()), rel=0.1)


def test_an_own_model_takes_its_weights_and_a_copy_in_a_sync(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "llama")
    weights = TorchTrainer(folder).footprint(CPU).awake["weights"]
    footprint = TorchRollout(folder, dtype="bfloat16").footprint(CPU)
    assert footprint.awake == {"weights": weights // 2}
    assert footprint.calls["receive"] == {"sync buckets": weights // 2}
    assert TorchRollout(folder).footprint(replace(CPU, in_process=True)).calls["receive"] == {"sync buckets": 0}


def test_an_engine_takes_its_share_of_the_device(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "llama")
    weights = TorchTrainer(folder).footprint(CPU).awake["weights"] // 2  # bfloat16
    parts = VLLM(folder, memory_fraction=0.5).footprint(GPU).awake
    assert parts["weights"] == weights
    assert parts["weights"] + parts["KV cache"] + parts["engine"] == 40 * GIB
    assert VLLM(folder, kv_cache_bytes=GIB).footprint(GPU).awake["KV cache"] == GIB
    token = 2 * 4 * 2 * 64 * 2  # keys and values, layers, KV heads, head size, bytes
    assert SGLang(folder, cache_tokens=1000).footprint(GPU).awake["KV cache"] == 1000 * token
    assert VLLM(folder, tensor_parallel=2).footprint(GPU).awake["weights"] == weights // 2
    small = VLLM(folder, memory_fraction=0.01).footprint(GPU).awake
    assert small["KV cache"] == token * (PROMPT + RESPONSE)  # a row needs as much
    assert VLLM(folder).footprint(GPU).asleep.keys() == {"engine", "CUDA"}

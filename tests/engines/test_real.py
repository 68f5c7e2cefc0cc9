"""A pretrained model in bfloat16: the probe accepts a correct engine and detects planted faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.backends import VLLM, SGLang, TorchTrainer
from flowrl.backends.torch.score.engine import TorchTrainerEngine
from flowrl.protocols.protocols import Sampling
from tests.engines.contract.answers import CONTEXT, KEY, to_score
from tests.engines.contract.sources import Altered, SendsOtherWeights
from tests.engines.real import PACKAGE, smollm2
from tests.engines.vllm.vllm_slot import VLLMSlot
from tests.support.errors import raises

pytestmark = [pytest.mark.engines("vllm", "sglang", PACKAGE), pytest.mark.timeout(480)]

Weights = dict[str, Tensor]
LAYER = "model.layers.{}.{}.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return smollm2(tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="module")
def trainer(folder: str) -> TorchTrainerEngine:
    return TorchTrainer(folder, device="cpu", dtype="bfloat16").build(CONTEXT)


@pytest.fixture(scope="module", params=["vllm", pytest.param("sglang", marks=pytest.mark.nightly)])
def engine(request: pytest.FixtureRequest, folder: str, vllm_slot: VLLMSlot) -> Iterator[Any]:
    """An engine with default settings, except for its memory."""
    vllm_slot.free()
    small: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8}
    if request.param == "vllm":
        engine: Any = VLLM(folder, kv_cache_bytes=128 << 20, **small).build(CONTEXT)
    else:
        engine = SGLang(folder, cache_tokens=4096, **small).build(CONTEXT)
    yield engine
    engine.close()


def test_a_correct_engine_passes_the_probe_and_generates_plausible_text(
    engine: Any, trainer: TorchTrainerEngine, folder: str
) -> None:
    receipt = engine.sync(trainer)
    original = dict(trainer.weights())
    assert receipt.bytes == sum(tensor.numel() * (2 if tensor.ndim > 1 else 4) for tensor in original.values())
    fine = TorchTrainer(folder, device="cpu").build(CONTEXT)
    engine._scores = None  # the next sync has another trainer
    engine.sync(Altered(fine, version=2))
    engine._scores = None

    def prompt_of(question: str) -> list[int]:
        return engine.tokenizer.prompt_ids([{"role": "user", "content": question}])

    # Near ties of two tokens are decided by how a CPU rounds. These answers have none where they are checked.
    questions = ["List the months of the year.", "Repeat after me: Paris, London, Berlin.", "What is two plus three?"]
    prompts, prompt_mask = engine.tokenizer.pad_left([prompt_of(question) for question in questions])
    rows = ["a", "b", "c"]
    greedy = engine.generate(prompts, prompt_mask, rows, Sampling(0.0, 0, 1.0, 24), KEY)
    answers = [
        engine.tokenizer.text(row[mask]) for row, mask in zip(greedy.responses, greedy.response_mask, strict=True)
    ]
    assert "January, February, March" in answers[0] and "London, Berlin" in answers[1]
    sampled = engine.generate(prompts, prompt_mask, rows, Sampling(1.0, 0, 1.0, 24), KEY)
    for source in (fine, trainer):
        difference = (sampled.log_probs - source.log_probs(to_score(prompts, prompt_mask, sampled, 1.0))).abs()
        assert 1e-4 < difference[sampled.response_mask].mean() < 0.1


def swap_layers(weights: Weights) -> None:
    for name in [name for name in weights if name.startswith("model.layers.14.")]:
        other = name.replace(".14.", ".15.")
        weights[name], weights[other] = weights[other], weights[name]


def permute_heads(weights: Weights) -> None:
    name = LAYER.format(10, "self_attn.o_proj")
    weights[name] = weights[name].roll(64, 1)


def zero_a_matrix(weights: Weights) -> None:
    name = LAYER.format(10, "mlp.down_proj")
    weights[name] = torch.zeros_like(weights[name])


@pytest.mark.parametrize("change", [swap_layers, permute_heads, zero_a_matrix])
def test_the_probe_detects_wrong_weights_in_bfloat16(
    engine: Any, trainer: TorchTrainerEngine, change: Callable[[Weights], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = dict(trainer.weights())
    change(weights)
    monkeypatch.setattr(engine, "_stopping_on_error", nullcontext)  # so that it is not restarted
    with raises("sync.scores-differ", engine=engine.name, dtypes=("bfloat16", "bfloat16")):
        engine.sync(SendsOtherWeights(trainer, sorted(weights.items())))
    assert engine.receipt is None


def test_the_probe_detects_old_weights_in_bfloat16(
    engine: Any, trainer: TorchTrainerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update is smaller than the tolerance, and the digest of the sent weights is correct."""
    engine.sync(Altered(trainer, version=3))
    take, halt = engine._take_over, engine._halt

    def idle(arrival: Any, caches: Any) -> str:
        for _ in arrival.weights():
            pass
        return "nowhere"

    monkeypatch.setattr(engine, "_stopping_on_error", nullcontext)
    original = {name: tensor.detach().clone() for name, tensor in trainer.weights()}
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in trainer.weights():
            if "mlp" in name:
                tensor.add_(torch.randn(tensor.shape, generator=draw) * tensor.std() * 0.01)
    try:
        monkeypatch.setattr(engine, "_halt", lambda caches: [])
        monkeypatch.setattr(engine, "_take_over", idle)
        with raises("sync.old-weights", engine=engine.name, followed=0.0):
            engine.sync(Altered(trainer, version=4))
        monkeypatch.setattr(engine, "_halt", halt)
        monkeypatch.setattr(engine, "_take_over", take)
        assert engine.sync(Altered(trainer, version=4)).version == 4
    finally:
        with torch.no_grad():
            for name, tensor in trainer.weights():
                tensor.copy_(original[name])

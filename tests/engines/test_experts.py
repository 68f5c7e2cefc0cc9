"""Mixtures of experts: engines store their weights fused and packed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from flowrl.backends import VLLM, SGLang, TorchTrainer
from flowrl.protocols.protocols import Sampling
from tests.engines.contract.answers import CONTEXT, GREEDY, KEY, assert_log_probs_of, by_torch, names, ragged, rows
from tests.engines.contract.sources import Altered
from tests.engines.vllm.vllm_slot import VLLMSlot
from tests.support.models import EOS, PAD, VOCAB, char_tokenizer

SMALL: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 16, "max_model_len": 128}


def moe_folder(folder: Path, seed: int) -> str:
    """Two layers of four experts, two per token."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return moe_folder(tmp_path_factory.mktemp("experts"), seed=0)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return TorchTrainer(moe_folder(tmp_path_factory.mktemp("others"), seed=1), device="cpu").build(CONTEXT)


def vllm(folder: str) -> VLLM:
    return VLLM(folder, kv_cache_bytes=64 << 20, **SMALL)


def tensor_parallel_vllm(folder: str) -> VLLM:
    return VLLM(folder, kv_cache_bytes=64 << 20, tensor_parallel=2, **SMALL)


def sglang(folder: str) -> SGLang:
    return SGLang(folder, cache_tokens=4096, **SMALL)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(vllm, marks=pytest.mark.engines("vllm")),
        pytest.param(tensor_parallel_vllm, marks=[pytest.mark.engines("vllm"), pytest.mark.nightly]),
        pytest.param(sglang, marks=[pytest.mark.engines("sglang"), pytest.mark.nightly]),
    ],
)
def engine(request: pytest.FixtureRequest, folder: str, vllm_slot: VLLMSlot) -> Iterator[Any]:
    vllm_slot.free()
    engine = request.param(folder).build(CONTEXT)
    yield engine
    engine.close()


@pytest.mark.timeout(480)
def test_generation_uses_the_synced_expert_weights(engine: Any, trainer: Any, other: Any, folder: str) -> None:
    """On a CPU vLLM itself loads plain weights of experts, but then uses them as if they were packed."""
    prompts, mask = ragged(engine, [4, 9, 1])
    for version, source in enumerate([trainer, other, trainer]):
        engine.sync(Altered(source, version=version))
        sampled = engine.generate(prompts, mask, names(3), Sampling(1.0, 0, 1.0, 24), KEY)
        assert_log_probs_of(source, prompts, mask, sampled, 1.0)
        responses = rows(engine.generate(prompts, mask, names(3), GREEDY, KEY))
        assert responses == by_torch(source, folder, prompts, mask)

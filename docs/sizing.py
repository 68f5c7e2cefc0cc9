"""Write docs/reference/sizing.md, the table of models and GPUs that they fit on: ``python docs/sizing.py``.

Models are the facts of their ``config.json``; `flowrl.backends.torch.sizing` predicts from these alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from flowrl.backends import TorchTrainer
from flowrl.protocols.footprint import GIB, Demand
from flowrl.run.prediction.hardware import HARDWARE

PAGE = Path(__file__).resolve().parent / "reference" / "sizing.md"
GPU = HARDWARE["H100"]
GPUS = (1, 8, 16, 64)
LENGTHS = (4096, 16384, 32768)
HEAD = f"""# Sizing

Whether a trainer fits on {GPU.name} GPUs of {GPU.memory:.1f} GiB: the peak of each GPU in an update, in GiB, by the
number of GPUs that shard the model (`Mesh(fsdp=GPUs)`, or `ranks=GPUs`) and the longest row, prompt and response
together. **Bold** fits; leave some room, since the allocator fragments.

All numbers are *predicted*, not measured: no run on these GPUs has been compared with them. They are what
`flowrl plan --hardware` computes from each model's `config.json`, for
`TorchTrainer(dtype="bfloat16", gradient_checkpointing=True)` with AdamW and one row per micro-batch, and 1.5 GiB for an
engine that is asleep on the same GPU. See
[Fit a model into memory](../how-to/precision-and-memory.md#predict-what-fits) for what they count, and for your model.

<!-- written by docs/sizing.py -->
"""

QWEN3: Mapping[str, Any] = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
LLAMA: Mapping[str, Any] = {"vocab_size": 128_256, "num_key_value_heads": 8, "tie_word_embeddings": False}


def _sizes(hidden: int, width: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


def models() -> dict[str, PreTrainedConfig]:
    """The configurations of published models, by name."""
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    qwen, untied = dict(QWEN3), {"tie_word_embeddings": False}
    return {
        "Qwen3-0.6B": Qwen3Config(**qwen, **_sizes(1024, 3072, 28, 16), tie_word_embeddings=True),
        "Qwen3-1.7B": Qwen3Config(**qwen, **_sizes(2048, 6144, 28, 16), tie_word_embeddings=True),
        "Qwen3-8B": Qwen3Config(**qwen, **_sizes(4096, 12_288, 36, 32), **untied),
        "Llama-3.1-8B": LlamaConfig(**LLAMA, **_sizes(4096, 14_336, 32, 32)),
        "Qwen3-30B-A3B": Qwen3MoeConfig(
            **{**qwen, "num_key_value_heads": 4}, **_sizes(2048, 6144, 48, 32), **experts, **untied
        ),
        "Qwen3-32B": Qwen3Config(**qwen, **_sizes(5120, 25_600, 64, 64), **untied),
        "Llama-3.1-70B": LlamaConfig(**LLAMA, **_sizes(8192, 28_672, 80, 64)),
    }


def row(name: str, config: PreTrainedConfig, gpus: Sequence[int] = GPUS) -> list[str]:
    """The lines of a model."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        for ranks in gpus:
            cells = (cell(folder, ranks, tokens) for tokens in LENGTHS)
            lines.append(f"| {name} | {ranks} | {' | '.join(cells)} |")
    return lines


def cell(folder: str, ranks: int, tokens: int) -> str:
    """The peak of a GPU, of so many, with rows of so many tokens."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "gradient_checkpointing": True, "max_tokens": tokens}
    found = TorchTrainer(folder, ranks=ranks, **settings).footprint(Demand(0, tokens, None, None, "cuda", GPU.room))
    size = (sum(found.awake.values()) + sum(found.calls["update"].values())) / GIB + 1.5
    text = f"{size:.1f}" if size < 1000 else f"{size:.0f}"
    return f"**{text}**" if size <= GPU.memory else text


def page() -> str:
    """The page as Markdown."""
    head = (
        f"| model | GPUs | {' | '.join(f'{tokens} tokens' for tokens in LENGTHS)} |\n|---|---|{'---|' * len(LENGTHS)}"
    )
    lines = [line for name, config in models().items() for line in row(name, config)]
    return "\n".join([HEAD, head, *lines]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Random models of the sizes that parts need, and rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from lengths import Batch
from transformers import Qwen3Config, Qwen3ForCausalLM

from flowrl.demo.model import make_tokenizer

from .parts import Target

CONTEXT: Any = SimpleNamespace(seed=0, rank=0, world_size=1)


class Size(NamedTuple):
    """A size of Qwen3."""

    layers: int
    width: int
    inner: int
    heads: int
    head: int
    vocabulary: int


QWEN3_06B = Size(28, 1024, 3072, 16, 128, 151_936)
SMALL = Size(8, 512, 1536, 8, 64, 32_000)
TINY = Size(2, 64, 128, 2, 32, 512)
PREDICTABLE = Size(4, 256, 512, 4, 64, 512)
"""The smallest size whose activations are predicted within 10 %."""


def qwen3(target: Target, size: Size) -> str:
    """The folder of a model with random weights and the demo's tokenizer, with two query heads per key head."""
    folder = target.folder / f"qwen3-{size.layers}-{size.width}"
    if (folder / "tokenizer_config.json").exists():  # of another part
        return str(folder)
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        head_dim=size.head,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def ragged(rows: int, prompt: int, longest: int) -> Batch:
    """Rows whose prompts and responses have other lengths, padded on the left and on the right."""
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(prompt // 2, prompt + 1, (rows, 1), generator=draw)
    responses = torch.randint(1, longest + 1, (rows, 1), generator=draw)
    responses[0] = longest
    return _batch(prompts, responses, prompt, longest)


def even(rows: int, prompt: int, response: int) -> Batch:
    """Rows of one length."""
    return _batch(torch.full((rows, 1), prompt), torch.full((rows, 1), response), prompt, response)


def _batch(prompts: torch.Tensor, responses: torch.Tensor, prompt: int, longest: int) -> Batch:
    draw, columns = torch.Generator().manual_seed(1), torch.arange(prompt + longest)
    mask = (columns >= prompt - prompts) & (columns < prompt + responses)
    ids = torch.randint(8, 90, mask.shape, generator=draw).masked_fill(~mask, 0)
    advantages = torch.randn(len(ids), 1, generator=draw).expand(-1, longest).contiguous()
    return Batch(ids, mask, (mask.cumsum(1) - 1).clamp(min=0), mask[:, prompt:], torch.ones(len(ids)), advantages)

"""Tiny random Hugging Face folders for tests: a char-level tokenizer with a chat template and a 2-layer causal LM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?+-*/=()<>\n"
SPECIALS = ("<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>")
VOCAB = len(SPECIALS) + len(CHARACTERS)
PAD, EOS = 0, 1
KINDS = ["llama", "qwen2", "gpt2", "gemma2"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def char_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, plus `SPECIALS`; pad is id 0 and EOS id 1.

    It is a byte-level BPE without merges, because transformers forces that pre-tokenization on a ``qwen2`` folder.
    """
    symbols = CHARACTERS.replace(" ", "Ġ").replace("\n", "Ċ")
    core = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIALS, *symbols])}, [], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIALS[3:]),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config(kind: str) -> PreTrainedConfig:
    """Two layers, hidden size 64, head size 32. ``llama`` and ``gemma2`` have grouped keys; ``qwen2``, ``gpt2`` and
    ``gemma2`` are tied; ``gpt2`` has dropout and learned positions; ``gemma2`` soft-caps its logits, ``granite`` and
    ``cohere`` scale theirs, and the head of ``phi`` has a bias."""
    ids = dict(vocab_size=VOCAB, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None)
    size = dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=256
    )
    grouped = dict(num_key_value_heads=1, head_dim=32)
    match kind:
        case "llama":
            return LlamaConfig(**ids, **size, **grouped, tie_word_embeddings=False)
        case "qwen2":
            return Qwen2Config(**ids, **size, num_key_value_heads=2, tie_word_embeddings=True)
        case "gpt2":
            return GPT2Config(**ids, n_embd=64, n_layer=2, n_head=2, n_positions=256)
        case "gemma2":
            return Gemma2Config(**ids, **size, **grouped, query_pre_attn_scalar=32, sliding_window=64)
        case "granite":
            return GraniteConfig(**ids, **size, num_key_value_heads=2, logits_scaling=3.0)
        case "cohere":
            return CohereConfig(**ids, **size, num_key_value_heads=2, logit_scale=0.3)
        case "phi":
            return PhiConfig(**ids, **size)
    raise ValueError(f"no tiny model {kind!r}; expected one of those above.")


def tiny_folder(tmp_path: str | os.PathLike[str], kind: str = "llama", seed: int = 0, **changed: Any) -> str:
    """Write a tiny random model and its tokenizer under `tmp_path`; returns the folder. Its config may be `changed`.

    The spread of weights is larger than usual, so distributions are far from uniform and differ from token to token.
    """
    folder = Path(tmp_path) / f"{kind}-{seed}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(kind)
        config.update(changed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return str(folder)


class Ragged(NamedTuple):
    """Sequences as a rollout returns them, with a column (`pull`) of token weights for losses of tests."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    response_mask: torch.Tensor
    temperature: torch.Tensor
    pull: torch.Tensor
    uid: np.ndarray
    absent: torch.Tensor | None


def ragged(rows: int = 6, prompt: int = 7, response: int = 9, seed: int = 0) -> Ragged:
    """Random rows of unequal lengths, padded with unknown ids; masks with holes; temperatures 0.5 to 1.5.

    The first row fills the whole width, the second has the shortest prompt and response.
    """
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, prompt + 1, (rows,), generator=draw)
    responses = torch.randint(1, response + 1, (rows,), generator=draw)
    prompts[:2], responses[:2] = torch.tensor([prompt, 1]), torch.tensor([response, 1])
    attended = torch.cat(
        [torch.arange(prompt) >= prompt - prompts[:, None], torch.arange(response) < responses[:, None]], dim=1
    )
    ids = torch.randint(len(SPECIALS), VOCAB, (rows, prompt + response), generator=draw)
    holes = torch.rand(rows, response, generator=draw) < 0.2
    holes[:, 0] = False
    return Ragged(
        input_ids=ids.masked_fill(~attended, 10**9),
        attention_mask=attended,
        position_ids=(attended.cumsum(1) - 1).masked_fill(~attended, -7),
        response_mask=attended[:, prompt:] & ~holes,
        temperature=0.5 + torch.rand(rows, generator=draw),
        pull=torch.randn(rows, response, generator=draw),
        uid=np.array([f"row {i}" for i in range(rows)], dtype=object),
        absent=None,
    )


def unpadded(batch: Ragged) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Row number, its attended tokens ``[1 length]``, and the positions in these of those under its response mask."""
    width = batch.response_mask.shape[1]
    for row in range(len(batch.input_ids)):
        attended = batch.attention_mask[row]
        counted = torch.zeros_like(attended)
        counted[-width:] = batch.response_mask[row]
        yield row, batch.input_ids[row][attended][None], counted[attended].nonzero().flatten()

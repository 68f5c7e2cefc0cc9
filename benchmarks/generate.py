"""Tokens a second of `TorchRollout` and of transformers' `model.generate`, on the same weights and prompts.

`TorchRollout` also returns log-probs, and draws each row from a key of its own; it runs a prompt that several rows
share through the model once.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import medians, table
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from flowrl import Key
from flowrl.backends import TorchRollout, TorchTrainer
from flowrl.core.protocols import Sampling
from flowrl.demo.model import make_tokenizer
from flowrl.graphs import grpo

ROWS, PROMPT, NEW = 32, 128, 48  # rows, tokens of a prompt, tokens of a response at most
SIZES = {"2 layers of 64": (2, 64), "4 layers of 256": (4, 256)}


def write_model(folder: Path, layers: int, width: int) -> str:
    """A random Llama with the demo's tokeniser."""
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def compare(engine: Any, group: int) -> list[str]:
    """Tokens a second of both, and their ratio, where `group` rows share a prompt."""
    prompts = torch.randint(8, 100, (ROWS // group, PROMPT)).repeat_interleave(group, 0)
    mask = torch.ones_like(prompts, dtype=torch.bool)
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=NEW)
    row_ids, tokens = [str(i) for i in range(ROWS)], {"flowrl": 0, "transformers": 0}
    calls = dict.fromkeys(tokens, 0)

    def flowrl() -> None:
        key = Key.of(0).derive(calls["flowrl"])
        sampled = engine.generate(prompts, mask, row_ids, sampling, key)
        calls["flowrl"] += 1
        tokens["flowrl"] += int(sampled.response_mask.sum())

    def transformers() -> None:
        with torch.no_grad():
            whole = engine.model.generate(
                prompts, attention_mask=mask.long(), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=NEW
            )
        answers, config = whole[:, PROMPT:], engine.model.config
        ended = (answers == config.eos_token_id).cumsum(1)
        calls["transformers"] += 1
        tokens["transformers"] += int((ended - (answers == config.eos_token_id).long() == 0).sum())

    taken = medians({"flowrl": flowrl, "transformers": transformers}, seconds=4, least=2)
    rates = [tokens[name] / calls[name] / seconds for name, seconds in taken.items()]
    return [f"{rates[0]:,.0f}", f"{rates[1]:,.0f}", f"{rates[0] / rates[1]:.2f}"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory() as base:
        for size, (layers, width) in SIZES.items():
            model = write_model(Path(base) / size, layers, width)
            graph = grpo("flowrl.demo.verifier:compute_score", kl_coef=0.0)
            with graph.bind(actor=TorchTrainer(model), rollout=TorchRollout()).eager() as session:
                for group in (1, 8):
                    rows.append([f"{size}, groups of {group}", *compare(session.engines["rollout"], group)])
    heads = ["", "flowrl", "model.generate", "ratio"]
    table(f"Tokens a second: {ROWS} rows, prompts of {PROMPT} tokens, at most {NEW} new ones", heads, rows)

"""The small models of the examples: one token per word, and a warm start on demonstrations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from flowrl.demo import make_model, word_tokenizer

SPECIAL = ("<|pad|>", "<|unk|>", "<|end|>", "<|user|>", "<|tool|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

Conversation = list[dict[str, str]]


def make_tokenizer(words: Sequence[str]) -> Any:
    """One token for each of `words`, else one per character."""
    tokens = dict.fromkeys((*SPECIAL, *words, "\n", *map(chr, range(32, 127))))
    return word_tokenizer(tokens, sorted(words, key=len, reverse=True), SPECIAL[3:], TEMPLATE)


def imitate(
    folder: Path,
    words: Sequence[str],
    demonstration: Callable[[random.Random], Conversation],
    seed: int,
    steps: int,
    rows: int,
) -> Path:
    """Train a model of 115,000 parameters to imitate demonstrations; write it as a Hugging Face folder. Half a minute.

    Args:
        folder: output folder.
        words: vocabulary of its tokenizer.
        demonstration: samples a conversation.
        seed: seed of the weights and the demonstrations.
        steps: optimizer steps.
        rows: conversations per step.
    """
    tokenizer = make_tokenizer(words)
    model, numbers = make_model(tokenizer, seed), random.Random(f"demonstrations {seed}")
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20, (steps - step) / (0.3 * steps))
    )
    answering = tokenizer.encode("<|assistant|>", add_special_tokens=False)[0]
    for _ in range(steps):
        texts = [tokenizer.apply_chat_template(demonstration(numbers), tokenize=False) for _ in range(rows)]
        batch = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
        ids = batch["input_ids"]
        # The loss covers the assistant's tokens, from the one after its mark to the end of its turn.
        ends = ids == tokenizer.eos_token_id
        turn = torch.cat([torch.zeros(len(ids), 1, dtype=torch.int64), ends.cumsum(1)[:, :-1]], dim=1)
        counts = (turn % 2 == 1) & (ids != answering) & batch["attention_mask"].bool()
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        labels = ids[:, 1:].masked_fill(~counts[:, 1:], -100)
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

"""The warm start of the agents' models: supervised fine-tuning on conversations with tool calls, with flowrl."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the module in the folder above
from imitation import SPECIAL

from flowrl import DemoData, Training
from flowrl.backends import AdamW, TorchTrainer
from flowrl.demo import make_model, word_tokenizer
from flowrl.graphs import sft
from flowrl.schedules import Cosine

TEMPLATE = """\
{%- if tools %}{{ '<|tool|>' }}{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ '<|end|>' }}{% endif %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
"""Hermes' format of calls; of the tools, it lists the names."""

Conversation = list[dict[str, Any]]


def call(name: str, **arguments: str) -> dict[str, Any]:
    """A message of the assistant with a tool call."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def imitate(
    folder: Path,
    words: Sequence[str],
    tools: Sequence[str],
    demonstration: Callable[[random.Random], Conversation],
    seed: int,
    epochs: int,
) -> Path:
    """Train a model of 115,000 parameters on 2,048 demonstrations; returns its folder.

    Args:
        folder: of the run; the model is in its folder ``actor``.
        words: the vocabulary of its tokenizer, besides single characters.
        tools: the names of the tools in each conversation.
        demonstration: samples a conversation.
        seed: seed of the weights and the demonstrations.
        epochs: passes over the demonstrations.
    """
    base, numbers = folder / "base", random.Random(f"demonstrations {seed}")
    words = (*words, '"}}\n</tool_call>', *tools)
    tokens = dict.fromkeys((*SPECIAL, *words, "\n", *map(chr, range(32, 127))))
    tokenizer = word_tokenizer(tokens, sorted(words, key=len, reverse=True), SPECIAL[3:], TEMPLATE)
    make_model(tokenizer, seed).save_pretrained(base)
    tokenizer.save_pretrained(base)
    schemas = [{"type": "function", "function": {"name": name}} for name in tools]
    rows = [json.dumps({"messages": demonstration(numbers), "tools": schemas}) for _ in range(2048)]
    (folder / "demonstrations.jsonl").write_text("\n".join(rows))
    run = Training(
        sft().bind(actor=TorchTrainer(base, AdamW(lr=4e-3, betas=(0.9, 0.95)), Cosine(1.0, 0.0, warmup=0.1))),
        DemoData(folder / "demonstrations.jsonl"),
        epochs=epochs,
        prompts=64,
        seed=seed,
        folder=str(folder / "sft"),
    ).run()
    return run.folder / "actor"

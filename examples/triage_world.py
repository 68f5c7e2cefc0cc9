"""The world of `triage.py`: incidents in a small shop, and a small model that has seen some handled.

A service fails by one of four causes. Who asks for the metrics of the right service sees the cause; who guesses is
right once in four times.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from flowrl.demo.model import make_model

SERVICES = ("checkout", "payment", "cart", "search", "auth", "catalog", "shipping", "email", "orders", "gateway")
CAUSES = {"cpu": "cpu_saturation", "mem": "memory_leak", "disk": "disk_full", "net": "network_loss"}

SPECIAL = ("<|pad|>", "<|unk|>", "<|end|>", "<|user|>", "<|tool|>", "<|assistant|>")
WORDS = (
    *SERVICES,
    *CAUSES.values(),
    *('{"service": "', '", "incident_type": "', '"}', '{"tool": "get_metrics", "service": "'),
    *("Thought: probably ", "Incident: ", " errors=", "cpu=", "mem=", "disk=", "net=", "Answer with JSON."),
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Incident(NamedTuple):
    """What is seen of an incident, what is asked for, and what the metrics of each service would show."""

    seen: str
    service: str
    cause: str
    metrics: dict[str, str]


def incident(numbers: random.Random) -> Incident:
    """One of three services has many errors, and one of its metrics is high."""
    services = numbers.sample(SERVICES, 3)
    faulty, high = numbers.choice(services), numbers.choice(list(CAUSES))
    errors = (f"{s} errors={numbers.randint(6, 9) if s == faulty else numbers.randint(0, 3)}" for s in services)
    metrics = {
        s: " ".join(
            f"{m}={numbers.randint(8, 9) if (s, m) == (faulty, high) else numbers.randint(1, 5)}" for m in CAUSES
        )
        for s in services
    }
    return Incident("Incident: " + ", ".join(errors), faulty, CAUSES[high], metrics)


def report(service: str, cause: str) -> str:
    """The answer that is asked for."""
    return f'{{"service": "{service}", "incident_type": "{cause}"}}'


def call(service: str) -> str:
    """The call of the tool."""
    return f'{{"tool": "get_metrics", "service": "{service}"}}'


def write_data(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Incidents to train on, and others: the paths of two JSONL files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, count in (("train", 4000), ("heldout", 400)):
        numbers = random.Random(f"{name} {seed}")
        rows = (_row(incident(numbers)) for _ in range(count))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        paths.append(folder / f"{name}.jsonl")
    return paths[0], paths[1]


def _row(one: Incident) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": one.seen}],
        "data_source": "triage",
        "reward_model": {"ground_truth": {"service": one.service, "incident_type": one.cause}},
        "extra_info": {"metrics": one.metrics},
    }


def make_tokenizer() -> Any:
    """One token a word of `WORDS`, else one a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = dict.fromkeys((*SPECIAL, *WORDS, "\n", *map(chr, range(32, 127))))
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<|unk|>"))
    words = sorted(WORDS, key=len, reverse=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*map(re.escape, words), r"[\s\S]"])), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|end|>",
        additional_special_tokens=list(SPECIAL[3:]),
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


def _demonstration(numbers: random.Random) -> list[dict[str, str]]:
    """How somebody handled an incident: fewer than half ask for metrics, and of those some of the wrong service. Who
    has not seen the cause names the same one always."""
    one = incident(numbers)
    others = [service for service in one.metrics if service != one.service]
    service = one.service if numbers.random() < 0.55 else numbers.choice(others)
    if numbers.random() < 0.45:
        said, reply = call(service), {"role": "tool", "content": one.metrics[service]}
        cause = one.cause if service == one.service else CAUSES["cpu"]
    else:
        said, reply = f"Thought: probably {service}", {"role": "user", "content": "Answer with JSON."}
        cause = CAUSES["cpu"]
    return [
        {"role": "user", "content": one.seen},
        {"role": "assistant", "content": said},
        reply,
        {"role": "assistant", "content": report(service, cause)},
    ]


def build(folder: Path, seed: int = 0, steps: int = 300, rows: int = 128) -> Path:
    """A model of 115 thousand parameters that imitates demonstrations, as a Hugging Face folder; half a minute."""
    tokenizer = make_tokenizer()
    model, numbers = make_model(tokenizer, seed), random.Random(f"demonstrations {seed}")
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20, (steps - step) / (0.3 * steps))
    )
    answering = tokenizer.encode("<|assistant|>", add_special_tokens=False)[0]
    for _ in range(steps):
        texts = [tokenizer.apply_chat_template(_demonstration(numbers), tokenize=False) for _ in range(rows)]
        batch = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
        ids = batch["input_ids"]
        # What counts is what the assistant says, from behind its mark to the end of its turn.
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

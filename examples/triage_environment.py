"""The environment of `triage.py`: incidents in a small shop, and a small model that imitates weak responders.

A service fails for one of four causes. The metrics of the right service show the cause; a guess is right one time in
four.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

from imitation import imitate
from rows import write_rows

SERVICES = ("checkout", "payment", "cart", "search", "auth", "catalog", "shipping", "email", "orders", "gateway")
CAUSES = {"cpu": "cpu_saturation", "mem": "memory_leak", "disk": "disk_full", "net": "network_loss"}

WORDS = (
    *SERVICES,
    *CAUSES.values(),
    *('{"service": "', '", "incident_type": "', '"}', '{"tool": "get_metrics", "service": "'),
    *("Thought: probably ", "Incident: ", " errors=", "cpu=", "mem=", "disk=", "net=", "Answer with JSON."),
)


class Incident(NamedTuple):
    """The visible report, the expected answer, and the metrics of each service."""

    seen: str
    service: str
    cause: str
    metrics: dict[str, str]


def incident(numbers: random.Random) -> Incident:
    """Sample an incident: one of three services has many errors, and one of its metrics is high."""
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
    """The expected answer."""
    return f'{{"service": "{service}", "incident_type": "{cause}"}}'


def call(service: str) -> str:
    """The tool call."""
    return f'{{"tool": "get_metrics", "service": "{service}"}}'


def write_data(folder: Path) -> tuple[Path, Path]:
    """Write training and held-out incidents; return the paths of both JSONL files."""
    return write_rows(folder, _row)


def _row(numbers: random.Random) -> dict[str, Any]:
    one = incident(numbers)
    return {
        "prompt": [{"role": "user", "content": one.seen}],
        "data_source": "triage",
        "reward_model": {"ground_truth": {"service": one.service, "incident_type": one.cause}},
        "extra_info": {"metrics": one.metrics},
    }


def _demonstration(numbers: random.Random) -> list[dict[str, str]]:
    """A weak responder: requests metrics in 45% of the cases, in 45% of these of the wrong service, and answers CPU
    saturation unless the metrics show the cause."""
    one = incident(numbers)
    others = [service for service in one.metrics if service != one.service]
    service = one.service if numbers.random() < 0.55 else numbers.choice(others)
    if numbers.random() < 0.45:
        text, reply = call(service), {"role": "tool", "content": one.metrics[service]}
        cause = one.cause if service == one.service else CAUSES["cpu"]
    else:
        text, reply = f"Thought: probably {service}", {"role": "user", "content": "Answer with JSON."}
        cause = CAUSES["cpu"]
    return [
        {"role": "user", "content": one.seen},
        {"role": "assistant", "content": text},
        reply,
        {"role": "assistant", "content": report(service, cause)},
    ]


def build(folder: Path, seed: int = 0, steps: int = 300, rows: int = 128) -> Path:
    """Train a model to imitate demonstrations; write it as a Hugging Face folder."""
    return imitate(folder, WORDS, _demonstration, seed, steps, rows)

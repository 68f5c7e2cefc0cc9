"""The environment of `triage.py`: incidents in a small shop, and a small model that has seen some handled.

A service fails by one of four causes. Who asks for the metrics of the right service sees the cause; who guesses is
right once in four times.
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


def write_data(folder: Path) -> tuple[Path, Path]:
    """Incidents to train on, and others: the paths of two JSONL files."""
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
    """A model that imitates demonstrations, as a Hugging Face folder."""
    return imitate(folder, WORDS, _demonstration, seed, steps, rows)

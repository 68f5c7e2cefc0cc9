"""The environment of `propose.py`: sums of two numbers from 1 to 5, and small models of a weak proposer and solver."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from imitation import Conversation, imitate
from rows import write_rows

NUMBERS, VALUES = range(1, 6), range(2, 11)
WORDS = ("Which sum is ", "What is ", "+", "?", *map(str, VALUES))
RIGHT = 0.4  # how often the weak models are right on purpose


def value_of(problem: str) -> int | None:
    """The value of a problem such as ``"2+5"``; None if it is not a sum of two numbers from 1 to 5."""
    found = re.fullmatch(r"([1-5])\+([1-5])", problem)
    return int(found[1]) + int(found[2]) if found else None


def request(value: int) -> Conversation:
    """What the proposer is asked."""
    return [{"role": "user", "content": f"Which sum is {value}?"}]


def question(problem: str) -> Conversation:
    """What the solver is asked."""
    return [{"role": "user", "content": f"What is {problem}?"}]


def write_data(folder: Path) -> tuple[Path, Path]:
    """Write training and held-out values; return the paths of both JSONL files."""
    return write_rows(folder, _row)


def _row(numbers: random.Random) -> dict[str, Any]:
    value = numbers.choice(VALUES)
    return {
        "prompt": request(value),
        "data_source": "propose",
        "reward_model": {"ground_truth": str(value)},
    }


def _proposed(numbers: random.Random) -> Conversation:
    """A weak proposer: any problem, which often has another value than the one that it was asked for."""
    first, second = numbers.choice(NUMBERS), numbers.choice(NUMBERS)
    value = first + second if numbers.random() < RIGHT else numbers.choice(VALUES)
    return [*request(value), {"role": "assistant", "content": f"{first}+{second}"}]


def _solved(numbers: random.Random) -> Conversation:
    """A weak solver, which often answers any value."""
    problem = f"{numbers.choice(NUMBERS)}+{numbers.choice(NUMBERS)}"
    value = value_of(problem) if numbers.random() < RIGHT else numbers.choice(VALUES)
    return [*question(problem), {"role": "assistant", "content": str(value)}]


def build(folder: Path, seed: int = 0, steps: int = 250, rows: int = 64) -> Path:
    """Train a model to imitate the weak proposer; write it as a Hugging Face folder."""
    return imitate(folder, WORDS, _proposed, seed, steps, rows)


def build_solver(folder: Path, seed: int = 0, steps: int = 250, rows: int = 64) -> Path:
    """Train a model to imitate the weak solver; write it as a Hugging Face folder."""
    return imitate(folder, WORDS, _solved, seed + 100, steps, rows)

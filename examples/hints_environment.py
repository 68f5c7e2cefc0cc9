"""The environment of `hints.py`: numbers to guess by a hint, and a small model that imitates a weak pair of players."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from imitation import Conversation, imitate
from rows import write_rows

NUMBERS = range(1, 7)
HINTS = ("warm", "cold", "soft", "loud", "fast", "slow")
WORDS = ("Hint at ", "The hint is ", "Which number?", ". ", *HINTS, *map(str, NUMBERS))
AGREED = 0.4  # how often the weak players use the same hint for a number


def give(number: int) -> Conversation:
    """What the player that gives a hint reads."""
    return [{"role": "user", "content": f"Hint at {number}"}]


def guess(hint: str) -> Conversation:
    """What the player that guesses reads."""
    return [{"role": "user", "content": f"The hint is {hint}. Which number?"}]


def write_data(folder: Path) -> tuple[Path, Path]:
    """Write training and held-out numbers; return the paths of both JSONL files."""
    return write_rows(folder, _row)


def _row(numbers: random.Random) -> dict[str, Any]:
    number = numbers.choice(NUMBERS)
    return {"prompt": give(number), "data_source": "hints", "reward_model": {"ground_truth": str(number)}}


def _played(numbers: random.Random) -> Conversation:
    """One of the two players, who often hint or guess at random."""
    number = numbers.choice(NUMBERS)
    hint = HINTS[number - 1] if numbers.random() < AGREED else numbers.choice(HINTS)
    if numbers.random() < 0.5:
        return [*give(number), {"role": "assistant", "content": hint}]
    return [*guess(hint), {"role": "assistant", "content": str(number)}]


def build(folder: Path, seed: int = 0, steps: int = 250, rows: int = 64) -> Path:
    """Train a model to imitate the weak players; write it as a Hugging Face folder."""
    return imitate(folder, WORDS, _played, seed, steps, rows)

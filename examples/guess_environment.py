"""The environment of `guess.py`: a number to guess, and a small model that imitates weak players."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from imitation import Conversation, imitate
from rows import write_rows

LOWEST, HIGHEST = 10, 41
TURNS = 6

WORDS = ("Guess my number", "It is not that", ", from ", " to ", *map(str, range(LOWEST, HIGHEST + 1)))


class Candidates:
    """The remaining range, from `low` to `high`."""

    def __init__(self) -> None:
        self.low, self.high = LOWEST, HIGHEST

    def narrow(self, guess: int, number: int) -> float:
        """Narrow the range by a guess; return the information gained as a fraction of all: halving 32 gives 1/5."""
        before = self.high - self.low + 1
        if guess <= number:
            self.low = max(self.low, guess + (guess < number))
        if guess >= number:
            self.high = min(self.high, guess - (guess > number))
        return math.log2(before / (self.high - self.low + 1)) / math.log2(HIGHEST - LOWEST + 1)

    def __str__(self) -> str:
        return f", from {self.low} to {self.high}"


PROMPT = f"Guess my number{Candidates()}"


def write_data(folder: Path) -> tuple[Path, Path]:
    """Write training and held-out numbers; return the paths of both JSONL files."""
    return write_rows(folder, _row)


def _row(numbers: random.Random) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": PROMPT}],
        "data_source": "guess",
        "reward_model": {"ground_truth": str(numbers.randint(LOWEST, HIGHEST))},
    }


def _demonstration(numbers: random.Random) -> Conversation:
    """A weak player: guesses within the remaining range half of the time, else any number."""
    number, candidates = numbers.randint(LOWEST, HIGHEST), Candidates()
    messages = [{"role": "user", "content": PROMPT}]
    for turn in range(TURNS):
        attentive = numbers.random() < 0.5
        guess = numbers.randint(*((candidates.low, candidates.high) if attentive else (LOWEST, HIGHEST)))
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number or turn == TURNS - 1:
            break
        candidates.narrow(guess, number)
        messages.append({"role": "user", "content": f"It is not that{candidates}"})
    return messages


def build(folder: Path, seed: int = 0, steps: int = 250, rows: int = 64) -> Path:
    """Train a model to imitate demonstrations; write it as a Hugging Face folder."""
    return imitate(folder, WORDS, _demonstration, seed, steps, rows)

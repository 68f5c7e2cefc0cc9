"""The environment of `guess.py`: a number to guess, and a small model that has seen it played badly."""

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
    """The numbers that it may still be, from `low` to `high`."""

    def __init__(self) -> None:
        self.low, self.high = LOWEST, HIGHEST

    def told(self, guess: int, number: int) -> float:
        """Leave out what a guess rules out, and give how much of the number was found out by that, in shares of all
        that is to be found out: where one of two is left of 32, that is one of five halvings."""
        before = self.high - self.low + 1
        if guess <= number:
            self.low = max(self.low, guess + (guess < number))
        if guess >= number:
            self.high = min(self.high, guess - (guess > number))
        return math.log2(before / (self.high - self.low + 1)) / math.log2(HIGHEST - LOWEST + 1)

    def __str__(self) -> str:
        return f", from {self.low} to {self.high}"


ASKED = f"Guess my number{Candidates()}"


def write_data(folder: Path) -> tuple[Path, Path]:
    """Numbers to train on, and others: the paths of two JSONL files."""
    return write_rows(folder, _row)


def _row(numbers: random.Random) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": ASKED}],
        "data_source": "guess",
        "reward_model": {"ground_truth": str(numbers.randint(LOWEST, HIGHEST))},
    }


def _demonstration(numbers: random.Random) -> Conversation:
    """How somebody played who half of the time minds what was said, and else names any number."""
    number, left = numbers.randint(LOWEST, HIGHEST), Candidates()
    said = [{"role": "user", "content": ASKED}]
    for turn in range(TURNS):
        minds = numbers.random() < 0.5
        guess = numbers.randint(left.low, left.high) if minds else numbers.randint(LOWEST, HIGHEST)
        said.append({"role": "assistant", "content": str(guess)})
        if guess == number or turn == TURNS - 1:
            break
        left.told(guess, number)
        said.append({"role": "user", "content": f"It is not that{left}"})
    return said


def build(folder: Path, seed: int = 0, steps: int = 250, rows: int = 64) -> Path:
    """A model that imitates demonstrations, as a Hugging Face folder."""
    return imitate(folder, WORDS, _demonstration, seed, steps, rows)

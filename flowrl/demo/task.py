"""Addition of two numbers: the problems, their demonstrations, and a dataset in verl's format.

The demo adds numbers of two digits; more digits (`digits`) are harder. A problem is ``59+36=``. The answer is direct
(``95``) or worked, by column addition from right to left with the carry (``<think>9+6=15 5+3+1=9</think>95``). The
verifier (`flowrl.demo.verifier`) reads the final answer only, so the policy must discover whether to think.
"""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from flowrl.data.keys import Key
from flowrl.demo.verifier import END_THINK, THINK

DATA_SOURCE = "addition"
HELDOUT = 500
PAIRS = 10_000
"""Maximum number of sampled pairs; there are 4,095 of two digits, and 405,450 of three."""


class Problem(NamedTuple):
    """Add `a` and `b`, which have equally many digits."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """The user's message: ``59+36=``."""
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        """The sum, which is also the direct demonstration: ``95``."""
        return str(self.a + self.b)

    @property
    def worked(self) -> str:
        """The worked demonstration: ``<think>9+6=15 5+3+1=9</think>95``."""
        steps, carry = [], 0
        for x, y in zip(reversed(str(self.a)), reversed(str(self.b)), strict=True):
            total = int(x) + int(y) + carry
            steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
            carry = total // 10
        return f"{THINK}{' '.join(steps)}{END_THINK}{self.answer}"


class Holdout(NamedTuple):
    """Problems to train on, and held-out problems."""

    train: tuple[Problem, ...]
    heldout: tuple[Problem, ...]


@cache
def split(digits: int = 2) -> Holdout:
    """500 held-out problems, and training problems, none of which is a held-out one or its swap.

    With two digits there are 7,110 training problems, all others; with more digits, 19,000 sampled ones. The split does
    not depend on a seed, so no warm start has seen held-out problems of any dataset.
    """
    key = Key(0).derive(DATA_SOURCE, "split")
    numbers = range(10 ** (digits - 1), 10**digits)
    pairs = list(itertools.starmap(Problem, itertools.combinations_with_replacement(numbers, 2)))
    pairs = sorted(pairs, key=lambda pair: key.derive(*pair).bits)[:PAIRS]
    # Half of the held-out problems are swapped, so that neither order of the operands is favored.
    heldout = tuple(Problem(b, a) if i % 2 else Problem(a, b) for i, (a, b) in enumerate(pairs[:HELDOUT]))
    train = {problem for a, b in pairs[HELDOUT:] for problem in (Problem(a, b), Problem(b, a))}
    return Holdout(tuple(sorted(train)), heldout)


def write_dataset(folder: str | Path, seed: int = 0, digits: int = 2) -> tuple[Path, Path]:
    """Write ``train.jsonl``, shuffled by `seed`, and ``heldout.jsonl``; returns their paths.

    Each line is a row in verl's format: ``data_source, prompt`` (chat messages), ``reward_model.ground_truth`` and
    ``extra_info``.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    key = Key.of(seed).derive(DATA_SOURCE, "order")
    problems = split(digits)
    train = sorted(problems.train, key=lambda problem: key.derive(*problem).bits)
    paths = folder / "train.jsonl", folder / "heldout.jsonl"
    for path, half in zip(paths, (train, problems.heldout), strict=True):
        rows = (_row(problem, index, path.stem) for index, problem in enumerate(half))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return paths


def _row(problem: Problem, index: int, split_name: str) -> dict[str, object]:
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.prompt}],
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"index": index, "split": split_name},
    }

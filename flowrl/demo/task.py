"""Two-digit addition: the problems, their demonstrations, and a dataset in verl's format.

A problem reads ``59+36=``. It can be answered at once (``95``) or worked first, by column addition from right to left
with the carry (``<think>9+6=15 5+3+1=9</think>95``). The verifier (`flowrl.demo.verifier`) looks at the final answer
only, so the policy must find out by itself whether to think.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from flowrl.data.keys import Key
from flowrl.demo.verifier import END_THINK, THINK

DATA_SOURCE = "addition"
HELDOUT = 500


class Problem(NamedTuple):
    """Add `a` and `b`, both from 10 to 99."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """What the user asks: ``59+36=``."""
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        """The sum, and the demonstration that gives it at once: ``95``."""
        return str(self.a + self.b)

    @property
    def worked(self) -> str:
        """The demonstration that thinks first: ``<think>9+6=15 5+3+1=9</think>95``."""
        (tens_a, units_a), (tens_b, units_b) = divmod(self.a, 10), divmod(self.b, 10)
        units = units_a + units_b
        carry = units // 10
        tens = tens_a + tens_b + carry
        steps = f"{units_a}+{units_b}={units} {tens_a}+{tens_b}{'+1' if carry else ''}={tens}"
        return f"{THINK}{steps}{END_THINK}{self.answer}"


class Holdout(NamedTuple):
    """Problems to train on, and problems that are held out of all training."""

    train: tuple[Problem, ...]
    heldout: tuple[Problem, ...]


@cache
def split() -> Holdout:
    """The 500 held-out problems, and the 7,110 that are neither held out nor the swapped twin of one that is.

    The split belongs to the task and has no seed: a model that was warm-started under one seed has not seen the
    held-out problems of a dataset that was written under another.
    """
    key = Key(0).derive(DATA_SOURCE, "split")
    pairs = [Problem(a, b) for a in range(10, 100) for b in range(a, 100)]
    pairs.sort(key=lambda pair: key.derive(*pair).bits)
    # Half of the held-out problems are swapped, so that neither order of the operands is favoured.
    heldout = tuple(Problem(b, a) if i % 2 else Problem(a, b) for i, (a, b) in enumerate(pairs[:HELDOUT]))
    train = {problem for a, b in pairs[HELDOUT:] for problem in (Problem(a, b), Problem(b, a))}
    return Holdout(tuple(sorted(train)), heldout)


def write_dataset(folder: str | Path, seed: int = 0) -> tuple[Path, Path]:
    """Write ``train.jsonl``, in an order drawn from `seed`, and ``heldout.jsonl``; returns their paths.

    Each line is a row in verl's format: ``data_source, prompt`` (chat messages), ``reward_model.ground_truth`` and
    ``extra_info``.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    key = Key.of(seed).derive(DATA_SOURCE, "order")
    train = sorted(split().train, key=lambda problem: key.derive(*problem).bits)
    paths = folder / "train.jsonl", folder / "heldout.jsonl"
    for path, problems in zip(paths, (train, split().heldout), strict=True):
        rows = (_row(problem, index, path.stem) for index, problem in enumerate(problems))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return paths


def _row(problem: Problem, index: int, split_name: str) -> dict[str, object]:
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.prompt}],
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"index": index, "split": split_name},
    }

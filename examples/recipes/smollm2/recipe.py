"""GRPO teaches a pretrained model of 135M parameters to answer word problems of one step, on one CPU core.

flowrl show examples/recipes/smollm2/recipe.py:graph       show the graph
MODEL=models/smollm2 python recipe.py                      train; SEED, STEPS and REWARD=shuffled change the run

MODEL is a folder or a name on the Hub.
"""

import json
import os
import random
from pathlib import Path

import torch

from flowrl import INJECTED, After, Key, Operator, PromptData, Terminal, Training, Validation, rewards
from flowrl.backends import AdamW, TorchRollout, TorchTrainer
from flowrl.columns import ResponseMask, TokenLevelScores
from flowrl.graphs import grpo
from flowrl.schedules import Constant

MODEL = os.environ.get("MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")
DATA = Path("runs/word-problems-data")
STEPS = int(os.environ.get("STEPS", "32"))
SEED = int(os.environ.get("SEED", "0"))

NAMES = ("Tom", "Anna", "Ben", "Mia", "Sam", "Lena")
THINGS = ("apples", "books", "coins", "cards", "shells", "pens")


def problem(numbers: random.Random, heldout: bool) -> dict[str, object]:
    """A row; no pair of numbers is both in training and held-out rows."""
    while True:
        first, second = numbers.randint(2, 9), numbers.randint(2, 9)
        if ((first + 3 * second) % 5 == 0) == heldout:
            break
    name, things = numbers.choice(NAMES), numbers.choice(THINGS)
    if numbers.random() < 0.5:
        text = f"{name} has {first} {things} and gets {second} more. How many {things} does {name} have now?"
        result = first + second
    else:
        text = f"{name} has {first + second} {things} and gives away {second}. How many {things} does {name} have left?"
        result = first
    question = f"{text} Reply with the number only."
    return {"prompt": [{"role": "user", "content": question}], "ground_truth": str(result)}


def write_data(folder: Path) -> tuple[Path, Path]:
    """Write 2,000 training rows and 200 held-out rows; return both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "heldout.jsonl"
    for path, count in zip(paths, (2000, 200), strict=True):
        numbers = random.Random(path.stem)
        lines = (json.dumps(problem(numbers, path.stem == "heldout")) + "\n" for _ in range(count))
        path.write_text("".join(lines), encoding="utf-8")
    return paths


class Shuffled(Operator):
    """Control: every response gets the score of another one, so there is nothing to learn."""

    def __call__(
        self, token_level_scores: TokenLevelScores, response_mask: ResponseMask, key: Key = INJECTED
    ) -> TokenLevelScores:
        order = torch.randperm(len(token_level_scores), generator=key.generator())
        last = response_mask.long().cumsum(-1).argmax(-1, keepdim=True)
        return torch.zeros_like(token_level_scores).scatter(1, last, token_level_scores.sum(-1)[order].unsqueeze(1))


# The last number of the response counts. 64 responses per step: 8 prompts with 8 each, two optimizer steps.
graph = grpo(rewards.gsm8k(method="flexible"), n=8, max_new_tokens=16, mini_batch=32, kl_coef=0.0)
if os.environ.get("REWARD") == "shuffled":
    graph = graph.edit(insert={"shuffled": After("reward", Shuffled())})


def training() -> Training:
    """The graph with its backends, data and number of steps."""
    train, heldout = write_data(DATA)
    job = graph.bind(
        actor=TorchTrainer(
            MODEL, AdamW(lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0), Constant(1.0, warmup=5), dtype="bfloat16"
        ),
        rollout=TorchRollout(),
    )
    answers = Validation(PromptData(heldout), every=STEPS, changes={"repeat.n": 2}, batch=200)
    return Training(job, PromptData(train), steps=STEPS, prompts=8, seed=SEED, validation=answers, save_model=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    training().run([Terminal()])

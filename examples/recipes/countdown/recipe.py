"""Countdown: make a number of given ones, with GRPO; README.md says how to start it.

flowrl run examples/recipes/countdown/recipe.py:training
"""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the module in the folder of the recipes
from arithmetic import value_of

from flowrl import PromptData, Training, Validation
from flowrl.backends import VLLM, AdamW, TorchScorer, TorchTrainer
from flowrl.graphs import grpo

MODEL, DATA = "Qwen/Qwen2.5-1.5B-Instruct", "Jiayi-Pan/Countdown-Tasks-3to4"
ASK = (
    "Using the numbers {nums}, create an equation that equals {target}. You can use basic arithmetic operations "
    "(+, -, *, /), and each number once. Show your work in <think> </think> tags, and return the final answer in "
    "<answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def countdown(data_source: str, solution_str: str, ground_truth: dict[str, Any], extra_info: object = None) -> float:
    """1 if the last answer has the value and uses each number once; 0.1 for another expression; 0 without one."""
    answers = _ANSWER.findall(solution_str)
    try:
        value, used = value_of(answers[-1].partition("=")[0])
    except (IndexError, ValueError):
        return 0.0
    return 1.0 if value == ground_truth["target"] and sorted(used) == sorted(ground_truth["numbers"]) else 0.1


graph = grpo(countdown, n=8, max_new_tokens=1024)


def row(record: dict[str, Any]) -> dict[str, Any]:
    """A row of the data set as a prompt."""
    truth = {"target": record["target"], "numbers": list(record["nums"])}
    prompt = ASK.format(nums=truth["numbers"], target=truth["target"])
    return {"data_source": "countdown", "prompt": prompt, "ground_truth": truth}


def prompts(data: str = DATA, split: str = "train[:1000]") -> PromptData:
    """The prompts of a part of the only split, ``train``."""
    return PromptData(data, split=split, map=row)


def training(
    model: str = MODEL, data: str = DATA, train: str = "train[1000:33768]", test: str = "train[:1000]"
) -> Training:
    """The training, on one GPU that trainer and engine share."""
    job = graph.bind(
        actor=TorchTrainer(model, AdamW(lr=1e-6), dtype="bfloat16"),
        ref=TorchScorer(model, dtype="bfloat16"),
        rollout=VLLM(model, memory_fraction=0.4, max_model_len=1536),
    )
    held_out = Validation(prompts(data, test), every=20)
    return Training(job, prompts(data, train), steps=200, prompts=64, validation=held_out, checkpoint_every=20)

"""GSM8K with a calculator as a tool, which the policy calls in Hermes' format; README.md says how to start it.

flowrl run examples/recipes/calculator/recipe.py:training
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the module in the folder of the recipes
from arithmetic import value_of

from flowrl import PromptData, Training, Validation
from flowrl.backends import VLLM, AdamW, TorchScorer, TorchTrainer
from flowrl.episodes import InvalidToolCall
from flowrl.graphs import grpo
from flowrl.operators import Interact
from flowrl.rewards import gsm8k

MODEL, DATA = "Qwen/Qwen2.5-1.5B-Instruct", "openai/gsm8k"
ASK = 'Use the calculator for every calculation, and output the final answer after "####".'


async def calculate(expression: str) -> str:
    """The value of an arithmetic expression of whole numbers, such as (48 + 24) / 2."""
    try:
        return str(value_of(expression)[0])
    except ValueError as error:
        raise InvalidToolCall(str(error)) from error


# The reward reads the last answer of an episode: the one without a call.
graph = grpo(gsm8k, n=8).edit(
    replace={
        "generate": Interact(
            tools=[calculate], parser="hermes", max_turns=5, context=1536, timeout=10.0, max_new_tokens=384
        )
    },
    name="calculator",
)


def row(record: dict[str, Any]) -> dict[str, Any]:
    """A row of the data set as a prompt; the ground truth is the whole solution."""
    return {"data_source": "openai/gsm8k", "prompt": f"{record['question']} {ASK}", "ground_truth": record["answer"]}


def prompts(data: str = DATA, split: str = "test") -> PromptData:
    """The prompts of a split."""
    return PromptData(data, name="main", split=split, map=row)


def training(model: str = MODEL, data: str = DATA) -> Training:
    """The training, on one GPU that trainer and engine share."""
    job = graph.bind(
        actor=TorchTrainer(model, AdamW(lr=1e-6), dtype="bfloat16"),
        ref=TorchScorer(model, dtype="bfloat16"),
        rollout=VLLM(model, memory_fraction=0.4, max_model_len=1536),
    )
    held_out = Validation(prompts(data), every=20, changes={"repeat.n": 1, "interact.temperature": 0.0})
    return Training(job, prompts(data, "train"), epochs=1, prompts=64, validation=held_out, checkpoint_every=20)

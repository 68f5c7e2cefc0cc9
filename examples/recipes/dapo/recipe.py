"""Competition mathematics: DAPO on DAPO-Math-17k, tested on MATH-500; README.md says how to start it.

flowrl run examples/recipes/dapo/recipe.py:training
"""

from typing import Any

from flowrl import PromptData, Training, Validation
from flowrl.backends import VLLM, AdamW, TorchTrainer
from flowrl.graphs import dapo
from flowrl.rewards import math

MODEL, DATA, HELD_OUT = "Qwen/Qwen2.5-1.5B-Instruct", "open-r1/DAPO-Math-17k-Processed", "HuggingFaceH4/MATH-500"
ASK = "Please reason step by step, and put your final answer within \\boxed{}."

# math-verify may take very long for an expression; such a response scores 0 after the timeout.
graph = dapo(math(boxed=True), n=8, groups=32, max_new_tokens=2048).edit(set={"reward.on_error": 0.0})


def row(record: dict[str, Any]) -> dict[str, Any]:
    """A row of DAPO-Math-17k as a prompt."""
    return {"data_source": "math_dapo", "prompt": f"{record['prompt']} {ASK}", "ground_truth": record["solution"]}


def held_out_row(record: dict[str, Any]) -> dict[str, Any]:
    """A row of MATH-500 as a prompt."""
    prompt = f"{record['problem']} {ASK}"
    return {"data_source": "HuggingFaceH4/MATH-500", "prompt": prompt, "ground_truth": record["answer"]}


def held_out(data: str = HELD_OUT) -> PromptData:
    """The prompts of MATH-500."""
    return PromptData(data, split="test", map=held_out_row)


def training(model: str = MODEL, data: str = DATA, test: str = HELD_OUT) -> Training:
    """The training, on one GPU that trainer and engine share."""
    job = graph.bind(
        actor=TorchTrainer(model, AdamW(lr=1e-6), dtype="bfloat16"),
        rollout=VLLM(model, memory_fraction=0.4, max_model_len=3072),
    )
    prompts = PromptData(data, name="en", split="train", map=row, max_prompt_length=1024, overlong="drop")
    return Training(
        job, prompts, steps=200, prompts=48, validation=Validation(held_out(test), every=20), checkpoint_every=20
    )

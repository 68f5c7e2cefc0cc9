"""GSM8K: grade-school mathematics with GRPO; README.md says how to start it.

flowrl run examples/recipes/gsm8k/recipe.py:training
"""

from typing import Any

from flowrl import PromptData, Training, Validation
from flowrl.backends import VLLM, AdamW, TorchScorer, TorchTrainer
from flowrl.graphs import grpo
from flowrl.rewards import gsm8k

MODEL, DATA = "Qwen/Qwen2.5-0.5B-Instruct", "openai/gsm8k"
ASK = 'Let\'s think step by step and output the final answer after "####".'

# The reward is 1 if the last number after #### is that of the solution.
graph = grpo(gsm8k, n=8, max_new_tokens=512)


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
        rollout=VLLM(model, memory_fraction=0.4, max_model_len=1024),
    )
    held_out = Validation(prompts(data, "test"), every=20)
    return Training(
        job, prompts(data, "train"), epochs=1, prompts=64, validation=held_out, checkpoint_every=20, max_checkpoints=1
    )

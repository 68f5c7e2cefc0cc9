"""RLHF: PPO with a reward model, on the prompts of UltraFeedback; README.md says how to start it.

flowrl run examples/recipes/rlhf/recipe.py:training
"""

from typing import Any

from flowrl import PromptData, Training, Validation
from flowrl.backends import VLLM, AdamW, TorchCritic, TorchRewardModel, TorchScorer, TorchTrainer
from flowrl.graphs import ppo
from flowrl.operators import TextModelReward

MODEL, DATA = "Qwen/Qwen2.5-0.5B-Instruct", "HuggingFaceH4/ultrafeedback_binarized"
REWARD_MODEL = "Skywork/Skywork-Reward-V2-Qwen3-0.6B"

# The reward model reads text by its own chat template, so its vocabulary may differ from the policy's.
graph = ppo(None, n=1, max_new_tokens=512, kl_coef=0.02).edit(
    replace={"reward": TextModelReward().named("reward")}, name="rlhf"
)


def row(record: dict[str, Any]) -> dict[str, Any]:
    """A row of the data set as a prompt; the reward model needs no ground truth."""
    return {"data_source": "ultrafeedback", "prompt": record["prompt"], "ground_truth": None}


def prompts(data: str = DATA, split: str = "test_prefs") -> PromptData:
    """The prompts of a split."""
    return PromptData(data, split=split, map=row, max_prompt_length=512, overlong="drop")


def training(model: str = MODEL, data: str = DATA, reward_model: str = REWARD_MODEL) -> Training:
    """The training, on one GPU that all models share."""
    job = graph.bind(
        actor=TorchTrainer(model, AdamW(lr=1e-6), dtype="bfloat16"),
        critic=TorchCritic(model, AdamW(lr=1e-5), dtype="bfloat16"),
        ref=TorchScorer(model, dtype="bfloat16"),
        rollout=VLLM(model, memory_fraction=0.3, max_model_len=1024),
        reward_model=TorchRewardModel(reward_model, dtype="bfloat16"),
    )
    held_out = Validation(prompts(data), every=20)
    return Training(job, prompts(data, "train_prefs"), steps=200, prompts=64, validation=held_out, checkpoint_every=20)

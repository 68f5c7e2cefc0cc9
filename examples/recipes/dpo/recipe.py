"""DPO on UltraFeedback: learn from pairs of responses, without sampling; README.md says how to start it.

flowrl run examples/recipes/dpo/recipe.py:training
"""

from flowrl import PreferenceData, Training
from flowrl.backends import AdamW, TorchScorer, TorchTrainer
from flowrl.graphs import dpo

MODEL, DATA = "Qwen/Qwen2.5-0.5B-Instruct", "HuggingFaceH4/ultrafeedback_binarized"

graph = dpo(beta=0.1)


def training(model: str = MODEL, data: str = DATA) -> Training:
    """The training, on one GPU; a step takes 64 pairs."""
    job = graph.bind(
        actor=TorchTrainer(model, AdamW(lr=5e-7), dtype="bfloat16", gradient_checkpointing=True),
        ref=TorchScorer(model, dtype="bfloat16"),
    )
    pairs = PreferenceData(data, split="train_prefs", max_prompt_length=1024, max_response_length=1024, overlong="drop")
    return Training(job, pairs, epochs=1, prompts=64, checkpoint_every=100)

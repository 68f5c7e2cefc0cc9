"""GRPO with TRL: ``trl_side.py MODEL PROMPTS WORK``, in an environment with TRL; see `benchmarks/race/__main__.py`."""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from work import CLIP, GROUP, LEARNING_RATE, WORKS, Gate, reward


class Steps(TrainerCallback):
    """Runs one step of the trainer each time the gate opens."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.tokens = gate, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.gate.wait()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.gate.done(self.tokens)


def main(model_folder: str, prompts: str, name: str) -> None:
    """Train until the driver stops it."""
    work, steps = WORKS[name], Steps(Gate())
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    generate = model.generate

    def timed(*args: Any, **settings: Any) -> Any:
        started = time.perf_counter()
        answers = generate(*args, **settings)
        steps.gate.generating += time.perf_counter() - started
        return answers

    def rewards(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        steps.tokens = sum(map(len, completion_ids)) / len(completion_ids)
        return [reward(completion[0]["content"]) for completion in completions]

    model.generate = timed
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=work.prompts * GROUP,
            num_generations=GROUP,
            max_completion_length=work.tokens,
            generation_kwargs=None if work.natural else {"min_new_tokens": work.tokens},
            temperature=1.0,
            top_k=0,
            beta=0.0,
            epsilon=CLIP,
            loss_type="dapo",  # the mean over tokens, as in flowrl
            mask_truncated_completions=False,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            max_steps=10_000,
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        data = load_dataset("json", data_files=prompts, split="train")
        trainer = GRPOTrainer(model, rewards, config, data, processing_class=tokenizer, callbacks=[steps])
        trainer.train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])

"""The demonstration: reinforcement learning teaches a small language model to think before it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.lazy import lazy

if TYPE_CHECKING:
    from flowrl.demo.model import build, make_model, word_tokenizer
    from flowrl.demo.task import write_dataset
    from flowrl.demo.verifier import compute_score, score_and_thinking

__all__ = [
    "build",
    "compute_score",
    "make_model",
    "score_and_thinking",
    "word_tokenizer",
    "write_dataset",
]

__getattr__ = lazy(
    __name__,
    {
        "build": "model",
        "compute_score": "verifier",
        "make_model": "model",
        "score_and_thinking": "verifier",
        "word_tokenizer": "model",
        "write_dataset": "task",
    },
)

"""Jobs of GRPO that collect groups in rounds, and the streams of their prompts."""

from __future__ import annotations

from typing import Any

from flowrl import After, PromptData
from flowrl.data.sources.prompts import PromptStream
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.operators import Collect, Spread
from tests.support.jobs import job_of

N, PROMPTS, TARGET = 4, 5, 6


def half(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """0.5 for prompts with an odd number, so that their groups have no spread; others differ."""
    return 0.5 if int(ground_truth) % 2 else sum(map(ord, solution_str)) / 1e4


def constant(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return 0.5


def collecting(folder: str, reward: Any = half, **settings: Any) -> Any:
    """GRPO that collects `TARGET` groups per step."""
    gate = Collect(Spread(), **({"groups": TARGET} | settings))
    return job_of("grpo", folder, reward, n=N).edit(insert={"collect": After("reward", gate)})


def stream_of(folder: str, data: str) -> PromptStream:
    return PromptData(data).load(ChatTokenizer(folder), 0)

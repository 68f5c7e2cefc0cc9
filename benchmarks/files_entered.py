"""Which files of the project one local GRPO step enters, and how many functions and calls each of them has in it."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from harness import table

import flowrl
from flowrl.backends import TorchRollout, TorchScorer, TorchTrainer
from flowrl.data.sources.prompts import PromptData
from flowrl.demo.model import build
from flowrl.demo.task import write_dataset
from flowrl.demo.verifier import score_and_thinking
from flowrl.graphs import grpo

PROJECT = Path(flowrl.__file__).resolve().parents[1]
PROMPTS, GROUP, TOKENS = 2, 4, 4


def one_step(base: Path) -> Counter[CodeType]:
    """How often one step calls each function; the step before it, in which caches fill, is not counted."""
    model, data = str(base / "model"), str(base / "data")
    build(Path(model), steps=1)
    write_dataset(Path(data))
    job = grpo(score_and_thinking, n=GROUP, max_new_tokens=TOKENS).bind(
        actor=TorchTrainer(model), ref=TorchScorer(model), rollout=TorchRollout()
    )
    calls: Counter[CodeType] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code] += 1

    with job.open(seed=0) as executor:
        prompts = PromptData(f"{data}/train.jsonl").load(executor.tokenizer(), seed=0)
        executor.sync()
        executor.step(prompts.next(PROMPTS), 0)
        batch = prompts.next(PROMPTS)
        sys.setprofile(count)
        executor.step(batch, 1)
        sys.setprofile(None)
    return calls


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        calls = one_step(Path(folder))
    functions: Counter[str] = Counter()
    entered: Counter[str] = Counter()
    for code, times in calls.items():
        file = Path(code.co_filename).resolve()  # flowrl/operators is operators
        if file.is_file() and file.is_relative_to(PROJECT) and "site-packages" not in file.parts:
            functions[str(file.relative_to(PROJECT))] += 1
            entered[str(file.relative_to(PROJECT))] += times
    rows = [[file, str(functions[file]), str(entered[file])] for file in sorted(entered)]
    rows.append([f"{len(rows)} files", str(functions.total()), str(entered.total())])
    table(f"One local GRPO step of {PROMPTS} prompts x {GROUP}", ["file", "functions", "calls"], rows)

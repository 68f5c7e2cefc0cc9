"""``--engine``: the synced rollouts of a training on another engine, with what carries over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowrl import PromptData, Training
from flowrl.app.changes.changes import engine_of
from flowrl.app.changes.engine import with_engine
from flowrl.backends import VLLM, Backend, LoRA, SGLang, TorchRollout, TorchScorer, TorchTrainer
from flowrl.data.sources.demos import DemoData
from flowrl.graphs import grpo, sft
from flowrl.spec import written
from tests.support.errors import raises
from tests.support.rewards import digits


def training(rollout: Backend) -> Training:
    job = grpo(digits, n=2).bind(actor=TorchTrainer("model"), ref=TorchScorer("model"), rollout=rollout)
    return Training(job, PromptData("train.jsonl"), steps=1, prompts=2)


@pytest.mark.parametrize(
    ("rollout", "name", "expected", "lost"),
    [
        (TorchRollout(max_rows=64), "vllm", VLLM("model", max_num_seqs=64), []),
        (TorchRollout("copy", dtype="bfloat16"), "sglang", SGLang("copy", dtype="bfloat16"), []),
        (
            VLLM("model", tensor_parallel=2, kv_cache_bytes=8, engine_args={"seed": 1}, lora=LoRA(r=4)),
            "sglang",
            SGLang("model", tensor_parallel=2, lora=LoRA(r=4)),
            ["engine_args", "kv_cache_bytes"],
        ),
        (
            SGLang("model", ranks=2, max_num_seqs=8, cache_tokens=64),
            "torch",
            TorchRollout("model", ranks=2, max_rows=8),
            ["cache_tokens"],
        ),
        (TorchRollout(), "torch", TorchRollout(), []),
    ],
)
def test_what_the_new_engine_has_carries_over_and_the_rest_is_named(
    rollout: Backend, name: str, expected: Backend, lost: list[str]
) -> None:
    changed, lines = with_engine(training(rollout), engine_of(name))
    assert changed.job.graph.bindings["rollout"] == expected
    assert changed == replace(training(rollout), job=training(rollout).job.edit(bind={"rollout": expected}))
    without = f", without {', '.join(lost)} of {type(rollout).__name__}" if lost else ""
    assert lines == ([f"--engine: rollout is {written(expected)}{without}"] if rollout != expected else [])


def test_a_graph_without_a_rollout_and_an_unknown_engine_are_refused() -> None:
    job = sft().bind(actor=TorchTrainer("model"))
    with raises("cli.bad-option", option="--engine"):
        with_engine(Training(job, DemoData("demos.jsonl"), steps=1, prompts=2), "vllm")
    with raises("cli.bad-option", found="vlm"):
        engine_of("vlm")

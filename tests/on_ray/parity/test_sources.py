"""On Ray: graphs with other data, and adaptive samplers, are bit-equal to one process, which records no columns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl import After, ByDifficulty, DemoData, PreferenceData, PromptData, Recording, Training, graphs
from flowrl.distributed.place import Colocate
from flowrl.operators import Collect, Feedback, Spread
from flowrl.run.training.checkpoint import Checkpoints
from tests.on_ray.parity.test_parity import numbers
from tests.on_ray.process_leaks import leaves_nothing
from tests.support.jobs import bind_tiny, write_prompts
from tests.support.rewards import digits
from tests.support.rows.prompt_files import write_jsonl

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]


def cases(folder: Path) -> dict[str, Any]:
    """Graphs with their data, by name."""
    rows = [{"prompt": f"q{i}", "response": "12" * (1 + i % 3)} for i in range(5)]
    pairs = [{"prompt": f"q{i}", "chosen": "12" * (1 + i % 3), "rejected": "abc"} for i in range(5)]
    demo_data = DemoData(write_jsonl(folder / "demos.jsonl", rows))
    prompts = PromptData(write_prompts(folder / "prompts.jsonl"), sampler=ByDifficulty(0.3))
    learning = graphs.grpo_sft(digits, n=3, max_new_tokens=5).edit(insert={"feedback": After("reward", Feedback())})
    collect = After("feedback", Collect(Spread(0.1), groups=3, rounds=20))
    return {
        "sft": (graphs.sft(), demo_data),
        "dpo": (graphs.dpo(), PreferenceData(write_jsonl(folder / "pairs.jsonl", pairs))),
        "grpo_sft": (learning.edit(insert={"collect": collect}), {"batch": prompts, "demos": demo_data}),
    }


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo_sft"])
def test_three_steps_are_bit_equal_to_one_process(name: str, tiny: str, tmp_path: Path) -> None:
    graph, data = cases(tmp_path)[name]
    job = bind_tiny(graph, tiny)
    settings: dict[str, Any] = {"steps": 3, "prompts": 4, "checkpoint_every": 3, "save_model": False}
    training = Training(job, data, folder=str(tmp_path / "ray"), **settings)
    local = replace(training, folder=str(tmp_path / "local"), recording=Recording(texts=None, columns=None)).run()
    with leaves_nothing():
        remote = replace(training, job=replace(job, place=Colocate(1))).run()
    assert numbers(local.metrics) == numbers(remote.metrics)
    assert flowrl.open(tmp_path / "local").rows().equals(flowrl.open(tmp_path / "ray").rows())
    assert (tmp_path / "ray" / "columns").exists() and not (tmp_path / "local" / "columns").exists()
    ends = [Checkpoints(tmp_path / where / "checkpoints", 1).latest() for where in ("local", "ray")]
    assert ends[0] is not None and ends[1] is not None
    assert ends[0][1]["data"] == ends[1][1]["data"]

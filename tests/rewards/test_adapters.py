"""Functions of verl, TRL and OpenRLHF are called as these frameworks call them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.graphs import grpo
from flowrl.operators.reward.operator import Reward
from flowrl.rewards import from_openrlhf, from_trl, from_verl
from tests.support.errors import raises
from tests.support.rows.reward_rows import objects, rows, values

# as users have them: TRL's documentation has the second and third, OpenRLHF's examples the last
FUNCTIONS = '''
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0, **kwargs):
    return {"score": float(solution_str == ground_truth) + bonus, "acc": solution_str == ground_truth}

def format_reward_func(completions, **kwargs):
    """Reward function that checks if the completion has a specific format."""
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(r"^<think>.*?</think><answer>.*?</answer>$", content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]

async def by_column(prompts, completions, solution, difficulty, log_metric=None, **kwargs):
    log_metric("difficulty", difficulty[0])
    return [float(c[0]["content"] == p[-1]["content"] + s) for p, c, s in zip(prompts, completions, solution)]

def reward_func(queries, prompts, labels):
    import torch
    reward = torch.tensor([float(q == p + l) for q, p, l in zip(queries, prompts, labels)])
    return {"rewards": reward, "scores": reward * 2, "extra_logs": {"dummy_scores": reward * 3}}
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("functions") / "functions.py"
    path.write_text(FUNCTIONS)
    return str(path)


PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}]


def call(fn: Any, solution: str, truth: str, **extra: Any) -> Any:
    return fn(data_source="d", solution_str=solution, ground_truth=truth, extra_info=extra, prompt=PROMPT)


def test_verl(file: str) -> None:
    plain, more = from_verl(f"{file}:compute_score"), from_verl(f"{file}:compute_score", reward_kwargs={"bonus": 1.0})
    assert plain("d", "4", "4") == {"score": 1.0, "acc": True}
    assert more("d", "5", "4", {}) == {"score": 1.0, "acc": False}
    assert from_verl(f"{file}:compute_score", key="acc")("d", "4", "4") == {"score": True, "acc": True}
    with raises("reward.invalid-score", key="other"):
        from_verl(f"{file}:compute_score", key="other")("d", "4", "4")


def test_trl(file: str) -> None:
    assert call(from_trl(f"{file}:format_reward_func"), "<think>2</think><answer>4</answer>", "4") == {"score": 1.0}
    reward = from_trl(f"{file}:by_column")
    assert call(reward, "2+2=4", "4", difficulty=3, prompt="not a column") == {"score": 1.0, "difficulty": 3}
    texts = from_trl(lambda prompts, completions, answer, **_: [float(completions[0] == answer[0])], "answer", False)
    assert call(texts, "4", "4") == {"score": 1.0}


def test_openrlhf(file: str) -> None:
    reward = call(from_openrlhf(f"{file}:reward_func"), "4", "4")
    assert reward == {"score": 1.0, "scores": 2.0, "dummy_scores": 3.0}
    query = "Be brief.\n\n2+2=4"
    seen = from_openrlhf(lambda queries, prompts, labels: torch.tensor(float(queries == [query])))
    assert call(seen, "4", "4") == {"score": 1.0}


@pytest.mark.parametrize("returned", [[1.0, 2.0], [], "1", {"rewards": None}, None])
def test_other_than_one_reward_is_refused(returned: Any) -> None:
    with raises("reward.invalid-score"):
        call(from_openrlhf(lambda queries, prompts, labels: returned), "4", "4")


def test_a_name_that_does_not_exist_is_refused(file: str) -> None:
    with raises("reference.undefined-name"):
        from_verl(f"{file}:compute_scores")


def test_adapters_run_in_worker_processes_and_read_the_prompt(file: str) -> None:
    rollout, prompts = rows(["2+2=4", "2+2=5"], ["4", "4"], [{"difficulty": 1}, {"difficulty": 2}])
    with_prompt = type("WithPrompt", (), {**prompts._asdict(), "raw_prompt": objects([PROMPT] * 2)})()
    reward = Reward(from_trl(f"{file}:by_column"))
    assert reward._source is not None
    assert values(reward, rollout, with_prompt) == [1.0, 0.0]
    graph = grpo(from_trl(f"{file}:by_column"))
    reads = {str(port.field) for port in graph["reward"].inputs if port.port == "prompts"}
    assert "raw_prompt" in reads and not graph.check()
    plain = grpo(from_verl(f"{file}:compute_score"))
    assert "raw_prompt" not in {str(port.field) for port in plain["reward"].inputs}

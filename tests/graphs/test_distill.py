"""On-policy distillation: three steps without a reward function, and convergence towards the teacher."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.backends import SGD, AdamW, TorchRollout, TorchScorer, TorchTrainer
from flowrl.errors import BindError
from flowrl.graph import Graph
from flowrl.graphs import distill, distill_full, distill_top
from tests.nightly import nightly
from tests.support.jobs import PROMPTS, weights_of
from tests.support.models import tiny_folder
from tests.support.runs import walk

GRAPHS = [
    distill(n=2, max_new_tokens=6),
    distill_full(max_new_tokens=6),
    distill_full(beta=0.5, n=2, mini_batch=2, max_new_tokens=6),
    distill_top(k=6, max_new_tokens=6),
    distill_top(k=6, beta=0.5, n=2, mini_batch=2, max_new_tokens=6),
]
each = pytest.mark.parametrize("graph", GRAPHS, ids=["log-prob", "full", "full between", "top", "top between"])


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("teacher"), "qwen2", seed=7)


def bound(graph: Graph, student: str, teacher: str, optimizer: Any = None) -> Any:
    return graph.bind(
        actor=TorchTrainer(student, optimizer or SGD(lr=0.05), device="cpu", logprob_chunk=5),
        teacher=TorchScorer(teacher, device="cpu", logprob_chunk=4),
        rollout=TorchRollout(),
    )


@each
def test_distillation_trains_three_steps(graph: Graph, tiny: str, teacher: str) -> None:
    assert graph.check(prompts=2) == []
    assert Graph.from_dict(graph.to_dict()).fingerprint() == graph.fingerprint()
    job = bound(graph, tiny, teacher)
    job.refuse_unready()
    engines = job.build(0)
    steps, before = walk(graph, **engines), weights_of(engines["actor"])
    steps.sync()
    for step in range(3):
        assert all(map(math.isfinite, steps.step(PROMPTS, step).metrics.compute().values()))
    assert any(not torch.equal(before[name], after) for name, after in weights_of(engines["actor"]).items())


def test_token_advantages_are_log_ratios_of_teacher_to_student(tiny: str, teacher: str) -> None:
    job = bound(GRAPHS[0], tiny, teacher)
    engines = job.build(0)
    steps = walk(job.graph, **engines)
    steps.sync()
    kept = steps.step(PROMPTS, 0, return_nodes=list(job.graph.nodes)).columns
    mask = kept["generate"].columns["response_mask"]
    old, marks = kept["old_log_prob"].columns["old_log_probs"], kept["teacher_log_prob"].columns["ref_log_prob"]
    expected = torch.where(mask, marks.double() - old.double(), 0.0)
    torch.testing.assert_close(kept["reverse_kl"].columns["advantages"].double(), expected, atol=1e-6, rtol=0)
    assert expected.std() > 0.1


@pytest.mark.parametrize(
    ("graph", "key"),
    [
        (distill(n=8, max_new_tokens=6), "distill/reverse_kl"),
        (distill_full(n=8, max_new_tokens=6), "actor/divergence"),
        nightly(distill_full(beta=0.0, n=8, max_new_tokens=6), "actor/divergence"),
        nightly(distill_top(k=20, n=8, max_new_tokens=6), "actor/divergence"),
        nightly(distill_top(k=20, beta=0.0, n=8, max_new_tokens=6), "actor/divergence"),
    ],
    ids=["log-prob", "reverse", "forward", "top reverse", "top forward"],
)
def test_the_divergence_from_the_teacher_decreases(graph: Graph, key: str, tiny: str, teacher: str) -> None:
    job = bound(graph, tiny, teacher, AdamW(lr=2e-3))
    steps = walk(job.graph, **job.build(0))
    steps.sync()
    divergences = [steps.step(PROMPTS, step).metrics.compute()[key] for step in range(25)]
    assert sum(divergences[-5:]) < 0.75 * sum(divergences[:5])


def test_a_teacher_of_another_vocabulary_is_refused_before_any_loads(tiny: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, seed=3)
    tokens = json.loads((file := Path(folder, "tokenizer.json")).read_text())
    vocab = tokens["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokens))
    for graph in GRAPHS:
        with pytest.raises(BindError, match="'actor' and 'teacher' have different vocabularies: 2 ids differ"):
            bound(graph, tiny, folder).refuse_unready()

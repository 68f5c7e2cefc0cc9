"""A fused plan is bit-equal to the unfused plan, with one forward pass less."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl import PromptData, Training
from flowrl import columns as c
from flowrl.backends import AdamW, LoRA, TorchRollout
from flowrl.core.graphs.after import After
from flowrl.core.operators.operator import Operator
from flowrl.operators import Filter, OldLogProb, Ranked
from flowrl.run.prediction.costs import Costs
from flowrl.run.prediction.prediction import predict
from flowrl.run.training.job import Job
from flowrl.run.training.loop import Run
from flowrl.sync.digest import weights_digest
from tests.nightly import nightly
from tests.run.training.interrupted import Stop, Stopper
from tests.support.jobs import PROMPTS, job_of
from tests.support.runs import described, train, without_times

pytestmark = pytest.mark.runs

SMALL = {"max_tokens": 60}
"""Several micro-batches a step."""


class EveryOther(Operator):
    """Removes every other row's tokens from the mask."""

    def __call__(self, response_mask: c.ResponseMask) -> c.ResponseMask:
        mask = response_mask.clone()
        mask[::2] = False
        return mask


def job(name: str, folder: str, **parameters: Any) -> Job:
    return job_of(name, folder, optimizer=AdamW(lr=2e-3), **{"trainer": SMALL, **parameters})


def digest(run: Run) -> str:
    """Digest of the actor's weights."""
    return weights_digest(run.engines["actor"].weights())


def both(fusable: Job, data: str, folder: Path, **settings: Any) -> tuple[Run, Run]:
    """The fused and the unfused run."""
    assert "old_log_prob" not in fusable.runs and "old_log_prob" in replace(fusable, optimize=False).runs
    one = train(fusable, data, folder / "one", **settings)
    two = train(replace(fusable, optimize=False), data, folder / "two", **settings)
    return one, two


def assert_same(one: Run, two: Run) -> None:
    assert without_times(list(one.metrics)) == without_times(list(two.metrics))
    assert digest(one) == digest(two)
    assert all("timing/old_log_prob" not in step for step in one.metrics)
    assert all("timing/old_log_prob" in step for step in two.metrics)
    assert all("rollout/logp_diff_mean" in step and step["actor/approx_kl"] == 0 for step in one.metrics)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("grpo", {}),
        ("grpo", {"kl_coef": 0.0}),
        nightly("grpo", {"temperature": 0.7, "trainer": {}}),
        ("grpo", {"trainer": {"dtype": "bfloat16", **SMALL}}),
        ("grpo", {"trainer": {"gradient_checkpointing": True, **SMALL}}),
        nightly("rloo", {}),
        nightly("dr_grpo", {}),
        ("gspo", {}),
        ("reinforce_plus_plus", {"n": 3}),
        nightly("reinforce_plus_plus_baseline", {}),
    ],
)
def test_fused_runs_are_bit_equal(name: str, parameters: Any, tiny: str, prompts_file: str, tmp_path: Path) -> None:
    fusable = job(name, tiny, **parameters)
    if "kl_shape" in fusable.graph:  # it reads the old log-probs before the update
        fusable = fusable.edit(drop=["kl_shape"])
    one, two = both(fusable, prompts_file, tmp_path)
    assert_same(one, two)
    assert ("kl/ref" in one.metrics[0]) == ("ref_log_prob" in fusable.graph)
    assert len({step["actor/grad_norm"] for step in one.metrics}) == 3


def test_fused_adapter_runs_are_bit_equal(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    trainer = {"lora": LoRA(r=4), **SMALL}
    fusable = job("grpo", tiny, trainer=trainer).edit(bind={"rollout": TorchRollout(tiny, device="cpu")})
    assert_same(*both(fusable, prompts_file, tmp_path))


def test_fused_runs_with_a_filter_are_bit_equal(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    fusable = job("grpo", tiny).edit(insert={"filter": After("reward", Filter(Ranked(2)))})
    assert_same(*both(fusable, prompts_file, tmp_path))


def test_fused_log_probs_of_empty_rows_are_zero(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    """A micro-batch of empty rows is skipped; its log-probs are 0, as those of the unfused node."""
    fusable = job("grpo", tiny, trainer={"max_tokens": 1}).edit(insert={"every_other": After("generate", EveryOther())})
    assert_same(*both(fusable, prompts_file, tmp_path))


def test_fused_runs_with_lag_are_bit_equal(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    fusable = job("grpo", tiny).edit(
        bind={"rollout": TorchRollout(tiny, device="cpu")},
        lag=1,
        allow={"FR006": "the correction reads the log-probs earlier"},
    )
    assert_same(*both(fusable, prompts_file, tmp_path))


def column(fusable: Job, name: str) -> tuple[Tensor, Mapping[str, float], int]:
    """A column after a step with the loaded weights; its metrics; and the number of forward passes of the actor."""
    separate = fusable.edit(bind={"rollout": TorchRollout(fusable.graph.bindings["actor"].model, device="cpu")})
    with separate.open() as steps:
        passes = []
        steps.sync()
        steps.runner.engines["actor"].model.base_model.register_forward_pre_hook(lambda *_: passes.append(None))
        result = steps.step(PROMPTS, 0, return_nodes=[name])
        return result.columns[name]["old_log_probs"], result.metrics.compute(), len(passes)


def test_fusing_saves_one_forward_pass_per_micro_batch(tiny: str) -> None:
    """The column is returned for the removed node and for the update."""
    fusable = job("grpo", tiny, trainer={"max_tokens": 1})
    old, metrics, passes = column(replace(fusable, optimize=False), "old_log_prob")
    rows = len(old)
    assert passes == 2 * rows
    for name in ("old_log_prob", "update_actor"):
        found, other_metrics, fewer = column(fusable, name)
        assert torch.equal(found, old) and other_metrics == metrics and fewer == rows


def test_an_interrupted_run_resumes_with_either_fusing_setting(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    """Fusing is not part of a run's identity, so a run may also resume with the other setting."""
    fusable = job("grpo", tiny)
    settings = {"steps": 4, "checkpoint_every": 1}
    one, two = both(fusable, prompts_file, tmp_path, **settings)
    assert_same(one, two)
    for name, resumed in (("fused", fusable), ("unfused", replace(fusable, optimize=False))):
        with pytest.raises(Stop):
            train(fusable, prompts_file, tmp_path / name, [Stopper(2, "mismatch")], **settings)
        run = train(resumed, prompts_file, tmp_path / name, resume=True, **settings)
        assert without_times(list(run.metrics)) == without_times(list(two.metrics)) and digest(run) == digest(two)
        states = [
            json.loads((folder / "checkpoints/step-000004/state.json").read_text())["state"]
            for folder in (run.folder, two.folder)
        ]
        assert states[0] == states[1] and states[0]["mismatch.seen"]["steps"] == 4
        assert described(run.folder)["optimize"] == resumed.optimize


def test_measured_costs_predict_fused_steps(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    fusable = job("grpo", tiny)
    run = train(fusable, prompts_file, tmp_path / "run")
    costs = Costs.of(run.folder)
    assert "old_log_prob" not in costs.nodes
    for graph in (fusable.graph, fusable.runs, fusable.graph.bound({})):  # the last without bindings
        assert predict(graph, None, 4, costs).seconds > 0
    assert fusable.graph.diff(fusable.graph.edit(set={"repeat.n": 2}), costs).seconds is not None
    unfused = predict(fusable.graph, None, 4, costs, optimize=False)  # by a node with similar work
    assert unfused.seconds > predict(fusable.graph, None, 4, costs).seconds
    given = costs.given(old_log_prob=100.0)
    assert (
        predict(fusable.graph, None, 4, given).seconds
        < 100
        < predict(fusable.graph, None, 4, given, optimize=False).seconds
    )
    again = Training(
        fusable, PromptData(prompts_file), steps=1, prompts=4, folder=str(tmp_path / "next"), costs=str(run.folder)
    ).run()
    assert described(again.folder)["step_seconds"].keys() == {"predicted", "measured"}


def test_the_plan_names_fused_nodes(tiny: str) -> None:
    fusable = job("grpo", tiny)
    line = "old_log_prob is the first pass of update_actor: computed once, saves a forward pass over 32 rows"
    assert line in fusable.plan(prompts=8).splitlines()
    assert "old_log_prob is not fused into update_actor: kl_shape reads it before" in job("ppo", tiny).plan()
    assert "optimize=False" in replace(fusable, optimize=False).plan()


def test_the_plan_names_duplicate_nodes_though_one_of_them_is_fused(tiny: str) -> None:
    fusable = job("grpo", tiny).edit(
        insert={"again": After("old_log_prob", OldLogProb())},
        wire={"mismatch.old_log_probs": "again.old_log_probs"},
    )
    [hint] = [
        line for line in fusable.plan().splitlines() if line.startswith("again computes the same as old_log_prob")
    ]
    fixed: Job = eval(f"fusable.{hint.partition(': ')[2]}", {"fusable": fusable})
    assert fixed.graph == job("grpo", tiny).graph and "again" not in fixed.plan()
    assert replace(fusable, optimize=False).plan().splitlines().count(hint) == 1

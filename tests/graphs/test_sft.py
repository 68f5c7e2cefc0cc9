"""Graphs that learn from data: SFT, offline DPO, and GRPO with SFT."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import DemoData, Key, PreferenceData, Training
from flowrl.core.graphs.plan import Plan
from flowrl.data.proto.dataproto import DataProto
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import RuleError
from flowrl.graph import Graph
from flowrl.graphs import dpo, grpo_sft, sft
from flowrl.operators import DPO, NLL, UpdateActor
from flowrl.records import DemoBatch
from tests.support.errors import raises
from tests.support.jobs import PROMPTS, bind_tiny, weights_of
from tests.support.kernel import exact
from tests.support.rewards import digits
from tests.support.rows.prompt_files import write_jsonl
from tests.support.runs import walk

KEY = Key.of(0)


def demos(folder: Path, tiny: str, count: int = 4) -> DataProto:
    rows = [{"prompt": f"q{i}", "response": "12" * (1 + i % 3)} for i in range(count)]
    return DemoData(write_jsonl(folder / "demos.jsonl", rows)).load(ChatTokenizer(tiny), 0).next(count)


def pairs(folder: Path, tiny: str, count: int = 3) -> DataProto:
    rows = [{"prompt": f"q{i}", "chosen": "12" * (1 + i % 3), "rejected": "abc"} for i in range(count)]
    return PreferenceData(write_jsonl(folder / "pairs.jsonl", rows)).load(ChatTokenizer(tiny), 0).next(count)


@pytest.mark.parametrize(("graph", "roles"), [(sft(), ["actor"]), (dpo(), ["actor", "ref"])], ids=["sft", "dpo"])
def test_offline_algorithms_have_no_rollout_role(graph: Graph, roles: list[str]) -> None:
    assert sorted(graph.roles()) == roles and graph.check(prompts=8) == []


def test_sft_steps_lower_the_negative_log_likelihood(tiny: str, tmp_path: Path) -> None:
    job, batch = bind_tiny(sft(), tiny), demos(tmp_path, tiny)
    engines = job.build(0)
    steps, losses = walk(job.graph, **engines), []
    for step in range(3):
        log_probs = engines["actor"].log_probs(batch.to_record(DemoBatch)).double()
        metrics = steps.step(batch, step).metrics.compute()
        expected = -log_probs[batch["response_mask"]].mean()
        assert metrics["actor/pg_loss"] == pytest.approx(float(expected), rel=1e-5)
        losses.append(metrics["actor/pg_loss"])
    assert losses[2] < losses[1] < losses[0] and engines["actor"].version == 3


def test_dpo_steps_raise_the_margin_of_chosen_responses(tiny: str, tmp_path: Path) -> None:
    job, batch = bind_tiny(dpo(beta=0.5, mini_batch=6), tiny), pairs(tmp_path, tiny)
    engines = job.build(0)
    steps = walk(job.graph, **engines)
    found = [steps.step(batch, step).metrics.compute() for step in range(3)]
    assert found[0]["actor/pg_loss"] == pytest.approx(math.log(2), rel=1e-5)  # it is its own reference as yet
    assert found[0]["actor/dpo_margin"] == pytest.approx(0.0, abs=1e-5)
    assert found[2]["actor/dpo_margin"] > found[1]["actor/dpo_margin"] > 0 and found[2]["actor/dpo_accuracy"] == 1.0


def test_mini_batches_of_pairs_are_counted_in_rows() -> None:
    assert dpo(mini_batch=4).check(prompts=6) == []  # 12 rows
    [finding] = dpo(mini_batch=8).check(prompts=6)
    assert finding.rule == "FR004" and "the 12 rows of a step (6 prompts x 2)" in finding.message


def test_grpo_sft_updates_twice_and_then_syncs(tiny: str, tmp_path: Path) -> None:
    graph = grpo_sft(digits, n=3, max_new_tokens=5)
    order = [node.name for node in Plan(graph).order]
    assert order.index("update_actor") < order.index("imitate") < order.index("sync")
    assert graph["imitate"].operator == UpdateActor(NLL(), prior_updates=1).named("imitate")
    job = bind_tiny(graph, tiny)
    engines = job.build(0)
    steps, before = walk(job.graph, **engines), weights_of(engines["actor"])
    steps.sync()
    batches, losses = {"batch": PROMPTS, "demos": demos(tmp_path, tiny)}, []
    for step in range(3):
        metrics = steps.step(batches, step).metrics.compute()
        assert all(math.isfinite(value) for value in metrics.values())
        assert engines["actor"].version == engines["rollout"].receipt.version == 2 * step + 2
        losses.append(metrics["imitate/actor/pg_loss"])
    assert losses[2] < losses[0]
    assert any(not torch.equal(before[name], after) for name, after in weights_of(engines["actor"]).items())


def test_a_second_update_without_prior_updates_is_refused(tiny: str) -> None:
    graph = grpo_sft(exact)
    assert graph.check(prompts=8) == []
    with pytest.raises(RuleError, match="prior_updates=1"):
        bind_tiny(graph.edit(set={"imitate.prior_updates": 0}), tiny).refuse_unready()


def test_sampled_rows_of_another_version_are_refused(tiny: str, tmp_path: Path) -> None:
    """Rows without a version are always accepted."""
    actor = bind_tiny(sft(), tiny).build(0)["actor"]
    batch = demos(tmp_path, tiny).to_record(DemoBatch)
    UpdateActor(NLL(), actor=actor)(batch, key=KEY)
    mixed = torch.tensor([-1, 1, 0, -1])
    with raises("update.stale-rows", row=2, expected=1, found=0):
        UpdateActor(NLL(), actor=actor)(batch._replace(policy_version=mixed), key=KEY)
    UpdateActor(NLL(), prior_updates=1, actor=actor)(batch._replace(policy_version=mixed), key=KEY)


@pytest.mark.parametrize("changed", [{"beta": 0.3}, {"label_smoothing": 0.2}])
def test_settings_reach_the_loss(changed: dict[str, Any]) -> None:
    assert dpo(**changed)["update_actor"].operator.loss == DPO(**changed)


def test_a_run_without_a_rollout_engine_saves_a_model_folder(tiny: str, tmp_path: Path) -> None:
    """SFT takes the tokenizer of the model that it trains, and a run ends with a folder that is loaded again."""
    data = DemoData(write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "response": "b"}] * 3))
    run = Training(bind_tiny(sft(mini_batch=3), tiny), data, steps=2, prompts=3, folder=str(tmp_path / "run")).run()
    more, trained = str(tmp_path / "more"), str(run.folder / "actor")
    again = Training(bind_tiny(sft(), trained), data, steps=1, prompts=3, folder=more)
    assert again.run().metrics[0]["actor/pg_loss"] < run.metrics[0]["actor/pg_loss"]

"""Validations edit the job's graph: their own operators, their own engines, several validations at once."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from flowrl import After, PromptData, Validation
from flowrl.backends import SGD, TorchRollout, TorchScorer, TorchTrainer
from flowrl.core.operators.roles import Role
from flowrl.errors import FlowrlError
from flowrl.graphs import grpo
from flowrl.operators import Generate, MajorityAtK, PassAtK, Reward
from flowrl.operators.rows.held_out import majority_at_k, pass_at_k
from flowrl.run.validation.held_out import held_out, with_engines
from tests.support.errors import raises
from tests.support.jobs import bind_tiny, job_of, weights_of
from tests.support.kernel import exact
from tests.support.other_policies import judged
from tests.support.rewards import digits
from tests.support.runs import described, lines, train, without_times

pytestmark = pytest.mark.runs

SAMPLED = {"repeat.n": 4, "generate.temperature": 1.0}


def half(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """0.5 for every row."""
    return 0.5


def several(data: str, **settings: Any) -> Validation:
    estimates = {
        "pass_at_2": After("reward", PassAtK(2, passed=0.1)),
        "maj_at_2": After("reward", MajorityAtK(2)),
    }
    return Validation(PromptData(data), every=1, name="several", changes=SAMPLED, insert=estimates, batch=5, **settings)


def test_operators_can_be_added_to_a_validation_only(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    greedy = Validation(PromptData(prompts_file), every=2, name="greedy")
    job = job_of("grpo", tiny)
    run = train(job, prompts_file, tmp_path, validation=(several(prompts_file), greedy))
    assert not {"pass_at_2", "maj_at_2"} & set(job.graph.nodes)
    assert [line["step"] for line in run.validations if "several/pass@2" in line] == [0, 1, 2, 3]
    assert [line["step"] for line in run.validations if "greedy/reward/mean" in line] == [0, 2, 3]
    assert not any("pass@2" in key for line in run.metrics for key in line)
    groups: dict[Any, list[Any]] = defaultdict(list)
    for record in lines(tmp_path / "predictions.jsonl"):
        if record["validation"] == "several":
            groups[record["step"], record["uid"]].append(record)
    for line in (line for line in run.validations if "several/pass@2" in line):
        found = [rows for (step, _), rows in groups.items() if step == line["step"]]
        assert [len(rows) for rows in found] == [4] * 12
        passed = [pass_at_k(4, sum(row["score"] > 0.1 for row in rows), 2) for rows in found]
        voted = [
            majority_at_k([row["response"].strip() for row in rows], [row["score"] for row in rows], 2)
            for rows in found
        ]
        assert line["several/pass@2"] == pytest.approx(fmean(passed))
        assert line["several/maj@2"] == pytest.approx(fmean(voted), abs=1e-6)
    written = described(tmp_path)["training"]["validation"][0]
    assert written["insert"]["pass_at_2"]["after"] == "reward"
    assert written["insert"]["pass_at_2"]["operator"]["k"] == 2


def test_an_operator_can_be_replaced_in_a_validation_only(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    half_rewards = Validation(PromptData(prompts_file), every=1, name="half", replace={"reward": Reward(half)})
    run = train(job_of("grpo", tiny), prompts_file, tmp_path, steps=1, validation=half_rewards)
    assert [line["half/reward/mean"] for line in run.validations] == [0.5, 0.5]
    assert run.metrics[0]["reward/max"] <= 1.0 and run.metrics[0]["reward/mean"] != 0.5


def with_own_engine(data: str, folder: str, **settings: Any) -> Validation:
    engine = TorchRollout(folder, device="cpu")
    return Validation(PromptData(data), every=2, name="own", bind={"rollout": engine}, **settings)


def test_a_validation_engine_gets_the_trained_weights(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    shared = Validation(PromptData(prompts_file), every=2, name="shared")
    both = train(
        job_of("grpo", tiny), prompts_file, tmp_path / "a", validation=(with_own_engine(prompts_file, tiny), shared)
    )
    plain = train(job_of("grpo", tiny), prompts_file, tmp_path / "b")
    assert without_times(list(both.metrics)) == without_times(list(plain.metrics))
    trained = weights_of(both.engines["actor"])
    assert all(torch.equal(trained[name], weight) for name, weight in plain.engines["actor"].weights())
    records: dict[str, list[Any]] = {"own": [], "shared": []}
    for record in lines(tmp_path / "a" / "predictions.jsonl"):
        records[record.pop("validation")].append(record)
    assert len(records["own"]) == 36 and records["own"] == records["shared"]
    own, shares = both.engines["rollout_of_own"], both.engines["rollout"]
    assert own.model is not shares.model
    assert (own.receipt.version, own.receipt.transport) == (3, "copy")
    assert described(tmp_path / "a")["graph"] == described(tmp_path / "b")["graph"]


def test_a_resumed_run_has_the_same_validations(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    settings = {"validation": (with_own_engine(prompts_file, tiny), several(prompts_file)), "checkpoint_every": 2}
    through = train(job_of("grpo", tiny), prompts_file, tmp_path / "a", steps=4, **settings)
    train(job_of("grpo", tiny), prompts_file, tmp_path / "b", steps=2, **settings)
    again = train(job_of("grpo", tiny), prompts_file, tmp_path / "b", steps=4, resume=True, **settings)
    assert list(again.validations) == list(through.validations)
    predictions = [lines(tmp_path / run / "predictions.jsonl") for run in ("a", "b")]
    assert predictions[0] == predictions[1]


def test_predictions_contain_the_response_of_the_policy(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    validation = Validation(PromptData(prompts_file), until="verdict", name="judged")
    job = bind_tiny(judged(), tiny, judge=TorchRollout(tiny, device="cpu", frozen=True))
    rounded = TorchRollout(tiny, device="cpu", frozen=True, dtype="bfloat16")
    strict = validation.__class__(PromptData(prompts_file), until="verdict", name="strict", bind={"judge": rounded})
    run = train(job, prompts_file, tmp_path, steps=1, validation=(validation, strict))
    alone = Validation(PromptData(prompts_file), until="generate", name="alone")
    train(job, prompts_file, tmp_path / "alone", steps=1, validation=alone)
    responses = [record["response"] for record in lines(tmp_path / "alone" / "predictions.jsonl")]
    judged_records = [record for record in lines(tmp_path / "predictions.jsonl") if record["validation"] == "judged"]
    assert [record["response"] for record in judged_records] == responses
    assert all("score" in record for record in judged_records)
    assert run.engines["judge_of_strict"] is not run.engines["judge"]


def test_validation_engines_are_built_and_placed() -> None:
    job = grpo(exact).edit(bind={"rollout": TorchRollout(), "actor": TorchTrainer("m"), "ref": TorchScorer("m")})
    data = PromptData("m.jsonl")
    plain, same = Validation(data), Validation(data, bind={"rollout": TorchRollout()})
    assert with_engines(job, held_out(job, [plain, same])) is job
    one, two = (Validation(data, name=name, bind={"rollout": TorchRollout("m")}) for name in ("a/b", "a b"))
    found = held_out(job, [one, two])
    assert [list(each.bindings) for each in found] == [["rollout_of_a_b"], ["rollout_of_a_b_"]]
    assert [[sync.writes for sync in each.syncs] for each in found] == [[["rollout_of_a_b"]], [["rollout_of_a_b_"]]]
    complete = with_engines(job, found)
    assert set(complete.bindings) == {*job.bindings, "rollout_of_a_b", "rollout_of_a_b_"}
    assert complete.check(prompts=4) == []
    assert {name: complete[name] for name in job.nodes} == dict(job.nodes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"insert": {"x": After("judge", PassAtK(2))}}, r"names 'judge', not a node of grpo"),
        ({"bind": {"engine": TorchRollout()}}, r"has no role 'engine' to bind"),
        ({"bind": {"rollout": SGD(lr=0.1)}}, r"Validation\(.*bind"),
        ({"bind": {"rollout": TorchScorer("m")}}, r"bound to TorchScorer, but generate needs a Rollout"),
        ({"bind": {"rollout": TorchRollout("m", frozen=True)}}, r"'rollout_of_val', whose engine is frozen"),
        (
            {"replace": {"generate": Generate(rollout=Role("x"))}, "changes": {}},
            r"'val' uses the role 'x', .*={'x'",
        ),
        ({"wire": {"reward.rollout": "unknown"}}, r"unknown"),
        ({"drop": ["repeats"]}, r"names 'repeats'.*did you mean 'repeat'"),
        (
            {"changes": {"repeat.n": 4, "generate.temperature": 0.0}, "insert": {"best": After("reward", PassAtK(4))}},
            r"The validation 'val' violates rules .*\n  FR031 best: .*'generate.temperature': 1.0",
        ),
    ],
)
def test_an_invalid_edit_is_refused_before_a_folder_is_created(
    tiny: str, prompts_file: str, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(FlowrlError, match=message):
        validation = Validation(PromptData(prompts_file), **settings)
        train(job_of("grpo", tiny, digits), prompts_file, tmp_path / "run", validation=validation)
    assert not (tmp_path / "run").exists()


def test_a_validation_engine_without_sync_is_refused(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    job = bind_tiny(judged(), tiny, judge=TorchRollout(tiny, device="cpu", frozen=True))
    loose = Validation(PromptData(prompts_file), until="verdict", bind={"judge": TorchRollout(tiny, device="cpu")})
    with raises("backend.never-synced", role="judge_of_val"):
        train(job, prompts_file, tmp_path / "run", validation=loose)

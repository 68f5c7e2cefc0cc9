"""Tests of `step_snapshot.py` and of generation with a lag, in one process.

They cover the version that samples each row, training, and resumed runs.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowrl import INJECTED, After, Colocate, Metrics, Operator, PromptData, Split, State
from flowrl.backends import TorchRollout
from flowrl.columns import TokenLevelScores
from flowrl.core.graphs.plan import Plan
from flowrl.data.files import parse_json
from flowrl.data.metrics import GroupScores
from flowrl.data.proto.dataproto import DataProto
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.graphs import grpo
from flowrl.operators import Collect, RolloutCorrection, Spread
from flowrl.run.engine.execution_graph import ExecutionGraph
from flowrl.run.engine.local import LocalRunner
from flowrl.run.engine.nodes import NodeInfo
from flowrl.run.engine.step_snapshot import NodeOutputs, StepSnapshot, load_snapshots, save_snapshots
from flowrl.run.training.job import Job
from tests.nightly import nightly
from tests.run.training.interrupted import STEPS, assert_same, cut_off, jobs, run
from tests.support.errors import raises
from tests.support.jobs import PROMPTS, prompt_batch, rollout_batch
from tests.support.rewards import digits

pytestmark = pytest.mark.runs

BEHIND = {"grpo": "group_advantage", "ppo": "whiten"}


def job_with_lag(name: str, folder: str, lag: int, **changed: Any) -> Job:
    """The jobs of `tests.run.training.interrupted` with a lag, a separate rollout engine, and a correction."""
    at = After(BEHIND[name], RolloutCorrection("token", "truncate", high=2.0))
    inserted = {"correction": at, **changed.pop("insert", {})}
    return jobs(name, folder).edit(
        lag=lag, insert=inserted, bind={"rollout": TorchRollout(folder, device="cpu")}, **changed
    )


class Counted(Operator):
    """Counts its calls as a metric."""

    count = State(lambda self: 0)

    def __call__(self, token_level_scores: TokenLevelScores, metrics: Metrics = INJECTED) -> TokenLevelScores:
        self.count.value += 1
        metrics.sum("count", self.count.value)
        return token_level_scores


def log_probs(folder: Path, columns: Any) -> torch.Tensor:
    """Log-probs of the responses by transformers, ``[batch response]``; a token attends to its segment."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    attended, positions = columns["attention_mask"].bool(), columns["position_ids"]
    segment = (attended & (positions == 0)).cumsum(1)
    sees = attended[:, None] & (segment[:, None] == segment[..., None])
    mask = torch.where(sees.tril()[:, None], 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = model(input_ids=columns["input_ids"], attention_mask=mask, position_ids=positions).logits
    width = columns["responses"].shape[1]
    scored = logits[:, -width - 1 : -1].log_softmax(-1).gather(-1, columns["responses"][..., None])
    return scored[..., 0]


class TestVersions:
    @pytest.mark.parametrize("lag", [1, 2, 4])
    def test_rows_are_sampled_with_weights_from_lag_steps_earlier(
        self, lag: int, tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        stream, found = PromptData(prompts_file).load(ChatTokenizer(tiny), 0), []
        with job_with_lag("grpo", tiny, lag).open() as steps:
            steps.sync()
            steps.save_pretrained("actor", tmp_path / "0")
            results = steps.run(
                lambda step: stream.next(5), range(STEPS), lag=lag, return_nodes=["generate", "old_log_prob"]
            )
            for step, result in enumerate(results):
                steps.save_pretrained("actor", tmp_path / f"{step + 1}")
                found.append((step, result))
        for step, result in found:
            rollout, age = result.columns["generate"], min(step, lag)
            mask = rollout["response_mask"]
            assert set(rollout["policy_version"].tolist()) == {step - age}
            sampled = log_probs(tmp_path / f"{step - age}", rollout)
            assert torch.allclose(rollout["rollout_log_probs"][mask], sampled[mask], atol=1e-5)
            now = log_probs(tmp_path / f"{step}", rollout)
            assert torch.allclose(result.columns["old_log_prob"]["old_log_probs"][mask], now[mask], atol=1e-5)
            assert age == 0 or not torch.allclose(now[mask], sampled[mask], atol=1e-3)
            metrics = result.metrics.compute()
            assert metrics["queue/age_mean"] == metrics["queue/age_max"] == age
            assert result.filled == (1 if step == 0 else min(lag, STEPS - step))


CUTS = [(1, "update_actor"), (2, "sync"), (3, "generate")]


class TestCutOff:
    @pytest.mark.parametrize(("name", "lag"), [("ppo", 2)])
    def test_an_interrupted_run_resumes_with_the_same_metrics(
        self, name: str, lag: int, tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        uninterrupted = run(job_with_lag(name, tiny, lag), prompts_file, tmp_path / "uninterrupted", checkpoint_every=1)
        for step, node in CUTS:
            folder = tmp_path / f"{step}-{node}"
            cut_off(job_with_lag(name, tiny, lag), prompts_file, folder, step, node, checkpoint_every=1)
            assert_same(
                run(job_with_lag(name, tiny, lag), prompts_file, folder, resume=True, checkpoint_every=1), uninterrupted
            )

    @pytest.mark.parametrize("cuts", [CUTS[-1:], nightly(CUTS)], ids=["one", "all"])
    def test_a_resumed_run_collects_the_same_groups(
        self, cuts: list[tuple[int, str]], tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        gate = {"collect": After("reward", Collect(Spread(), groups=5, rounds=6))}
        uninterrupted = run(
            job_with_lag("grpo", tiny, 2, insert=gate), prompts_file, tmp_path / "uninterrupted", checkpoint_every=1
        )
        assert max(line["collect/rounds"] for line in uninterrupted.metrics) > 1
        for step, node in cuts:
            folder = tmp_path / f"{step}-{node}"
            cut_off(job_with_lag("grpo", tiny, 2, insert=gate), prompts_file, folder, step, node, checkpoint_every=1)
            resumed = run(
                job_with_lag("grpo", tiny, 2, insert=gate), prompts_file, folder, resume=True, checkpoint_every=1
            )
            assert_same(resumed, uninterrupted)

    def test_the_state_of_nodes_in_flight_is_resumed(self, tiny: str, prompts_file: str, tmp_path: Path) -> None:
        gate = {"counted": After("reward", Counted()), "collect": After("reward", Collect(Spread(), groups=5))}
        uninterrupted = run(
            job_with_lag("grpo", tiny, 1, insert=gate), prompts_file, tmp_path / "uninterrupted", checkpoint_every=1
        )
        cut_off(job_with_lag("grpo", tiny, 1, insert=gate), prompts_file, tmp_path / "run", 3, checkpoint_every=1)
        resumed = run(
            job_with_lag("grpo", tiny, 1, insert=gate), prompts_file, tmp_path / "run", resume=True, checkpoint_every=1
        )
        assert_same(resumed, uninterrupted)

    @pytest.mark.parametrize(("before", "after"), [(2, 1), nightly(1, 2)])
    def test_a_run_may_resume_with_another_lag(
        self,
        before: int,
        after: int,
        tiny: str,
        prompts_file: str,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        cut_off(job_with_lag("grpo", tiny, before), prompts_file, tmp_path / "run", 2, "update_actor")
        with caplog.at_level(logging.WARNING):
            resumed = run(job_with_lag("grpo", tiny, after), prompts_file, tmp_path / "run", resume=True)
        assert len(resumed.metrics) == STEPS
        warning = f"was written with lag={before}, and the run resumes with lag={after}"
        assert (warning in caplog.text) == bool(before)  # without a lag no step was in flight
        uninterrupted = run(job_with_lag("grpo", tiny, after), prompts_file, tmp_path / "uninterrupted")
        position = [
            parse_json((folder / "checkpoints" / "step-000006" / "state.json").read_bytes())["data"]
            for folder in (resumed.folder, uninterrupted.folder)
        ]
        assert position[0] == position[1]  # no row is skipped or sampled twice


class TestSnapshots:
    """Steps in flight, written to a checkpoint and read again."""

    @staticmethod
    def written(folder: Path) -> tuple[dict[int, StepSnapshot], dict[str, NodeInfo], LocalRunner]:
        """Two steps in flight with a lag of 2, in their second round, with samples."""
        runner = LocalRunner({})
        infos = NodeInfo.all(ExecutionGraph(Plan(grpo(digits, n=2)), 2), runner)
        rollout = rollout_batch(prompt_batch([[10, 11], [12]]), [[5], [6, 7]])._asdict()
        outputs = NodeOutputs({name: rollout[name] for name in infos["generate"].columns}, None)
        scores = GroupScores(scores={"a": (0.5, 1.0), "b": (0.0, 0.0)})
        metrics = {"generate": Metrics({"groups": scores}, rows={"length": {"row-0": 1.0, "row-1": 2.0}})}
        batches = [{"batch": PROMPTS}, {"batch": PROMPTS[:1]}]
        rounds = [{"generate": {"response_mask": rollout["response_mask"][:count]}} for count in (2, 1)]
        snapshot = StepSnapshot(batches, {"generate": outputs}, metrics, {"generate": 1.5}, rounds=rounds)
        steps = {3: snapshot, 4: snapshot}
        save_snapshots(steps, 2, infos, runner, folder)
        return steps, infos, runner

    @pytest.mark.parametrize("lag", [2, 3])
    def test_batches_samples_metrics_and_lengths_are_those_that_were_written(self, lag: int, tmp_path: Path) -> None:
        steps, infos, runner = self.written(tmp_path)
        read = load_snapshots(tmp_path, lag, infos, runner)[3]
        for found, batches in zip(read.batches, steps[3].batches, strict=True):
            assert found.keys() == batches.keys() and all(found[name].equal(batches[name]) for name in batches)
        sampled, before = read.sampled["generate"], steps[3].sampled["generate"].outputs
        assert DataProto(dict(sampled.outputs)).equal(DataProto(dict(before)))
        assert sampled.lengths is not None and sampled.lengths.response is not None
        assert (sampled.lengths.tokens.tolist(), sampled.lengths.response.tolist()) == ([3, 3], [1, 2])
        assert read.metrics["generate"] == steps[3].metrics["generate"] and read.seconds == {"generate": 1.5}
        assert read.metrics["generate"].rows == steps[3].metrics["generate"].rows
        for found, expected in zip(read.rounds, steps[3].rounds, strict=True):
            assert DataProto(dict(found["generate"])).equal(DataProto(dict(expected["generate"])))

    def test_samples_that_a_smaller_lag_forbids_are_dropped_and_all_their_rows_are_not(self, tmp_path: Path) -> None:
        _, infos, runner = self.written(tmp_path)
        read = load_snapshots(tmp_path, 1, infos, runner)[3]
        assert not read.sampled and not read.metrics
        assert [len(batches["batch"]) for batches in read.batches] == [3, 1]

    @pytest.mark.parametrize(("lag", "what"), [(1, "sampled again"), (2, None), (3, "trained on unchanged")])
    def test_another_lag_is_logged_with_what_becomes_of_the_rows(
        self, lag: int, what: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        _, infos, runner = self.written(tmp_path)
        load_snapshots(tmp_path, lag, infos, runner)
        messages = [record.message for record in caplog.records]
        assert len(messages) == bool(what) and all(f"are {what}." in message for message in messages)


class TestRefused:
    def test_lag_with_shared_weights_is_refused(self, tiny: str) -> None:
        job = job_with_lag("grpo", tiny, 1).edit(bind={"rollout": TorchRollout()})
        with raises("lag.unsupported", role="rollout"):
            job.refuse_unready()

    def test_the_plan_explains_a_useless_lag(self, tiny: str) -> None:
        job = job_with_lag("grpo", tiny, 1)
        assert "lag=1 gains nothing in one process" in job.plan()
        together = replace(job, place=Colocate(gpus=1))
        assert "lag=1 gains nothing with Colocate" in together.plan() and "'rollout'" not in together.plan()
        assert "rollout and actor take turns on its slots" in together.plan()
        assert "gains nothing" not in replace(job, place=Split(train=1, rollout=1)).plan()
        assert "gains nothing" not in job.edit(lag=0).plan()

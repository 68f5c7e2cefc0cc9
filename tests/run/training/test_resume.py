"""Resuming: an interrupted run ends with the numbers and weights of an uninterrupted one, bit for bit."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowrl import INJECTED, After, Colocate, Metrics, Operator, PromptData, State, TensorBoard, Training
from flowrl import columns as c
from flowrl.backends import SGD, TorchRollout
from flowrl.errors import DataError, NodeError, ParameterError
from flowrl.operators import Repeat
from flowrl.run.engine.steps import Steps
from flowrl.run.engine.timeline import Timeline
from flowrl.run.training.checkpoint import MANIFEST
from flowrl.run.training.loop import Run
from flowrl.sync.digest import weights_digest
from tests import ROOT
from tests.nightly import nightly
from tests.run.training.interrupted import (
    STEPS,
    TIMES,
    Stop,
    Stopper,
    assert_same,
    checkpoints,
    contents,
    cut_off,
    jobs,
    run,
    settings,
    status,
    without_times,
)
from tests.support.errors import raises
from tests.support.jobs import job_of, weights_of, write_prompts
from tests.support.rewards import digits

pytestmark = pytest.mark.runs


@pytest.fixture(scope="module")
def whole(tiny: str, prompts_file: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The uninterrupted run of an algorithm, cached."""
    runs: dict[str, Run] = {}

    def of(name: str) -> Run:
        if name not in runs:
            runs[name] = run(jobs(name, tiny), prompts_file, tmp_path_factory.mktemp("whole") / name)
        return runs[name]

    return of


Whole = Callable[[str], Run]


class TestSameNumbers:
    """A resumed run has the metrics, predictions and weights of an uninterrupted one, bit for bit."""

    # in the first step after a checkpoint, in the next one, in a step across epochs, in a validation
    @pytest.mark.parametrize(
        ("name", "step", "node"),
        [
            ("ppo", 2, "update_actor"),
            ("ppo", 3, "sync"),
            ("grpo", 4, "reward"),
            ("grpo", 5, "generate"),
            nightly("grpo", 2, "update_actor"),
            nightly("grpo", 3, "sync"),
            nightly("ppo", 4, "reward"),
            nightly("ppo", 5, "generate"),
        ],
    )
    def test_a_run_interrupted_in_a_step_resumes(
        self, tiny: str, prompts_file: str, tmp_path: Path, whole: Whole, name: str, step: int, node: str
    ) -> None:
        cut_off(jobs(name, tiny), prompts_file, tmp_path / "run", step, node)
        assert_same(run(jobs(name, tiny), prompts_file, tmp_path / "run", resume=True), whole(name))
        assert checkpoints(tmp_path / "run") == ["step-000002", "step-000004", "step-000006"]

    def test_every_restored_state_affects_the_metrics(self, whole: Whole) -> None:
        """Every kind of state changes within the run, so a state that is not restored would change a metric."""
        ppo = whole("ppo").metrics
        for key in ("kl/coef", "actor/lr", "actor/grad_norm", "critic/vf_loss", "reward/mean"):
            assert len({metrics[key] for metrics in ppo}) == STEPS, key
        position = json.loads((whole("ppo").folder / "checkpoints/step-000004/state.json").read_text())
        assert position["data"] == {"epoch": 1, "offset": 8, "rows": 12}
        assert position["state"]["kl_shape.beta"] == ppo[4]["kl/coef"]

    def test_an_interrupted_validation_resumes(
        self, tiny: str, prompts_file: str, tmp_path: Path, whole: Whole
    ) -> None:
        cut_off(jobs("grpo", tiny), prompts_file, tmp_path, 3, "val")
        assert [line["step"] for line in without_times(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
        assert_same(run(jobs("grpo", tiny), prompts_file, tmp_path, resume=True), whole("grpo"))

    def test_an_often_interrupted_run_resumes(self, tiny: str, prompts_file: str, tmp_path: Path, whole: Whole) -> None:
        job = jobs("ppo", tiny)
        cut_off(job, prompts_file, tmp_path, 3)
        for step in (2, 3, 4, 5):
            cut_off(job, prompts_file, tmp_path, step, resume=True)
        assert_same(run(job, prompts_file, tmp_path, resume=True), whole("ppo"))
        updates = [span for span in Timeline.load(tmp_path / "trace.json").spans if span.name == "update_actor"]
        assert len(updates) > STEPS  # the trace has repeated steps, too

    def test_a_failed_run_resumes(self, tiny: str, prompts_file: str, tmp_path: Path, whole: Whole) -> None:
        flag = tmp_path / "asleep"

        def judge(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
            if flag.exists() and extra_info["index"] == 4:
                raise RuntimeError("asleep")
            return digits(data_source, solution_str, ground_truth)

        class Sleeper(Stopper):
            def node(self, name: str) -> None:
                if (self.done, name) == (self.at, self.name):
                    flag.touch()

        job = jobs("grpo", tiny, judge)
        with pytest.raises(NodeError, match=r"reward failed in step 3.*(?s:.*)asleep"):
            run(job, prompts_file, tmp_path / "run", [Sleeper(2, "generate")])
        flag.unlink()
        assert_same(run(job, prompts_file, tmp_path / "run", resume=True), whole("grpo"))

    def test_a_killed_run_resumes(self, tiny: str, prompts_file: str, tmp_path: Path, whole: Whole) -> None:
        script = """
            import os, signal, sys
            from pathlib import Path
            import torch
            from tests.run.training.interrupted import Stopper, jobs, run

            class Killer(Stopper):
                def node(self, name):
                    if (self.done, name) == (self.at, self.name):
                        os.kill(os.getpid(), signal.SIGKILL)

            torch.set_num_threads(1)
            tiny, prompts, folder = sys.argv[1:]
            run(jobs("ppo", tiny), prompts, Path(folder), [Killer(3, "update_critic")])
        """
        arguments = [sys.executable, "-c", textwrap.dedent(script), tiny, prompts_file, str(tmp_path)]
        killed = subprocess.run(arguments, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
        assert status(tmp_path) == "running"  # a killed process cannot update it
        assert_same(run(jobs("ppo", tiny), prompts_file, tmp_path, resume=True), whole("ppo"))

    def test_a_finished_run_is_extended(self, tiny: str, prompts_file: str, tmp_path: Path, whole: Whole) -> None:
        run(jobs("grpo", tiny), prompts_file, tmp_path, steps=3)  # the last step always has a checkpoint
        assert checkpoints(tmp_path) == ["step-000002", "step-000003"]
        assert_same(run(jobs("grpo", tiny), prompts_file, tmp_path, resume=True), whole("grpo"))

    @pytest.mark.ray
    def test_a_run_on_ray_resumes_locally(self, tiny: str, prompts_file: str, tmp_path: Path, whole: Whole) -> None:
        job = jobs("ppo", tiny)
        cut_off(replace(job, place=Colocate(gpus=1)), prompts_file, tmp_path, 3)
        assert_same(run(job, prompts_file, tmp_path, resume=True), whole("ppo"))


class TestCheckpoints:
    @pytest.mark.parametrize("damage", ["flipped", nightly("short"), nightly("gone"), "manifest"])
    def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(
        self,
        tiny: str,
        prompts_file: str,
        tmp_path: Path,
        whole: Whole,
        caplog: pytest.LogCaptureFixture,
        damage: str,
    ) -> None:
        cut_off(jobs("ppo", tiny), prompts_file, tmp_path, 5)
        newest = tmp_path / "checkpoints" / "step-000004"
        victim = next(path for path in sorted((newest / "critic").iterdir()) if path.stat().st_size > 1000)
        content = bytearray(victim.read_bytes())
        match damage:
            case "flipped":
                content[len(content) // 2] ^= 1
                victim.write_bytes(content)
            case "short":
                victim.write_bytes(content[:-1])
            case "gone":
                victim.unlink()
            case "manifest":
                (newest / MANIFEST).write_text("{")
        with caplog.at_level(logging.WARNING):
            assert_same(run(jobs("ppo", tiny), prompts_file, tmp_path, resume=True), whole("ppo"))
        assert "step-000004" in caplog.text and "resuming from step-000002, which is intact" in caplog.text
        assert checkpoints(tmp_path) == ["step-000002", "step-000004", "step-000006"]  # the new one is complete

    def test_a_run_resumes_after_a_partial_checkpoint(
        self, tiny: str, prompts_file: str, tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save = Steps.save

        def save_critic_and_stop(self: Steps, folder: Path) -> None:
            if "000002" in folder.name:
                return save(self, folder)
            self.runner.engines["critic"].save_checkpoint(str(folder / "critic"))
            raise Stop

        with monkeypatch.context() as patched, pytest.raises(Stop):
            patched.setattr(Steps, "save", save_critic_and_stop)
            run(jobs("ppo", tiny), prompts_file, tmp_path)
        assert checkpoints(tmp_path) == ["step-000002"]
        assert_same(run(jobs("ppo", tiny), prompts_file, tmp_path, resume=True), whole("ppo"))
        assert checkpoints(tmp_path) == ["step-000002", "step-000004", "step-000006"]

    def test_a_run_with_only_damaged_checkpoints_is_refused(self, tiny: str, prompts_file: str, tmp_path: Path) -> None:
        cut_off(jobs("grpo", tiny), prompts_file, tmp_path, 2)
        (tmp_path / "checkpoints/step-000002/state.json").write_text("{}")
        before = (tmp_path / "run.json").read_text()
        with raises("checkpoint.damaged"):
            run(jobs("grpo", tiny), prompts_file, tmp_path, resume=True)
        assert (tmp_path / "run.json").read_text() == before

    @pytest.mark.parametrize(
        ("every", "limit", "expected"),
        [(1, 2, [5, 6]), nightly(4, 1, [6]), (4, 3, [4, 6]), nightly(9, 1, [6])],
    )
    def test_only_the_newest_max_checkpoints_remain(
        self, tiny: str, prompts_file: str, tmp_path: Path, every: int, limit: int, expected: list[int]
    ) -> None:
        run(jobs("grpo", tiny), prompts_file, tmp_path, checkpoint_every=every, max_checkpoints=limit, validation=())
        assert checkpoints(tmp_path) == [f"step-{step:06d}" for step in expected]

    def test_no_checkpoints_are_written_by_default(self, tiny: str, prompts_file: str, tmp_path: Path) -> None:
        run(jobs("grpo", tiny), prompts_file, tmp_path, checkpoint_every=None, steps=1)
        assert not (tmp_path / "checkpoints").exists()

    def test_checkpoints_contain_a_loadable_policy(
        self, tiny: str, prompts_file: str, tmp_path: Path, whole: Whole
    ) -> None:
        """A checkpoint in the middle of a run has the model of a run that ends at its step."""
        ended = run(jobs("grpo", tiny), prompts_file, tmp_path, steps=2).engines["actor"]
        folders = (whole("grpo").folder / f"checkpoints/step-{step:06}/actor/huggingface" for step in (2, 6))
        for folder, engine in zip(folders, (ended, whole("grpo").engines["actor"]), strict=True):
            model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
            AutoTokenizer.from_pretrained(folder, local_files_only=True)
            assert weights_digest(model.named_parameters()) == weights_digest(engine.weights())

    def test_checkpoints_do_not_change_a_run(self, tiny: str, prompts_file: str, tmp_path: Path, whole: Whole) -> None:
        assert_same(run(jobs("ppo", tiny), prompts_file, tmp_path, checkpoint_every=None), whole("ppo"))

    def test_an_unserializable_state_is_refused_before_a_model_loads(self, prompts_file: str, tmp_path: Path) -> None:
        class NotFinite(Operator):
            """Has a state that JSON cannot represent."""

            mean = State(lambda self: torch.zeros(()))

            def __call__(self, token_level_scores: c.TokenLevelScores) -> c.TokenLevelScores:
                return token_level_scores

        job = job_of("grpo", "no such model").edit(insert={"odd": After("reward", NotFinite())})
        with pytest.raises(DataError, match=r"the state odd.mean is a Tensor, which JSON does not restore exactly"):
            run(job, prompts_file, tmp_path / "run")
        assert not (tmp_path / "run").exists()


class TestStart:
    def test_resume_or_start_starts_a_run_or_resumes_it(
        self, tiny: str, prompts_file: str, tmp_path: Path, whole: Whole
    ) -> None:
        cut_off(jobs("grpo", tiny), prompts_file, tmp_path / "new", 3, resume="or-start")
        assert_same(run(jobs("grpo", tiny), prompts_file, tmp_path / "new", resume="or-start"), whole("grpo"))

    def test_a_run_without_a_checkpoint_restarts(
        self, tiny: str, prompts_file: str, tmp_path: Path, whole: Whole
    ) -> None:
        cut_off(jobs("grpo", tiny), prompts_file, tmp_path, 1)
        assert [line["step"] for line in without_times(tmp_path / "metrics.jsonl")] == [0, 1]
        assert_same(run(jobs("grpo", tiny), prompts_file, tmp_path, resume=True), whole("grpo"))

    def test_only_an_unchanged_run_restarts_without_a_checkpoint(
        self, tiny: str, prompts_file: str, tmp_path: Path, whole: Whole, caplog: pytest.LogCaptureFixture
    ) -> None:
        cut_off(jobs("grpo", tiny), prompts_file, tmp_path, 1, checkpoint_every=None)
        before = contents(tmp_path)
        for changed, other in (({"seed": 4}, "seed"), ({"prompts": 10}, "prompts")):
            with raises("resume.no-checkpoint", found=f"a run with another {other}"):
                run(jobs("grpo", tiny), prompts_file, tmp_path, resume=True, checkpoint_every=None, **changed)
        with raises("resume.no-checkpoint", found="a run with another graph"):
            run(jobs("ppo", tiny), prompts_file, tmp_path, resume=True)
        assert before == contents(tmp_path)
        with caplog.at_level(logging.WARNING):
            restarted = run(jobs("grpo", tiny), prompts_file, tmp_path, resume=True, checkpoint_every=None)
        assert_same(restarted, whole("grpo"))
        assert "holds no checkpoint; the run starts from step 0" in caplog.text
        before = contents(tmp_path)
        with raises("resume.no-checkpoint", found="a finished run"):
            run(jobs("grpo", tiny), prompts_file, tmp_path, resume=True, checkpoint_every=None)
        assert before == contents(tmp_path)

    def test_resuming_a_finished_run_only_saves_the_model(
        self, tiny: str, prompts_file: str, tmp_path: Path, whole: Whole
    ) -> None:
        run(jobs("grpo", tiny), prompts_file, tmp_path)
        before = (tmp_path / "metrics.jsonl").read_text(), (tmp_path / "predictions.jsonl").read_text()

        class RecordsDone(Stopper):
            def node(self, name: str) -> None:
                raise AssertionError(name)

            def end(self, summary: Any) -> None:
                assert summary is None
                self.done = -1

        recorder = RecordsDone(0, "")
        again = run(jobs("grpo", tiny), prompts_file, tmp_path, [recorder], resume=True, save_model=True)
        assert recorder.done == -1
        assert before == ((tmp_path / "metrics.jsonl").read_text(), (tmp_path / "predictions.jsonl").read_text())
        assert_same(again, whole("grpo"))
        assert (tmp_path / "actor" / "model.safetensors").exists()

    def test_an_existing_run_is_refused_without_resume(self, tiny: str, prompts_file: str, tmp_path: Path) -> None:
        cut_off(jobs("grpo", tiny), prompts_file, tmp_path, 2)
        with raises("run.folder-taken", path=str(tmp_path)):
            run(jobs("grpo", tiny), prompts_file, tmp_path)
        with pytest.raises(ParameterError, match=r"resume=True needs the folder"):
            Training(jobs("grpo", tiny), PromptData(prompts_file), **settings(prompts_file, resume=True))

    def test_resuming_does_not_run_the_first_validation_again(
        self, tiny: str, prompts_file: str, tmp_path: Path
    ) -> None:
        cut_off(jobs("grpo", tiny), prompts_file, tmp_path, 2)
        resumed = Stopper(-1, "")
        steps: list[int] = []
        resumed.validation = lambda step, metrics: steps.append(step)  # type: ignore[method-assign]
        run(jobs("grpo", tiny), prompts_file, tmp_path, [resumed], resume=True)
        assert steps == [3, 6]


@pytest.fixture(scope="module")
def cut(tiny: str, prompts_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted after two steps; do not write to it."""
    folder = tmp_path_factory.mktemp("cut") / "run"
    cut_off(jobs("grpo", tiny), prompts_file, folder, 2)
    return folder


class TestRefused:
    @pytest.mark.parametrize(
        ("changed", "code", "facts"),
        [
            ({"seed": 4}, "resume.other-run", {"changed": "seed", "expected": 3, "found": 4}),
            ({"prompts": 10}, "resume.other-run", {"changed": "prompts", "expected": 5, "found": 10}),
            ({"steps": 1}, "resume.fewer-steps", {"found": 2, "steps": 1}),
        ],
    )
    def test_other_run_settings_are_refused(
        self, tiny: str, prompts_file: str, cut: Path, changed: dict[str, Any], code: str, facts: dict[str, Any]
    ) -> None:
        before = (cut / "run.json").read_text()
        with raises(code, **facts):
            run(jobs("grpo", tiny), prompts_file, cut, resume=True, **changed)
        assert (cut / "run.json").read_text() == before  # the file still describes the existing run

    def test_another_graph_is_refused(self, prompts_file: str, cut: Path) -> None:
        nowhere = "no such model"  # the refusal comes before a model loads
        for job in (
            jobs("grpo", nowhere).edit(replace={"repeat": Repeat(3)}),
            jobs("grpo", nowhere, lambda data_source, solution_str, ground_truth, extra_info=None: 1.0),
            jobs("ppo", nowhere),
        ):
            with raises("resume.other-run", changed="graph"):
                run(job, prompts_file, cut, resume=True)

    def test_changed_data_is_refused(self, tiny: str, prompts_file: str, cut: Path, tmp_path: Path) -> None:
        ordered = Training(
            jobs("grpo", tiny),
            PromptData(prompts_file, shuffle=False),
            folder=str(cut),
            **settings(prompts_file, resume=True),
        )
        with raises("resume.other-run", changed="data") as raised:
            ordered.run()
        assert "'shuffle': True" in raised.value.facts["expected"]
        assert "'shuffle': False" in raised.value.facts["found"]
        copy = shutil.copytree(cut, tmp_path / "copy")
        for rows in (11, 13):
            with raises("resume.other-run", changed="content of the data"):
                run(jobs("grpo", tiny), write_prompts(tmp_path / "other.jsonl", rows), copy, resume=True)
        moved = shutil.copyfile(prompts_file, tmp_path / "moved.jsonl")  # its location may change
        run(jobs("grpo", tiny), str(moved), copy, resume=True)

    def test_another_model_is_refused(self, tiny: str, prompts_file: str, cut: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(cut, tmp_path / "copy")
        job = jobs("grpo", tiny)
        other = job.edit(bind={"actor": type(job.graph.bindings["actor"])(tiny, optimizer=SGD(lr=1.0), device="cpu")})
        with pytest.raises(DataError, match="another model or optimizer"):
            run(other, prompts_file, copy, resume=True)
        assert status(copy) == "failed"

    def test_another_backend_is_logged(
        self, tiny: str, prompts_file: str, cut: Path, tmp_path: Path, whole: Whole, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A rollout engine with its own weights instead of shared ones gives the same numbers."""
        copy = shutil.copytree(cut, tmp_path / "copy")
        job = jobs("grpo", tiny).edit(bind={"rollout": TorchRollout(tiny, device="cpu")})
        with caplog.at_level(logging.WARNING):
            found = run(job, prompts_file, copy, resume=True)
        assert "was written with other backends (role rollout.model: None -> " in caplog.text
        assert "; role rollout.device: None -> 'cpu'); the run resumes" in caplog.text
        for resumed, expected in zip(found.metrics, whole("grpo").metrics, strict=True):
            same = {k: v for k, v in expected.items() if not k.startswith((*TIMES, "sync/"))}
            assert {k: resumed[k] for k in same} == same
        assert all(
            torch.equal(w, weights_of(whole("grpo").engines["actor"])[n]) for n, w in found.engines["actor"].weights()
        )


class NotFinite(Operator):
    """Reports a mean without a weight, which is NaN."""

    def __call__(self, token_level_scores: c.TokenLevelScores, metrics: Metrics = INJECTED) -> c.TokenLevelScores:
        metrics.mean("odd/mean", 0.0, 0.0)
        return token_level_scores


class TestFolder:
    def test_null_metrics_are_read_as_nan(self, tiny: str, prompts_file: str, tmp_path: Path) -> None:
        job = jobs("grpo", tiny).edit(insert={"odd": After("reward", NotFinite())})
        cut_off(job, prompts_file, tmp_path, 2)
        metrics = run(job, prompts_file, tmp_path, resume=True, steps=4).metrics
        assert all(math.isnan(one["odd/mean"]) for one in metrics)
        assert [line.get("odd/mean", 0) for line in without_times(tmp_path / "metrics.jsonl")].count(None) == 4

    def test_tensorboard_has_every_step_once_after_resuming(self, tiny: str, prompts_file: str, tmp_path: Path) -> None:
        event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        with pytest.raises(Stop):
            run(jobs("grpo", tiny), prompts_file, tmp_path, [TensorBoard(), Stopper(3, "sync")])
        found = run(jobs("grpo", tiny), prompts_file, tmp_path, [TensorBoard()], resume=True)
        events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
        steps = {tag: [event.step for event in events.Scalars(tag)] for tag in ("reward/mean", "val/reward/mean")}
        assert steps == {"reward/mean": [*range(1, STEPS + 1)], "val/reward/mean": [0, 3, 6]}
        assert [e.value for e in events.Scalars("kl/ref")] == [pytest.approx(m["kl/ref"]) for m in found.metrics]

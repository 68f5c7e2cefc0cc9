"""References that follow the policy (`reference.py`, `flowrl/protocols/scorers.py`): reset, averaged, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import After
from flowrl.backends import AdamW, LoRA, TorchScorer, TorchTrainer
from flowrl.operators import SyncReference
from flowrl.run.engine.result import StepResult
from flowrl.run.training.job import Job
from tests.run.engine.collecting import stream_of
from tests.run.training.interrupted import equal
from tests.support.errors import raises
from tests.support.jobs import job_of, weights_of
from tests.support.runs import Recorder, train, without_times

STEPS = 5


def job(folder: str, reference: SyncReference) -> Job:
    made = job_of("grpo", folder, optimizer=AdamW(lr=1e-2), n=3)
    return made.edit(insert={"reference": After("update_actor", reference)})


def run(made: Job, prompts_file: str) -> tuple[list[StepResult], list[dict[str, torch.Tensor]], list[Any]]:
    """The results, and the weights of actor and reference after each step."""
    results, actors, refs = [], [], []
    with made.open() as steps:
        steps.sync()
        stream, engines = stream_of(made.graph.bindings["ref"].model, prompts_file), steps.runner.engines  # type: ignore
        for result in steps.run(
            lambda step: stream.next(3), range(STEPS), return_nodes=["old_log_prob", "ref_log_prob"]
        ):
            results.append(result)
            actors.append(weights_of(engines["actor"]))
            refs.append({name: tensor.clone() for name, tensor in engines["ref"].model.state_dict().items()})
    return results, actors, refs


def test_a_reference_is_reset_every_second_step_after_its_log_probs_are_read(tiny: str, prompts_file: str) -> None:
    results, actors, refs = run(job(tiny, SyncReference().when(every=2, start=1)), prompts_file)
    for step, ref in enumerate(refs):
        newest = actors[step if step % 2 else step - 1] if step else None
        assert newest is None or all(equal(newest[name], ref[name]) for name in newest)
    far = []
    for result in results:
        old, ref = (result.columns[f"{name}_log_prob"] for name in ("old", "ref"))
        far.append(float((old["old_log_probs"] - ref["ref_log_prob"]).abs().max()))
    assert [value > 1e-4 for value in far] == [False, True, False, True, False]  # 0 in the step after a reset
    assert [result.metrics["ref/version"].value for result in results if "ref/version" in result.metrics] == [2, 4]


def test_a_moving_average_is_the_recursion_in_float64(tiny: str, prompts_file: str) -> None:
    start = {k: v.double() for k, v in weights_of(TorchTrainer(tiny, device="cpu").build(_context())).items()}
    _, actors, refs = run(job(tiny, SyncReference(alpha=0.25)), prompts_file)
    for actor, ref in zip(actors, refs, strict=True):
        start = {name: 0.75 * value + 0.25 * actor[name].double() for name, value in start.items()}
        for name, value in start.items():
            assert ref[name].double() == pytest.approx(value, abs=1e-6)


def _context() -> Any:
    from flowrl.run.engine.build import EngineBuilder

    return EngineBuilder({}, seed=0)


@pytest.mark.runs
def test_a_resumed_run_has_the_reference_of_the_checkpoint(tiny: str, prompts_file: str, tmp_path: Path) -> None:
    class Killer(Recorder):
        def step(self, step: int, metrics: Any) -> None:
            if step == 4:
                raise KeyboardInterrupt

    made = job(tiny, SyncReference(alpha=0.5))
    settings: dict[str, Any] = {"steps": 5, "checkpoint_every": 1}
    whole = train(made, prompts_file, tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        train(made, prompts_file, tmp_path / "run", [Killer()], **settings)
    resumed = train(made, prompts_file, tmp_path / "run", resume=True, **settings)
    assert without_times(list(resumed.metrics)) == without_times(list(whole.metrics))
    first, second = (one.engines["ref"].model.state_dict() for one in (whole, resumed))
    assert all(equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("setting", ["model", "cache", "ranks"])
def test_a_reference_without_weights_of_its_own_is_refused(setting: str, tiny: str, tmp_path: Path) -> None:
    ref = {
        "model": TorchScorer(),
        "cache": TorchScorer(tiny, device="cpu", cache=str(tmp_path)),
        "ranks": TorchScorer(tiny, device="cpu", ranks=2),
    }[setting]
    made = job(tiny, SyncReference()).edit(bind={"ref": ref})
    if setting == "model":
        made = made.edit(bind={"actor": TorchTrainer(tiny, device="cpu", lora=LoRA(r=2))})
    with raises("backend.cannot-follow", setting=setting):
        made.refuse_unready(3)

"""Real models: the numbers of one process, of Ray with one rank, and of Ray with two FSDP ranks."""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowrl import After, PromptData, Training, Validation
from flowrl.backends import SGD, AdamW, TorchRollout, TorchTrainer
from flowrl.backends.torch.score.engine import TorchTrainerEngine
from flowrl.data.metrics import Metrics
from flowrl.data.proto.dataproto import DataProto
from flowrl.distributed.place import Colocate, Split
from flowrl.protocols.protocols import BuildContext
from flowrl.run.placement.place import Place
from flowrl.run.training.job import Job
from flowrl.sync.digest import weights_digest
from tests.on_ray.process_leaks import ends, leaves_nothing, process_ids
from tests.on_ray.toys import without_placement
from tests.run.engine.test_not_finite import Broken
from tests.support.errors import raises
from tests.support.jobs import job_of, prompt_batch, proto
from tests.support.runs import TIMES

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]

PROMPTS = [[11, 12], [13], [14, 15, 16, 17, 18]]


def numbers(records: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The metrics that depend neither on timing nor on placement."""
    return [
        {key: value for key, value in record.items() if not key.startswith((*TIMES, "sync/by/"))} for record in records
    ]


def saved(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


@pytest.mark.parametrize(
    ("algorithm", "prompts", "own", "place", "parameters"),
    [
        ("ppo", 3, False, Colocate(1), {}),
        ("grpo", 4, True, Split(2, 1), {"n": 3, "mini_batch": 6, "ppo_epochs": 2}),
        pytest.param("ppo", 5, True, Colocate(3), {"n": 2, "ppo_epochs": 2, "kl_coef": 0.1}, marks=pytest.mark.nightly),
        pytest.param("gspo", 4, True, Split(1, 1), {"n": 3, "mini_batch": 6}, marks=pytest.mark.nightly),
        ("dapo", 3, True, Split(1, 1), {"n": 3, "groups": 4, "max_new_tokens": 20, "mini_batch": 6}),
    ],
)
def test_one_rank_is_bit_equal_to_one_process(
    algorithm: str, prompts: int, own: bool, place: Place, parameters: Any, tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    """Metrics of every step and validation, and the weights at the end."""
    job = job_of(algorithm, tiny, optimizer=AdamW(lr=1e-3), **parameters)
    if own:
        job = job.edit(bind={"rollout": TorchRollout(tiny, device="cpu")})
    data = PromptData(prompts_file)
    training = Training(
        job, data, steps=3, prompts=prompts, validation=Validation(data, every=2), folder=str(tmp_path / "local")
    )
    local = training.run()
    with leaves_nothing():
        remote = replace(training, job=replace(job, place=place), folder=str(tmp_path / "ray")).run()
    assert len(local.metrics) == 3
    assert numbers(local.metrics) == numbers(remote.metrics)
    assert numbers(local.validations) == numbers(remote.validations)
    here, there = saved(tmp_path / "local" / "actor"), saved(tmp_path / "ray" / "actor")
    assert weights_digest(here.items()) == weights_digest(there.items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fused_update_on_ray_is_bit_equal_to_one_process(
    ranks: int, tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    """Each rank writes the column for its rows, and a node without a slot reads it."""
    job = job_of("grpo", tiny, optimizer=AdamW(lr=1e-3), trainer={"max_tokens": 60, "ranks": ranks})
    if ranks > 1:
        job = job.edit(bind={"rollout": TorchRollout(tiny, device="cpu")})
    training = Training(job, PromptData(prompts_file), steps=3, prompts=4, folder=str(tmp_path / "alone"))
    runs = {}
    with leaves_nothing():
        for optimize in (True, False):
            folder = tmp_path / f"{optimize}"
            there = replace(job, place=Colocate(ranks), optimize=optimize)
            run = replace(training, job=there, folder=str(folder)).run()
            assert ("timing/old_log_prob" in run.metrics[0]) == (not optimize)
            runs[optimize] = numbers(run.metrics), weights_digest(saved(folder / "actor").items())
    assert runs[True] == runs[False]
    if ranks == 1:
        alone = training.run()
        assert runs[True] == (numbers(alone.metrics), weights_digest(saved(tmp_path / "alone" / "actor").items()))


@pytest.mark.parametrize(("first", "second"), [(None, Colocate(1)), (Split(1, 1), None)])
def test_a_run_resumes_on_ray_and_in_one_process_from_either_checkpoint(
    first: Place | None, second: Place | None, tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    """Written in one process and resumed on Ray, and vice versa, with the numbers of an uninterrupted run."""
    job = job_of("ppo", tiny, optimizer=AdamW(lr=1e-3)).edit(bind={"rollout": TorchRollout(tiny, device="cpu")})
    training = Training(
        replace(job, place=first),
        PromptData(prompts_file),
        steps=4,
        prompts=3,
        checkpoint_every=2,
        folder=str(tmp_path / "uninterrupted"),
    )
    uninterrupted = replace(training, job=job).run()
    folder = str(tmp_path / "parts")
    replace(training, steps=2, folder=folder).run()
    resumed = replace(training, job=replace(job, place=second), folder=folder, resume=True).run()
    assert numbers(resumed.metrics) == numbers(uninterrupted.metrics)
    here, there = saved(tmp_path / "uninterrupted" / "actor"), saved(tmp_path / "parts" / "actor")
    assert weights_digest(here.items()) == weights_digest(there.items())


class DiesInUpdate(TorchTrainer):
    """A trainer whose rank 1 dies during an update, as the others wait in a collective, if the file `fate` exists."""

    fate: str = ""

    def build(self, context: BuildContext) -> TorchTrainerEngine:
        engine, fate = super().build(context), Path(self.fate)
        update = engine.update

        def dying(*arguments: Any) -> Any:
            if context.rank == 1 and fate.exists():
                fate.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return update(*arguments)

        engine.update = dying  # type: ignore[method-assign]
        return engine


def fsdp_job(algorithm: str, tiny: str, ranks: int, optimizer: Any, place: Place | None, fate: Path) -> Job:
    """Actor, critic and reference on so many ranks; the rollout has a separate model."""
    job = job_of(algorithm, tiny, optimizer=optimizer, n=3, max_new_tokens=6, ppo_epochs=2)
    backends = {
        role: replace(job.graph.bindings[role], ranks=ranks) for role in job.graph.bindings if role != "rollout"
    }
    backends["actor"] = DiesInUpdate(tiny, optimizer=optimizer, device="cpu", ranks=ranks, fate=str(fate))
    return replace(job, place=place).edit(bind={**backends, "rollout": TorchRollout(tiny, device="cpu")})


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """The distance of two tensors relative to the norm of the first."""
    return float((a - b).double().norm() / a.double().norm().clamp_min(1e-30))


def assert_columns_close(found: Mapping[str, DataProto], expected: Mapping[str, DataProto]) -> None:
    """Per node: floats equal up to rounding, everything else exactly."""
    for node, columns in expected.items():
        for name, column in columns.columns.items():
            other = found[node][name]
            if isinstance(column, torch.Tensor) and column.is_floating_point():
                torch.testing.assert_close(other, column, rtol=1e-6, atol=2e-6)
            elif isinstance(column, torch.Tensor):
                assert torch.equal(other, column), f"{node}.{name}"
            else:
                assert list(other) == list(column), f"{node}.{name}"


def assert_same_entropies(here: Metrics, there: Metrics) -> None:
    """The entropies of tokens, whatever the order in which ranks report their rows."""
    assert here.columns and here.columns.keys() == there.columns.keys()
    for key, (rows, of_tokens) in here.columns.items():
        numbers, values = there.columns[key]
        assert torch.equal(numbers.sort().values, rows), key
        torch.testing.assert_close(values[numbers.argsort()], of_tokens, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "optimizer", "place"),
    [
        pytest.param("grpo", SGD(lr=0.05), Split(2, 1), marks=pytest.mark.nightly),
        ("ppo", AdamW(lr=1e-3, eps=1e-5), Colocate(2)),
        ("online_dpo", SGD(lr=0.05), Colocate(2)),  # a loss that compares rows of both ranks
    ],
)
def test_two_fsdp_ranks_agree_with_one_process(
    algorithm: str, optimizer: Any, place: Place, tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nine rows for two ranks. Then a rank is killed during an update: both end, and the repeated step is bit-equal."""
    batch, fate = proto(prompt_batch(PROMPTS)), tmp_path / "fate"
    caplog.set_level(logging.WARNING, "flowrl")
    with fsdp_job(algorithm, tiny, 1, optimizer, None, fate).open(seed=1) as executor:
        executor.sync()
        keep = tuple(executor.plan.graph.nodes)
        local = executor.step(batch, 0, return_nodes=keep)
        executor.save_pretrained("actor", str(tmp_path / "local"))
    with leaves_nothing() as processes:
        with fsdp_job(algorithm, tiny, 2, optimizer, replace(place, restart="role"), fate).open(seed=1) as executor:
            before = process_ids(executor)
            processes += before.values()
            executor.sync()
            remote = executor.step(batch, 0, return_nodes=keep)
            executor.save_pretrained("actor", str(tmp_path / "ray"))
            receipt = remote.values["sync"]["receipt"]
            actors = [plan for plan in executor.runner.hosts.processes if "actor" in plan.roles]

            fate.touch()
            after = executor.step(batch, 1)
            assert not fate.exists()
            assert all(ends(before[plan]) for plan in actors)
            [record] = (one for one in caplog.records if one.name.startswith("flowrl."))
            assert record.getMessage().startswith("update_actor in step 2 lost actor rank 1, whose process died")
            processes += process_ids(executor).values()
        with fsdp_job(algorithm, tiny, 2, optimizer, place, fate).open(seed=1) as executor:
            processes += process_ids(executor).values()
            executor.sync()
            first, second = executor.step(batch, 0), executor.step(batch, 1)

    assert torch.equal(local.columns["generate"]["responses"], remote.columns["generate"]["responses"])
    assert_columns_close(remote.columns, local.columns)
    here, there = local.metrics, remote.metrics
    assert list(without_placement(here)) == list(without_placement(there))
    for key in without_placement(here):
        assert here[key].reduction == there[key].reduction
        assert math.isclose(here[key].compute(), there[key].compute(), rel_tol=2e-5, abs_tol=1e-6), key
    assert "update_actor/entropy" in here.rows and here.rows.keys() == there.rows.keys()
    for key, values in here.rows.items():
        assert there.rows[key] == pytest.approx(values, rel=2e-5, abs=1e-6), key
    assert_same_entropies(here, there)
    started, one, two = saved(tiny), saved(tmp_path / "local"), saved(tmp_path / "ray")
    for name in one:
        assert relative(one[name] - started[name], two[name] - started[name]) < 1e-3, name
        assert relative(one[name], two[name]) < 1e-6, name
    # The engine received the joined weights of the ranks.
    assert receipt.digest == weights_digest(two.items())
    assert (receipt.transport, receipt.version) == ("object store", 1)
    assert first.metrics.compute() == there.compute()
    assert second.metrics.compute() == after.metrics.compute()
    assert second.values["sync"]["receipt"].digest == after.values["sync"]["receipt"].digest


def test_nan_is_traced_to_its_node_if_the_update_is_fused_and_has_two_ranks(tiny: str) -> None:
    backends = {"trainer": {"ranks": 2}, "optimizer": SGD(lr=0.05)}
    job = job_of("grpo", tiny, **backends).edit(bind={"rollout": TorchRollout(tiny, device="cpu")})
    job = replace(job.edit(insert={"broken": After("reward", Broken())}), place=Colocate(2))
    assert "old_log_prob" not in job.runs
    with job.open(seed=0) as executor:
        executor.sync()
        facts = {"node": "update_actor", "step": 1, "origin": "broken.token_level_scores", "row": 0, "token": 0}
        with raises("trainer.not-finite-gradient", **facts) as caught:
            executor.step(proto(prompt_batch(PROMPTS)), 0)
    assert "Then update_actor failed in step 1 on actor rank " in caught.value.message
    assert "operator: UpdateActor(" in caught.value.message and "ScoringUpdate" not in caught.value.message

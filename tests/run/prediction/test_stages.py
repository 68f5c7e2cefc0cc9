"""`stages.py`: the stages of a job, what is not predicted, and measured costs in their place."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl import Colocate, Split
from flowrl.backends import VLLM, MegatronTrainer, Mesh, TorchScorer, TorchTrainer
from flowrl.graphs import grpo
from flowrl.run.prediction.cost import Cost
from flowrl.run.prediction.costs import Costs
from flowrl.run.prediction.hardware import Hardware, hardware_of
from flowrl.run.prediction.memory import RowLimits
from flowrl.run.prediction.stages import Times, times_of
from tests.backends.torch.sizing.counting import folder_of
from tests.support.errors import raises
from tests.support.rewards import digits

LIMITS = RowLimits(64, 192)
H100 = hardware_of("H100")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(tmp_path_factory.mktemp("model"), "llama")


def job_of(folder: str, place: Any, ranks: int = 1, lag: int = 0, **settings: Any) -> Any:
    graph = grpo(digits, n=4, max_new_tokens=192).edit(lag=lag)
    settings = {"dtype": "bfloat16", **settings}
    ref = TorchScorer(folder, dtype="bfloat16", ranks=ranks)
    return graph.bind(
        actor=TorchTrainer(folder, ranks=ranks, **settings), ref=ref, rollout=VLLM(folder, ranks=ranks), place=place
    )


def times(job: Any, **settings: Any) -> Times:
    return times_of(job, H100, LIMITS, 200, 64, **settings)


def test_each_node_with_a_model_has_a_stage_and_a_source(folder: str) -> None:
    found = times(job_of(folder, Colocate(gpus=1)))
    kinds = {one.node: one.kind for one in found.stages}
    assert kinds == {"generate": "generate", "ref_log_prob": "score", "update_actor": "update", "sync": "sync"}
    assert all(one.seconds > 0 and any(map(str.isdigit, one.source)) for one in found.stages)
    assert found.seconds == pytest.approx(sum(one.seconds for one in found.stages))
    assert found.unknown["reward"] == "its own code"


def test_more_devices_and_half_the_passes_take_less(folder: str) -> None:
    one, two = times(job_of(folder, Colocate(gpus=1))), times(job_of(folder, Colocate(gpus=2), ranks=2))
    assert two.of("score") < one.of("score") and two.of("generate") <= one.of("generate")
    again = times(job_of(folder, Colocate(gpus=1), gradient_checkpointing=True))
    assert again.of("update") > one.of("update") == pytest.approx(3.0 * one.of("score"), rel=0.1)


def test_with_a_lag_a_step_takes_as_long_as_its_busiest_slot(folder: str) -> None:
    found = times(job_of(folder, Split(train=1, rollout=1), lag=1))
    trained = found.of("score") + found.of("update") + found.of("sync")
    assert found.lag == 1
    assert found.seconds == pytest.approx(max(trained, found.of("generate") + found.of("sync")))


def test_measured_costs_replace_predicted_ones(folder: str) -> None:
    costs = Costs("runs/first", {"update_actor": {1: Cost(fixed=7.0, row=0.5)}})
    found = {one.node: one for one in times(job_of(folder, Colocate(gpus=1)), costs=costs).stages}
    assert found["update_actor"].seconds == 7.0 + 0.5 * 64 * 4
    assert found["update_actor"].source == "measured in runs/first"
    assert not found["generate"].source.startswith("measured")


def test_float32_takes_its_stated_operations_and_twice_the_bytes(folder: str) -> None:
    def update(dtype: str, hardware: Hardware) -> float:
        job = job_of(folder, Colocate(gpus=1), dtype=dtype)
        found = times_of(job, hardware, LIMITS, 200, 64)
        [one] = [one for one in found.stages if one.node == "update_actor"]
        assert one.float32 == (dtype == "float32") == ("of float32" in one.source)
        return one.seconds

    computes = Hardware(80, flops=100, flops_float32=25, bandwidth=1e12)
    assert update("float32", computes) == pytest.approx(4.0 * update("bfloat16", computes), rel=1e-3)
    moves = Hardware(80, flops=1e9, flops_float32=1e9, bandwidth=1000)
    assert update("float32", moves) == pytest.approx(2.0 * update("bfloat16", moves), rel=1e-3)


def test_a_float32_engine_is_synced_with_twice_the_bytes(folder: str) -> None:
    half, full = (
        job_of(folder, Split(train=1, rollout=1)).edit(bind={"rollout": VLLM(folder, dtype=dtype)})
        for dtype in ("auto", "float32")
    )
    assert times(full).of("sync") == pytest.approx(2.0 * times(half).of("sync"))
    assert times(full).of("generate") > times(half).of("generate")


def test_float32_without_a_stated_speed_is_named(folder: str) -> None:
    hardware = Hardware(80, flops=989, bandwidth=3350)
    found = times_of(job_of(folder, Colocate(gpus=1), dtype="float32"), hardware, LIMITS, 200, 64)
    assert found.unknown["update_actor"] == "actor computes in float32, and --hardware states no flops_float32="
    assert "update_actor" not in {one.node for one in found.stages}


def test_stages_of_a_pipeline_wait_once_in_each_mini_batch(folder: str) -> None:
    """Of m micro-batches on p stages (p - 1) / (m + p - 1) of the time (Narayanan et al. 2021, section 2.2.1)."""

    def seconds(**axes: int) -> Times:
        actor = MegatronTrainer(folder, dtype="bfloat16", mesh=Mesh(**axes), max_tokens=800)
        graph = grpo(digits, n=4, max_new_tokens=192, mini_batch=64, kl_coef=0.0)
        return times(graph.bind(actor=actor, rollout=VLLM(folder), place=Colocate(gpus=2)))

    copies, stages = seconds(replicate=2), seconds(pipeline=2)  # of 64 rows of 200 tokens: 16 micro-batches of 4
    assert stages.of("update") == pytest.approx(copies.of("update") * 17 / 16)


def test_hardware_without_speed_and_a_mean_over_the_most_are_refused(folder: str) -> None:
    job = job_of(folder, Colocate(gpus=1))
    with raises("memory.no-speed"):
        times_of(job, Hardware(memory=80), LIMITS, 200, 64)
    with raises("memory.mean-length"):
        times_of(job, H100, LIMITS, 257, 64)

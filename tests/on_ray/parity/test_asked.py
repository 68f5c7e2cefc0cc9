"""Episodes that ask engines of other processes: `flowrl/distributed/hosts/remote_engine.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl import PromptData, Training
from flowrl.backends import TorchRollout
from flowrl.distributed.place import Colocate, Split
from flowrl.run.placement.place import Place
from tests.on_ray.faults.test_faults import kill_at
from tests.on_ray.parity.test_parity import numbers
from tests.operators.engines import two_policies
from tests.support.errors import raises
from tests.support.jobs import prompt_batch, proto
from tests.support.models import tiny_folder
from tests.support.runs import lines

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.usefixtures("cluster")]


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("other"), "qwen2", seed=3)


@pytest.mark.parametrize(
    ("place", "ranks", "lag"),
    [(Colocate(1), (1, 1), 0), (Colocate(2), (2, 1), 0), (Split(1, 2), (1, 1), 1)],
)
def test_two_policies_on_ray_learn_as_in_one_process(
    place: Place, ranks: tuple[int, int], lag: int, tiny: str, other_model: str, prompts_file: str, tmp_path: Path
) -> None:
    """The same answers and rewards; which requests the engines compute together may differ, and so the last bits."""
    job = two_policies.job(tiny, other_model).edit(lag=lag, allow={"FR006": "the parity of runs"})
    settings: dict[str, Any] = {"steps": 2, "prompts": 4, "rollouts_every": 1}
    training = Training(job, PromptData(prompts_file), folder=str(tmp_path / "local"), **settings)
    local = numbers(training.run().metrics)
    rollouts = {
        role: TorchRollout(folder, device="cpu", ranks=count)
        for role, folder, count in zip(("rollout", "user"), (tiny, other_model), ranks, strict=True)
    }
    remote_job = replace(job.edit(bind=rollouts), place=place)
    remote = numbers(replace(training, job=remote_job, folder=str(tmp_path / "ray")).run().metrics)
    here, there = (
        [(row["row_id"], row["episode"]) for row in lines(tmp_path / folder / "rollouts.jsonl")]
        for folder in ("local", "ray")
    )
    assert here == there and len(here) == 16
    for one, two in zip(local, remote, strict=True):
        for key in ("others/user/reward", "others/user/answers", "reward/mean"):
            assert one[key] == pytest.approx(two[key]), key
        for key in ("update_user/actor/grad_norm", "update_actor/actor/grad_norm"):
            assert one[key] == pytest.approx(two[key], rel=1e-3), key


def test_an_engine_that_dies_when_it_is_asked_is_rebuilt(tiny: str, other_model: str) -> None:
    """The episodes are played again, with the same answers."""
    job = two_policies.job(tiny, other_model)
    user = TorchRollout(other_model, device="cpu")
    batch = proto(prompt_batch([[11, 12], [13]]))
    with job.open(seed=5) as executor:
        executor.sync()
        expected = executor.step(batch, 0).metrics.compute()
    with replace(job.edit(bind={"user": user}), place=Split(1, 2, restart="role")).open(seed=5) as executor:
        executor.sync()
        found = executor.step(batch, 0, on_node=kill_at(executor, "interact", "user")).metrics.compute()
        again = executor.step(batch, 1)
    for key in ("others/user/reward", "reward/mean", "others/user/length"):
        assert found[key] == pytest.approx(expected[key])
    assert again.metrics.compute()["sync_user/sync/version"] == 2


def test_without_a_restart_the_error_names_the_engine_that_died(tiny: str, other_model: str) -> None:
    job = replace(two_policies.job(tiny, other_model), place=Split(1, 2))
    batch = proto(prompt_batch([[11, 12], [13]]))
    with job.open(seed=5) as executor:
        executor.sync()
        with raises("host.died", host="user rank 0", task="interact in step 1"):
            executor.step(batch, 0, on_node=kill_at(executor, "interact", "user"))

"""On Ray: episodes as in one process, also where ranks share the rows out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl import PromptData, Training
from flowrl.backends import TorchRollout
from flowrl.distributed.place import Colocate, Split
from flowrl.episodes import Answer, Environment, Reply
from flowrl.operators import Interact
from flowrl.run.place import Place
from tests.jobs import job_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.usefixtures("cluster")]


class Longer(Environment):
    """Three turns, each worth its length."""

    async def step(self, answer: Answer) -> Reply:
        return Reply(f"{len(answer.ids)} tokens", reward=len(answer.ids) / 8, done=answer.turn == 2)


def numbers(records: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    clock = ("timing", "throughput", "sync/by/", "episodes/waiting")
    return [{key: value for key, value in record.items() if not key.startswith(clock)} for record in records]


@pytest.mark.parametrize(("ranks", "place"), [(1, Split(1, 1)), (2, Colocate(2))])
def test_episodes_are_those_of_one_process(
    ranks: int, place: Place, tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    operator = Interact(Longer, max_turns=3, context=150, max_new_tokens=8)
    job = job_of("grpo", tiny, n=2).edit(
        replace={"generate": operator}, drop=["reward"], bind={"rollout": TorchRollout(tiny, device="cpu")}
    )
    training = Training(job, PromptData(prompts_file), steps=2, prompts=4, folder=str(tmp_path / "local"))
    local = numbers(training.run().metrics)
    remote_job = job.edit(bind={"rollout": TorchRollout(tiny, device="cpu", ranks=ranks)})
    remote = numbers(
        replace(training, job=replace(remote_job, place=place), folder=str(tmp_path / "ray")).run().metrics
    )
    if ranks == 1:
        assert local == remote
    for mine, theirs in zip(local, remote, strict=True):
        assert mine["reward/mean"] == pytest.approx(theirs["reward/mean"])
        assert mine["episodes/turns"] == theirs["episodes/turns"] == 3
        assert theirs["rollout/logp_diff_max"] < 1e-4

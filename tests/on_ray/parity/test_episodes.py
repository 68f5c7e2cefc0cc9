"""Episodes on Ray equal those in one process, also if several ranks split the rows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl import PromptData, Training
from flowrl.backends import TorchRollout
from flowrl.core.operators.operator import Operator
from flowrl.data.waits import SHORT
from flowrl.distributed.place import Colocate, Split
from flowrl.episodes import Answer, Chat, Endpoint, Environment, Reply, Row
from flowrl.operators import GroupAdvantage, Interact, TurnGroupAdvantage
from flowrl.run.engine.timeline import Timeline, idle
from flowrl.run.placement.place import Place
from tests.episodes.endpoint.clients import Client
from tests.on_ray.parity.test_parity import numbers
from tests.support.jobs import job_of
from tests.support.runs import lines

SETTINGS: Any = {"max_turns": 3, "context": 150, "max_new_tokens": 8}

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.usefixtures("cluster")]


class Longer(Environment):
    """Three turns, each rewarded by its length. Closing takes long enough to appear in a trace; a slow reply would
    change which rows are decoded together, and so the last bits."""

    async def step(self, answer: Answer) -> Reply:
        return Reply(f"{len(answer.ids)} tokens", reward=len(answer.ids) / 8, done=answer.turn == 2)

    async def close(self) -> None:
        await asyncio.sleep(2 * SHORT)


async def forgets(chat: Chat, row: Row) -> float:
    """Three turns in two segments: the second continues the first turn."""
    first = await chat.answer()
    start = chat.messages
    second = await chat.answer(f"{len(first.ids)} tokens")
    chat.rewrite([*start, {"role": "user", "content": f"not {len(second.ids)}"}])
    third = await chat.answer()
    await asyncio.sleep(2 * SHORT)
    return len(first.ids) / 8 + len(third.ids) / 4


async def speaks(url: str, key: str, row: Row) -> float:
    """Three turns over HTTP."""
    client, length = Client(url, key, row), 0
    async with client.http:
        for turn in range(3):
            length += len((await client.ask(f"{length} characters" if turn else None))["content"])
    await asyncio.sleep(2 * SHORT)
    return length / 8


def deterministic(records: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """`numbers` without the waiting times for environments."""
    return [{key: value for key, value in one.items() if key != "episodes/waiting"} for one in numbers(records)]


@pytest.mark.parametrize(
    ("ranks", "place", "advantage", "operator"),
    [
        (1, Split(1, 1), GroupAdvantage(), Interact(Longer, **SETTINGS)),
        pytest.param(2, Colocate(2), GroupAdvantage(), Interact(Longer, **SETTINGS), marks=pytest.mark.nightly),
        (2, Colocate(2), TurnGroupAdvantage(), Interact(Longer, **SETTINGS)),
        (2, Colocate(2), TurnGroupAdvantage(), Interact(forgets, rewrites="segment", **SETTINGS)),
        (2, Colocate(2), TurnGroupAdvantage(), Interact(Endpoint(speaks), **SETTINGS)),
    ],
)
def test_episodes_equal_those_of_one_process(
    ranks: int, place: Place, advantage: Operator, operator: Interact, tiny: str, prompts_file: str, tmp_path: Path
) -> None:
    job = job_of("grpo", tiny, n=2).edit(
        replace={"generate": operator}, drop=["reward"], bind={"rollout": TorchRollout(tiny, device="cpu")}
    )
    job = job.edit(replace={"group_advantage": advantage})
    settings = {"steps": 2, "prompts": 4, "rollouts_every": 2}
    training = Training(job, PromptData(prompts_file), folder=str(tmp_path / "local"), **settings)
    local = deterministic(training.run().metrics)
    remote_job = job.edit(bind={"rollout": TorchRollout(tiny, device="cpu", ranks=ranks)})
    remote = deterministic(
        replace(training, job=replace(remote_job, place=place), folder=str(tmp_path / "ray")).run().metrics
    )
    if ranks == 1:
        assert local == remote
    for single, distributed in zip(local, remote, strict=True):
        assert single["reward/mean"] == pytest.approx(distributed["reward/mean"])
        assert single["episodes/turns"] == distributed["episodes/turns"] == 3
        segments = 2 if operator.rewrites == "segment" else None
        assert single.get("episodes/segments") == distributed.get("episodes/segments") == segments
        assert distributed["rollout/logp_diff_max"] < 1e-4
        assert single["actor/grad_norm"] == pytest.approx(distributed["actor/grad_norm"], rel=1e-3)
    here, there = (
        [(row["row_id"], row["episode"]) for row in lines(tmp_path / folder / "rollouts.jsonl")]
        for folder in ("local", "ray")
    )
    assert here == there and len(here) == 8
    for folder, count in (("local", 1), ("ray", ranks)):
        assert lane_of_environments(Timeline.load(tmp_path / folder / "trace.json")) == count


def lane_of_environments(trace: Timeline) -> int:
    """The number of places with waits for environments in a trace, one for each rank of the node."""
    environments = [span for span in trace.spans if span.kind == "environment"]
    places = {span.place for span in trace.spans if span.name == "interact"}
    assert {span.place for span in environments} == {f"{place}: environments" for place in places}
    assert {span.step for span in environments} == {0, 1}
    assert "interact: some wait for their environments" in {span.name for span in environments}
    assert idle(trace.spans).keys().isdisjoint(span.place for span in environments)
    return len(places)

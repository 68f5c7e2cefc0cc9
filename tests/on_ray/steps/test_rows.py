"""Operators with new rows and axes on Ray: several ranks are bit-equal to one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from flowrl import After, Operator, PromptBatch, PromptData, algorithm
from flowrl import columns as c
from flowrl.columns import Rows, Widths
from flowrl.core.operators.roles import Reads, Role
from flowrl.data.proto.dataproto import DataProto
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.distributed.place import Split
from flowrl.graphs import grpo
from flowrl.operators import (
    Collect,
    Filter,
    Generate,
    GroupAdvantage,
    Length,
    OldLogProb,
    Repeat,
    Reward,
    Spread,
    Sync,
    UpdateActor,
)
from flowrl.protocols.protocols import Scorer
from flowrl.records import RolloutBatch, Sequences
from tests.on_ray.process_leaks import leaves_nothing, process_ids
from tests.on_ray.steps.test_runner import refuse_difference, run
from tests.on_ray.toys import Desk, kill_blocked, toy_job
from tests.support.jobs import prompt_batch, rollout_batch, write_prompts
from tests.support.rewards import digits

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


class Longer(Operator):
    """The longer of two responses to a prompt."""

    new_axes: ClassVar[tuple[str, ...]] = ("response",)

    def __call__(self, first: RolloutBatch, second: Widths[RolloutBatch, "second"]) -> RolloutBatch:
        one, other = (DataProto(batch._asdict()) for batch in (first, second))
        longer = second.response_mask.sum(1) > first.response_mask.sum(1)
        rows = [len(one) + row if later else row for row, later in enumerate(longer.tolist())]
        return DataProto.concat([one, other])[rows].to_record(RolloutBatch)


class Demos(Operator):
    """Two rows that are wider than any response."""

    new_axes: ClassVar[tuple[str, ...]] = ("batch", "prompt")

    def __call__(self, prompts: c.Prompts) -> RolloutBatch:
        return rollout_batch(prompt_batch([[7, 8, 9], [7]]), [[8] * 9, [30] * 4])


class Compared(Operator):
    """Reference log-probs minus the mean of the demonstrations', all of which every rank needs."""

    granularity = "row"
    ref: Reads[Scorer] = Role("ref")

    def __call__(self, rollout: Sequences, demos: Rows[Sequences, "demo"]) -> c.RefLogProbs:
        baseline = self.ref.log_probs(demos).double().sum() / len(demos.input_ids)
        return (self.ref.log_probs(rollout) - float(baseline)) * rollout.response_mask


@algorithm
def axes(batch: PromptBatch) -> Any:
    prompts = Repeat(3)(batch)
    second = Generate(max_new_tokens=9).named("second")(prompts)
    rollout = Longer()(Generate(max_new_tokens=4)(prompts), second)
    compared = Compared()(rollout, Demos()(batch.prompts))
    advantages = GroupAdvantage()(Reward(digits)(rollout, prompts), rollout.response_mask, prompts.uid)
    return Sync()(UpdateActor(mini_batch=3)(rollout, OldLogProb()(rollout), advantages)), compared


def test_nodes_with_new_axes_are_bit_equal_to_one_process(tiny: str, tmp_path: Path) -> None:
    graph = axes()
    keep = tuple(graph.nodes)
    with toy_job(graph, tmp_path / "local", tiny).open(seed=3) as executor:
        local = run(executor, 4, 2, keep)
    ranks = {"actor": 2, "ref": 2, "rollout": 2}
    with leaves_nothing() as processes, toy_job(graph, tmp_path / "ray", tiny, ranks, Split(2, 2)).open(3) as executor:
        processes += process_ids(executor).values()
        refuse_difference(local, run(executor, 4, 2, keep))


def test_a_filter_passes_the_same_rows_as_in_one_process(tiny: str, tmp_path: Path) -> None:
    """Groups with equal scores are dropped, and short rows of the others; ranks split the rest."""
    graph = grpo(digits, n=3, max_new_tokens=6).edit(
        insert={"long": After("generate", Filter(Length(least=3))), "spread": After("reward", Filter(Spread(0.1)))}
    )
    keep = tuple(graph.nodes)
    with toy_job(graph, tmp_path / "local", tiny).open(seed=3) as executor:
        local = run(executor, 5, 3, keep)
    counts = [len(result.columns["spread"]) for result in local]
    assert all(0 < count < 15 for count in counts)
    assert any(count % 2 for count in counts)
    assert [result.metrics["spread/kept"].value for result in local] == counts
    ranks = {"actor": 2, "ref": 2, "rollout": 2}
    with leaves_nothing() as processes, toy_job(graph, tmp_path / "ray", tiny, ranks, Split(2, 2)).open(3) as executor:
        processes += process_ids(executor).values()
        refuse_difference(local, run(executor, 5, 3, keep))


def collected(executor: Any, stream: Any, steps: int, keep: tuple[str, ...]) -> list[Any]:
    executor.sync()
    return list(executor.run(lambda step: stream.next(3), range(steps), return_nodes=keep, more=stream.next))


def test_collected_groups_equal_those_of_one_process_also_after_a_death(tiny: str, tmp_path: Path) -> None:
    """Rows of several rounds on several ranks are joined as in one process. If a rank dies in a later round, it is
    restarted, and the step repeats with the same prompts."""
    gate = Collect(Spread(0.1), groups=5, rounds=20)
    graph = grpo(digits, n=3, max_new_tokens=6).edit(insert={"collect": After("reward", gate)})
    prompts = PromptData(write_prompts(tmp_path / "prompts.jsonl", 30))
    streams = [prompts.load(ChatTokenizer(tiny), 0) for _ in range(3)]
    keep = tuple(graph.nodes)
    with toy_job(graph, tmp_path / "local", tiny).open(seed=3) as executor:
        local = collected(executor, streams[0], 2, keep)
    assert all(result.metrics["collect/rounds"].value > 1 for result in local)
    ranks = {"actor": 2, "ref": 2, "rollout": 2}
    with leaves_nothing() as processes, toy_job(graph, tmp_path / "ray", tiny, ranks, Split(2, 2)).open(3) as executor:
        processes += process_ids(executor).values()
        refuse_difference(local, collected(executor, streams[1], 2, keep))
    assert streams[0].position == streams[1].position
    place = Split(1, 1, restart="role")
    with leaves_nothing() as processes, toy_job(graph, tmp_path / "lost", tiny, place=place).open(3) as executor:
        processes += process_ids(executor).values()
        desk, requests = Desk(str(tmp_path / "lost")), list[int]()

        def more(number: int) -> Any:
            requests.append(number)
            if len(requests) == 1:
                killers.append(kill_blocked(desk, "rollout.generate"))
            return streams[2].next(number)

        killers: list[Any] = []
        executor.sync()
        results = list(executor.run(lambda step: streams[2].next(3), range(2), return_nodes=keep, more=more))
        killers[0].join()
        processes += process_ids(executor).values()
    refuse_difference(local, results)
    assert streams[0].position == streams[2].position

"""Tests of `in_flight.py`: instances that end in any order, a lost process, and requests for data, on two steps."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flowrl import After, Lag
from flowrl.backends import TorchRollout
from flowrl.core.graphs.graph import Node
from flowrl.core.graphs.plan import Plan
from flowrl.core.operators.symbols import Edge
from flowrl.errors import NodeError
from flowrl.operators import RolloutCorrection
from flowrl.run.engine.local import LocalRunner
from flowrl.run.engine.result import StepResult
from flowrl.run.engine.runner import Lengths, Task, TaskResult
from flowrl.run.engine.steps import Steps
from flowrl.run.engine.weights import TrainedWeights
from tests.run.engine.collecting import PROMPTS, N, collecting, constant, half, stream_of
from tests.support.jobs import job_of, write_prompts


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write_prompts(tmp_path / "prompts.jsonl", 40)


class AnyOrder(LocalRunner):
    """Runs one launched instance at a time, in an order by `seed`, as several processes would end in any order.

    Args:
        last: nodes that run only when no others can, the first one first.
        lost: an instance that fails once, as if its process were lost.
        times: in which of its runs it fails, from 1; a collected step has several.
    """

    def __init__(
        self,
        engines: Mapping[str, Any],
        seed: int,
        last: Sequence[str] = (),
        lost: tuple[int, str] | None = None,
        times: int = 1,
    ) -> None:
        super().__init__(engines)
        self.swaps = True
        self.ran: list[tuple[int | None, str]] = []
        self.lengths = dict[tuple[int | None, str], Lengths | None]()
        self._chance, self._last, self._lost, self._times = random.Random(seed), ["", *last], lost, times
        self._launched: list[Task] = []

    def slots(self, node: Node) -> frozenset[int]:
        """One slot a role: nodes without a role occupy none."""
        return frozenset(sorted(self.engines).index(role) for role in node.roles)

    def launch(self, task: Task) -> None:
        self._launched.append(task)

    def wait(self) -> Sequence[TaskResult]:
        ranks = [self._last.index(task.node.name) if task.node.name in self._last else 0 for task in self._launched]
        task = self._chance.choice(
            [task for task, rank in zip(self._launched, ranks, strict=True) if rank == min(ranks)]
        )
        self._launched.remove(task)
        self.ran.append((task.step, task.node.name))
        self.lengths[self.ran[-1]] = task.lengths
        if self.ran[-1] == self._lost and self.ran.count(self._lost) == self._times:
            self._lost = None
            self._launched.clear()
            raise NodeError("its process was lost", code="step.node-failed")
        super().launch(task)
        return super().wait()

    def can_recover(self, error: NodeError) -> bool:
        return True

    def recover(self, error: NodeError) -> None:
        """Nothing: the engines of this process are still there."""


def in_any_order(
    job: Any, data: str, folder: str, place: Path, runner: Callable[[Mapping[str, Any]], LocalRunner], steps: int = 4
) -> tuple[list[tuple[str, int]], list[list[str]], list[StepResult], LocalRunner]:
    """Run a job with a lag of 1 on another runner of this process.

    Returns:
        The number of prompts of each request for data, in order; the prompts and the result of each step; the runner.
    """
    stream, requests = stream_of(folder, data), list[tuple[str, int]]()

    def draw(what: str, prompts: int) -> Any:
        requests.append((what, prompts))
        return stream.next(prompts)

    with job.open() as opened:
        chosen = runner(opened.runner.engines)
        plan = Plan(job.runs)
        place.mkdir()
        executor = Steps(plan, chosen, 0, TrainedWeights(plan, chosen, 0, place))
        executor.sync()
        more = functools.partial(draw, "more")
        last = "collect" if "collect" in plan.graph.nodes else "repeat"
        run = executor.run(
            lambda step: draw("step", PROMPTS),
            range(steps),
            lag=1,
            return_nodes=[last],
            more=more,
            columns=lambda step: [Edge("reward", "token_level_scores")],
        )
        results = list(run)
    return requests, [result.columns[last]["uid"].tolist() for result in results], results, chosen


def spanned(job: Any, folder: str) -> Any:
    """The job with generation one version ahead, whose weights may change while it runs."""
    correction = After("group_advantage", RolloutCorrection("token", "truncate", high=2.0))
    rollout = TorchRollout(folder, device="cpu")
    return job.edit(lag=Lag(1, spans=True), insert={"correction": correction}, bind={"rollout": rollout})


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.runs), pytest.param(2, marks=pytest.mark.runs)])
def test_data_is_requested_in_the_order_of_steps_whatever_ends_first(
    seed: int, tiny: str, data: str, tmp_path: Path
) -> None:
    """As without live weight updates, where a sync waits for generation; the reward depends on the prompts only."""
    job = spanned(collecting(tiny), tiny)
    *expected, _, _ = in_any_order(job, data, tiny, tmp_path / "one", LocalRunner)
    *found, _, _ = in_any_order(
        job, data, tiny, tmp_path / "other", lambda engines: AnyOrder(engines, seed, ["collect"])
    )
    assert found == expected
    assert [what for what, _ in expected[0]].count("more") > 4


def test_a_restart_in_a_later_round_requests_no_prompts_again(tiny: str, data: str, tmp_path: Path) -> None:
    job = spanned(collecting(tiny), tiny)
    *expected, _, _ = in_any_order(job, data, tiny, tmp_path / "one", LocalRunner)
    *found, _, runner = in_any_order(
        job, data, tiny, tmp_path / "other", lambda engines: AnyOrder(engines, 0, lost=(1, "reward"), times=2)
    )
    assert isinstance(runner, AnyOrder) and runner.ran.count((1, "reward")) > 3
    assert found == expected


@pytest.mark.parametrize(
    ("step", "lost", "again"),
    [(0, "mismatch", True), (0, "update_actor", False), (1, "update_actor", False)],
    ids=["after its sync", "before its update", "before the update of the second step"],
)
def test_a_restart_samples_the_next_step_again_only_after_a_sync(
    step: int, lost: str, again: bool, tiny: str, data: str, tmp_path: Path
) -> None:
    """Rows of the next step that may be of weights that the restart loses are not retained; the others are."""
    job = spanned(job_of("grpo", tiny, half, n=N), tiny)
    last = ["update_actor", "sync", "mismatch"]
    *_, results, runner = in_any_order(
        job, data, tiny, tmp_path / "one", lambda engines: AnyOrder(engines, 0, last, lost=(step, lost)), steps=step + 2
    )
    assert isinstance(runner, AnyOrder)
    at, following = runner.ran.index((step, lost)), (step + 1, "generate")
    assert following in runner.ran[:at] and ((step, "sync") in runner.ran[:at]) == again
    assert (following in runner.ran[at:]) == again
    # Nodes that ran twice are counted once.
    assert [result.metrics["reward/mean"].weight for result in results] == [PROMPTS * N] * (step + 2)


def test_a_restart_forgets_the_rounds_that_it_samples_again(tiny: str, data: str, tmp_path: Path) -> None:
    job, last = spanned(collecting(tiny), tiny), ["update_actor", "sync", "mismatch"]
    *_, results, runner = in_any_order(
        job, data, tiny, tmp_path / "one", lambda engines: AnyOrder(engines, 0, last, lost=(0, "mismatch")), steps=2
    )
    assert isinstance(runner, AnyOrder)
    at = runner.ran.index((0, "mismatch"))
    assert (1, "collect") in runner.ran[:at] and (1, "generate") in runner.ran[at:]
    for step, result in enumerate(results):
        assert len(result.columns["reward"]) == result.metrics["collect/offered"].value * N
        lengths, mask = runner.lengths[step, "update_actor"], result.columns["collect"]["response_mask"]
        assert lengths is not None and lengths.response is not None
        assert lengths.response.tolist() == mask.sum(1).tolist()


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_collector_asks_for_prompts_in_no_more_than_its_rounds(rounds: int, tiny: str, data: str) -> None:
    stream, asked = stream_of(tiny, data), list[int]()

    def more(prompts: int) -> Any:
        asked.append(prompts)
        return stream.next(prompts)

    with collecting(tiny, constant, rounds=rounds).open() as executor:
        executor.sync()
        with pytest.raises(NodeError, match=r"^collect failed in step 1: DataError: "):
            list(executor.run(lambda step: stream.next(PROMPTS), range(1), more=more))
    assert len(asked) == rounds - 1

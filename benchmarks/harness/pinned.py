"""Jobs open at several places, with the processes of each slot pinned to a core, in alternating runs."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from statistics import median, quantiles
from typing import Any, NamedTuple

from flowrl import PromptData
from flowrl.distributed.cluster.cluster import connected
from flowrl.distributed.place import Colocate
from flowrl.distributed.runner import RayRunner
from flowrl.run.engine.steps import Steps
from flowrl.run.training.job import Job

CORES = sorted(os.sched_getaffinity(0))


def digits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The fraction of characters that are digits: a random model has other scores in every row."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))


class Opened(NamedTuple):
    """An open job, its data, and the number of its next step."""

    steps: Steps
    lag: int
    stream: Any
    next: int


class Seconds(NamedTuple):
    """Seconds of a step: the median of several runs, and their quartiles."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(runs: list[float]) -> Seconds:
        """Of the seconds of each run."""
        low, middle, high = quantiles(runs, n=4, method="inclusive")
        return Seconds(middle, low, high)


def pin(process: int, cores: set[int]) -> None:
    """Let the main thread of a process, which computes, run on these cores only."""
    os.sched_setaffinity(process, cores)


@contextmanager
def alone() -> Iterator[None]:
    """This process computes on the first core only."""
    pin(os.getpid(), {CORES[0]})
    try:
        yield
    finally:
        pin(os.getpid(), set(CORES))


def pin_slots(steps: Steps) -> None:
    """Pin each process of a job on Ray to the core of its slot; the driver, and nodes without a role, may use all."""
    if isinstance(steps.runner, RayRunner):
        for process, location in steps.runner.hosts.locations.items():
            pin(location.process, {CORES[process.slots[0] % len(CORES)]})


@contextmanager
def opened(jobs: Mapping[str, Job[Any]], data: PromptData) -> Iterator[dict[str, Opened]]:
    """All these jobs, loaded and pinned."""
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # as this process
    here = {name: job for name, job in jobs.items() if job.place is None}
    elsewhere = {name: job for name, job in jobs.items() if job.place is not None}
    with ExitStack() as stack:
        found = {}
        for some in (here, elsewhere):  # loading a model sets variables, which hosts must have from their start
            for job in some.values():
                if job.place is not None:
                    job.place.warm_up(job.graph)
            if some is elsewhere:
                slots = sum(job.place.slots for job in some.values() if job.place is not None)
                stack.enter_context(connected(Colocate(gpus=slots)))
            for name, job in some.items():
                steps = stack.enter_context(job.open())
                pin_slots(steps)
                steps.sync()
                found[name] = Opened(steps, job.graph.lag.versions, data.load(steps.tokenizer(), seed=0), 0)
        yield found


def timed(job: Opened, prompts: int, steps: int) -> tuple[float, Opened]:
    """The median seconds of a step of a run of this many, while ``lag + 1`` of them are in flight."""
    ends = [time.perf_counter()]
    batch = job.stream.next(prompts)
    numbers = range(job.next, job.next + steps)
    context = alone() if not isinstance(job.steps.runner, RayRunner) else ExitStack()
    with context:
        for _ in job.steps.run(lambda step: batch, numbers, lag=job.lag):
            ends.append(time.perf_counter())
        job.steps.drain()
    steady = ends[job.lag + 1 : len(ends) - job.lag]
    return median(b - a for a, b in itertools.pairwise(steady)), job._replace(next=numbers.stop)


def interleaved(jobs: Mapping[str, Opened], prompts: int, runs: int, steps: int) -> dict[str, list[float]]:
    """The seconds of a step in each of several runs of each job, which alternate; one more, first, warms up."""
    found: dict[str, list[float]] = {name: [] for name in jobs}
    now = dict(jobs)
    for run in range(runs + 1):
        for name in jobs:
            seconds, now[name] = timed(now[name], prompts, steps)
            found[name] += [seconds] * (run > 0)
    return found

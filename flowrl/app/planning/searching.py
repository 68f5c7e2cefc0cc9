"""``flowrl plan --search``: the ranking of a job's places for stated hardware, or by measured costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flowrl.app.planning.search_table import ranked
from flowrl.errors import ParameterError
from flowrl.run.prediction.hardware import Hardware
from flowrl.run.prediction.memory import Memory, RowLimits, memory_of
from flowrl.run.prediction.search import Ranking, search
from flowrl.run.prediction.stages import OWN_CODE, Times, by_reason, times_of
from flowrl.run.prediction.timing import ERRORS
from flowrl.run.training.job import Job


class Sized(NamedTuple):
    """A job on hardware: its longest rows, their mean tokens if given, and the prompts of a step."""

    job: Job[Any]
    hardware: Hardware
    limits: RowLimits
    mean: int | None
    prompts: int | None

    def memory(self, job: Job[Any]) -> Memory:
        """The predicted memory of a changed job."""
        return memory_of(job, self.hardware, self.limits, self.prompts)


def searched(job: Job[Any], gpus: Sequence[int], sized: Sized | None, prompts: int | None, costs: Any) -> list[str]:
    """The ranking for `sized`, or by `costs`; with both, seconds are those of the costs.

    Args:
        gpus: numbers of slots; empty are those of the job's place.
    """
    counts = gpus or (1 if job.place is None else job.place.slots,)
    times, basis = _measured(prompts, costs) if costs is not None else _stated(sized)
    if sized is None:
        basis.append("memory is not checked: pass --hardware; meshes need it, too, so only ranks are ranked")
    else:
        stated = "engines' buffers and CUDA are stated constants"
        basis.append(f"memory: counted from config.json, in {sized.hardware}; {stated}")
    found = search(job, counts, times, None if sized is None else sized.memory)
    if costs is None:
        _refuse_no_stage(found)
    return ranked(found, basis)


def _refuse_no_stage(found: Ranking) -> None:
    """Refuse to rank jobs of whose models no node is predicted."""
    if found.candidates and all(one.kind == "sync" for other in found.candidates for one in other.times.stages):
        models = {node: why for node, why in found.unknown.items() if why != OWN_CODE}
        raise ParameterError(
            f"--search ranks by seconds, and for --hardware none are predicted of {by_reason(models)}. Run the job for "
            f"a few steps and pass what it measured: --costs RUN.",
            code="cli.bad-option",
            missing="--costs",
        )


_Predicts = Callable[[Job[Any]], Times]


def _measured(prompts: int | None, costs: Any) -> tuple[_Predicts, list[str]]:
    """Seconds by measured costs, on the scheduler."""
    from flowrl.run.prediction.prediction import predict

    count = prompts or costs.prompts

    def times(job: Job[Any]) -> Times:
        found = predict(job.graph, job.place, count, costs, optimize=job.optimize)
        return Times((), found.seconds, {}, found.lag)

    place = "one process" if costs.place is None else type(costs.place).__name__
    basis = [f"seconds: measured in {costs.source}, in {place}, on the scheduler with {count} prompts"]
    if costs.place is None and costs.machine is None:
        basis.append(
            "NOT measured: waits of ranks, syncs, turns and calls between processes count as 0, so places look too "
            "fast; pass --machine ALONE --machine SPLIT"
        )
    return times, basis


def _stated(sized: Sized | None) -> tuple[_Predicts, list[str]]:
    """Seconds by formulas for stated hardware."""
    if sized is None or sized.mean is None or sized.prompts is None:
        missing = "--hardware H100" if sized is None else "--lengths mean=600,max=1536"
        missing = missing if sized is None or sized.mean is None else "--prompts 128"
        raise ParameterError(
            f"--search ranks by seconds, which need measured costs (--costs RUN), or --hardware, --lengths mean= and "
            f"the prompts of a step. Pass {missing}.",
            code="cli.bad-option",
            missing=missing.split(" ", 1)[0],
        )
    hardware, limits, mean, prompts = sized.hardware, sized.limits, sized.mean, sized.prompts

    def times(job: Job[Any]) -> Times:
        return times_of(job, hardware, limits, mean, prompts)

    least, most = ERRORS["step"]
    basis = [
        f"seconds: formulas with {hardware.name} as stated and 4 fitted constants; of published steps of other models, "
        f"80 % took {least} to {most} times what these predict"
    ]
    return times, basis

"""`Costs`: costs measured from a run's trace, for the pretend runner."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol, cast

import numpy as np

from flowrl.core.graphs.graph import Graph
from flowrl.data.files import parse_json
from flowrl.data.keys import Key
from flowrl.data.proto.rows import is_count
from flowrl.errors import DataError, ParameterError, type_of
from flowrl.files.values import decode, refuse_foreign
from flowrl.run.engine.runner import Counts, Lengths
from flowrl.run.engine.timeline import Span, Timeline
from flowrl.run.placement.place import Place
from flowrl.run.prediction.cost import Cost, Load
from flowrl.run.prediction.measured.similar import forward_of, similar, split
from flowrl.run.prediction.measured.traces import (
    Samples,
    between_of,
    driver_of,
    instances,
    lengths_of,
    loads_of,
    samples_of,
    warm,
)
from flowrl.run.prediction.measured.work import Work
from flowrl.run.training.run_folder import RunFolder


class CarriesCosts(Protocol):
    """What places cost on a machine: `flowrl.run.prediction.measured.machine.Machine`."""

    def carry(self, costs: Costs, graph: Graph) -> Costs:
        """Costs of one process for a graph, as they are at other places."""
        ...


@dataclass(frozen=True)
class Costs:
    """The measured costs of nodes, and lengths of rows.

    Args:
        source: the run folder, for messages.
        nodes: the cost on one rank, by node and number of ranks.
        lengths: the row lengths of each measured step, by node that wrote tokens.
        noise: for each measured step, by node, the ratio of its measured to its fitted time.
        gaps: by node, seconds between the end of its last input and its start, without turns: the driver's work.
        turns: seconds of ``"sleep"`` and ``"wake"``, by event and by the node that they made room for.
        between: seconds of a step in which no node runs.
        prompts: prompts per step of the run.
        place: of the run; None is one process.
        works: what the measured nodes did with their rows, by which others resemble them.
        machine: carries costs of one process to other places, if it was measured; see `on`.
        contention: how many times as long a process takes while another one computes, too.
        bound: -1 and 1 give the least and the most seconds that explain the measurements, 0 the usual ones.
    """

    source: str
    nodes: Mapping[str, Mapping[int, Cost]]
    lengths: Mapping[str, Sequence[Lengths]] = field(default_factory=dict)
    noise: Sequence[Mapping[str, float]] = ()
    gaps: Mapping[str, float] = field(default_factory=dict)
    turns: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    between: float = 0.0
    prompts: int = 1
    place: Place | None = None
    works: Mapping[str, Work] = field(default_factory=dict)
    machine: CarriesCosts | None = None
    contention: float = 1.0
    bound: int = 0

    @staticmethod
    def of(run: str | Path, *, imports: bool | None = None) -> Costs:
        """The costs that a run measured.

        The first call of each node in a process does not count: it is the warm-up. Validations in the trace count for
        node costs, since their other numbers of rows improve the fit.

        Args:
            run: the run folder.
            imports: import the class of the run's place if it is not flowrl's; see `flowrl.load`.

        Raises:
            DataError: the folder holds no run, or no trace of a step.
            GraphError: the class of its place is missing, or would have to be imported.
        """
        return replace(Costs.measured(run), place=_place(Path(run), imports))

    @staticmethod
    def measured(run: str | Path) -> Costs:
        """The costs that a run measured, without its place, of which nothing is imported."""
        described, timeline, steps = read_run(Path(run))
        operators = {name: node["operator"] for name, node in described.get("graph", {}).get("nodes", {}).items()}
        recorded = {name: Work.recorded(operator) for name, operator in operators.items()}
        spans = warm(timeline.spans)
        nodes = _fitted(samples_of(spans, recorded), recorded)
        trained = [span for span in spans if "/" not in span.name]
        return Costs(
            str(run),
            nodes,
            lengths_of(timeline.spans),
            _noise(trained, nodes, recorded),
            *driver_of(trained),
            between_of(trained, steps),
            described["training"]["prompts"],
            works={name: work for name, work in recorded.items() if name in nodes},
        )

    def given(self, **seconds: float) -> Costs:
        """A copy with fixed seconds for some nodes.

        Raises:
            ParameterError: a value that is not a number of seconds.
        """
        for node, s in seconds.items():
            if not _is_seconds(s):
                raise ParameterError(
                    f"given({node}={s!r}): expected a finite number of seconds, such as given({node}=0.1).",
                    code="predict.bad-costs",
                    node=node,
                    found=s,
                )
        nodes = {**self.nodes, **{node: {1: Cost(fixed=s)} for node, s in seconds.items()}}
        noise = [{node: n for node, n in step.items() if node not in seconds} for step in self.noise]
        works = {node: work for node, work in self.works.items() if node not in seconds}
        return replace(self, nodes=nodes, noise=noise, works=works)

    def on(self, machine: CarriesCosts) -> Costs:
        """A copy that predicts other places by what these cost on a machine."""
        return replace(self, machine=machine)

    def covering(self, graph: Graph) -> Costs:
        """A copy with costs of all nodes of a graph: those that were not measured from measured ones that do similar
        work, with a wider range.

        Raises:
            DataError: no measured node does similar work.
        """
        absent = [name for name, node in graph.nodes.items() if not node.is_input and name not in self.nodes]
        found = {name: similar(Work.of(graph[name]), self.nodes, self.works) for name in absent}
        if missing := [name for name, ranks in found.items() if ranks is None]:
            raise DataError(
                f"{self.source} has no costs of {', '.join(missing)} of {graph.name}, nor of a node that does similar "
                f"work. Run that graph for a few steps and use its costs, or pass seconds: "
                f"costs.given({missing[0]}=0.1), --cost {missing[0]}=0.1.",
                code="predict.unmeasured-node",
                graph=graph.name,
                nodes=missing,
                path=self.source,
            )
        return replace(self, nodes={**self.nodes, **{name: ranks for name, ranks in found.items() if ranks}})

    def seconds(self, node: str, ranks: int, load: Load, step: int | None = None) -> float:
        """The seconds of a node on one rank, from the closest measured number of ranks.

        With `step`, it is scaled by the noise of that measured step, so that what slows several nodes at once is not
        averaged away.
        """
        known = self.nodes[node]
        cost = known[min(known, key=lambda other: (abs(other - ranks), other))]
        usual = cost.range(load)[1 + self.bound]
        if step is None or not self.noise:
            return usual
        return usual * self.noise[step % len(self.noise)].get(node, 1.0)

    def gap(self, node: str) -> float:
        """Seconds between the end of a node's last input and its start."""
        return self.gaps.get(node, median(self.gaps.values()) if self.gaps else 0.0)

    def turn(self, what: str, node: str) -> float:
        """Seconds of ``"sleep"`` or ``"wake"`` before a node can start."""
        known = self.turns.get(what, {})
        return known.get(node, median(known.values()) if known else 0.0)

    def draw(self, node: str, rows: int, key: Key, limit: int | None = None) -> Lengths:
        """Sample the lengths of a node's output rows from measured steps.

        They are consecutive rows of one or several steps, so the maximum of a few rows is shorter than that of many.

        Args:
            limit: the most tokens of a response, if the node was measured with another limit: longer responses are
                cut, and those that the measured limit cut go on.
        """
        draw = np.random.Generator(np.random.Philox(key=key.bits))
        known, found = self.lengths.get(node, ()), list[Lengths]()
        if not known or not rows:
            return Lengths(np.zeros(rows, dtype=np.int64))
        order: list[int] = []
        while rows > 0:
            order = order or draw.permutation(len(known)).tolist()
            step = known[order.pop()]
            start, count = int(draw.integers(len(step.tokens))), min(rows, len(step.tokens))
            found.append(step.of((start + np.arange(count)) % len(step.tokens)))
            rows -= count
        responses = [part.response for part in found if part.response is not None]
        tokens = np.concatenate([part.tokens for part in found])
        lengths = Lengths(tokens, np.concatenate(responses) if responses else None)
        measured = self.works[node].tokens if node in self.works else None
        if limit is None or measured is None or limit == measured or lengths.response is None:
            return lengths
        response = relimited(lengths.response, measured, limit, self._ending(node, measured), draw)
        return Lengths(tokens + response - lengths.response, response)

    def _ending(self, node: str, limit: int) -> float:
        """The part of tokens after which a response ended before its limit; with `bound`, half or twice as many."""
        every = np.concatenate([one.response for one in self.lengths[node] if one.response is not None])
        return float((every < limit).sum() / max(every.sum(), 1)) * 2.0**-self.bound


def relimited(response: Counts, measured: int, limit: int, ending: float, draw: np.random.Generator) -> Counts:
    """Response lengths under another limit.

    Args:
        response: lengths under the limit `measured`.
        ending: the probability that a response ends after a token, beyond `measured`.
    """
    cut = response >= measured
    more = draw.geometric(ending, len(response)) if ending > 0 else np.full(len(response), limit)
    return np.minimum(response + cut * more, limit)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def refuse_no_costs(costs: object) -> None:
    """Refuse what is not `Costs`, such as the path of a run."""
    if not isinstance(costs, Costs):
        raise ParameterError(
            f"costs={costs!r} is {type_of(costs)}; expected the costs of a run: Costs.of('runs/first').",
            code="predict.bad-costs",
            found=costs,
        )


def _described(folder: Path) -> Mapping[str, Any]:
    """The ``run.json`` of a run."""
    for file in ("run.json", "trace.json", "metrics.jsonl"):
        if not (folder / file).is_file():
            what = "holds no run" if file == "run.json" else f"holds a run without {file}"
            raise DataError(
                f"{folder} {what}. Pass the folder of a run with some finished steps, such as runs/grpo-001.",
                code="predict.no-run",
                path=folder,
                missing=file,
            )
    try:
        described = parse_json((folder / "run.json").read_bytes())
        if not is_count(prompts := described["training"]["prompts"]) or "place" not in described:
            raise ValueError(f"prompts={prompts!r}")
    except (ValueError, LookupError, TypeError) as error:
        raise damaged(folder, error) from error
    return cast("Mapping[str, Any]", described)


def _place(folder: Path, imports: bool | None) -> Place | None:
    """The place of a run."""
    data = _described(folder)["place"]
    if imports is None:
        refuse_foreign(data, folder / "run.json", f"Costs.of({str(folder)!r}, imports=True)")
    try:
        place = decode(data, f"the place in {folder / 'run.json'}", imports)
        if not isinstance(place, Place | None):
            raise ValueError(f"place={place!r}")
    except (ValueError, LookupError, TypeError) as error:
        raise damaged(folder, error) from error
    return place


def damaged(folder: Path, error: Exception) -> DataError:
    """The error of a ``run.json`` that no run wrote."""
    return DataError(
        f"{folder / 'run.json'} was not written by a run, or is damaged ({error!r}). Run it again.",
        code="run.damaged",
        path=folder / "run.json",
    )


def read_run(folder: Path) -> tuple[Mapping[str, Any], Timeline, dict[int | None, float]]:
    """The ``run.json`` of a run with a finished step, its trace, and seconds by step.

    Raises:
        DataError: the folder holds no such run, or a file of it is damaged.
    """
    described = _described(folder)
    measured, _ = RunFolder(folder).lines()
    steps: dict[int | None, float] = {int(line["step"]) - 1: line["timing/step"] for line in measured}
    if odd := [line["step"] for line in measured if not _is_seconds(line["timing/step"])]:
        raise DataError(
            f"{folder / 'metrics.jsonl'} has no number of seconds (timing/step) for step {odd[0]}. Run it again.",
            code="run.damaged",
            path=folder / "metrics.jsonl",
            step=odd[0],
        )
    timeline = Timeline.load(folder / "trace.json")
    if not steps or not any(span.kind == "node" for span in timeline.spans):
        raise DataError(
            f"{folder} holds a run without a finished step, so it has no costs. Run it again for a few steps.",
            code="predict.no-run",
            path=folder,
        )
    return described, timeline, steps


def _fitted(samples: Samples, works: Mapping[str, Work]) -> dict[str, dict[int, Cost]]:
    medians = [median(seconds for _, seconds in found) for by in samples.values() for found in by.values()]
    least = min(medians, default=0.0)  # the fastest node shows the overhead of a call: on Ray, milliseconds
    nodes = {
        name: {
            ranks: Cost.fit([load for load, _ in found], [s for _, s in found], least) for ranks, found in by.items()
        }
        for name, by in samples.items()
    }
    measured = {name: works[name] for name in nodes if name in works}
    for name in (name for name, work in measured.items() if work.kind == "update"):
        forward = nodes.get(forward_of(name, measured) or "", {})
        for ranks, cost in nodes[name].items():
            usual = Load(*(int(median(term)) for term in zip(*(load for load, _ in samples[name][ranks]), strict=True)))
            nodes[name][ranks] = split(cost, usual, forward.get(ranks))
    return nodes


def _noise(
    spans: Iterable[Span], nodes: Mapping[str, Mapping[int, Cost]], works: Mapping[str, Work]
) -> list[dict[str, float]]:
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for ranks in instances(spans):
        name, step = ranks[0].name, ranks[0].step
        usual = sum(nodes[name][len(ranks)].seconds(load) for load in loads_of(ranks, works))
        if step is not None and usual > 0:
            found[step][name] = sum(span.seconds for span in ranks) / usual
    return list(found.values())

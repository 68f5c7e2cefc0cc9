"""The algorithms of `flowrl.graphs` by name, with default settings: for the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowrl import graphs
from flowrl.edits.diff import Diff
from flowrl.errors import ParameterError
from flowrl.graph import Graph
from flowrl.graphs.variants import parent_of, settings_of


def your_reward(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """Placeholder for your reward function in a graph that is only inspected; always raises."""
    raise ParameterError(
        "This graph was made by its name, for inspection, and has no reward function. Make one with your own: "
        "grpo('my_reward.py:exact_match').",
        code="cli.no-reward",
    )


def names() -> Sequence[str]:
    """The names of all algorithms."""
    return graphs.__all__


def graph(name: str) -> Graph:
    """The graph of the algorithm `name`, one of `names`."""
    algorithm = getattr(graphs, name)
    given = {"reward_fn": your_reward} if "reward_fn" in settings_of(algorithm).parameters else {}
    made: Graph = algorithm(**given)
    return made


def listed() -> Iterator[tuple[str, str, str, str]]:
    """Each algorithm's name, summary with its source, the algorithm that it edits, and its changes.

    Changes are the difference of the two graphs with their defaults: added (+) and removed (-) nodes, and parameters
    (~).
    """
    for name in names():
        summary = (getattr(graphs, name).__doc__ or "").partition("\n\n")[0]
        neighbor = parent_of(name)
        yield name, summary, neighbor or "", "" if neighbor is None else _changes(graph(neighbor).diff(graph(name)))


def _changes(diff: Diff) -> str:
    changed = [f"{node}.{name}" for node, change in diff.changed.items() for name in change.parameters]
    signs = {"+": diff.added, "-": (*diff.removed, *diff.pruned), "~": changed}
    return " ".join(f"{sign}{name}" for sign, found in signs.items() for name in found)

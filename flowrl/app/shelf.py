"""The algorithms of `flowrl.graphs` by their names, with all settings at their defaults: for the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowrl import graphs
from flowrl.edits.diff import Diff
from flowrl.errors import ParameterError
from flowrl.graph import Graph
from flowrl.graphs.variants import neighbour_of, settings_of


def your_reward(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """Stands where a reward function of yours belongs, in a graph that is looked at.

    Raises:
        ParameterError: always.
    """
    raise ParameterError(
        "this graph was made by its name, to be looked at, and scores nothing; make one with a reward function of "
        "yours: grpo('my_reward.py:exact_match')."
    )


def names() -> Sequence[str]:
    """Of all algorithms."""
    return graphs.__all__


def graph(name: str) -> Graph:
    """The graph of the algorithm `name`, one of `names`."""
    algorithm = getattr(graphs, name)
    given = {"reward_fn": your_reward} if "reward_fn" in settings_of(algorithm).parameters else {}
    made: Graph = algorithm(**given)
    return made


def listed() -> Iterator[tuple[str, str, str, str]]:
    """Of each algorithm its name, what it is and where that comes from, its neighbour, and what it changes there.

    What changes is the difference of the two as `graph` makes them, so their defaults count: the nodes that come (+),
    those that go (-), and parameters (~).
    """
    for name in names():
        said = (getattr(graphs, name).__doc__ or "").partition("\n\n")[0]
        neighbour = neighbour_of(name)
        yield name, said, neighbour or "", "" if neighbour is None else _changes(graph(neighbour).diff(graph(name)))


def _changes(diff: Diff) -> str:
    changed = [f"{node}.{name}" for node, change in diff.changed.items() for name in change.parameters]
    signs = {"+": diff.added, "-": (*diff.removed, *diff.pruned), "~": changed}
    return " ".join(f"{sign}{name}" for sign, found in signs.items() for name in found)

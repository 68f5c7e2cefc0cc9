"""The algorithms of `flowrl.graphs` by their names, for the command line."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl import graphs
from flowrl.graph import Graph


def your_reward(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """Stands where a reward function of yours belongs, in a graph that is only looked at."""
    raise NotImplementedError("this graph is here to be looked at; make one with a reward function of your own")


def named(name: str) -> Graph | None:
    """The graph of an algorithm, all settings at their defaults; None where there is none of that name."""
    return getattr(graphs, name)(your_reward) if name in graphs.__all__ else None


def listed() -> Iterator[tuple[str, str, str]]:
    """The name of each algorithm, its summary with its source, and what it changes against PPO or GRPO.

    Of the two it is the one that it is nearer to, by the number of lines of the diff.
    """
    neighbours = {name: getattr(graphs, name)(your_reward) for name in ("ppo", "grpo")}
    for name in graphs.__all__:
        algorithm = getattr(graphs, name)
        graph = algorithm(your_reward)
        diffs = {other: str(near.diff(graph)).splitlines()[1:] for other, near in neighbours.items() if other != name}
        nearest = min(diffs, key=lambda other: len(diffs[other]))
        summary = (algorithm.__doc__ or "").partition("\n\n")[0]
        yield name, summary, "\n".join([f"{nearest} -> {name}", *diffs[nearest]])

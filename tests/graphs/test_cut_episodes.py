"""Cutting an episode into segments by hand changes no advantage, no metric and no update of any algorithm.

Tests `flowrl/data/segments.py` with everything that reads episodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import Key
from flowrl.core.graphs.after import After
from flowrl.core.operators.ports import INJECTED
from flowrl.data.metrics import Metrics
from flowrl.data.now import Now
from flowrl.episodes import Answer, Environment, Reply
from flowrl.graph import Graph
from flowrl.operators import (
    DecoupledGAE,
    Interact,
    OverlongPenalty,
    RolloutCorrection,
    TurnGAE,
    TurnGroupAdvantage,
)
from flowrl.operators.engines.interact import EpisodePrompts
from flowrl.records import EpisodeBatch
from flowrl.run.recording.tables import read_columns
from tests.look.recorded import ALGORITHMS, data_of, graph_of, record
from tests.nightly import nightly, nightly_except
from tests.support.rows.cut_rows import cut
from tests.support.runs import lines, without_times


class Echo(Environment):
    """Two to four turns, by the length of the first answer; rewards the length of each."""

    async def step(self, answer: Answer) -> Reply:
        if answer.turn == 0:
            self.turns = 2 + len(answer.ids) % 3
        return Reply(f"{len(answer.ids)} tokens", reward=len(answer.ids) / 8, done=answer.turn + 1 == self.turns)


class CutInteract(Interact):
    """`Interact`, whose episodes begin a segment with every turn."""

    def __call__(
        self, prompts: EpisodePrompts, key: Key = INJECTED, metrics: Metrics = INJECTED, now: Now = INJECTED
    ) -> EpisodeBatch:
        batch = super().__call__(prompts)
        turns = batch.turn_ids
        return cut(batch, [[int((row == turn).nonzero()[0]) for turn in range(1, int(row.max()) + 1)] for row in turns])


SETTINGS: dict[str, Any] = {"max_turns": 4, "context": 200, "max_new_tokens": 8}
SAMPLING = tuple(sorted(name for name in ALGORITHMS if "generate" in graph_of(name).nodes))


def compare(graph: Graph, drop: list[str], folder: Path, model: str, data: Any, **edit: Any) -> set[str]:
    """Run a graph with and without cuts and compare all that it records; returns the names of the columns."""
    runs = []
    for operator in (Interact, CutInteract):
        interact = operator(Echo, **SETTINGS).named("interact")
        played = graph.edit(replace={"generate": interact}, drop=drop).edit(**edit)
        runs.append(record(played, folder / operator.__name__, model, data, steps=2, prompts=2))
    whole, parts = (without_times(lines(run / "metrics.jsonl")) for run in runs)
    for one, other in zip(whole, parts, strict=True):
        assert one["episodes/turns"] > 2 and one.pop("episodes/waiting") and other.pop("episodes/waiting")
        assert {k: v for k, v in one.items() if v is None} == {k: v for k, v in other.items() if v is None}
        for name in one.keys() | other.keys():
            assert one[name] is None or one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
    names: set[str] = set()
    for step in sorted({table.name for table in (runs[0] / "columns").rglob("*.parquet")}):
        one, other = (_columns(run / "columns", step) for run in runs)
        assert one.keys() == other.keys()
        for name, column in one.items():
            of_node = f"{name.partition('.')[0]}.response_mask"
            masks = [columns.get(of_node, columns["interact.response_mask"]) for columns in (one, other)]
            _compare(name, column, other[name], *masks)
        names |= one.keys()
    return names


def _columns(folder: Path, step: str) -> dict[str, Any]:
    """All recorded columns of a step."""
    return {name: column for table in sorted(folder.rglob(step)) for name, column in read_columns(table).items()}


def _compare(name: str, column: Any, other: Any, mask: Any, cut_mask: Any) -> None:
    """Compare columns of rows, and what columns of tokens have on the mask."""
    if isinstance(column, torch.Tensor) and column.ndim == 2 and column.shape == mask.shape:
        column, other = column[mask], other[cut_mask]
    elif not isinstance(column, torch.Tensor) or column.ndim == 2:
        return
    torch.testing.assert_close(column, other, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", nightly_except(["ppo", "gspo"], SAMPLING))
def test_no_algorithm_sees_a_cut(name: str, tiny: str, tmp_path: Path) -> None:
    graph = graph_of(name)
    columns = compare(graph, [*{"reward"} & graph.nodes.keys()], tmp_path, tiny, data_of(name, tmp_path))
    assert {"interact.response_mask", "update_actor.old_log_probs"} & columns, columns


BY_TURNS: dict[str, Any] = {
    "replace": {"group_advantage": TurnGroupAdvantage()},
    "insert": {
        "overlong": After("interact", OverlongPenalty(most=30, buffer=20)),
        "correction": After("group_advantage", RolloutCorrection("sequence", "truncate", high=1.5)),
    },
}


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("grpo", BY_TURNS),
        nightly("ppo", {"replace": {"gae": TurnGAE(gamma=0.9, lam=0.8)}}),
        nightly("ppo", {"replace": {"gae": DecoupledGAE(alpha=0.1)}}),
    ],
)
def test_credit_of_turns_lengths_and_corrections_are_those_of_the_episode(
    name: str, edit: dict[str, Any], tiny: str, tmp_path: Path
) -> None:
    """Of turns and of tokens, by groups and by a critic; lengths and ratios of rows."""
    compare(graph_of(name), ["reward"], tmp_path, tiny, data_of(name, tmp_path), **edit)

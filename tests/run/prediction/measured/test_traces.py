"""Loads of a trace, and the time between its nodes, computed by hand; whole runs: `test_costs.py`."""

from __future__ import annotations

import pytest

from flowrl.run.engine.timeline import Span
from flowrl.run.prediction.cost import Load
from flowrl.run.prediction.measured.traces import between_of, driver_of, instances, loads_of, warm
from flowrl.run.prediction.measured.work import Work


def node(name: str, place: str, start: float, seconds: float, step: int = 0, rows: int = 8) -> Span:
    return Span(name, place, start, start + seconds, 0, "node", step, rows, 10 * rows, 12 * rows)


class TestTraces:
    def test_ranks_of_a_node_are_one_instance(self) -> None:
        spans = [node("train", "actor rank 0", 0.0, 1.0), node("train", "actor rank 1", 0.0, 2.0)]
        spans.append(node("train", "actor rank 0", 5.0, 1.0, step=1))
        assert [len(ranks) for ranks in instances(spans)] == [2, 1]

    def test_an_update_of_two_ranks_has_the_optimizer_steps_of_all_rows(self) -> None:
        ranks = [node("train", f"actor rank {rank}", 0.0, 1.0) for rank in (0, 1)]
        found = loads_of(ranks, {"train": Work("update", ("actor",), epochs=2, mini_batch=4)})
        assert found == [Load(16, 160, 192, 0, updates=2 * 16 // 4)] * 2

    def test_the_first_call_in_a_process_is_left_out(self) -> None:
        spans = [node("train", "actor rank 0", 10.0 * step, 1.0, step) for step in range(3)]
        assert [span.step for span in warm(spans)] == [1, 2]

    def test_time_between_nodes_and_steps(self) -> None:
        spans = [
            span
            for step in range(3)
            for span in (node("a", "x", 10.0 * step, 1.0, step), node("b", "x", 10.0 * step + 1.5, 2.0, step))
        ]
        gaps, turns = driver_of(spans)
        assert gaps == pytest.approx({"b": 0.5}) and not turns["sleep"] and not turns["wake"]
        assert between_of(spans, dict.fromkeys(range(3), 4.2)) == pytest.approx(4.2 - 3.5)

"""Traces: the file is valid for trace viewers; tables equal worked examples."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flowrl import INJECTED, Operator, PromptBatch, algorithm
from flowrl import columns as c
from flowrl.core.graphs.plan import Plan
from flowrl.data.now import Now
from flowrl.data.waits import Wait
from flowrl.graphs import ppo
from flowrl.run.engine.timeline import Span, Timeline, critical_path, idle, lanes
from tests.support.errors import raises
from tests.support.jobs import PROMPTS
from tests.support.kernel import exact
from tests.support.runs import walk

TIMES = st.tuples(st.integers(0, 10_000), st.integers(0, 3_000))
START = 1_763_000_000.0  # near the precision limit of float64 for microseconds
NO_SPANS: list[Span] = []


@st.composite
def traces(draw: st.DrawFn) -> Timeline:
    trace = Timeline()
    for name, place, (start, length) in draw(
        st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["x", "y"]), TIMES), max_size=30)
    ):
        trace.add(name, place, START + start / 7e4, START + (start + length) / 7e4, length)
    return trace


def written(trace: Timeline, folder: Path) -> list[dict[str, Any]]:
    trace.save(folder / "trace.json")
    content = json.loads((folder / "trace.json").read_text())
    assert content.keys() == {"traceEvents", "displayTimeUnit", "otherData"}  # the keys of the format
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


class TestFile:
    def test_a_saved_timeline_equals_a_worked_example(self, tmp_path: Path) -> None:
        trace = Timeline()
        trace.add("generate", "rollout rank 0", START + 1, START + 3, bytes=64)
        trace.add("export actor", "driver", START, START + 0.5, kind="transfer")
        assert written(trace, tmp_path) == [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 1, "args": {"name": "rollout rank 0"}},
            {"ph": "M", "name": "process_name", "pid": 2, "tid": 1, "args": {"name": "driver"}},
            {"ph": "X", "name": "generate", "cat": "node", "pid": 1, "tid": 1, "ts": 1_000_000, "dur": 2_000_000,
             "args": {"bytes": 64}},
            {"ph": "X", "name": "export actor", "cat": "transfer", "pid": 2, "tid": 1, "ts": 0, "dur": 500_000,
             "args": {"bytes": 0}},
        ]  # fmt: skip

    def test_steps_are_counted_from_1(self, tmp_path: Path) -> None:
        trace = Timeline()
        trace.spans += [
            Span("reward", "here", START + at, START + at, step=step) for at, step in enumerate((0, 41, None))
        ]
        events = [event for event in written(trace, tmp_path) if event["ph"] == "X"]
        assert [event["args"].get("step") for event in events] == [1, 42, None]
        assert Timeline.load(tmp_path / "trace.json").spans == trace.spans

    def test_an_empty_timeline_is_an_empty_file(self, tmp_path: Path) -> None:
        assert written(Timeline(), tmp_path) == []

    @pytest.mark.parametrize(
        ("changed", "of"),
        [
            ({"name": ["a"]}, {}),
            ({"ts": float("nan")}, {}),
            ({"dur": float("inf")}, {}),
            ({"cat": "martian"}, {}),
            ({}, {"bytes": "many"}),
            ({}, {"rows": -1}),
            ({}, {"step": "1"}),
            ({}, {"lengths": [[1, 2, 3]]}),
        ],
    )
    def test_an_invalid_span_is_refused(self, tmp_path: Path, changed: dict[str, Any], of: dict[str, Any]) -> None:
        trace = Timeline()
        trace.add("generate", "driver", START, START + 1)
        [place, event] = written(trace, tmp_path)
        event = event | changed | {"args": event["args"] | of}
        text = json.dumps({"otherData": {"begin": START}, "traceEvents": [place, event]})
        (tmp_path / "trace.json").write_text(text)
        with raises("run.damaged", path=str(tmp_path / "trace.json")):
            Timeline.load(tmp_path / "trace.json")

    @given(trace=traces())
    def test_every_span_is_one_event(self, tmp_path_factory: pytest.TempPathFactory, trace: Timeline) -> None:
        events = written(trace, tmp_path_factory.getbasetemp())
        places = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
        assert sorted(places.values()) == sorted({span.place for span in trace.spans})
        complete = [event for event in events if event["ph"] == "X"]
        assert len(events) == len(places) + len(complete)
        found = sorted((e["name"], places[e["pid"]], e["args"]["bytes"]) for e in complete)
        assert found == sorted((s.name, s.place, s.bytes) for s in trace.spans)
        for event, span in zip(complete, trace.spans, strict=True):
            assert event["ts"] >= 0 and event["dur"] >= 0 and event["tid"] >= 1 and event["pid"] >= 1
            assert abs(event["dur"] - span.seconds * 1e6) <= 1
        assert min((event["ts"] for event in complete), default=0) == 0

    @given(trace=traces())
    def test_spans_round_trip_through_the_file(self, tmp_path_factory: pytest.TempPathFactory, trace: Timeline) -> None:
        path = tmp_path_factory.getbasetemp() / "again.json"
        trace.save(path)
        for span, loaded in zip(trace.spans, Timeline.load(path).spans, strict=True):
            assert (loaded.name, loaded.place, loaded.bytes, loaded.kind) == (
                span.name,
                span.place,
                span.bytes,
                span.kind,
            )
            assert abs(loaded.start - span.start) <= 2e-6 and abs(loaded.end - span.end) <= 2e-6

    @given(trace=traces())
    def test_spans_of_one_lane_do_not_overlap(self, tmp_path_factory: pytest.TempPathFactory, trace: Timeline) -> None:
        threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for event in written(trace, tmp_path_factory.getbasetemp()):
            if event["ph"] == "X":
                threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        for spans in threads.values():
            assert all(before[1] <= after[0] for before, after in pairwise(sorted(spans)))

    def test_rounding_creates_no_overlap(self, tmp_path: Path) -> None:
        trace = Timeline()
        for i in range(50):  # each span ends as the next starts, at fractions of a microsecond
            trace.add("a", "x", START + i * 1.6e-6, START + (i + 1) * 1.6e-6)
        spans = [event for event in written(trace, tmp_path) if event["ph"] == "X"]
        assert all(a["ts"] + a["dur"] == b["ts"] for a, b in pairwise(spans))

    @given(traces())
    def test_lanes_do_not_exceed_concurrent_spans(self, trace: Timeline) -> None:
        for place in {span.place for span in trace.spans}:
            spans = [span for span in trace.spans if span.place == place]
            at_once = max(sum(a.start <= b.start < a.end for a in spans) + (b.start == b.end) for b in spans)
            assert max(lanes(spans)) < at_once


class TestSpan:
    def test_a_block_is_recorded_as_a_span(self) -> None:
        trace = Timeline()
        with trace.span("export", "driver", kind="transfer"):
            pass
        (span,) = trace.spans
        assert (span.name, span.place, span.bytes, span.kind) == ("export", "driver", 0, "transfer")
        assert 0 <= span.seconds < 60

    def test_a_failing_block_is_recorded_as_a_span(self) -> None:
        trace = Timeline()
        with pytest.raises(RuntimeError), trace.span("export", "driver"):
            raise RuntimeError
        assert len(trace.spans) == 1


class TestCriticalPath:
    diamond = nx.DiGraph([("batch", "a"), ("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")])

    def test_the_critical_path_takes_the_longer_branch(self) -> None:
        seconds = {"a": 1.0, "b": 2.0, "c": 2.5, "d": 0.5}
        assert critical_path(self.diamond, seconds) == (["a", "c", "d"], 4.0)

    def test_the_critical_path_compares_a_node_with_a_chain(self) -> None:
        network = nx.DiGraph([("a", "b"), ("b", "c")])
        network.add_node("alone")
        assert critical_path(network, {"a": 1.0, "b": 1.0, "c": 1.0, "alone": 2.9})[0] == ["a", "b", "c"]
        assert critical_path(network, {"a": 1.0, "b": 1.0, "c": 1.0, "alone": 3.1}) == (["alone"], 3.1)

    def test_an_empty_network_has_no_critical_path(self) -> None:
        assert critical_path(nx.DiGraph(), {}) == ([], 0.0)
        assert critical_path(self.diamond, {}) == ([], 0.0)

    def test_weight_readers_precede_writers_on_the_critical_path(self) -> None:
        """State edges are dependencies: the critic's update waits for the critic's values."""
        plan = Plan(ppo(exact))
        seconds = {node.name: 0.0 for node in plan.order} | {"generate": 4.0, "old_log_prob": 3.0, "update_actor": 5.0}
        path, length = critical_path(plan.network, {**seconds, "sync": 1.0, "update_critic": 4.0})
        assert length == 13.0
        assert [name for name in path if seconds[name] or name == "sync"] == [
            "generate", "old_log_prob", "update_actor", "sync",
        ]  # fmt: skip

    @given(st.integers(1, 6).flatmap(lambda n: st.tuples(
        st.lists(st.integers(0, 9), min_size=n, max_size=n),
        st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))),
    )))  # fmt: skip
    def test_the_critical_path_is_the_longest_chain(self, case: tuple[list[int], set[tuple[int, int]]]) -> None:
        times, pairs = case
        network: nx.DiGraph[str] = nx.DiGraph()
        network.add_nodes_from(map(str, range(len(times))))
        network.add_edges_from((str(a), str(b)) for a, b in pairs if a < b)
        seconds = {str(i): float(t) for i, t in enumerate(times)}

        def longest(node: str) -> float:
            return seconds[node] + max(map(longest, network.successors(node)), default=0.0)

        path, length = critical_path(network, seconds)
        assert length == max(map(longest, network)) == sum(seconds[node] for node in path)
        assert all(network.has_edge(a, b) for a, b in pairwise(path))


class TestIdle:
    def test_idle_shares_equal_a_worked_example(self) -> None:
        spans = [
            Span("a", "x", 0.0, 4.0),
            Span("b", "x", 2.0, 5.0),  # overlaps: x is busy from 0 to 5
            Span("c", "x", 3.0, 4.0),  # within
            Span("d", "y", 9.0, 10.0),
            Span("e", "y", 2.0, 4.0),
            Span("f", "z", 0.0, 10.0, kind="wait"),
            Span("g", "z", 5.0, 6.0, kind="transfer"),
        ]
        expected = {"x": 0.5, "y": 0.7, "z": 0.9}
        assert idle(spans) == pytest.approx(expected)
        assert idle(reversed(spans)) == pytest.approx(expected)

    def test_idle_shares_of_no_time_are_zero(self) -> None:
        assert idle(NO_SPANS) == {}
        assert idle([Span("a", "x", 1.0, 1.0)]) == {"x": 0.0}

    @given(traces())
    def test_idle_shares_are_between_0_and_1(self, trace: Timeline) -> None:
        assert all(-1e-6 <= share <= 1 for share in idle(trace.spans).values())


class RecordsWait(Operator):
    """Records a wait."""

    def __call__(self, prompt_mask: c.PromptMask, now: Now = INJECTED) -> c.PromptMask:
        now.waits.append(Wait("all wait", START, START + 2))
        return prompt_mask


class TestEnvironments:
    """Waits of a node for environments are in a separate lane."""

    def test_waits_of_a_node_are_spans(self) -> None:
        @algorithm
        def asking(batch: PromptBatch) -> Any:
            return RecordsWait()(batch.prompt_mask)

        steps = walk(asking())
        for step in (3, 4):
            steps.step(PROMPTS, step)
        environments = [span for span in steps.timeline.spans if span.kind == "environment"]
        span = Span("records_wait: all wait", "this process: environments", START, START + 2, kind="environment")
        assert environments == [replace(span, step=3), replace(span, step=4)]
        assert len(steps.timeline.spans) == 4

    def test_a_direct_call_discards_waits(self) -> None:
        mask = PROMPTS.columns["prompt_mask"]
        assert RecordsWait()(mask) is mask

    def test_a_wait_is_neither_idle_nor_busy_time(self) -> None:
        spans = [Span("interact", "x", 0, 2), Span("interact: all wait", "x: environments", 0, 9, kind="environment")]
        assert idle(spans) == {"x": 0.0}


class TestSummary:
    plan = Plan(ppo(exact))

    def trace(self) -> Timeline:
        trace = Timeline()
        for step in range(2):
            at = START + 10 * step
            trace.add("generate", "rollout rank 0", at, at + 4, bytes=1000)
            trace.add("update_actor", "actor rank 0", at + 4, at + 8, bytes=500)
            trace.add("update_actor", "actor rank 1", at + 4, at + 7, bytes=400)
            trace.add("export actor", "driver", at + 8, at + 9, bytes=10, kind="transfer")
        return trace

    def test_the_summary_equals_a_worked_example(self) -> None:
        steps = [{"generate": 4.0, "update_actor": 4.0, "sync": 1.0}, {"generate": 3.0, "update_actor": 5.0}]
        summary = self.trace().summary(self.plan, steps, [10.0, 10.0])
        found = [(t.name, t.calls, t.seconds, t.share, t.bytes) for t in summary.totals]
        assert found == [
            ("generate", 2, 7.0, 0.35, 2000),
            ("update_actor", 2, 9.0, 0.45, 1800),
            ("sync", 1, 1.0, 0.05, 0),
            ("export actor", 2, 2.0, 0.1, 20),
        ]
        assert summary.path == ("generate", "update_actor", "sync")
        assert summary.path_seconds == 8.5
        assert summary.step_seconds == 10.0
        busy = {"rollout rank 0": 8, "actor rank 0": 8, "actor rank 1": 6, "driver": 2}
        assert summary.idle == pytest.approx({place: 1 - seconds / 19 for place, seconds in busy.items()})

    def test_the_summary_table_shows_times_shares_and_bytes(self) -> None:
        console = Console(width=150, file=io.StringIO())
        steps = [{"generate": 4.0, "reward": 1.0, "old_log_prob": 2.0, "update_actor": 4.0}]
        console.print(self.trace().summary(self.plan, steps, [12.5]).table())
        text = console.file.getvalue()  # type: ignore[attr-defined]
        for part in (
            "generate *", "update_actor *", "export actor", "32.0%", "2.0 KiB",
            "* critical path 10.000 s", "fetched", "a step takes 12.500 s, 25.0% more", "idle: rollout rank 0 58%",
        ):  # fmt: skip
            assert part in text, part
        assert "reward *" not in text

    def test_a_summary_without_steps_is_empty(self) -> None:
        summary = Timeline().summary(self.plan, [], [])
        assert (summary.totals, summary.path, summary.path_seconds, summary.step_seconds) == ((), (), 0.0, 0.0)
        Console(quiet=True).print(summary.table())

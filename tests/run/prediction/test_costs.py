"""Tests of `costs.py`, `cost.py` and `measured/traces.py`: fitting recovers known costs from a trace.

Lengths are sampled, not averaged; missing costs are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl import After, Colocate, PromptData, Training, Validation
from flowrl.data.keys import Key
from flowrl.errors import DataError
from flowrl.files.values import encode
from flowrl.graph import Graph
from flowrl.operators import PassAtK
from flowrl.run.engine.runner import Lengths
from flowrl.run.engine.timeline import Span, Timeline
from flowrl.run.placement.place import Place
from flowrl.run.prediction.cost import Cost, Load
from flowrl.run.prediction.costs import Costs, relimited
from flowrl.run.prediction.measured.work import Work
from flowrl.run.prediction.prediction import predict
from tests.support.errors import raises
from tests.support.jobs import job_of
from tests.support.rewards import digits

TERMS = st.sampled_from([0.0, 0.001, 0.01])


class TestFit:
    @given(st.tuples(TERMS, TERMS, TERMS, TERMS, TERMS), st.integers(0, 2**32))
    def test_fitting_recovers_the_costs_that_generated_the_times(self, terms: tuple[float, ...], seed: int) -> None:
        draw = np.random.default_rng(seed)
        loads = [Load(*map(int, row)) for row in draw.integers([1, 1, 1, 1], [200, 4000, 9000, 60], (40, 4))]
        actual = Cost(1e-3 + terms[0], *terms[1:])
        found = Cost.fit(loads, [actual.seconds(load) for load in loads])
        for load in loads:
            assert found.seconds(load) == pytest.approx(actual.seconds(load), rel=0.06)

    def test_outliers_do_not_change_the_fit(self) -> None:
        draw = np.random.default_rng(0)
        actual, loads = Cost(fixed=0.1, token=0.001), [Load(8, 100 * i) for i in range(1, 41)]
        noise = np.where(draw.random(40) < 0.2, 3.0, draw.uniform(0.97, 1.03, 40))
        found = Cost.fit(loads, [actual.seconds(load) * n for load, n in zip(loads, noise, strict=True)])
        assert found.seconds(Load(8, 8000)) == pytest.approx(8.1, rel=0.05)

    def test_indistinguishable_loads_scale_with_rows(self) -> None:
        loads = [Load(128, 3000 + i, 5000, 28) for i in (-30, 0, 30)]
        found = Cost.fit(loads, [1.0, 1.02, 0.98])
        assert found.seconds(Load(256, 6000, 10000, 28)) == pytest.approx(2.0, rel=0.05)

    def test_varying_row_counts_separate_fixed_and_row_costs(self) -> None:
        loads = [Load(128, 3000 + i, 5000, 28) for i in (-30, 0, 30)] + [Load(500, 12000, 20000, 28)] * 2
        found = Cost.fit(loads, [1.0, 1.02, 0.98, 1.3, 1.3])
        assert found.seconds(Load(256, 6000, 10000, 28)) == pytest.approx(1.1, rel=0.05)

    def test_without_loads_the_cost_is_the_median(self) -> None:
        assert Cost.fit([Load()] * 3, [1.0, 5.0, 2.0]) == Cost(fixed=pytest.approx(2.0))

    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99), st.integers(0, 99), st.floats(0, 9)), min_size=1))
    def test_fitted_costs_are_not_negative(self, measured: list[tuple[int, int, int, float]]) -> None:
        found = Cost.fit([Load(*given[:3]) for given in measured], [given[3] for given in measured])
        assert all(term >= 0 for term in (found.fixed, found.row, found.token, found.padded, found.decode))


class TestLimits:
    def test_longer_responses_are_cut_at_a_lower_limit(self) -> None:
        found = relimited(np.array([3, 8, 8]), 8, 5, 0.1, np.random.default_rng(0))
        assert found.tolist() == [3, 5, 5]

    def test_responses_that_the_limit_cut_go_on(self) -> None:
        cut = relimited(np.full(20_000, 8), 8, 10_000, 0.1, np.random.default_rng(0))
        assert cut.min() > 8 and cut.mean() == pytest.approx(8 + 1 / 0.1, rel=0.03)
        assert relimited(np.array([3, 8]), 8, 12, 0.0, np.random.default_rng(0)).tolist() == [3, 12]

    def test_prompts_stay(self) -> None:
        costs = Costs("given", {}, {"generate": [LONG, SHORT]}, works={"generate": Work("generate", tokens=79)})
        lengths = costs.draw("generate", 8, Key.of(0), 10)
        assert lengths.response is not None
        assert lengths.response.max() == 10 and sorted(lengths.tokens - lengths.response) == [19] * 4 + [20] * 4


LONG = Lengths(np.array([30, 31, 32, 99]), np.array([10, 11, 12, 79]))
SHORT = Lengths(np.array([20, 21, 22, 23]), np.array([1, 2, 3, 4]))


class TestLengths:
    costs = Costs("given", {}, {"generate": [LONG, SHORT]})

    def sampled(self, rows: int, seed: int = 0) -> list[tuple[int, int]]:
        lengths = self.costs.draw("generate", rows, Key.of(seed))
        assert lengths.response is not None
        return [(int(t), int(r)) for t, r in zip(lengths.tokens, lengths.response, strict=True)]

    @given(st.integers(1, 30), st.integers(0, 50))
    def test_sampled_lengths_are_measured_lengths(self, rows: int, seed: int) -> None:
        found = self.sampled(rows, seed)
        known = {(30, 10), (31, 11), (32, 12), (99, 79), (20, 1), (21, 2), (22, 3), (23, 4)}
        assert len(found) == rows and set(found) <= known
        assert self.sampled(rows, seed) == found

    @given(st.integers(0, 50))
    def test_sampled_lengths_come_from_one_step(self, seed: int) -> None:
        assert len({response > 4 for _, response in self.sampled(4, seed)}) == 1
        assert sorted(self.sampled(8, seed)) == sorted(self.sampled(8, 0))  # all lengths of both steps

    def test_lengths_of_zero_rows_or_an_unmeasured_node_are_zero(self) -> None:
        assert len(self.costs.draw("generate", 0, Key.of(0)).tokens) == 0
        assert self.costs.draw("other", 3, Key.of(0)).tokens.tolist() == [0, 0, 0]

    def test_different_keys_sample_different_lengths(self) -> None:
        assert len({tuple(self.sampled(3, seed)) for seed in range(20)}) > 4

    def test_the_longest_of_few_rows_is_shorter_than_of_many(self) -> None:
        few, many = ([max(r for _, r in self.sampled(rows, seed)) for seed in range(200)] for rows in (1, 8))
        assert np.mean(few) < 25 < min(many)


# -------------------------------------------------------------------------------------------------------- from a run


def write_run(folder: Path, spans: Sequence[Span], steps: Mapping[int, float], place: Place | None = None) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    timeline = Timeline()
    timeline.spans += spans
    timeline.save(folder / "trace.json")
    described = {"status": "finished", "training": {"prompts": 8}, "place": encode(place, "place")}
    (folder / "run.json").write_text(json.dumps(described))
    lines = [json.dumps({"step": step + 1, "timing/step": seconds}) for step, seconds in steps.items()]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in [*lines, json.dumps({"step": 2})]))
    return str(folder)


def on_ray(step: int, rows: int = 8, warm: float = 0.0) -> list[Span]:
    """A step on Ray: `a` runs on two ranks, then the role changes, then `b` runs on one."""
    at, lengths = 100.0 * (step + 1), tuple((10 + i, 5 + i) for i in range(rows))
    return [
        Span("a", "actor rank 0", at, at + warm + 2.0, 0, "node", step, rows, sum(t for t, _ in lengths), 0, lengths),
        Span("a", "actor rank 1", at, at + warm + 1.0, 0, "node", step, rows, sum(t for t, _ in lengths), 0, lengths),
        Span("fetch", "actor rank 0", at, at + 0.5, kind="transfer"),
        Span("sleep", "driver", at + warm + 2.1, at + warm + 2.4, kind="wait"),
        Span("wake", "driver", at + warm + 2.4, at + warm + 3.0, kind="wait"),
        Span("b", "ref rank 0", at + warm + 3.2, at + warm + 4.2, 0, "node", step, 2 * rows, 0),
    ]


class TestOfARun:
    def test_costs_of_a_trace_equal_a_worked_example(self, tmp_path: Path) -> None:
        spans = [span for step in range(4) for span in on_ray(step, warm=50.0 * (step == 0))]
        costs = Costs.of(write_run(tmp_path, spans, {0: 54.9, 1: 4.5, 2: 4.5, 3: 4.5}, Colocate(gpus=2)))
        assert (costs.prompts, costs.place) == (8, Colocate(gpus=2))
        load = Load(8, 108, 0, 12)
        assert costs.seconds("a", 2, load) == pytest.approx(1.5, abs=0.51)  # between its ranks
        assert costs.seconds("b", 1, Load(16)) == pytest.approx(1.0)
        assert costs.seconds("b", 3, Load(16)) == pytest.approx(1.0)  # as measured
        assert costs.gap("b") == pytest.approx(3.2 - 2.0 - 0.3 - 0.6, abs=1e-5)
        assert (costs.turn("sleep", "b"), costs.turn("wake", "b")) == (
            pytest.approx(0.3, abs=1e-5),
            pytest.approx(0.6, abs=1e-5),
        )
        assert costs.between == pytest.approx(0.3, abs=1e-5)
        assert [len(step.tokens) for step in costs.lengths["a"]] == [16] * 4
        assert len(costs.noise) == 3 and costs.noise[0]["b"] == pytest.approx(1.0)

    def test_fixed_costs_do_not_grow_with_rows(self, tmp_path: Path) -> None:
        spans = [span for step in range(4) for span in on_ray(step)]
        spans += [
            Span("c", "ref rank 0", at + 90.0, at + 90.4, 0, "node", step, 8, 0) for step, at in enumerate((0, 100))
        ]
        costs = Costs.of(write_run(tmp_path, spans, dict.fromkeys(range(4), 4.5)))
        assert costs.seconds("c", 1, Load(800)) == pytest.approx(
            0.4
        )  # the fastest node bounds the fixed cost of a call
        assert costs.seconds("b", 1, Load(32)) == pytest.approx(0.4 + 2 * 0.6)

    def test_validations_contribute_node_costs_but_not_step_costs(self, tmp_path: Path) -> None:
        spans = [span for step in range(3) for span in on_ray(step)]
        spans += [Span("val/b", "ref rank 0", at, at + 3.0, 0, "node", 0, 160, 0) for at in (50.0, 500.0, 600.0)]
        costs = Costs.of(write_run(tmp_path, spans, dict.fromkeys(range(3), 4.5)))
        assert costs.seconds("b", 1, Load(88)) == pytest.approx(2.0, rel=0.05)
        assert "val/b" not in costs.lengths and "val/b" not in costs.gaps

    def test_given_costs_replace_measured_ones(self) -> None:
        costs = Costs("given", {"a": {1: Cost(row=1.0)}}, noise=[{"a": 2.0}])
        assert costs.seconds("a", 1, Load(3), step=0) == 6.0
        assert costs.given(a=0.5).seconds("a", 1, Load(3), step=0) == 0.5

    @pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, "1", True])
    def test_invalid_costs_are_refused(self, seconds: Any) -> None:
        with raises("predict.bad-costs", node="a"):
            Costs("given", {"a": {1: Cost(row=1.0)}}).given(a=seconds)

    @pytest.mark.parametrize(
        ("file", "before", "after"),
        [
            ("run.json", '"prompts": 8', '"prompts": 0'),
            ("run.json", '"prompts": 8', '"prompts": "8"'),
            ("run.json", '"place": null', '"place": "gpu"'),
            ("metrics.jsonl", "4.5", "null"),
            ("metrics.jsonl", "4.5", '"4.5"'),
        ],
    )
    def test_a_malformed_run_folder_is_refused(self, tmp_path: Path, file: str, before: str, after: str) -> None:
        write_run(tmp_path, [span for step in range(3) for span in on_ray(step)], dict.fromkeys(range(3), 4.5))
        text = (tmp_path / file).read_text()
        assert before in text
        (tmp_path / file).write_text(text.replace(before, after, 1))
        with pytest.raises(DataError, match=f"{file}.* [Rr]un it again"):
            Costs.of(tmp_path)

    def test_a_missing_run_is_refused(self, tmp_path: Path) -> None:
        with raises("predict.no-run", path=str(tmp_path / "nowhere"), missing="run.json"):
            Costs.of(tmp_path / "nowhere")

    def test_a_run_without_trace_is_refused(self, tmp_path: Path) -> None:
        write_run(tmp_path, [], {})
        with raises("predict.no-run", path=str(tmp_path)):
            Costs.of(tmp_path)
        (tmp_path / "trace.json").unlink()
        with raises("predict.no-run", path=str(tmp_path), missing="trace.json"):
            Costs.of(tmp_path)


# ------------------------------------------------------------------------------------------------- of a run that ran


@pytest.fixture(scope="module")
def trained(tiny: str, prompts_file: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, str]:
    """A training of three steps, and the folder of a run of it."""
    folder = tmp_path_factory.mktemp("trained")
    job, data = job_of("grpo", tiny, digits, n=2), PromptData(prompts_file)
    training = Training(
        job,
        data,
        steps=3,
        prompts=4,
        validation=Validation(data, every=3),
        folder=str(folder / "first"),
        save_model=False,
    )
    return training, str(training.run().folder)


class TestOfTraining:
    def test_predicted_step_time_is_close_to_the_measured(self, trained: tuple[Training, str]) -> None:
        training, folder = trained
        costs = Costs.of(folder)
        assert (costs.prompts, costs.place) == (4, None)
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        measured = [line["timing/step"] for line in lines if "timing/step" in line]
        found = predict(training.job.graph, None, 4, costs)
        assert min(measured[1:]) * 0.5 < found.seconds < max(measured[1:]) * 2.0
        assert predict(training.job.graph, None, 64, costs).seconds > found.seconds

    def test_costs_have_the_response_lengths_of_the_run(self, trained: tuple[Training, str]) -> None:
        steps = Costs.of(trained[1]).lengths["generate"]
        assert [len(step.tokens) for step in steps] == [8] * 3
        assert all(1 <= n <= 6 for step in steps for n in step.response)  # max_new_tokens=6

    def test_spans_record_the_rows_and_tokens_of_nodes(self, trained: tuple[Training, str]) -> None:
        spans = {(span.name, span.step): span for span in Timeline.load(Path(trained[1]) / "trace.json").spans}
        for step in range(3):
            answered, updated = spans["generate", step], spans["update_actor", step]
            tokens = [tokens for tokens, _ in answered.lengths]
            for span in (answered, updated, spans["reward", step]):
                assert (span.rows, span.tokens, span.padded) == (8, sum(tokens), 8 * max(tokens))
            assert updated.lengths == ()
            assert all(tokens > response for tokens, response in answered.lengths)  # tokens include the prompt

    def test_run_json_has_predicted_and_measured_step_seconds(
        self, trained: tuple[Training, str], tmp_path: Path
    ) -> None:
        training, folder = trained
        changed: dict[str, Any] = {"folder": str(tmp_path / "second"), "costs": folder, "steps": 2}
        run = type(training)(**{**vars_of(training), **changed}).run()
        seconds = json.loads((run.folder / "run.json").read_text())["step_seconds"]
        assert seconds["predicted"] > 0
        assert seconds["measured"] == pytest.approx(np.median([step["timing/step"] for step in run.metrics]))
        assert "step_seconds" not in json.loads((Path(folder) / "run.json").read_text())

    def test_missing_costs_are_refused_before_a_model_loads(
        self, trained: tuple[Training, str], tmp_path: Path
    ) -> None:
        changed: dict[str, Any] = {"folder": str(tmp_path / "second"), "costs": "nowhere"}
        with raises("predict.no-run", missing="run.json"):
            type(trained[0])(**{**vars_of(trained[0]), **changed}).run()
        assert not (tmp_path / "second").exists()

    def test_a_diff_shows_the_predicted_step_time_of_an_edit(self, trained: tuple[Training, str]) -> None:
        graph: Graph = trained[0].job.graph
        costs = Costs.of(trained[1]).given(ref_log_prob=1000.0)
        lighter = graph.edit(drop=["ref_log_prob"], set={"update_actor.kl": None})
        found = graph.diff(lighter, costs)
        assert found.seconds is not None and found.seconds[0] > 1000.0 > found.seconds[1]
        before, _, after = str(found).rpartition("\n")
        assert before == str(graph.diff(lighter))
        assert after == f"this edit: {found.seconds[0]:.3g} s → {found.seconds[1]:.3g} s"

    def test_an_unmeasured_node_is_predicted_from_one_that_does_similar_work(
        self, trained: tuple[Training, str]
    ) -> None:
        training, costs = trained[0], Costs.of(trained[1])
        graph: Graph = training.job.graph
        longer = graph.edit(insert={"pass_at_k": After("reward", PassAtK(2))})
        before, after = (predict(one, None, training.prompts, costs) for one in (graph, longer))
        assert after.low < after.seconds < after.high
        assert after.high / after.seconds > before.high / before.seconds
        assert predict(longer, None, training.prompts, costs.given(pass_at_k=5.0)).seconds > 5.0

    def test_a_node_that_resembles_no_measured_one_is_refused(self, trained: tuple[Training, str]) -> None:
        graph: Graph = trained[0].job.graph
        costs = replace(Costs.of(trained[1]), nodes={}).given(reward=0.1)
        with raises("predict.unmeasured-node", graph="grpo", path=trained[1]):
            graph.diff(graph, costs)

    def test_edits_of_epochs_and_limits_change_the_prediction(self, trained: tuple[Training, str]) -> None:
        training, costs = trained[0], replace(Costs.of(trained[1]), noise=())
        graph: Graph = training.job.graph
        update = costs.nodes["update_actor"][1]

        def seconds(**changes: Any) -> float:
            edited = graph.edit(set={name.replace("__", "."): value for name, value in changes.items()})
            return predict(edited, None, training.prompts, costs, optimize=False).seconds

        more = seconds(update_actor__ppo_epochs=3) - seconds(update_actor__ppo_epochs=2)
        assert more == pytest.approx(seconds(update_actor__ppo_epochs=4) - seconds(update_actor__ppo_epochs=3))
        assert more > 0 and update.update >= 0
        assert seconds(generate__max_new_tokens=2) < seconds() < seconds(generate__max_new_tokens=24)
        assert seconds(repeat__n=4) > seconds()

    def test_a_run_path_in_place_of_costs_is_refused(self, trained: tuple[Training, str]) -> None:
        graph = trained[0].job.graph
        for call in (lambda run: graph.diff(graph, run), lambda run: predict(graph, None, 4, run)):
            with raises("predict.bad-costs", found=trained[1]):
                call(trained[1])


def vars_of(training: Training) -> dict[str, Any]:
    return {name: getattr(training, name) for name in type(training).__dataclass_fields__}

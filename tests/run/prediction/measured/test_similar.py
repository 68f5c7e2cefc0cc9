"""Costs of nodes from similar ones, and of updates from forward passes, computed by hand."""

from __future__ import annotations

import pytest

from flowrl.run.prediction.cost import Cost, Load
from flowrl.run.prediction.measured.similar import forward_of, similar, split
from flowrl.run.prediction.measured.work import Work

FORWARD = Cost(fixed=0.001, token=0.01)
LOAD = Load(rows=10, tokens=100, padded=120, updates=4)
SCORE, OTHER_SCORE = Work("score", ("actor",)), Work("score", ("ref",))
UPDATE = Work("update", ("actor",))


class TestSplit:
    def test_an_update_is_three_forward_passes_and_its_optimizer_steps(self) -> None:
        found = split(Cost(fixed=0.5, token=0.04), LOAD, FORWARD)
        assert found.seconds(LOAD) == pytest.approx(4.5)
        assert (found.fixed, found.token, found.update) == (0.5, pytest.approx(0.03), pytest.approx(1.0 / 4))
        twice = found.range(LOAD._replace(updates=8))
        assert twice == pytest.approx((4.5, 5.5, 6.5))  # four passes and no steps; three; two passes

    def test_an_update_faster_than_three_passes_has_no_time_for_steps(self) -> None:
        found = split(Cost(token=0.02), LOAD, FORWARD)
        assert (found.token, found.update) == (pytest.approx(0.02), 0.0)

    def test_without_a_forward_pass_most_of_an_update_grows_with_rows(self) -> None:
        found = split(Cost(token=0.04), LOAD, None)
        assert found.range(LOAD) == pytest.approx((4.0, 4.0, 4.0))
        assert found.range(LOAD._replace(updates=8)) == pytest.approx((4.0, 4.8, 6.0))

    def test_an_update_without_optimizer_steps_stays(self) -> None:
        cost = Cost(token=0.04)
        assert split(cost, LOAD._replace(updates=0), FORWARD) is cost


class TestSimilar:
    def test_a_scorer_of_the_same_role_is_preferred(self) -> None:
        nodes = {"old": {1: Cost(token=1.0)}, "ref": {1: Cost(token=2.0)}}
        works = {"old": SCORE, "ref": OTHER_SCORE}
        for work, expected in ((SCORE, 1.0), (OTHER_SCORE, 2.0)):
            found = similar(work, nodes, works)
            assert found is not None and found[1].range(Load(tokens=1)) == pytest.approx(
                (0.7 * expected, expected, 1.4 * expected)
            )

    def test_a_forward_pass_takes_a_third_of_an_update(self) -> None:
        found = similar(SCORE, {"update": {1: Cost(token=3.0, update=5.0)}}, {"update": UPDATE})
        assert found is not None and found[1].range(Load(tokens=10, updates=2)) == pytest.approx((6.0, 10.0, 16.0))

    def test_an_update_takes_three_forward_passes(self) -> None:
        found = similar(UPDATE, {"score": {1: FORWARD}}, {"score": SCORE})
        assert found is not None and found[1].seconds(Load(tokens=100)) == pytest.approx(3.001)

    def test_a_node_without_an_engine_takes_as_long_as_the_median_one(self) -> None:
        nodes = {name: {1: Cost(fixed=seconds)} for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 9.0))}
        found = similar(Work(), nodes, dict.fromkeys(nodes, Work()))
        assert found is not None and found[1].range(Load()) == pytest.approx((0.4, 2.0, 8.0))

    def test_nothing_resembles_generation_but_generation(self) -> None:
        assert similar(Work("generate", ("rollout",)), {"score": {1: FORWARD}}, {"score": SCORE}) is None

    def test_the_forward_pass_of_an_update_uses_its_role(self) -> None:
        works = {"ref": OTHER_SCORE, "old": SCORE, "update": UPDATE, "critic": Work("update", ("critic",))}
        assert (forward_of("update", works), forward_of("critic", works)) == ("old", None)

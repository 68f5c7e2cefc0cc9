"""Rules about rows (`row_rules.py`), and the share of rows in a metric (`shares.py`), on tables written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flowrl.run.alarms.history import History
from flowrl.run.alarms.row_rules import ConstantReward, GroupsAlike, OneComponent, Skips, Truncated
from flowrl.run.alarms.rule import Rule
from flowrl.run.alarms.shares import BASIS_OF_SIZE, blamable, shares
from flowrl.run.recording.statistics import statistics


def table(**columns: Any) -> pa.Table:
    """Row summaries with these columns; rows are named r0, r1, …"""
    rows = len(next(iter(columns.values())))
    known = {"response_tokens": [4] * rows, "row_id": [f"r{i}" for i in range(rows)], "advantage": [None] * rows}
    return pa.table({**known, "advantage_max": [None] * rows, "uid": ["g"] * rows, **columns})


def steps(count: int, **metrics: float) -> list[dict[str, float]]:
    named = {name if "/" in name else name.replace("_", "/", 1): value for name, value in metrics.items()}
    return [{"step": i + 1.0, **named} for i in range(count)]


def check(rule: Rule, history: list[dict[str, float]], rows: pa.Table) -> Any:
    return rule.check(History(history, rows=rows))


class TestStatistics:
    def test_groups_without_spread_are_counted_right_and_wrong_apart(self) -> None:
        uid = ["a", "a", "b", "b", "c", "c", "d", "d"]
        found = statistics(table(uid=uid, score=[1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.2, 0.2]))
        assert found["groups/all_right"] == 1 / 4 and found["groups/all_wrong"] == 2 / 4
        assert found["groups/reward_std"] == pytest.approx(0.5 / 4)
        assert found["reward/std"] == pytest.approx(np.std([1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.2, 0.2]))

    def test_advantages_have_mean_spread_and_largest_size(self) -> None:
        found = statistics(table(score=[0.0, 1.0], advantage=[-1.0, 2.0], advantage_max=[-3.0, 2.0]))
        assert (found["advantage/mean"], found["advantage/std"], found["advantage/max"]) == (0.5, 1.5, 3.0)

    def test_rows_without_a_token_and_groups_of_one_row_do_not_count(self) -> None:
        found = statistics(table(uid=["a", "a", "b"], score=[1.0, 0.0, 1.0], response_tokens=[3, 0, 3]))
        assert found == {"reward/std": 0.0}


class TestRewards:
    def test_one_score_since_the_start_is_an_alarm_in_the_second_step(self) -> None:
        rows, alike = table(score=[0.5, 0.5]), {"reward_min": 0.5, "reward_max": 0.5}
        assert check(ConstantReward(), steps(1, **alike), rows) is None
        assert check(ConstantReward(), steps(2, **alike), rows).value == 0.5
        assert check(ConstantReward(), [*steps(1, reward_min=0, reward_max=1), *steps(3, **alike)], rows) is None

    def test_groups_alike_for_three_steps_are_an_alarm_with_their_rows(self) -> None:
        rows = table(score=[0.0, 0.0, 0.0, 1.0], group_spread=[0.0, 0.0, 0.5, 0.5])
        alike = {"groups_all_right": 0.1, "groups_all_wrong": 0.5, "reward_mean": 0.2, "reward_std": 0.4}
        found = check(GroupsAlike(), steps(3, **alike), rows)
        assert found.rows == ["r0", "r1"] and found.metric == "groups/all_wrong"
        assert "10%" in found.message and "50%" in found.message
        assert check(GroupsAlike(), steps(2, **alike), rows) is None
        assert check(GroupsAlike(), steps(3, **{**alike, "groups_all_wrong": 0.4}), rows) is None

    def test_five_skipped_steps_in_a_row_are_an_alarm(self) -> None:
        rows = table(score=[0.0])
        found = check(Skips(), steps(5, gate_skipped=1.0), rows)
        assert (found.metric, found.node) == ("gate/skipped", "gate")
        assert check(Skips(), steps(4, gate_skipped=1.0), rows) is None
        assert check(Skips(), [*steps(1, gate_skipped=0.0), *steps(4, gate_skipped=1.0)], rows) is None

    def test_groups_that_are_all_right_because_the_run_has_learned_are_no_alarm(self) -> None:
        rows = table(score=[1.0, 1.0], group_spread=[0.0, 0.0])
        solved = steps(4, groups_all_right=0.9, groups_all_wrong=0.0, reward_mean=0.95, reward_std=0.2)
        low = steps(1, groups_all_right=0.0, groups_all_wrong=0.1, reward_mean=0.3, reward_std=0.5)
        assert check(GroupsAlike(), [*low, *solved], rows) is None
        assert check(GroupsAlike(), solved, rows) is not None  # too easy from the start


class TestTruncated:
    def test_truncated_rows_that_score_low_are_an_alarm_with_the_worst_of_them(self) -> None:
        rows = table(score=[0.15, 1.0, 0.0, 1.0], truncated=[True, False, True, False])
        found = check(Truncated(), steps(1, **{"response_length/clip_ratio": 0.5}), rows)
        assert found.rows == ["r2", "r0"] and found.value == 0.5

    def test_truncated_rows_that_score_well_or_are_few_are_none(self) -> None:
        rows = table(score=[0.4, 1.0, 0.5, 0.0], truncated=[True, False, True, False])
        assert check(Truncated(), steps(1, **{"response_length/clip_ratio": 0.5}), rows) is None
        rows = table(score=[0.0, 1.0, 1.0, 1.0], truncated=[True, False, False, False])
        assert check(Truncated(), steps(1, **{"response_length/clip_ratio": 0.25}), rows) is None

    def test_rows_that_are_all_truncated_are_an_alarm_if_none_scores(self) -> None:
        whole = steps(1, **{"response_length/clip_ratio": 1.0})
        assert check(Truncated(), whole, table(score=[0.0, 0.0], truncated=[True, True])) is not None
        assert check(Truncated(), whole, table(score=[1.0, 1.0], truncated=[True, True])) is None


class TestComponents:
    right = np.array([0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    length = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])

    def rows(self, weight: float) -> pa.Table:
        parts = {"reward/right": self.right, "reward/length": self.length}
        return table(score=self.right + weight * self.length, **parts)

    def history(self, right: float, length: float) -> list[dict[str, float]]:
        start = {"reward_right": 0.5, "reward_length": 1.0}
        return [*steps(4, **start), *steps(1, reward_right=right, reward_length=length)]

    def test_a_component_that_makes_the_spread_and_rises_alone_is_an_alarm_with_its_rows(self) -> None:
        found = check(OneComponent(), self.history(0.5, 4.5), self.rows(2.0))
        assert found.metric == "reward/length" and found.rows[0] == "r7" and found.value > 0.9

    def test_a_component_beside_which_the_other_rises_is_none(self) -> None:
        assert check(OneComponent(), self.history(1.0, 4.5), self.rows(2.0)) is None
        assert check(OneComponent(), self.history(0.5, 1.0), self.rows(2.0)) is None
        assert check(OneComponent(), self.history(0.5, 4.5), self.rows(0.1)) is None

    def test_a_component_near_its_highest_beside_which_another_one_rises_is_none(self) -> None:
        right = np.array([1.0] * 19 + [0.0])
        noise = table(score=right + 2 * np.arange(20.0), **{"reward/right": right, "reward/length": np.arange(20.0)})
        known = {"reward_right": 0.95, "reward_length": 1.0}
        still = [*steps(4, **known), *steps(1, reward_right=0.95, reward_length=9.5)]
        assert check(OneComponent(), still, noise) is None
        fell = [*steps(4, **{**known, "reward_right": 1.2}), *still[-1:]]
        assert check(OneComponent(), fell, noise).metric == "reward/length"

    def test_a_penalty_that_falls_is_a_gain(self) -> None:
        found = check(OneComponent(), self.history(0.5, -3.0), self.rows(-2.0))
        assert found.metric == "reward/length" and found.rows[0] == "r0" and "--worst" in found.command
        assert check(OneComponent(), self.history(0.5, 4.5), self.rows(-2.0)) is None

    def test_the_terms_of_a_weighed_reward_count_as_they_add_to_it(self) -> None:
        terms = {"reward/right": self.right, "reward/length": self.length}
        gated = {"reward/right/weighted": self.right, "reward/length/weighted": 2 * self.length * self.right}
        score = np.maximum(self.right + gated["reward/length/weighted"], 3.0)  # clipped: no sum of terms
        found = check(OneComponent(), self.history(0.5, 4.5), table(score=score, **terms, **gated))
        assert found.metric == "reward/length" and found.rows[0] == "r7"
        even = {**gated, "reward/length/weighted": 0.05 * self.length * self.right}
        assert check(OneComponent(), self.history(0.5, 4.5), table(score=score, **terms, **even)) is None

    def test_numbers_that_are_no_parts_of_the_score_are_no_components(self) -> None:
        parts = {"reward/thinks": self.right, "reward/length": self.length}
        assert check(OneComponent(), self.history(0.5, 4.5), table(score=self.length**2, **parts)) is None


class TestShares:
    def test_shares_of_a_mean_over_tokens_add_up_to_it(self) -> None:
        found = shares(table(kl=[1.0, 6.0, 1.0], response_tokens=[2, 4, 2]), "kl/ref")
        assert found is not None and found.total == pytest.approx(8 / 8)
        assert found.rows[0] == 1 and found.shares.tolist() == pytest.approx([6 / 8, 1 / 8, 1 / 8])
        assert found.half().tolist() == [1]

    def test_shares_of_a_change_are_measured_from_the_earlier_value(self) -> None:
        found = shares(table(kl=[2.0, 8.0], response_tokens=[4, 4]), "update/kl/ref", against=0.5)
        assert found is not None and found.total == pytest.approx(1.25 - 0.5)
        assert found.shares.tolist() == pytest.approx([1.0, 0.0])

    def test_a_metric_that_no_column_holds_is_shared_by_the_weight_of_the_rows_in_the_loss(self) -> None:
        rows = table(score=[0.0, 1.0], loss_weight=[0.1, 0.5], advantage_max=[-1.0, 1.0])
        found = shares(rows, "actor/grad_norm")
        assert found is not None and found.basis == BASIS_OF_SIZE and found.rows[0] == 1
        assert shares(rows, "actor/grad_norm", against=0.1) is None

    def test_rows_without_a_number_have_no_share(self) -> None:
        found = shares(table(score=[None, 2.0, 0.0]), "reward/mean")
        assert found is not None and found.total == 1.0 and found.shares[0] == 1.0
        assert blamable(table(score=[1.0])) == ["reward/mean", "response_length/mean"]

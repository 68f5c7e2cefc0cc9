"""Rules of alarms on histories written by hand: `rules.py`, `run_rules.py`, `history.py` and `rule.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from flowrl.run.alarms.history import History
from flowrl.run.alarms.rule import Check, Rule
from flowrl.run.alarms.rules import Above, Falls, Jump
from flowrl.run.alarms.run_rules import HeldOutFalls, Mismatch, NoRecording, NotFinite, NothingUpdated, Slow


def history(validations: Sequence[tuple[int, float]] = (), facts: Any = None, **series: Sequence[float]) -> History:
    """A history of metrics; ``kl_ref`` is ``kl/ref``."""
    length = len(next(iter(series.values()), ()))
    steps = [{"step": i + 1.0, **{k.replace("_", "/", 1): v[i] for k, v in series.items()}} for i in range(length)]
    return History(steps, [{"step": s, "val/reward/mean": v} for s, v in validations], facts=facts or {})


def fires(rule: Rule, **series: Any) -> bool:
    return rule.check(history(**series)) is not None


@pytest.mark.parametrize(
    ("rule", "quiet", "loud"),
    [
        (Above("kl/ref", 1.0), [0.5, 1.0], [0.5, 1.1]),
        (Above("kl/ref", 0.2, times=2), [0.1, 0.1, 0.15, 0.29], [0.1, 0.1, 0.15, 0.31]),
        (Above("kl/ref", 0.2, times=2), [0.5], [0.0, 0.3]),  # nothing is known before the first step
        (Above("kl/ref", 0.2, times=2, early=1.0), [0.0, 0.9], [0.0, 1.1]),
        (Above("kl/ref", 0.2, times=2, early=1.0), [0.0, 0.0, 0.1, 0.1], [0.0, 0.0, 0.1, 0.3]),
        (Jump("kl/ref", 5), [1.0, 1.0, 5.1], [1.0, 1.0, 1.0, 5.1]),  # three steps are usual
        (Jump("kl/ref", 5, floor=6.0), [1.0, 1.0, 1.0, 5.5], [1.0, 1.0, 1.0, 6.5]),
        (Jump("kl/ref", 1.5, of="start"), [1.0, 3.0, 1.4], [1.0, 0.1, 1.6]),
        (Jump("kl/ref", 2), [9.0, *[1.0] * 9, 2.5], [9.0, *[1.0] * 10, 2.5]),  # ten steps are recent
        (Falls("kl/ref", 0.5), [1.0, 0.5], [1.0, 0.4]),
        (Falls("kl/ref", 0.5), [-1.0, -9.0], [1.0, 2.0, 0.4]),
        (Falls("kl/ref", 0.6, of="best", steps=2), [1.0, 1.0, 0.5, 1.0], [0.1, 1.0, 1.0, 0.5, 0.5]),
        (Falls("kl/ref", 0.6, of="best", steps=2), [1.0, 0.5, 0.5], [1.0, 1.0, 0.5, 0.5]),
    ],
    ids=str,
)
def test_a_rule_about_a_metric_fires_beyond_its_limit_only(
    rule: Rule, quiet: Sequence[float], loud: Sequence[float]
) -> None:
    assert not fires(rule, kl_ref=quiet)
    assert fires(rule, kl_ref=loud)


def test_a_finding_names_metric_value_and_what_was_usual() -> None:
    found = Above("kl/ref", 0.2, times=2).check(history(kl_ref=[0.1, 0.3, 0.25, 3.5]))
    assert found is not None and (found.metric, found.value, found.usual) == ("kl/ref", 3.5, 0.3)
    assert "3.5" in found.message and "0.3" in found.message


def test_a_metric_of_two_nodes_is_found_under_both_names() -> None:
    steps = [{"step": 1.0, "first/kl/ref": 0.1, "second/kl/ref": 2.0}]
    found = Above("kl/ref", 1.0).check(History(steps))
    assert found is not None and found.metric == "second/kl/ref"


def test_a_drop_within_the_noise_of_the_rows_is_none() -> None:
    rule = Falls("reward/mean", 0.6, of="best", steps=2, spreads=1.0)
    falling: dict[str, Any] = {"reward_mean": [0.4, 0.4, 0.2, 0.2]}
    assert not fires(rule, **falling, reward_std=[0.3] * 4)
    assert fires(rule, **falling, reward_std=[0.1] * 4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_is_named(value: float) -> None:
    found = NotFinite().check(history(kl_ref=[0.1, value]))
    assert found is not None and (found.metric, found.usual) == ("kl/ref", 0.1)
    assert not fires(NotFinite(), kl_ref=[value, 0.1])


@pytest.mark.parametrize("metric", ["actor_lr", "actor_grad_norm", "kl_ref"])
def test_a_number_that_is_exactly_0_since_the_start_means_that_nothing_is_updated(metric: str) -> None:
    assert fires(NothingUpdated(), **{metric: [0.0, 0.0, 0.0]})
    assert not fires(NothingUpdated(), **{metric: [0.0, 0.0]})  # a warm-up starts at 0
    assert not fires(NothingUpdated(), **{metric: [0.1, 0.0, 0.0, 0.0]})  # a schedule may end at 0


def test_held_out_scores_that_fall_while_the_training_reward_rises_are_an_alarm() -> None:
    rising: dict[str, Any] = {"reward_mean": [i / 20 for i in range(20)]}
    fall = [(0, 0.2), (4, 0.6), (8, 0.8), (12, 0.5), (16, 0.4)]
    assert fires(HeldOutFalls(), **rising, validations=fall)
    assert not fires(HeldOutFalls(), **rising, validations=fall[:4])
    assert not fires(HeldOutFalls(), **rising, validations=[(step, score + 1) for score, (step, _) in enumerate(fall)])
    assert not fires(HeldOutFalls(), reward_mean=rising["reward_mean"][::-1], validations=fall)


def test_a_mismatch_beyond_the_calibrated_threshold_is_an_alarm() -> None:
    assert not fires(Mismatch(), **{"rollout_logp_diff_mean": [0.2]})
    assert not fires(Mismatch(), **{"rollout_logp_diff_mean": [0.2], "rollout_alarm_above": [0.3]})
    assert fires(Mismatch(), **{"rollout_logp_diff_mean": [0.4], "rollout_alarm_above": [0.3]})


def test_a_node_that_takes_much_longer_than_usual_is_slow() -> None:
    assert not fires(Slow(), timing_generate=[10.0, 10.0, 10.0, 59.0])
    assert not fires(Slow(), timing_generate=[20.0, 20.0, 20.0, 100.0])
    found = Slow().check(history(timing_generate=[10.0, 10.0, 10.0, 70.0]))
    assert found is not None and found.node == "generate"


def test_a_node_that_is_still_open_is_slow() -> None:
    found = Slow().check(history(timing_generate=[10.0] * 4, facts={"open": ("generate", 90.0)}))
    assert found is not None and found.node == "generate" and found.value == 90.0


def test_a_recording_that_stopped_and_a_full_disk_are_alarms() -> None:
    assert fires(NoRecording(), kl_ref=[0.1], facts={"stopped": "no space left"})
    assert fires(NoRecording(), kl_ref=[0.1], facts={"free": 10**8})
    assert not fires(NoRecording(), kl_ref=[0.1], facts={"free": 10**10})


def test_a_function_is_a_rule() -> None:
    def long(history: History) -> str | None:
        return "too long" if (history.now("kl/ref") or 0) > 1 else None

    assert fires(Check(long), kl_ref=[2.0]) and not fires(Check(long), kl_ref=[0.5])
    assert "long" in str(Check(long))


def test_a_rule_is_written_with_the_settings_that_differ_from_its_defaults() -> None:
    assert str(Above("kl/ref", 1.0, action="stop")) == "Above(action='stop', metric='kl/ref', limit=1.0)"

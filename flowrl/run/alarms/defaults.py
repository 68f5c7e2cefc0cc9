"""`DEFAULT`: the alarms of a run that sets none."""

from __future__ import annotations

from flowrl.run.alarms.row_rules import ConstantReward, GroupsAlike, OneComponent, Skips, Truncated
from flowrl.run.alarms.rule import Rule
from flowrl.run.alarms.rules import Above, Falls, Jump
from flowrl.run.alarms.run_rules import HeldOutFalls, Mismatch, NoRecording, NotFinite, NothingUpdated, Slow

DEFAULT: tuple[Rule, ...] = (
    NotFinite(),
    Above("reward/errors", 0),
    Above("episodes/failed", 0),
    NothingUpdated(),
    ConstantReward(),
    GroupsAlike(),
    Skips(),
    Truncated(),
    Above("kl/ref", 0.2, times=2, early=1.0),
    Jump("grad_norm", 5, floor=1.0),
    Jump("actor/entropy", 1.5, of="start", floor=1.0),
    Falls("actor/entropy", 0.005),
    Falls("reward/mean", 0.6, of="best", steps=2, spreads=1.0),
    OneComponent(),
    HeldOutFalls(),
    Mismatch(),
    Slow(),
    NoRecording(),
)
"""Each with a floor, a direction and a recent reference, so that a healthy run fires none of them."""

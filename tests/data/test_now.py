"""`Now` in a job and in a call by hand; its parts cannot be injected on their own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from flowrl import INJECTED, Metrics, Now, Operator, operator
from flowrl import columns as c
from flowrl.core.operators.session import Session
from flowrl.data.balance import Shard
from flowrl.data.now import ONLY, NowByHand, Round
from tests.support.errors import raises

ONES = torch.ones(1, 2)


class Moment(Operator):
    """Reports everything in `Now` but the step."""

    def __call__(self, values: c.Values, now: Now = INJECTED, metrics: Metrics = INJECTED) -> c.Values:
        metrics.max("round", now.round.number)
        metrics.max("ahead", now.lag)
        metrics.max("shared", now.shard is not None)
        now.waits.clear()
        return values


class Later(Moment):
    """Multiplies by the step."""

    def __call__(self, values: c.Values, when: Now = INJECTED) -> c.Values:  # type: ignore[override]
        return super().__call__(values) * when.step


def test_direct_calls_have_no_step() -> None:
    metrics = Metrics()
    Moment()(ONES, metrics=metrics)
    assert metrics.compute() == {"round": 0.0, "ahead": 0.0, "shared": 0.0}
    with raises("session.no-job", node="later", parameter="when") as caught:
        Later()(ONES)
    assert "when=Now(0)" in caught.value.message
    assert Later()(ONES, when=Now(3)).tolist() == [[3.0, 3.0]]
    assert "NowByHand" in repr(NowByHand("later", "when"))


def test_a_session_injects_its_current_step() -> None:
    session, now = Session({}, seed=0), Now(7, Round(2), Shard(0, 2, None, None), lag=1)
    with session.active():
        session.begin_step(4)
        assert Later()(ONES).tolist() == [[4.0, 4.0]] and session.now.round == ONLY
        session.begin_step(4, now)
        assert Later()(ONES).tolist() == [[7.0, 7.0]]
    assert session.all_metrics().compute() == {"round": 2.0, "ahead": 1.0, "shared": 1.0}
    session.begin_step(4, Now(7))
    key = session.key("later")
    session.begin_step(4)
    assert key == session.key("later")  # keys depend on the step of the session
    assert pickle.loads(pickle.dumps(now)) == copy.deepcopy(now) == now
    assert Now(0).waits is not Now(0).waits


@pytest.mark.parametrize(("cls", "part"), [(Shard, "shard"), (Round, "round")])
@pytest.mark.parametrize("optional", [False, True])
def test_fields_of_now_cannot_be_injected(cls: Any, part: str, optional: bool) -> None:
    annotation = cls | None if optional else cls
    namespace: dict[str, Any] = {"c": c, "annotation": annotation, "INJECTED": INJECTED}
    exec(f"def call(self, values: c.Values, {part}: annotation = INJECTED) -> c.Values: ...", namespace)
    with raises("operator.injected-parameter", found=cls.__name__) as error:
        type("Old", (Operator,), {"__call__": namespace["call"], "__module__": __name__})
    exec(f"def old(values: c.Values, *, {part}: annotation = INJECTED) -> c.Values: ...", namespace)
    assert f"Old.__call__({part})" in str(error.value.facts["where"]) and f"now.{part}" in error.value.message
    with raises("operator.injected-parameter", found=cls.__name__):
        operator(namespace["old"])

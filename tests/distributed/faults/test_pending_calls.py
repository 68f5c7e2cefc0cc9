"""`PendingCalls` with a fake clock and a fake of Ray's calls; Ray is not started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from flowrl.distributed.faults import faults, pending_calls
from flowrl.distributed.faults import ray_processes as watch
from flowrl.distributed.faults.pending_calls import GRACE_SECONDS, PendingCalls
from flowrl.distributed.place import Split
from flowrl.protocols.mesh import Mesh
from flowrl.run.placement.place import ProcessSpec
from tests.support.errors import raises

ACTOR = [ProcessSpec(("actor",), rank, Mesh(fsdp=2), (rank,)) for rank in range(2)]
ROLLOUT = ProcessSpec(("rollout",), 0, Mesh(), (2,))
HOSTS = [*ACTOR, ROLLOUT, None]


class Ray:
    """A fake of Ray: references are names; their results are ready at given times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.times, self.pings = 0.0, dict[str, float](), list[str]()
        self.gone = set[ProcessSpec | None]()
        monkeypatch.setattr(pending_calls, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(watch, "wait", self._wait)
        look = SimpleNamespace(wait=lambda refs, timeout: ([ref for ref in refs if self._is_done(ref)], []))
        monkeypatch.setattr(pending_calls, "ray", look)
        monkeypatch.setattr(faults.ray, "get", self._get)

    def actor_of(self, host: ProcessSpec | None) -> Any:
        """An actor that counts pings, and responds at once or never."""

        def ping() -> str:
            self.pings.append(faults.named(host))
            ref = f"ping {len(self.pings)} of {faults.named(host)}"
            self.times[ref] = self.now if host is None or host in self.gone else float("inf")
            return ref

        return SimpleNamespace(pid=SimpleNamespace(remote=ping))

    def _is_done(self, ref: str) -> bool:
        return self.times.get(ref, float("inf")) <= self.now

    def _wait(self, refs: list[str], seconds: float) -> tuple[list[str], list[str]]:
        until = self.now + max(0.0, seconds)
        self.now = min([until, *(max(self.now, self.times[ref]) for ref in refs if ref in self.times)])
        done = [ref for ref in refs if self._is_done(ref)]
        return done, [ref for ref in refs if ref not in done]

    def _get(self, ref: str, timeout: float) -> int:
        if any(ref.endswith(faults.named(host)) for host in self.gone):
            raise ActorDiedError
        return 1


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    return Ray(monkeypatch)


def calls_of(ray: Ray, deadline: float = 100.0) -> PendingCalls:
    return PendingCalls(Split(2, 1, deadline=deadline), ray.actor_of, lambda: HOSTS)


def test_finished_calls_are_returned_once(ray: Ray) -> None:
    calls = calls_of(ray)
    ray.times |= {"a": 3.0, "b": 3.0}
    for ref in "abc":
        calls.add(ref, ROLLOUT, f"generate {ref}", "generate")
    assert calls.next(["a", "b", "c"]) == ["a", "b"]
    ray.times["c"] = 4.0
    assert calls.next(["c"]) == ["c"]
    assert ray.now == 4.0
    assert not ray.pings


@pytest.mark.parametrize("host", [ACTOR[1], None])
def test_a_dead_host_is_detected_within_seconds_if_its_call_never_returns(host: ProcessSpec | None, ray: Ray) -> None:
    """The call has no result, but a ping after the death fails."""
    calls = calls_of(ray, 3600.0)
    calls.add("unanswered", host, "update_actor in step 3", "update_actor")
    calls.add("busy", ROLLOUT, "generate in step 5", "generate")
    ray.gone.add(host)
    with raises("host.died", task="update_actor in step 3", host=faults.named(host)):
        calls.next(["unanswered", "busy"])
    assert ray.now <= 3 * GRACE_SECONDS


def test_a_busy_host_has_one_pending_ping_and_an_idle_host_gets_many(ray: Ray) -> None:
    """A host responds after its work, so one ping is pending; the general host responds at once."""
    calls = calls_of(ray)
    ray.times["done"] = 65.0
    calls.add("done", ROLLOUT, "generate in step 1", "generate")
    calls.add("judged", None, "judge in step 1", "judge")
    assert calls.next(["done", "judged"]) == ["done"]
    assert ray.pings.count("rollout rank 0") == 1
    assert ray.pings.count("the general host") == 6


def test_each_call_has_its_own_deadline(ray: Ray) -> None:
    """A later call with a shorter deadline fails first."""
    calls = calls_of(ray)
    calls.add("slow", ACTOR[0], "loading actor", "build", 600.0)
    ray.now = 30.0
    calls.add("stuck", ROLLOUT, "generate in step 2", "generate")
    with raises("host.stuck", task="generate in step 2", host="rollout rank 0", seconds=100.0):
        calls.next(["slow", "stuck"])
    assert ray.now == 130.0
    calls.discard(["stuck"])
    with raises("host.stuck", task="loading actor", host="actor rank 0", seconds=600.0):
        calls.next(["slow"])
    assert ray.now == 600.0


def test_a_straggler_is_logged_each_time_its_duration_doubles(ray: Ray, caplog: pytest.LogCaptureFixture) -> None:
    """First after a tenth of its deadline; the message names the calls of the other hosts."""
    calls = calls_of(ray, 1000.0)
    for rank in range(2):
        calls.add(f"update {rank}", ACTOR[rank], "update_actor in step 3", "update_actor")
    ray.now = 40.0
    calls.add("next_step", ROLLOUT, "generate in step 5", "generate")
    ray.times |= {"update 0": 50.0, "next_step": 1060.0}
    assert calls.next(["update 0", "update 1", "next_step"]) == ["update 0"]
    assert not caplog.messages
    ray.times["update 1"] = 460.0
    assert calls.next(["update 1", "next_step"]) == ["update 1"]
    [first, next_step, *later] = caplog.messages
    assert first == (
        "update_actor in step 3 has run for 100 s without a response from actor rank 1. Meanwhile: rollout rank 0 has "
        "run generate in step 5 for 60 s; idle: actor rank 0, the general host. It counts as stuck after 1000 s "
        "(Split(deadline=...))."
    )
    assert next_step.startswith("generate in step 5 has run for 100 s without a response from rollout rank 0.")
    assert "Meanwhile: actor rank 1 has run update_actor in step 3 for 140 s; idle" in next_step
    assert [message.partition(" without")[0] for message in later] == [
        f"{what} has run for {seconds} s"
        for what, seconds in [
            ("update_actor in step 3", 200),
            ("generate in step 5", 200),
            ("update_actor in step 3", 400),
            ("generate in step 5", 400),
        ]
    ]


def test_a_usually_slow_node_is_not_a_straggler(ray: Ray, caplog: pytest.LogCaptureFixture) -> None:
    """It becomes one when it takes twice as long as its longest call so far."""
    calls = calls_of(ray, 1000.0)
    for step, seconds in enumerate((300.0, 500.0, 610.0)):
        ray.times[f"{step}"] = ray.now + seconds
        calls.add(f"{step}", ROLLOUT, f"generate in step {step + 1}", "generate")
        assert calls.next([f"{step}"]) == [f"{step}"]
    assert [message.partition(" without")[0] for message in caplog.messages] == [
        "generate in step 1 has run for 100 s",
        "generate in step 1 has run for 200 s",
    ]

"""Who is waited for, on a clock of the test's own and with answers that it gives; no Ray is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from flowrl.distributed.faults import faults
from flowrl.distributed.faults import pending_calls as vigil
from flowrl.distributed.faults import ray_processes as watch
from flowrl.distributed.faults.faults import HostDiedError
from flowrl.distributed.faults.pending_calls import GRACE_SECONDS, PendingCalls
from flowrl.distributed.place import Split
from flowrl.errors import NodeError
from flowrl.run.placement.place import ProcessSpec

ACTOR = [ProcessSpec(("actor",), rank, 2, (rank,)) for rank in range(2)]
ROLLOUT = ProcessSpec(("rollout",), 0, 1, (2,))
HOSTS = [*ACTOR, ROLLOUT, None]


class Ray:
    """What the driver sees of Ray: refs are names, whose answers come at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.come, self.pings = 0.0, dict[str, float](), list[str]()
        self.gone = set[ProcessSpec | None]()
        monkeypatch.setattr(vigil, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(watch, "wait", self._wait)
        look = SimpleNamespace(wait=lambda refs, timeout: ([ref for ref in refs if self._is_there(ref)], []))
        monkeypatch.setattr(vigil, "ray", look)
        monkeypatch.setattr(faults.ray, "get", self._get)

    def actor_of(self, host: ProcessSpec | None) -> Any:
        """One that counts how often it is asked whether it is there, and answers at once, or never."""

        def ping() -> str:
            self.pings.append(faults.named(host))
            ref = f"ping {len(self.pings)} of {faults.named(host)}"
            self.come[ref] = self.now if host is None or host in self.gone else float("inf")
            return ref

        return SimpleNamespace(pid=SimpleNamespace(remote=ping))

    def _is_there(self, ref: str) -> bool:
        return self.come.get(ref, float("inf")) <= self.now

    def _wait(self, refs: list[str], seconds: float) -> tuple[list[str], list[str]]:
        until = self.now + max(0.0, seconds)
        self.now = min([until, *(max(self.now, self.come[ref]) for ref in refs if ref in self.come)])
        there = [ref for ref in refs if self._is_there(ref)]
        return there, [ref for ref in refs if ref not in there]

    def _get(self, ref: str, timeout: float) -> int:
        if any(ref.endswith(faults.named(host)) for host in self.gone):
            raise ActorDiedError
        return 1


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Ray:
    return Ray(monkeypatch)


def vigil_of(there: Ray, deadline: float = 100.0) -> PendingCalls:
    return PendingCalls(Split(2, 1, deadline=deadline), there.actor_of, lambda: HOSTS)


def test_what_comes_is_returned_and_each_is_waited_for_once(there: Ray) -> None:
    watched = vigil_of(there)
    there.come |= {"a": 3.0, "b": 3.0}
    for ref in "abc":
        watched.add(ref, ROLLOUT, f"generate {ref}", "generate")
    assert watched.next(["a", "b", "c"]) == ["a", "b"]
    there.come["c"] = 4.0
    assert watched.next(["c"]) == ["c"]
    assert there.now == 4.0
    assert not there.pings


@pytest.mark.parametrize("host", [ACTOR[1], None])
def test_whoever_is_gone_though_ray_never_said_so_is_named_within_seconds(host: ProcessSpec | None, there: Ray) -> None:
    """What it was asked as it died is never answered; what it is asked afterwards says that it is gone."""
    watched = vigil_of(there, 3600.0)
    watched.add("lost", host, "update_actor in step 3", "update_actor")
    watched.add("busy", ROLLOUT, "generate in step 5", "generate")
    there.gone.add(host)
    with pytest.raises(HostDiedError, match=f"update_actor in step 3 lost {faults.named(host)}, whose process died"):
        watched.next(["lost", "busy"])
    assert there.now <= 3 * GRACE_SECONDS


def test_whoever_works_is_asked_once_and_the_general_host_again(there: Ray) -> None:
    """A host answers behind its work, so that one call waits there; the general host answers at once."""
    watched = vigil_of(there)
    there.come["done"] = 65.0
    watched.add("done", ROLLOUT, "generate in step 1", "generate")
    watched.add("judged", None, "judge in step 1", "judge")
    assert watched.next(["done", "judged"]) == ["done"]
    assert there.pings.count("rollout rank 0") == 1
    assert there.pings.count("the general host") == 6


def test_each_has_its_own_time(there: Ray) -> None:
    """Also one that was asked later, and has less."""
    watched = vigil_of(there)
    watched.add("slow", ACTOR[0], "loading actor", "build", 600.0)
    there.now = 30.0
    watched.add("stuck", ROLLOUT, "generate in step 2", "generate")
    said = "generate in step 2 is stuck on rollout rank 0: nothing was heard for 100 s"
    with pytest.raises(NodeError, match=said):
        watched.next(["slow", "stuck"])
    assert there.now == 130.0
    watched.forget(["stuck"])
    with pytest.raises(NodeError, match="loading actor is stuck on actor rank 0: nothing was heard for 600 s"):
        watched.next(["slow"])
    assert there.now == 600.0


def test_a_straggler_is_named_while_it_is_waited_for(there: Ray, caplog: pytest.LogCaptureFixture) -> None:
    """At a tenth of its time, and then each time that it has taken twice as long; and what the others do."""
    watched = vigil_of(there, 1000.0)
    for rank in range(2):
        watched.add(f"update {rank}", ACTOR[rank], "update_actor in step 3", "update_actor")
    there.now = 40.0
    watched.add("ahead", ROLLOUT, "generate in step 5", "generate")
    there.come |= {"update 0": 50.0, "ahead": 1060.0}
    assert watched.next(["update 0", "update 1", "ahead"]) == ["update 0"]
    assert not caplog.messages
    there.come["update 1"] = 460.0
    assert watched.next(["update 1", "ahead"]) == ["update 1"]
    [first, ahead, *later] = caplog.messages
    assert first == (
        "update_actor in step 3 is still waited for, 100 s after it began: actor rank 1 has not answered. Meanwhile: "
        "rollout rank 0 has been at generate in step 5 for 60 s; idle are actor rank 0, the general host. It counts as "
        "stuck after 1000 s: Split(deadline=...)."
    )
    assert ahead.startswith("generate in step 5 is still waited for, 100 s after it began: rollout rank 0 has")
    assert "Meanwhile: actor rank 1 has been at update_actor in step 3 for 140 s; idle" in ahead
    told = [message.partition(":")[0] for message in later]
    assert told == [
        f"{what} is still waited for, {seconds} s after it began"
        for what, seconds in [
            ("update_actor in step 3", 200),
            ("generate in step 5", 200),
            ("update_actor in step 3", 400),
            ("generate in step 5", 400),
        ]
    ]


def test_what_takes_long_each_time_is_no_straggler(there: Ray, caplog: pytest.LogCaptureFixture) -> None:
    """It is one where it takes twice as long as it ever took."""
    watched = vigil_of(there, 1000.0)
    for step, seconds in enumerate((300.0, 500.0, 610.0)):
        there.come[f"{step}"] = there.now + seconds
        watched.add(f"{step}", ROLLOUT, f"generate in step {step + 1}", "generate")
        assert watched.next([f"{step}"]) == [f"{step}"]
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "generate in step 1 is still waited for, 100 s after it began",
        "generate in step 1 is still waited for, 200 s after it began",
    ]

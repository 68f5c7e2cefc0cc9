"""OpenEnv environments, played by a scripted policy; with OpenEnv's own classes where it is installed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl import Graph
from flowrl.episodes.environment import Row
from flowrl.episodes.openenv import OpenEnv
from flowrl.episodes.tools import InvalidToolCall
from flowrl.graphs import grpo
from flowrl.operators import Interact
from tests.episodes.scripted import played, row
from tests.support.kernel import exact


class Countdown:
    """An environment with OpenEnv's interface: it counts down from the last digit of its seed."""

    def __init__(self) -> None:
        self.closed = False

    def reset(self, seed: int | None = None) -> Any:
        self.left = 2 + (seed or 0) % 2
        return SimpleNamespace(left=self.left, reward=None, done=False)

    def step(self, action: int) -> Any:
        self.left -= action
        return SimpleNamespace(left=self.left, reward=self.left == 0, done=self.left <= 0)

    def step_async(self, action: int) -> Any:
        raise AssertionError("what blocks is stepped in a thread")

    def close(self) -> None:
        self.closed = True


class Blocking(Countdown):
    """Its blocking calls must not block other episodes."""

    pays = True

    def step(self, action: int) -> Any:
        assert threading.current_thread().name == "flowrl-environment"
        observation = super().step(action)
        return observation if self.pays else SimpleNamespace(left=observation.left, reward=None, done=observation.done)


class Client:
    """A client of the same environment: calls are awaited, and results wrap the observation."""

    def __init__(self) -> None:
        self.inner = Countdown()

    async def reset(self, **given: Any) -> Any:
        return self._result(self.inner.reset(**given))

    async def step(self, action: int) -> Any:
        return self._result(self.inner.step(action))

    async def close(self) -> None:
        self.inner.close()

    def _result(self, observation: Any) -> Any:
        return SimpleNamespace(observation=observation, reward=observation.reward, done=observation.done)


class Counting(OpenEnv):
    invalid_reward = -0.5

    def make(self) -> Any:
        return Blocking()

    def act(self, text: str) -> int:
        if text not in ("1", "2"):
            raise InvalidToolCall("take 1 or 2")
        return int(text)

    def observation_text(self, observation: Any) -> str:
        return f"{observation.left} left"


class CountingByClient(Counting):
    def make(self) -> Any:
        return Client()


def seeded(seed: int) -> list[Row]:
    return [row(0)._replace(extra_info={"seed": seed})]


@pytest.mark.parametrize("environment", [Counting, CountingByClient])
def test_openenv_style_environments_are_played(environment: Any) -> None:
    [one], _ = played(environment, lambda name, turn: ["1", "none", "2"][turn], rows=seeded(7))
    assert (one.ended, one.fault, one.chat.rewards) == ("done", None, [0.0, -0.5, 1.0])
    contents = [message["content"] for message in one.chat.messages]
    assert contents == ["go\n\n3 left", "1", "2 left", "none", "error: take 1 or 2", "2"]


def test_an_environment_without_rewards_places_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Blocking, "pays", False)
    [one], _ = played(Counting, lambda name, turn: "1", rows=seeded(0))
    assert one.ended == "done" and not one.chat.rewarded


@pytest.mark.parametrize("environment", [Counting, CountingByClient])
def test_each_episode_has_an_environment_which_is_closed(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = environment.make
    monkeypatch.setattr(environment, "make", lambda self: made.append(make(self)) or made[-1])
    played(environment, lambda name, turn: "1", count=3, turns=9)
    assert len(made) == 3 and all(getattr(one, "inner", one).closed for one in made)


def test_openenv_environments_are_serialized_with_their_graph() -> None:
    graph = grpo(exact, n=2).edit(replace={"generate": Interact(Counting, max_turns=3, context=99)}, drop=["reward"])
    assert Graph.from_dict(graph.to_dict()).fingerprint() == graph.fingerprint()


@pytest.fixture(scope="module")
def openenv_package() -> Iterator[tuple[Any, Any]]:
    """The same environment with OpenEnv's classes: in this process, and by a client of its server."""
    interfaces = pytest.importorskip("openenv.core.env_server.interfaces", reason="needs pip install 'flowrl[openenv]'")
    import openenv
    import uvicorn
    from openenv.core.env_server import http_server, types

    class Take(types.Action):  # type: ignore[misc, name-defined]
        number: int

    class Remaining(types.Observation):  # type: ignore[misc, name-defined]
        left: int

    class PackageEnvironment(interfaces.Environment):  # type: ignore[misc, name-defined]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Remaining:
            self.inner = Countdown()
            return Remaining(left=self.inner.reset(seed).left)

        def step(self, action: Take, timeout_s: float | None = None, **given: Any) -> Remaining:
            observation = self.inner.step(action.number)
            return Remaining(left=observation.left, reward=observation.reward, done=observation.done)

        @property
        def state(self) -> Any:
            return types.State()

    class InProcess(Counting):
        def make(self) -> Any:
            return PackageEnvironment()

        def act(self, text: str) -> Any:
            return Take(number=super().act(text))

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = http_server.create_fastapi_app(PackageEnvironment, Take, Remaining, max_concurrent_envs=8)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)

    class ByClient(InProcess):
        def make(self) -> Any:
            return openenv.GenericEnvClient(base_url=f"http://127.0.0.1:{port}")

        def act(self, text: str) -> Any:
            return super().act(text).model_dump()

        def observation_text(self, observation: Any) -> str:
            return f"{observation['left']} left"

    yield InProcess, ByClient
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize("by_client", [False, True])
@pytest.mark.filterwarnings("ignore")  # warnings of OpenEnv and its server
def test_environments_of_the_openenv_package_are_played(openenv_package: Any, by_client: bool) -> None:
    rows = [row(i)._replace(extra_info={"seed": i}) for i in range(4)]
    episodes, _ = played(openenv_package[by_client], lambda name, turn: "1", rows=rows)
    assert [(one.fault, one.chat.rewards) for one in episodes] == [(None, [0.0, 1.0]), (None, [0.0, 0.0, 1.0])] * 2

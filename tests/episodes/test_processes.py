"""Environments and tools in worker processes: those that hang, crash or leak are terminated and counted."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flowrl import references
from flowrl.episodes import Answer, Environment, Toolbox
from flowrl.episodes.play import EpisodeResult
from flowrl.episodes.processes import (
    Process,
    ProcessEnvironment,
    call_tool,
    close_environment_servers,
    environment_server,
    reference_of,
)
from flowrl.errors import ParameterError
from flowrl.operators import Interact
from flowrl.workers.fork_server import ForkServer
from tests.episodes.misbehaving import SOURCE
from tests.episodes.scripted import played, row
from tests.operators.reward.test_pool import wait_until_ended
from tests.support.errors import raises


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("user") / "environments.py"
    path.write_text(SOURCE)
    yield path
    close_environment_servers()


def play_in_processes(
    file: Path, name: str, count: int = 1, seconds: float = 60.0, tries: int = 1
) -> list[EpisodeResult]:
    """Play episodes of an environment of the file in worker processes."""
    for recorded in file.parent.glob("*[!y]"):
        if recorded.is_file():
            recorded.unlink()
    environment = references.resolve(f"{file}:{name}")
    return played(
        environment,
        lambda name, turn: f"says {turn}",
        count=count,
        seconds=seconds,
        tries=tries,
        server=server_for(file),
    )[0]


def server_for(file: Path) -> ForkServer:
    """A fork server for everything in the file."""
    return environment_server((f"{file}:Counts",))


def recorded(file: Path, name: str) -> list[str]:
    return (file.parent / name).read_text().split()


def test_an_environment_has_state_across_turns_and_its_process_ends(file: Path) -> None:
    episodes = play_in_processes(file, "Counts", count=6)
    assert all((one.ended, one.chat.rewards) == ("done", [1.0, 2.0, 3.0]) for one in episodes)
    pids = {int(pid) for pid in recorded(file, "pids")}
    assert len(pids) == 6 and os.getpid() not in pids
    assert sorted(recorded(file, "closed")) == [f"row-{i}" for i in range(6)]
    wait_until_ended(pids)


def test_a_hanging_environment_is_killed_with_its_children_and_retried(file: Path) -> None:
    episodes = play_in_processes(file, "Hangs", count=4, seconds=1.5, tries=2)
    assert [(one.ended, one.tries) for one in episodes] == [("done", 1), ("done", 2)] * 2
    assert all(one.chat.rewards == [1.0, 2.0, 3.0] for one in episodes)
    pids = {int(pid) for pid in recorded(file, "pids")}
    assert len(pids) == 8  # four environments, two more for the second tries, two children
    wait_until_ended(pids)


@pytest.mark.parametrize(
    ("name", "seconds", "code", "words"),
    [
        ("Blocks", 1.0, "episode.timeout", "its environment took more than 1 s"),
        ("Crashes", 60.0, "episode.process-died", "it crashed, exited, or was killed"),
        ("Leaves", 60.0, "episode.environment-failed", "SystemExit: 3 (at "),
        ("Raises", 60.0, "episode.environment-failed", "KeyError: 'planted' (at "),
        ("Odd", 60.0, "episode.invalid-reply", "'a text'; expected a Reply("),
        ("Unsendable", 60.0, "episode.not-sendable", "cannot be sent from the environment's process ("),
        ("Announces", 60.0, "episode.process-died", "announces 1152921504606846976 bytes; expected at most 16777216"),
        ("Forges", 60.0, "episode.invalid-reply", "returned 5; expected a Reply("),
        ("ForgesDone", 60.0, "episode.invalid-reply", "done='yes'"),
        ("ForgesReward", 60.0, "episode.invalid-reward", "The reward is inf"),
        ("ForgesRaised", 60.0, "episode.process-died", "sent something that is not a reply (TypeError"),
        ("ForgesFacts", 60.0, "c", "forged"),
        ("Truncates", 60.0, "episode.process-died", "it crashed, exited, or was killed"),
        ("Floods", 60.0, "episode.not-sendable", "expected at most 16777216. Shorten it."),
        ("Nests", 60.0, "episode.not-sendable", "RecursionError"),
        ("Closes", 60.0, "episode.process-died", "it crashed, exited, or was killed"),
        ("Unreadable", 60.0, "episode.environment-failed", "Broken: (its text cannot be read: ValueError)"),
    ],
)
def test_an_error_in_the_process_keeps_its_code(file: Path, name: str, seconds: float, code: str, words: str) -> None:
    (one,) = play_in_processes(file, name, seconds=seconds)
    assert one.ended == "failed" and one.fault is not None
    assert one.fault.code == code and words in one.fault.message


def test_an_error_in_the_process_keeps_its_facts(file: Path) -> None:
    (one,) = play_in_processes(file, "Odd")
    assert one.fault is not None and one.fault.facts["found"] == "'a text'"


ATTACKS = {
    "AttacksByMessage": "episode.not-sendable",
    "AttacksByReward": "episode.invalid-reward",
    "AttacksByError": "episode.environment-failed",
    "AttacksByDataclass": "episode.invalid-reply",
    "AttacksBySocket": "episode.process-died",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_that_a_process_sends_is_unpickled(file: Path, name: str) -> None:
    (one,) = play_in_processes(file, name)
    assert one.fault is not None and one.fault.code == ATTACKS[name]
    assert not (file.parent / "attacked").exists()


def test_numbers_and_text_of_a_reply_arrive_unchanged(file: Path) -> None:
    (one,) = play_in_processes(file, "Exact")
    assert one.chat.rewards == [0.1 + 0.2] * 2
    assert one.chat.messages[2]["content"] == "\u00e4 \u2028 \U0001f99c \x00 <tool_call>"


def test_class_attributes_are_not_shared_between_episodes(file: Path) -> None:
    for one in play_in_processes(file, "Shares", count=3):
        assert (one.ended, one.chat.rewards) == ("done", [1.0, 2.0])


@pytest.mark.parametrize(
    ("name", "rewards"), [("Prints", [1.0, 2.0, 3.0]), ("Loops", [0.0]), ("Forks", [1.0, 2.0, 3.0])]
)
def test_harmless_side_effects_do_not_change_an_episode(file: Path, name: str, rewards: list[float]) -> None:
    (one,) = play_in_processes(file, name)
    assert (one.ended, one.chat.rewards) == ("done", rewards)


def test_random_numbers_depend_on_row_and_attempt(file: Path) -> None:
    first, second = play_in_processes(file, "Draws", count=2)
    again, _ = play_in_processes(file, "Draws", count=2)
    assert first.chat.messages == again.chat.messages and first.chat.rewards == again.chat.rewards
    assert first.chat.messages[2] != second.chat.messages[2] and first.chat.rewards != second.chat.rewards
    (one,) = play_in_processes(file, "DrawsAgain", tries=2)
    assert (one.ended, one.tries) == ("done", 2) and len(set(recorded(file, "drawn"))) == 4


class TestTools:
    def call_tool(self, file: Path, name: str, arguments: str, **settings: Any) -> EpisodeResult:
        tool = references.resolve(f"{file}:{name}")
        call = f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        box = Toolbox([tool], "hermes", partial(call_tool, server_for(file)))
        (one,), _ = played(None, lambda name, turn: [call, "so"][min(turn, 1)], toolbox=box, **settings)
        return one

    def test_tools_run_in_another_process(self, file: Path) -> None:
        one = self.call_tool(file, "add", '{"a": 1, "b": "2"}')
        assert '"sum": 3' in one.chat.messages[2]["content"]
        assert f'"pid": {os.getpid()}' not in one.chat.messages[2]["content"]

    @pytest.mark.parametrize(
        ("name", "arguments", "message"),
        [("add", '{"a": 1}', "add does not take these arguments (b: Missing"), ("picky", '{"a": 1}', "no, not that")],
    )
    def test_the_policy_gets_the_error_of_an_invalid_call(
        self, file: Path, name: str, arguments: str, message: str
    ) -> None:
        one = self.call_tool(file, name, arguments)
        assert message in one.chat.messages[2]["content"] and one.chat.tool_errors == 1

    @pytest.mark.parametrize("name", ["attack", "attack_deep"])
    def test_no_result_of_a_tool_is_unpickled(self, file: Path, name: str) -> None:
        one = self.call_tool(file, name, '{"a": 1}')
        assert one.fault is not None and one.fault.code == "tool.invalid-result"
        assert not (file.parent / "attacked").exists()

    def test_a_tool_that_hangs_times_out(self, file: Path) -> None:
        one = self.call_tool(file, "hang", '{"a": 1}', seconds=0.5, tries=2)
        assert (one.ended, one.tries) == ("failed", 2) and one.fault is not None
        assert (one.fault.code, one.fault.facts["seconds"]) == ("episode.timeout", 0.5)


class TestServer:
    def test_an_import_error_names_the_line(self, tmp_path: Path) -> None:
        (tmp_path / "broken.py").write_text("import os\nraise OSError('planted')\n")
        with raises("episode.process-start") as caught:
            environment_server((f"{tmp_path}/broken.py:Environment",))
        assert "broken.py:2 raises OSError" in caught.value.message

    def test_a_closed_server_is_replaced(self, file: Path) -> None:
        server = server_for(file)
        server.close()
        with raises("episode.process-died"):
            Process(server)
        assert play_in_processes(file, "Counts")[0].ended == "done"

    def test_a_forked_program_does_not_end_the_processes_of_its_parent(self, file: Path) -> None:
        server = server_for(file)
        if (program := os.fork()) == 0:
            close_environment_servers()
            os._exit(0)
        os.waitpid(program, 0)
        assert server.alive and server_for(file) is server

    def test_a_cancelled_call_ends_its_process(self, file: Path) -> None:
        async def begin() -> Process:
            process = Process(server_for(file))
            await process.ask("make", f"{file}:Counts", row(1))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(process.ask("tool", f"{file}:hang", {"a": 1}), 0.1)
            return process

        (file.parent / "pids").unlink(missing_ok=True)
        assert asyncio.run(begin()).over
        wait_until_ended({int(pid) for pid in recorded(file, "pids")})

    @pytest.mark.parametrize("name", ["Announces", "Truncates"])
    def test_a_process_without_a_valid_reply_is_ended_and_closing_its_environment_is_no_error(
        self, file: Path, name: str
    ) -> None:
        async def begin() -> None:
            environment = ProcessEnvironment(server_for(file), references.resolve(f"{file}:{name}"))
            await environment.reset(row(1))
            with raises("episode.process-died"):
                await environment.step(Answer("x", (), 0, False))
            await asyncio.wait_for(environment.close(), 20.0)

        asyncio.run(begin())

    def test_a_killed_program_leaves_no_process(self, file: Path) -> None:
        server = server_for(file)
        (file.parent / "pids").unlink(missing_ok=True)

        async def begin() -> None:
            await Process(server).ask("make", f"{file}:Counts", row(1))
            os.kill(os.getpid(), signal.SIGKILL)

        if (program := os.fork()) == 0:
            asyncio.run(begin())
        assert os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]) == -signal.SIGKILL
        wait_until_ended({int(pid) for pid in recorded(file, "pids")})

    def test_a_script_that_would_run_again_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        script = tmp_path / "script.py"
        script.write_text("def tool(a: int) -> int: ...\n\ntrain()\n")
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
        with raises("episode.not-importable", path=str(script)):
            reference_of(f"{script}:tool")
        script.write_text("def tool(a: int) -> int: ...\n\nif __name__ == '__main__':\n    train()\n")
        assert reference_of(f"{script}:tool") == f"{script}:tool"

    @pytest.mark.parametrize("thing", [lambda a: a, partial(row, 1)])
    def test_objects_that_cannot_be_imported_are_refused(self, thing: Any) -> None:
        with raises("episode.not-importable"):
            reference_of(thing)


class TestInteract:
    def test_a_local_class_is_refused(self) -> None:
        class Local(Environment):
            def step(self, answer: Any) -> Any: ...

        with pytest.raises(ParameterError, match=r"A separate process cannot import .*Local"):
            Interact(Local, processes=True)

    def test_isolating_an_agent_without_environment_is_refused(self) -> None:
        async def agent(chat: Any, row: Any) -> None: ...

        with raises("episode.nothing-isolated"):
            Interact(agent, processes=True)

"""Tests of `flowrl/workers/supervisor.py` with reward functions that escape from their call.

The error names each one within its time limit, and flowrl terminates what it has started.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrl.operators.reward import pool as reward_pool
from flowrl.operators.reward.operator import Reward
from tests.operators.reward.test_pool import is_running, wait_until_ended
from tests.support.errors import raises
from tests.support.rows.reward_rows import rows, values

# Each entry is what a function does where the response is "bad"; CHANNEL is the socket of its worker.
HEAD = """
import ctypes, json, os, signal, socket, subprocess, sys, time
CHANNEL = max((int(fd) for fd in os.listdir("/proc/self/fd")), default=0)
FOLDER = os.path.dirname(__file__)

def detached(then):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open(os.path.join(FOLDER, "daemon.new"), "w").write(str(os.getpid()))
            os.rename(os.path.join(FOLDER, "daemon.new"), os.path.join(FOLDER, "daemon"))
            time.sleep(1000)
        os._exit(0)
    while not os.path.exists(os.path.join(FOLDER, "daemon")):
        time.sleep(0.01)
    return then()

class Odd(Exception):
    def __str__(self):
        raise RuntimeError

class Crooked:
    shape = ()
    def item(self):
        raise KeyError("no item")
    __repr__ = item
"""

FINE = {
    "fork_and_both_return": "return os.fork() * 0 + 0.5",
    "fork_a_child_that_raises": "if os.fork() == 0: raise ValueError\nreturn 0.5",
    "fork_below_python": "ctypes.CDLL(None).fork(); return 0.5",
    "inherit_nothing": "return 0.5 * (str(CHANNEL) not in subprocess.run(['ls', '/proc/self/fd'], close_fds=False, "
    "capture_output=True, text=True).stdout.split())",
    "fork_without_the_socket": "child = os.fork()\n"
    "if child == 0: os._exit(os.path.exists(f'/proc/self/fd/{CHANNEL}'))\n"
    "return 0.5 + os.waitpid(child, 0)[1]",
    "print_an_answer": """os.write(1, b'{"score": 9.0, "extras": {}}\\n'); return 0.5""",
}
BAD = {
    "write_to_every_descriptor": (
        "for fd in range(3, 400):\n try: os.write(fd, b'out of place\\n')\n except OSError: pass\nreturn 0.5",
        "wrote into the result socket of its process (b'out of place",
    ),
    "forge_an_answer": (
        """os.write(CHANNEL, b'{"id": 1, "score": 9.0, "extras": {}}\\n'); signal.pause()""",
        'wrote into the result socket of its process (b\'{"id": 1',
    ),
    "begin_an_answer": ("os.write(CHANNEL, b'{'); return 0.5", "wrote into the result socket"),
    "nest_deeply": ("os.write(CHANNEL, b'[' * 100_000 + b'\\n'); return 0.5", "wrote into the result socket"),
    "write_without_end": ("while True: os.write(CHANNEL, b'x' * 65536)", "wrote into the result socket"),
    "close_every_descriptor": ("os.closerange(3, 4096); return 0.5", "closed the result socket of its process"),
    "kill_its_supervisor": ("os.kill(os.getppid(), signal.SIGKILL); time.sleep(1000)", "(signal SIGKILL)"),
    "kill_its_group": ("os.killpg(0, signal.SIGKILL)", "ended its process (signal SIGKILL)"),
    "crash": ("ctypes.string_at(0)", "ended its process (signal SIGSEGV)"),
    "leave_a_child_behind": ("if os.fork(): os._exit(5)\ntime.sleep(1000)", "ended its process (exit status 5)"),
    "become_another_program": ("os.execv('/bin/sleep', ['sleep', '1000'])", "did not return within 1 s"),
    "stop": ("os.kill(os.getpid(), signal.SIGSTOP)", "did not return within 1 s"),
    "break_its_own_side": ("json.dumps = None; return 0.5", "ended its process (exit status 1)"),
    "raise_what_has_no_text": ("raise Odd", "raised Odd: (its text cannot be read: RuntimeError)"),
    "raise_half_a_character": ("raise ValueError('\\ud800')", r"raised ValueError: \ud800, for row"),
    "return_a_crooked_number": ("return Crooked()", "raised KeyError: 'no item'"),
    "return_a_crooked_score": ("return {'score': Crooked()}", "raised KeyError: 'no item'"),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The functions by name, each of which returns 1.0 for other responses than "bad"."""
    path = tmp_path_factory.mktemp("user") / "odd.py"
    source = HEAD
    does = {**FINE, **{name: work for name, (work, _) in BAD.items()}, "detach_and_hang": "detached(signal.pause)"}
    for name, work in {**does, "detach": "return detached(os.getpid)"}.items():
        source += f"\ndef {name}(data_source, solution_str, ground_truth, extra_info=None):\n"
        source += f"    if solution_str != 'bad': return 1.0\n{textwrap.indent(work, '    ')}\n"
    path.write_text(source)
    yield path
    reward_pool.close_pools()


@pytest.mark.parametrize("name", FINE)
def test_harmless_side_effects_change_no_score(name: str, file: Path) -> None:
    """No result is attributed to another call, then or later."""
    reward = Reward(f"{file}:{name}", timeout=20.0, workers=1)
    assert values(reward, *rows(["ok", "bad", "ok", "bad", "bad", "ok"])) == [1.0, 0.5, 1.0, 0.5, 0.5, 1.0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BAD)
def test_a_disruptive_call_fails_without_affecting_other_rows(name: str, file: Path) -> None:
    limit = 1.0 if "did not return" in BAD[name][1] else 20.0
    what = BAD[name][1]
    codes = {"did not return": "reward.timeout", "raised": "reward.raised"}
    code = next((code for start, code in codes.items() if what.startswith(start)), "reward.process-died")
    with raises(code, node="reward", row="row-1") as error:
        Reward(f"{file}:{name}", timeout=limit, workers=1)(*rows(["ok", "bad"]))
    assert what in error.value.message
    stated = Reward(f"{file}:{name}", timeout=limit, workers=1, on_error=-1.0)
    assert values(stated, *rows(["bad", "ok"])) == [-1.0, 1.0]


def test_an_endless_result_ends_at_the_timeout(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless reply is not read to its end; the timeout applies, too."""
    monkeypatch.setattr(reward_pool, "MAX_REPLY", 1 << 40)
    with raises("reward.timeout"):
        Reward(f"{file}:write_without_end", timeout=0.5, workers=1)(*rows(["bad"]))


def daemon_of(file: Path) -> int:
    """What a function has started that has left its session."""
    started = file.parent / "daemon"
    process = int(started.read_text())
    started.unlink()
    return process


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only the group of the function ends")
def test_detached_processes_end_with_the_call_or_the_pool(file: Path) -> None:
    with raises("reward.timeout"):
        Reward(f"{file}:detach_and_hang", timeout=2.0, workers=1)(*rows(["bad"]))
    wait_until_ended({daemon_of(file)})
    assert values(Reward(f"{file}:detach", workers=1), *rows(["bad"])) != [1.0]
    daemon = daemon_of(file)
    assert is_running(daemon)  # a call that has returned may have started something for the next one
    reward_pool.close_pools()
    assert not is_running(daemon)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only the group of the function ends")
def test_detached_processes_end_with_a_killed_program(file: Path) -> None:
    source = f"""if True:
        import os, signal
        from flowrl.operators.reward.operator import Reward
        from tests.support.rows.reward_rows import rows
        print(int(Reward({f"{file}:detach"!r}, workers=1)(*rows(["bad"]))), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    wait_until_ended({int(done.stdout), daemon_of(file)})


def test_a_worker_that_does_not_start_is_reported(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    reward_pool.close_pools()
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with raises("reward.worker-failed", error="BlockingIOError"):
        Reward(f"{file}:print_an_answer", workers=2)(*rows(["ok", "ok", "ok"]))


def test_arguments_that_cannot_be_serialized_fail_their_call(file: Path) -> None:
    """An integer of more digits than Python converts."""
    reward = Reward(f"{file}:print_an_answer", workers=1)
    with raises("reward.worker-failed", error="ValueError"):
        reward(*rows(["ok"], extra=[{"n": 10**5000}]))
    assert values(reward, *rows(["ok"])) == [1.0]


def test_a_forked_program_has_its_own_pools(file: Path) -> None:
    """It has none of the threads, so it would wait for ever; nor does its end end the workers."""
    reward = Reward(f"{file}:print_an_answer", workers=1)
    assert values(reward, *rows(["ok"])) == [1.0]
    source = f"""if True:
        import os
        from flowrl.operators.reward.operator import Reward
        from flowrl.operators.reward.pool import close_pools
        from tests.support.rows.reward_rows import rows, values
        reward = Reward({f"{file}:print_an_answer"!r}, workers=1)
        before = values(reward, *rows(["ok"]))
        if (child := os.fork()) == 0:
            inside = values(reward, *rows(["bad"]))
            close_pools()
            os._exit(inside != [0.5])
        print(before, os.waitpid(child, 0)[1], values(reward, *rows(["bad"])))
    """
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[1.0] 0 [0.5]\n", done.stderr


def test_an_invalid_result_in_a_thread_is_reported_at_once() -> None:
    class Crooked:
        shape = ()

        def item(self) -> float:
            raise KeyError("no item")

    started = time.monotonic()
    with raises("reward.raised", row="row-0"):
        Reward(lambda **_: Crooked(), timeout=300.0)(*rows(["a"]))
    assert time.monotonic() - started < 200

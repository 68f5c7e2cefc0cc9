"""Tests of `pool.py` and `worker.py`: no call of a reward function is lost, hangs, or silently becomes a 0."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl import references as functions
from flowrl.data.metrics import Metrics
from flowrl.operators.reward import pool as reward_pool
from flowrl.operators.reward.operator import Reward
from tests.support.errors import raises
from tests.support.rows.reward_rows import rows, values

# ------------------------------------------------------------------------------------------------ where functions run


def test_module_functions_run_in_workers_by_name_or_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "strict.py").write_text(
        "import os\nfrom my_rewards import __name__ as package\nparent = os.environ['PARENT']\n\n"
        "def same(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == ground_truth and str(os.getpid()) != parent)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PARENT", str(os.getpid()))
    assert values(Reward("my_rewards.strict:same"), *rows(["1", "2"])) == [1.0, 0.0]
    from my_rewards.strict import same  # type: ignore[import-not-found]

    assert functions.reference(same) == "my_rewards.strict:same"
    assert values(Reward(same), *rows(["1", "2"])) == [1.0, 0.0]


def test_methods_run_in_workers_and_closures_in_threads(scores: Callable[[str], str]) -> None:
    assert values(Reward(scores("Marker.length")), *rows(["abc"])) == [3.0]
    caller = threading.get_ident()

    def closure(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
        assert threading.get_ident() != caller
        return float(solution_str)

    class Scale:
        def __call__(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
            return 2 * float(solution_str)

    def power(exponent: int, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
        return float(solution_str) ** exponent

    batch = rows(["3", "4"], extra=[{1: object()}, None])  # nothing is turned into JSON here
    assert values(Reward(closure), *batch) == [3.0, 4.0]
    assert values(Reward(Scale()), *batch) == [6.0, 8.0]
    assert values(Reward(functools.partial(power, 2)), *batch) == [9.0, 16.0]


def test_arguments_reach_the_worker_unchanged(scores: Callable[[str], str]) -> None:
    plain = {"a": [1, 2.5], "b": {"c": None, "d": True}, "e": "ü\ud800\n"}
    arrays = {"a": np.array([1, 2.5]), "b": {"c": None, "d": np.bool_(True)}, "e": "ü\ud800\n"}
    assert values(Reward(scores("echo")), *rows(["a", "b"], extra=[plain, arrays])) == [1.0, 1.0]
    long = "x" * 3_000_000  # many times what a pipe holds
    assert values(Reward(scores("Marker.length")), *rows([long])) == [3_000_000.0]


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"raw", "a bytes"),
        ({1: 2}, "the key 1 (int)"),
        ([{2, 3}], "a set"),
        (nested(10_000), "values that nest too deeply"),
    ],
)
def test_non_json_arguments_name_row_and_column(value: Any, message: str, scores: Callable[[str], str]) -> None:
    with raises("reward.not-json", node="reward", row="row-1", column="extra_info") as error:
        Reward(scores("exact"))(*rows(["a", "b"], extra=[None, value]))
    assert message in error.value.message


def test_results_are_in_order_and_workers_are_reused(scores: Callable[[str], str]) -> None:
    generator = np.random.default_rng(0)
    extra = [{"score": float(i), "wait": float(w)} for i, w in enumerate(generator.uniform(0, 0.01, 60))]
    batch = rows(["a"] * 60, extra=extra)
    assert values(Reward(scores("from_extra"), workers=3), *batch) == [float(i) for i in range(60)]
    # float32 holds a process id exactly (they stay below 2**24)
    pids = {pid for _ in range(3) for pid in values(Reward(scores("pid"), workers=1), *rows(["a"] * 4))}
    assert len(pids) == 1 and pids != {float(os.getpid())}


def test_prints_and_stdin_do_not_disturb_the_protocol(scores: Callable[[str], str]) -> None:
    assert values(Reward(scores("talking")), *rows(["a", "b"])) == [1.0, 1.0]


def test_threads_that_find_a_server_unfit_at_once_share_its_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that starts a thread is imported by each worker; the server that imported it is closed once."""
    module = tmp_path / "threaded.py"
    module.write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    both, ready = threading.Barrier(2), reward_pool.ForkServer.wait_until_ready

    def wait_until_ready(server: reward_pool.ForkServer) -> int:
        threads = ready(server)
        both.wait()
        return threads

    monkeypatch.setattr(reward_pool.ForkServer, "wait_until_ready", wait_until_ready)
    source, found = reward_pool.FunctionSource(f"{module}:score", None), list[reward_pool.ForkServer]()
    threads = [threading.Thread(target=lambda: found.append(reward_pool.fork_server(source))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] and found[0].alive
    found[0].close()


def test_callers_in_several_threads_share_the_workers(scores: Callable[[str], str]) -> None:
    results: dict[int, list[float]] = {}

    def run(k: int) -> None:
        results[k] = values(
            Reward(scores("from_extra"), workers=2), *rows(["a"] * 20, extra=[{"score": k + i} for i in range(20)])
        )

    threads = [threading.Thread(target=run, args=(100 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {100 * k: [100.0 * k + i for i in range(20)] for k in range(4)}


def test_an_edited_file_is_reloaded(tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    source = "def f(data_source, solution_str, ground_truth, extra_info=None):\n    return {}\n"
    file.write_text(source.format(1.0))
    before = Reward(f"{file}:f", workers=1)
    assert values(before, *rows(["a"])) == [1.0]
    file.write_text(source.format(2.25))  # of another length: Python tells files of one second by their lengths alone
    assert values(Reward(f"{file}:f", workers=1), *rows(["a"])) == [2.25]
    assert values(before, *rows(["a"])) == [1.0]
    reward_pool.close_pools()
    with raises("reward.worker-start") as error:
        before(*rows(["a"]))
    assert "has changed since" in error.value.message


# ------------------------------------------------------------------------------------------- raising, hanging, dying


def test_a_raising_call_names_the_row(scores: Callable[[str], str]) -> None:
    reward = Reward(scores("raising"))
    with raises("reward.raised", node="reward", row="row-2") as error:
        reward(*rows(["ok", "ok", "bad", "bad"]))
    message = str(error.value)
    assert "raised ValueError: no number in it, for row 'row-2' (data_source 'demo', number 2 of 4)" in message
    assert "Reward(..., on_error=0.0)" in message
    assert "scores.py" in message and "in deeper" in message and "reward_worker" not in message
    assert values(reward, *rows(["ok"])) == [1.0]  # and the operator goes on


@pytest.mark.parametrize(
    ("name", "code"),
    [("looping", "reward.timeout"), ("backtracking", "reward.timeout"), ("dying", "reward.process-died")],
)
def test_a_hanging_or_crashing_call_is_ended(name: str, code: str, scores: Callable[[str], str]) -> None:
    bad = "a" * 40 + "b" if name == "backtracking" else "bad"
    with raises(code, node="reward", row="row-1") as error:
        Reward(scores(name), timeout=1.0, workers=2)(*rows(["ok", bad, "ok"]))
    assert ("exit status 3" in str(error.value)) == (name == "dying")
    assert ("timeout=..." in str(error.value)) == (name != "dying")
    metrics = Metrics()
    stated = Reward(scores(name), timeout=1.0, workers=2, on_error=-1.0)
    assert values(stated, *rows(["ok", bad, "ok", bad]), metrics) == [1.0, -1.0, 1.0, -1.0]
    assert metrics["reward/errors"].value == 2


def test_hangs_and_exits_in_threads_name_the_row() -> None:
    never = threading.Event()
    hanging = Reward(lambda solution_str, **_: never.wait() if solution_str == "bad" else 1.0, timeout=0.2, workers=2)
    with raises("reward.timeout", row="row-1"):
        hanging(*rows(["ok", "bad"]))
    with raises("reward.raised", row="row-0"):
        Reward(lambda **_: sys.exit(1))(*rows(["a"]))
    never.set()


def test_an_exit_fails_the_row(scores: Callable[[str], str]) -> None:
    with raises("reward.raised", row="row-0"):
        Reward(scores("exiting"))(*rows(["a", "b"]))


def test_on_error_scores_are_counted_and_logged(scores: Callable[[str], str], caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    assert values(Reward(scores("raising"), on_error=-2), *rows(["bad", "ok", "bad"]), metrics) == [-2.0, 1.0, -2.0]
    assert metrics.compute()["reward/errors"] == 2 and metrics.compute()["reward/mean"] == -1.0
    assert len(caplog.records) == 1 and "'row-0'" in caplog.text and "on_error=-2" in caplog.text
    metrics = Metrics()
    Reward(scores("raising"), on_error=0.0)(*rows(["ok"]), metrics)
    assert metrics.compute()["reward/errors"] == 0


def test_a_module_that_does_not_import_is_always_an_error(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import no_such_module\ndef f(**_):\n    return 1.0\n")
    for on_error in ("raise", 0.0):
        with raises("reward.worker-start") as error:
            Reward(f"{file}:f", on_error=on_error)(*rows(["a"] * 3))
        assert "importing it raised ModuleNotFoundError: No module named 'no_such_module'" in error.value.message
        assert "Install" in error.value.message and "__main__" not in error.value.message
    for meaning, found in (("max(1.0, 3.0)", "float, expected"), ("type('Score', (float,), {})", "class, which")):
        file.write_text(f"f = {meaning}\n")  # which the source does not plainly tell
        with raises("reward.invalid-function", function=f"{file}:f") as error:
            Reward(f"{file}:f")(*rows(["a"]))
        assert f"broken.py:f is a {found}" in error.value.message


def test_a_worker_starts_no_workers(tmp_path: Path) -> None:
    file = tmp_path / "nested.py"
    file.write_text(
        "from flowrl.operators.reward.operator import Reward\nfrom tests.support.rows.reward_rows import rows\n\n"
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n\n"
        f"with open({str(tmp_path / 'imports')!r}, 'a') as file:\n    assert file.write('x') and file.tell() < 5\n"
        "Reward(f'{__file__}:f')(*rows(['a']))\n"
    )
    with raises("reward.worker-start") as error:
        Reward(f"{file}:f", workers=1)(*rows(["a"]))
    assert "raised RewardError: A Reward ran while a reward worker imported" in error.value.message
    assert (tmp_path / "imports").read_text() == "xx"  # by the server that workers are forked from, and by the worker


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def wait_until_ended(pids: set[int]) -> None:
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def test_close_pools_ends_all_workers(scores: Callable[[str], str]) -> None:
    reward = Reward(scores("pid"), workers=2)
    pids = {int(pid) for pid in values(reward, *rows(["a"] * 20))}
    assert all(map(is_running, pids))
    reward_pool.close_pools()
    assert not any(map(is_running, pids))
    assert int(values(reward, *rows(["a"]))[0]) not in pids  # later calls start fresh ones


@pytest.mark.skipif(sys.platform != "linux", reason="needs a subreaper")
def test_a_reward_that_kills_its_supervisor_leaves_no_process(tmp_path: Path) -> None:
    """Neither a child in its own session nor a grandchild; other workers continue."""
    file = tmp_path / "kills.py"
    file.write_text(
        "import os, signal, subprocess, time\n\n"
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if solution_str == 'kill':\n"
        "        child = subprocess.Popen(['sh', '-c', 'sleep 1000 & echo $!; wait'], start_new_session=True,\n"
        "                                 stdout=subprocess.PIPE, text=True)\n"
        f"        with open({str(tmp_path / 'pids')!r}, 'w') as pids:\n"
        "            pids.write(f'{child.pid} {child.stdout.readline()} {os.getpid()}')\n"
        "        os.kill(os.getppid(), signal.SIGKILL)\n"
        "        time.sleep(1000)\n"
        "    return 1.0\n"
    )
    reward = Reward(f"{file}:f", workers=2, timeout=30.0, on_error=0.0)
    assert values(reward, *rows(["a", "kill", "b"])) == [1.0, 0.0, 1.0]
    wait_until_ended({int(pid) for pid in (tmp_path / "pids").read_text().split()})
    assert values(reward, *rows(["a", "b"])) == [1.0, 1.0]


SCRIPT = """
import os, re, signal, sys

def mine(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "kill the parent and hang":
        print(os.getpid(), flush=True, file=sys.stderr)
        os.kill(int(os.environ["SCRIPT"]), signal.SIGKILL)
        re.match(r"(a+)+$", "a" * 60 + "b")
    return os.getpid()

def run(fn, text, workers):
    import numpy as np
    import torch
    from types import SimpleNamespace
    from flowrl.operators.reward.operator import Reward
    one = lambda value: np.array([value], dtype=object)
    rollout = SimpleNamespace(response_text=one(text), response_mask=torch.tensor([[True]]))
    prompts = SimpleNamespace(data_source=one("demo"), ground_truth=one("1"), extra_info=one(None), row_id=one("row-0"))
    return int(Reward(fn, timeout=1.0, workers=workers)(rollout, prompts))

"""


def run_script(file: Path, work: str) -> tuple[int, list[int], list[int]]:
    """The exit status, and the process ids on stdout and on stderr."""
    file.write_text(SCRIPT + textwrap.dedent(work))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    assert not re.search("[a-z]", done.stderr), done.stderr
    return done.returncode, [int(pid) for pid in done.stdout.split()], [int(pid) for pid in done.stderr.split()]


def test_a_killed_script_leaves_no_worker(tmp_path: Path) -> None:
    work = """
    if __name__ == "__main__":
        os.environ["SCRIPT"] = str(os.getpid())
        print(os.getpid(), run(mine, "ok", 2), flush=True)
        run(mine, "kill the parent and hang", 1)
    """
    status, (parent, idle), (hanging,) = run_script(tmp_path / "killed.py", work)
    assert status == -signal.SIGKILL and len({parent, idle, hanging}) == 3
    wait_until_ended({idle, hanging})


def test_an_unimportable_script_runs_its_function_itself_and_ends_its_workers(
    tmp_path: Path, scores: Callable[[str], str]
) -> None:
    work = f"print(os.getpid(), run(mine, 'ok', 1), run({scores('pid')!r}, 'ok', 2), flush=True)"
    status, (parent, own, worker), _ = run_script(tmp_path / "flat.py", work)
    assert status == 0 and own == parent and worker != parent
    wait_until_ended({worker})

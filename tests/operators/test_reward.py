"""`Reward`: scores land on the last token, and no call is lost, hangs for ever, or becomes a silent 0."""

from __future__ import annotations

import functools
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.columns import ResponseMask, ResponseText
from flowrl.core import references as functions
from flowrl.core.operator import Operator
from flowrl.data.metrics import Metrics
from flowrl.errors import DataError, FlowrlError, ParameterError, PortError, RewardError
from flowrl.graph import algorithm
from flowrl.operators.reward import pool as reward_pool
from flowrl.operators.reward import worker as reward_worker
from flowrl.operators.reward.operator import Reward, place_scores
from flowrl.records import PromptBatch

# The functions of the worker processes: a file that imports in no time, as a user's reward file does.
SCORES = """
import os, re, sys, time

class Marker:
    @staticmethod
    def length(data_source, solution_str, ground_truth, extra_info=None):
        return len(solution_str)

def exact(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)

def verdict(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.5, "acc": solution_str == ground_truth, "pred": solution_str}

def from_extra(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(extra_info.get("wait", 0.0))
    return extra_info["score"]

def echo(data_source, solution_str, ground_truth, extra_info=None):
    return float(extra_info == {"a": [1, 2.5], "b": {"c": None, "d": True}, "e": "\\u00fc\\ud800\\n"})

def raising(data_source, solution_str, ground_truth, extra_info=None):
    return deeper(solution_str)

def deeper(solution_str):
    if solution_str == "bad":
        raise ValueError("no number in it")
    return 1.0

def looping(data_source, solution_str, ground_truth, extra_info=None):
    while solution_str == "bad":
        pass
    return 1.0

def backtracking(data_source, solution_str, ground_truth, extra_info=None):
    return float(re.match(r"(a+)+$", solution_str) is None)

def dying(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "bad":
        os._exit(3)
    return 1.0

def exiting(data_source, solution_str, ground_truth, extra_info=None):
    sys.exit("enough")

def talking(data_source, solution_str, ground_truth, extra_info=None):
    print('{"score": 7.0, "extras": {}}', flush=True)
    os.write(1, b'{"score": 8.0, "extras": {}}\\n')
    return float(sys.stdin.read() == "")

def pid(data_source, solution_str, ground_truth, extra_info=None):
    return os.getpid()

def nothing(data_source, solution_str, ground_truth, extra_info=None):
    pass

number = 3.0
"""


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """The reference of a function of `SCORES`."""
    file = tmp_path_factory.mktemp("user") / "scores.py"
    file.write_text(SCORES, encoding="utf-8")
    yield lambda name: f"{file}:{name}"
    reward_pool.close_pools()


class Rollout(NamedTuple):
    response_text: np.ndarray
    response_mask: torch.Tensor


class Prompts(NamedTuple):
    data_source: np.ndarray
    ground_truth: np.ndarray
    extra_info: np.ndarray
    row_id: np.ndarray


def objects(values: list[Any]) -> np.ndarray:
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def rows(
    texts: list[str],
    truths: list[Any] | None = None,
    extra: list[Any] | None = None,
    mask: list[list[int]] | None = None,
) -> tuple[Rollout, Prompts]:
    n = len(texts)
    response_mask = torch.tensor(mask if mask is not None else [[1]] * n, dtype=torch.bool)
    prompts = Prompts(
        objects(["demo"] * n),
        objects(truths or ["1"] * n),
        objects(extra or [{}] * n),
        objects([f"row-{i}" for i in range(n)]),
    )
    return Rollout(objects(texts), response_mask), prompts


def values(reward: Reward, *batch: Any) -> list[float]:
    """The scores of rows of one token each."""
    return reward(*batch).squeeze(1).tolist()


# ------------------------------------------------------------------------------------------------------------- scores


def test_the_score_lies_on_the_last_token_under_the_mask(scores: Callable[[str], str]) -> None:
    batch = rows(["7", "8", "7"], ["7", "7", "7"], mask=[[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0]])
    out = Reward(scores("exact"))(*batch)
    assert out.dtype == torch.float32
    assert out.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]]


def test_a_masked_row_is_neither_called_for_nor_counted(scores: Callable[[str], str]) -> None:
    metrics = Metrics()
    batch = rows(["ok", "bad", "ok"], mask=[[1, 0], [0, 0], [1, 1]])
    out = Reward(scores("raising"))(*batch, metrics=metrics)
    assert out.tolist() == [[1, 0], [0, 0], [0, 1]]
    assert metrics["reward/mean"].weight == 2


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_no_rows_and_no_tokens_are_legal(shape: tuple[int, int], scores: Callable[[str], str]) -> None:
    rollout, prompts = rows(["x"] * shape[0])
    metrics = Metrics()
    out = Reward(scores("raising"))(
        rollout._replace(response_mask=torch.zeros(shape, dtype=torch.bool)), prompts, metrics
    )
    assert out.shape == shape and not out.any() and not metrics


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6))
def test_place_scores_row_by_row(mask: list[list[bool]]) -> None:
    placed = place_scores(torch.arange(1.0, len(mask) + 1), torch.tensor(mask)).tolist()
    for i, row in enumerate(mask):
        wanted = [0.0] * 5
        if any(row):
            wanted[max(t for t in range(5) if row[t])] = i + 1.0
        assert placed[i] == wanted


def test_metrics(scores: Callable[[str], str]) -> None:
    metrics = Metrics()
    batch = rows(["a"] * 4, extra=[{"score": s} for s in (1.0, -2.0, 0.5, 0.25)])
    assert values(Reward(scores("from_extra")), *batch, metrics) == [1.0, -2.0, 0.5, 0.25]
    assert metrics.compute() == {"reward/mean": -0.0625, "reward/min": -2.0, "reward/max": 1.0}
    metrics = Metrics()
    assert values(Reward(scores("verdict")), *rows(["7", "8"], ["7", "7"]), metrics) == [0.5, 0.5]
    assert metrics.compute() == {"reward/mean": 0.5, "reward/min": 0.5, "reward/max": 0.5, "reward/acc": 0.5}


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (torch.tensor(2.0), 2.0),
        (np.array(3), 3.0),
    ],
)
def test_what_counts_as_a_number(returned: Any, score: float) -> None:
    assert values(Reward(lambda **_: returned), *rows(["a"])) == [score]
    assert values(Reward(lambda **_: {"score": returned}), *rows(["a"])) == [score]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (math.nan, "returned the score nan"),
        (math.inf, "returned the score inf"),
        (1e39, "range of float32"),
        (10**400, "returned the score inf"),
        ("1.0", "returned '1.0', expected a number or a dict"),
        (None, "returned None, expected a number or a dict"),
        (torch.ones(2), "expected a number or a dict"),
        ({"acc": 1.0}, "expected a number under 'score'"),
        ({"score": None}, "expected a number under 'score'"),
        ({"score": 1.0, "max": 3.0}, "a number named 'max', but reward/max is logged already"),
    ],
)
def test_what_is_no_score_names_the_row(returned: Any, said: str) -> None:
    reward = Reward(lambda solution_str, **_: returned if solution_str == "bad" else 1.0)
    with pytest.raises(RewardError, match=re.escape(said)) as error:
        reward(*rows(["ok", "bad"]))
    assert "'row-1'" in str(error.value)


# ------------------------------------------------------------------------------------------------ where functions run


def test_a_function_of_a_module_by_name_and_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_method_and_what_is_not_importable(scores: Callable[[str], str]) -> None:
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


def test_arguments_cross_as_they_are(scores: Callable[[str], str]) -> None:
    plain = {"a": [1, 2.5], "b": {"c": None, "d": True}, "e": "ü\ud800\n"}
    arrays = {"a": np.array([1, 2.5]), "b": {"c": None, "d": np.bool_(True)}, "e": "ü\ud800\n"}
    assert values(Reward(scores("echo")), *rows(["a", "b"], extra=[plain, arrays])) == [1.0, 1.0]
    long = "x" * 3_000_000  # many times what a pipe holds
    assert values(Reward(scores("Marker.length")), *rows([long])) == [3_000_000.0]


@pytest.mark.parametrize(("value", "said"), [(b"raw", "a bytes"), ({1: 2}, "the key 1 (int)"), ([{2, 3}], "a set")])
def test_what_is_not_json_names_row_and_column(value: Any, said: str, scores: Callable[[str], str]) -> None:
    with pytest.raises(DataError, match=re.escape(said)) as error:
        Reward(scores("exact"))(*rows(["a", "b"], extra=[None, value]))
    assert "extra_info of row 'row-1'" in str(error.value)


def test_order_is_kept_and_workers_stay(scores: Callable[[str], str]) -> None:
    generator = np.random.default_rng(0)
    extra = [{"score": float(i), "wait": float(w)} for i, w in enumerate(generator.uniform(0, 0.01, 60))]
    batch = rows(["a"] * 60, extra=extra)
    assert values(Reward(scores("from_extra"), workers=3), *batch) == [float(i) for i in range(60)]
    # float32 holds a process id exactly (they stay below 2**24)
    pids = {pid for _ in range(3) for pid in values(Reward(scores("pid"), workers=1), *rows(["a"] * 4))}
    assert len(pids) == 1 and pids != {float(os.getpid())}


def test_prints_and_stdin_do_not_meet_the_protocol(scores: Callable[[str], str]) -> None:
    assert values(Reward(scores("talking")), *rows(["a", "b"])) == [1.0, 1.0]


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


def test_an_edited_file_is_loaded_anew(tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    source = "def f(data_source, solution_str, ground_truth, extra_info=None):\n    return {}\n"
    file.write_text(source.format(1.0))
    before = Reward(f"{file}:f", workers=1)
    assert values(before, *rows(["a"])) == [1.0]
    file.write_text(source.format(2.0))
    assert values(Reward(f"{file}:f", workers=1), *rows(["a"])) == [2.0]
    assert values(before, *rows(["a"])) == [1.0]
    reward_pool.close_pools()
    with pytest.raises(RewardError, match="has changed since"):
        before(*rows(["a"]))


# ------------------------------------------------------------------------------------------- raising, hanging, dying


def test_a_raising_call_names_the_row(scores: Callable[[str], str]) -> None:
    reward = Reward(scores("raising"))
    with pytest.raises(RewardError) as error:
        reward(*rows(["ok", "ok", "bad", "bad"]))
    message = str(error.value)
    assert "raised ValueError: no number in it, for row 'row-2' (data_source 'demo', number 2 of 4)" in message
    assert "Reward(..., on_error=0.0)" in message
    assert "scores.py" in message and "in deeper" in message and "reward_worker" not in message
    assert values(reward, *rows(["ok"])) == [1.0]  # and the operator goes on


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("looping", "did not return within 1 s"),
        ("backtracking", "did not return within 1 s"),
        ("dying", "ended its process (exit status 3)"),
    ],
)
def test_a_hanging_or_dying_call_is_ended(name: str, said: str, scores: Callable[[str], str]) -> None:
    bad = "a" * 40 + "b" if name == "backtracking" else "bad"
    with pytest.raises(RewardError, match=re.escape(said)) as error:
        Reward(scores(name), timeout=1.0, workers=2)(*rows(["ok", bad, "ok"]))
    assert "'row-1'" in str(error.value)
    assert ("timeout=..." in str(error.value)) == (name != "dying")
    metrics = Metrics()
    stated = Reward(scores(name), timeout=1.0, workers=2, on_error=-1.0)
    assert values(stated, *rows(["ok", bad, "ok", bad]), metrics) == [1.0, -1.0, 1.0, -1.0]
    assert metrics["reward/errors"].value == 2


def test_in_threads_a_hang_and_an_exit_name_the_row() -> None:
    never = threading.Event()
    hanging = Reward(lambda solution_str, **_: never.wait() if solution_str == "bad" else 1.0, timeout=0.2, workers=2)
    with pytest.raises(RewardError, match=r"did not return within 0\.2 s, for row 'row-1'"):
        hanging(*rows(["ok", "bad"]))
    with pytest.raises(RewardError, match="raised SystemExit: 1, for row 'row-0'"):
        Reward(lambda **_: sys.exit(1))(*rows(["a"]))
    never.set()


def test_an_exit_is_the_rows_failure(scores: Callable[[str], str]) -> None:
    with pytest.raises(RewardError, match="raised SystemExit: enough, for row 'row-0'"):
        Reward(scores("exiting"))(*rows(["a", "b"]))


def test_the_stated_value_is_counted_and_logged(scores: Callable[[str], str], caplog: pytest.LogCaptureFixture) -> None:
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
        with pytest.raises(
            RewardError, match="importing it raised ModuleNotFoundError: No module named 'no_such_module'"
        ):
            Reward(f"{file}:f", on_error=on_error)(*rows(["a"] * 3))
    file.write_text("f = 3.0\n")
    with pytest.raises(RewardError, match="f is a float, expected a function"):
        Reward(f"{file}:f")(*rows(["a"]))


def test_a_worker_starts_no_workers(scores: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", reward_worker.__file__, raising=False)
    with pytest.raises(RewardError, match="while a reward worker imported the module"):
        Reward(scores("exact"))(*rows(["a"]))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_ended(pids: set[int]) -> None:
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} outlived their parent"
        time.sleep(0.01)


def test_closing_leaves_no_process(scores: Callable[[str], str]) -> None:
    reward = Reward(scores("pid"), workers=2)
    pids = {int(pid) for pid in values(reward, *rows(["a"] * 20))}
    assert all(map(is_running, pids))
    reward_pool.close_pools()
    assert not any(map(is_running, pids))
    assert int(values(reward, *rows(["a"]))[0]) not in pids  # later calls start fresh ones


SCRIPT = """
import os, re, signal, sys

def mine(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "kill the parent and hang":
        print(os.getpid(), flush=True, file=sys.stderr)
        os.kill(os.getppid(), signal.SIGKILL)
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


def test_a_killed_script_leaves_neither_an_idle_nor_a_hanging_worker(tmp_path: Path) -> None:
    work = """
    if __name__ == "__main__":
        print(os.getpid(), run(mine, "ok", 2), flush=True)
        run(mine, "kill the parent and hang", 1)
    """
    status, (parent, idle), (hanging,) = run_script(tmp_path / "killed.py", work)
    assert status == -signal.SIGKILL and len({parent, idle, hanging}) == 3
    wait_until_ended({idle, hanging})


def test_a_script_that_cannot_be_imported_keeps_its_function_and_ends_its_workers(
    tmp_path: Path, scores: Callable[[str], str]
) -> None:
    work = f"print(os.getpid(), run(mine, 'ok', 1), run({scores('pid')!r}, 'ok', 2), flush=True)"
    status, (parent, own, worker), _ = run_script(tmp_path / "flat.py", work)
    assert status == 0 and own == parent and worker != parent
    wait_until_ended({worker})


# ---------------------------------------------------------------------------------------------- definition and graphs


def trl_style(prompts: Any, completions: Any, **kwargs: Any) -> Any: ...


async def awaited(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return 1.0


class Awaited:
    async def __call__(self, **columns: Any) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        ("nowhere.py:exact", "there is no file"),
        ("no_such_package.rewards:exact", "No module named 'no_such_package'"),
        ("no_such_module_at_all:exact", "no module 'no_such_module_at_all' is on sys.path"),
        ("flowrl.errors:exact", "does not define 'exact'"),
        ("exact", "expected 'package.module:name' or 'path/to/file.py:name'"),
        (lambda solution, answer: 1.0, "cannot be called by keyword with data_source, solution_str"),
        (trl_style, "the reward function trl_style(prompts"),
        (awaited, "the reward function awaited is async, so a call of it gives a coroutine and no score"),
        (functools.partial(awaited, extra_info=None), "is async"),
        (Awaited(), "is async"),
        (3, "should be callable"),
    ],
)
def test_a_function_that_is_not_there_is_refused_where_the_operator_is_made(fn: Any, said: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(said)):
        Reward(fn)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "def f(prompts, completions, **kw): ...",
            "f(prompts, completions, **kw) cannot be called by keyword with data_",
        ),
        ("def f(data_source, solution_str, ground_truth): ...", "got an unexpected keyword argument 'extra_info'"),
        ("def f(data_source, /, solution_str, ground_truth, extra_info): ...", "cannot be called by keyword"),
        (
            "def f(*, data_source, solution_str, ground_truth, extra_info=2, more): ...",
            "missing a required argument: 'm",
        ),
        ("async def f(data_source, solution_str, ground_truth, extra_info=None): ...", "f is async, so a call of it"),
        ("async def f(**columns): ...", "await inside it with asyncio.run(...)"),
    ],
)
def test_what_a_file_defines_is_refused_without_running_it(source: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(f"import no_such_package\n{source}\n")
    with pytest.raises(ParameterError, match=re.escape(said)) as error:
        score(f"{file}:f")
    assert f"{file}:f" in str(error.value)


@pytest.mark.parametrize(
    "source",
    [
        "def f(data_source, solution_str, ground_truth, extra_info: Unknown = elsewhere()) -> Nowhere: ...",
        "def f(**columns): ...",
        "def f(solution_str, ground_truth, *rest, extra_info={}, data_source): ...",
        "@adapted\ndef f(prompts, completions): ...",
        "def f(prompts, completions): ...\nf = adapted(f)",
        "if fast:\n    from rewards_in_c import f\nelse:\n    def f(prompts, completions): ...",
        "def f(answer): ...\ndef f(**columns): ...",
    ],
)
def test_what_a_file_leaves_open_is_not_refused(source: str, tmp_path: Path) -> None:
    """A decorator, or a second meaning of the name: only running it would tell."""
    file = tmp_path / "rewards.py"
    file.write_text(f"{source}\n")
    assert "reward" in score(f"{file}:f")


def test_a_missing_name_lists_what_the_file_defines(scores: Callable[[str], str]) -> None:
    with pytest.raises(
        ParameterError, match=r"does not define 'exakt'; it defines .*exact, verdict.*; did you mean 'exact'\?"
    ):
        Reward(scores("exakt"))


@pytest.mark.parametrize(
    "wrong", [{"timeout": 0.0}, {"timeout": math.inf}, {"on_error": "skip"}, {"on_error": math.nan}, {"workers": 0}]
)
def test_parameters_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        Reward(lambda **_: 1.0, **wrong)


class Echoed(NamedTuple):
    response_text: ResponseText
    response_mask: ResponseMask


class Echo(Operator):
    """A rollout whose responses are the ground truths."""

    def __call__(self, batch: PromptBatch) -> Echoed:
        mask = torch.tensor([[True, False, False], [True, True, False]])
        return Echoed(batch.ground_truth.copy(), mask)


@algorithm
def score(batch: PromptBatch, reward_fn: Any) -> Any:
    rollout = Echo()(batch)
    return Reward(reward_fn)(rollout, batch)


def test_in_an_algorithm_as_symbols_and_as_tensors(scores: Callable[[str], str]) -> None:
    graph = score(scores("exact"))
    node = graph.nodes["reward"]
    assert isinstance(node.operator, Reward) and node.operator.granularity == "row"
    assert {slot: str(edge) for slot, edge in node.inputs.items()} == {
        "rollout.response_text": "echo.response_text",
        "rollout.response_mask": "echo.response_mask",
        **{f"prompts.{c}": f"batch.{c}" for c in ("data_source", "ground_truth", "extra_info", "row_id")},
    }
    two = objects(["a", "b"])
    tokens = torch.zeros(2, 1, dtype=torch.int64)
    batch = PromptBatch(tokens, tokens.bool(), two, two, two, two, objects([None, None]), two)
    assert score.step(batch, scores("exact")).tolist() == [[1, 0, 0], [0, 1, 0]]

    @algorithm
    def crossed(batch: PromptBatch, other: PromptBatch) -> Any:
        return Reward(scores("exact"))(Echo()(batch), other)

    with pytest.raises(PortError, match="batch axis"):
        crossed()


# ---------------------------------------------------------------------------------------------------------- functions


def test_reference_and_resolve_are_inverse(scores: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("exact", "Marker.length"):
        fn = functions.resolve(scores(name))
        assert fn is functions.resolve(scores(name))
        assert functions.reference(fn) == scores(name)
    file = Path(scores("exact").partition(":")[0])
    monkeypatch.chdir(file.parent.parent)  # below the working directory, a path is relative
    assert functions.reference(fn) == f"{file.parent.name}/scores.py:Marker.length"
    assert functions.resolve(f"{file.parent.name}/scores.py:Marker.length") is fn
    assert functions.reference(textwrap.dedent) == "textwrap:dedent"
    assert functions.resolve("textwrap:dedent") is textwrap.dedent
    for unnamed in (lambda: 1, functools.partial(textwrap.dedent), Echo().__call__):
        assert functions.reference(unnamed) is None
    with pytest.raises(ParameterError, match="has a float under that name"):
        functions.resolve(scores("number"))


def test_check_looks_without_running(tmp_path: Path) -> None:
    file = tmp_path / "loud.py"
    file.write_text("def f(): pass\nif f:\n    from os import path as g\nraise SystemExit('was run')\n")
    functions.check(f"{file}:f")
    functions.check(f"{file}:g")
    with pytest.raises(ParameterError, match="does not define 'h'; it defines f"):
        functions.check(f"{file}:h")
    file.write_text("from os import *\n")
    functions.check(f"{file}:anything")
    file.write_text("def f(:\n")
    with pytest.raises(ParameterError, match=r"loud.py:1 does not compile"):
        functions.check(f"{file}:f")


def test_source_hash_tells_functions_apart(tmp_path: Path) -> None:
    def bounded(limit: float) -> Callable[[float], float]:
        def inner(x: float) -> float:
            return min(x, limit)

        return inner

    def recursive() -> Callable[[int], int]:
        def count(n: int) -> int:
            return count(n - 1) if n else 0

        return count

    one, two = (lambda x: x + 1), (lambda x: x + 2)
    hashes = [
        functions.source_hash(fn)
        for fn in (
            *(
                one,
                two,
                lambda x, y=3: x,
                lambda x, y=4: x,
                bounded,
                bounded(1.0),
                bounded(2.0),
                recursive(),
                len,
                Echo,
            ),
            *(Echo(), functools.partial(one, 1), functools.partial(one, 2), functools.partial(one, x=1)),
        )
    ]
    assert len({*hashes}) == len(hashes) - 1  # an instance is as its class is
    assert functions.source_hash(bounded(1.0)) == functions.source_hash(bounded(1.0))
    assert all(re.fullmatch("[0-9a-f]{32}", h) for h in hashes)
    file = tmp_path / "versions.py"
    file.write_text("def f():\n    return 1\n")
    first = functions.source_hash(functions.resolve(f"{file}:f"))
    file.write_text("\n\n# moved\ndef f():\n    return 1\n")
    assert functions.source_hash(functions.resolve(f"{file}:f")) == first
    file.write_text("def f():\n    return 2\n")
    assert functions.source_hash(functions.resolve(f"{file}:f")) != first


def test_errors_survive_pickling(scores: Callable[[str], str]) -> None:
    import pickle

    with pytest.raises(FlowrlError) as error:
        Reward(scores("nothing"))(*rows(["a"]))
    again = pickle.loads(pickle.dumps(error.value))
    assert type(again) is RewardError and str(again) == str(error.value)

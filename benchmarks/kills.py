"""Kill training runs at random instants, resume them, and compare them with runs that were not interrupted.

    python benchmarks/kills.py [KILLS_OF_EACH] [SEED]     # 10 of each of 6 runs by default

Each run is a process of its own, forked from one that has imported everything, and is killed by SIGKILL after a uniform
share of the time that the uninterrupted run took. The folder of the killed run must open, with the rows of every step
that has metrics. The resumed run must have the same metrics, predictions, weights and recorded rows, bit for bit, and
no process of a killed run may be left.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pyarrow.parquet as pq  # noqa: E402
from harness import table  # noqa: E402
from harness.environment import Digits  # noqa: E402

import flowrl  # noqa: E402
from flowrl import After, PromptData, Training, Validation  # noqa: E402
from flowrl.backends import AdamW, TorchRollout  # noqa: E402
from flowrl.operators import Collect, Interact, RolloutCorrection, Spread  # noqa: E402
from flowrl.run.recording.files import FOLDERS, files_of  # noqa: E402
from flowrl.run.training.job import Job  # noqa: E402
from tests.support.jobs import job_of, write_prompts  # noqa: E402
from tests.support.models import tiny_folder  # noqa: E402
from tests.support.rewards import digits  # noqa: E402

STEPS = 6
TIMES = re.compile(r"(^|/)timing/|^throughput/|/waiting$|^time$|^total/seconds$")
ROUNDED = re.compile(r"^rollout/")
"""With processes, which rows share a forward pass depends on timing, so the engine's log-probs differ by rounding."""
MARK = "FLOWRL_KILLS_RUN"
"""The environment variable by which the processes of a run are found."""


def plain(algorithm: str, model: str, **edits: Any) -> Job:
    return job_of(algorithm, model, digits, optimizer=AdamW(lr=2e-3)).edit(**edits)


def of_episodes(model: str, processes: bool, **edits: Any) -> Job:
    """GRPO on episodes; their environments run in processes of their own, or in the run."""
    interact = Interact(Digits, max_turns=2, context=64, timeout=30.0, max_new_tokens=6, processes=processes)
    return job_of("grpo", model, None).edit(replace={"generate": interact}, drop=["reward"]).edit(**edits)


def lagged(model: str, gate: bool) -> dict[str, Any]:
    """The edit that lets generation run a step ahead; with `gate`, groups without spread are replaced."""
    inserted = {"correction": After("group_advantage", RolloutCorrection("token", "truncate", high=2.0))}
    if gate:
        inserted["collect"] = After("reward", Collect(Spread(), groups=4, rounds=6))
    return {"lag": 1, "insert": inserted, "bind": {"rollout": TorchRollout(model, device="cpu")}}


JOBS: dict[str, Callable[[str], Job]] = {
    "GRPO": lambda model: plain("grpo", model),
    "PPO": lambda model: plain("ppo", model),
    "episodes": lambda model: of_episodes(model, processes=False),
    "episodes in processes": lambda model: of_episodes(model, processes=True),
    "lag and Collect": lambda model: plain("grpo", model, **lagged(model, gate=True)),
    "episodes with a lag": lambda model: of_episodes(model, processes=False, **lagged(model, gate=False)),
}


def train(name: str, desk: Path, folder: Path, resume: bool) -> None:
    job = JOBS[name](str(desk / "model"))
    until = "reward" if "reward" in job.graph.nodes else "interact"
    validation = Validation(PromptData(str(desk / "prompts.jsonl")), every=3, changes={"repeat.n": 1}, until=until)
    Training(
        job,
        PromptData(str(desk / "prompts.jsonl")),
        steps=STEPS,
        prompts=5,
        checkpoint_every=2,
        seed=3,
        folder=str(folder),
        resume=resume,
        validation=validation,
    ).run([])


def start(name: str, desk: Path, folder: Path, resume: bool = False) -> int:
    """Fork a process that trains; returns its id. Its output goes to a file, and its exit status is 0 or 1."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        os.environ[MARK] = str(folder)
        log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        train(name, desk, folder, resume)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def left_over(folder: Path, seconds: float = 20.0) -> list[str]:
    """The processes of a run that still exist after so long."""
    mark, deadline = f"{MARK}={folder}".encode(), time.monotonic() + seconds
    while True:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:  # it has ended, or is another user's
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def outcome(name: str, folder: Path) -> dict[str, Any]:
    """What must be equal: metrics without times, predictions, and the trained weights."""
    left_out = re.compile(f"{TIMES.pattern}|{ROUNDED.pattern}") if "processes" in name else TIMES
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "metrics": [{k: v for k, v in line.items() if not left_out.search(k)} for line in lines],
        "predictions": (folder / "predictions.jsonl").read_bytes(),
        "recorded": {} if "processes" in name else recorded(folder),
        "weights": {path.name: path.read_bytes() for path in sorted((folder / "actor").glob("*.safetensors"))},
    }


def recorded(folder: Path) -> dict[str, Any]:
    """The state cells, and the content of every Parquet file, of a run folder."""
    paths = [path for kind in FOLDERS for path in files_of(folder / kind)]
    tables = {str(path.relative_to(folder)): pq.read_table(path) for path in paths}
    return {"state": (folder / "state.jsonl").read_bytes(), **{name: str(t.to_pylist()) for name, t in tables.items()}}


def missing_rows(folder: Path) -> list[int]:
    """The steps of a killed run that have metrics and no rows."""
    run = flowrl.open(folder)
    if not run.steps:
        return []
    return sorted({*run.steps} - {*run.rows()["step"].to_pylist()})


def kill(name: str, desk: Path, folder: Path, seconds: float, expected: dict[str, Any]) -> str:
    """Kill a run after so many seconds, and resume it; returns what is wrong, or an empty string."""
    pid = start(name, desk, folder)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    wait(pid)
    if processes := left_over(folder):
        return f"processes are left: {processes}"
    begun = (folder / "run.json").exists()
    if begun and (steps := missing_rows(folder)):
        return f"the killed run has no rows of the steps {steps}"
    if wait(start(name, desk, folder, resume=begun)):
        return f"the resumed run failed: {folder.with_suffix('.log').read_text()[-1500:]}"
    found = outcome(name, folder)
    return ", ".join(what for what in expected if found[what] != expected[what])


def main(each: int, seed: int) -> None:
    instants, rows, faults = random.Random(seed), [], []
    with tempfile.TemporaryDirectory() as place:
        desk = Path(place)
        write_prompts(desk / "prompts.jsonl")
        os.rename(tiny_folder(desk / "made"), desk / "model")
        for name in JOBS:
            whole = desk / f"{name}-whole".replace(" ", "-")
            started = time.perf_counter()
            if wait(start(name, desk, whole)):
                raise SystemExit(f"{name} fails without a kill:\n{whole.with_suffix('.log').read_text()[-3000:]}")
            took, expected = time.perf_counter() - started, outcome(name, whole)
            for number in range(each):
                folder = desk / f"{name}-{number}".replace(" ", "-")
                fault = kill(name, desk, folder, instants.uniform(0, took), expected)
                faults += [f"{name} {number}: {fault}"] if fault else []
            rows.append([name, str(each), str(sum(fault.startswith(name + " ") for fault in faults)), f"{took:.1f}"])
    table(f"Kills at seed {seed}", ["run", "kills", "faults", "seconds of the run"], rows)
    print("\n".join(faults))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main(*map(int, [*sys.argv[1:], *["10", "0"][len(sys.argv) - 1 :]]))

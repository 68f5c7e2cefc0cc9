"""The parts of `gpu.py`: what each shows, how long it may take, and what it needs."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from flowrl.workers.supervisor import supervise

from .report import Outcome, Report, Status

SCRIPT = Path(__file__).parents[1] / "gpu.py"
DEV = "pip install -e '.[dev]'"
T = TypeVar("T")


class Target(NamedTuple):
    """Where a part runs: the device, how many of them there are, and a folder for models and data."""

    device: str
    count: int
    folder: Path

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"

    def pick(self, on_gpu: T, on_cpu: T) -> T:
        """A size for a GPU, or the tiny one with which a part runs on a CPU."""
        return on_gpu if self.on_gpu else on_cpu


@dataclass(frozen=True)
class Part:
    """A part in a process of its own, of which nothing stays on a device.

    Args:
        limit: seconds after which it is ended.
        run: the function, as ``module:function`` in this folder; it gets a `Target` and a `Report`.
        packages: what it imports, each with the command that installs it.
        devices: the fewest devices.
    """

    name: str
    shows: str
    limit: int
    run: str
    packages: Mapping[str, str] = field(default_factory=dict)
    devices: int = 1

    def lacks(self, target: Target) -> str | None:
        """Why it cannot run here, with what to do about it."""
        missing = {name: command for name, command in self.packages.items() if find_spec(name) is None}
        if missing:
            return f"{' and '.join(missing)} cannot be imported: {' && '.join(dict.fromkeys(missing.values()))}"
        if target.on_gpu and target.count < self.devices:
            return f"it needs {self.devices} GPUs, and there is {target.count}"
        return None


TESTS = {"pytest": DEV, "pytest_timeout": DEV, "hypothesis": DEV}
PARTS = (
    Part("tests", "Tests that need a GPU", 240, "tests:run_tests", TESTS),
    Part("numbers", "Attention, packing and precision", 60, "numbers:compare"),
    Part("meshes", "Meshes over NCCL against one process", 180, "meshes:compare", TESTS, devices=2),
    Part("memory", "Peaks of memory against `flowrl plan --hardware`", 90, "memory:compare", TESTS),
    Part("times", "Seconds of stages against `flowrl plan --hardware`", 90, "times:compare"),
    Part("sync", "Weights by a copy, CUDA IPC and NCCL, and their digests", 90, "sync:measure"),
    Part("turns", "Sleeping, waking and steps in turns", 120, "turns:measure"),
    Part("speed", "Generation, packed updates and a large head", 90, "speed:measure"),
    Part("training", "GRPO on all GPUs with a model of the size of Qwen3-0.6B", 150, "training:train", {"ray": DEV}),
    Part("vllm", "vLLM", 310, "engines:probe_vllm", {"vllm": "pip install -e '.[vllm,ray,lora]'"}),
    Part("sglang", "SGLang", 310, "engines:probe_sglang", {"sglang": "pip install -e '.[sglang,ray,lora]'"}),
)


def run(part: Part, target: Target, number: int) -> Outcome:
    """Run a part in a new process, and end it with all that it started after its limit."""
    if why := part.lacks(target):
        print(f"  Skipped: {why}.", flush=True)
        return Outcome(part.name, part.shows, "skipped", 0.0, part.limit, (), why)
    report = Report(target.folder / f"{number}-{part.name}.jsonl")
    given = (part.run, target.device, target.count, target.folder, report.file)
    return watch(part, child("parts:run_supervised", *given), report)


def child(function: str, *arguments: object) -> list[str]:
    """The command of a process that calls a function of this folder, ``module:function``, with strings."""
    return [sys.executable, str(SCRIPT), "--child", function, *map(str, arguments)]


def load(function: str) -> Callable[..., object]:
    """The function ``module:function`` of this folder."""
    module, _, name = function.partition(":")
    found: Callable[..., object] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return found


def run_here(function: str, device: str, count: str, folder: str, file: str) -> None:
    """Run a part in this process, and leave no process group of torch."""
    try:
        load(function)(Target(device, int(count), Path(folder)), Report(Path(file)))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_supervised(*given: str) -> None:
    """`run_here` in a process whose descendants end with it, and if its stdin is closed."""
    supervise(lambda: None)
    run_here(*given)


def watch(part: Part, command: list[str], report: Report) -> Outcome:
    """The outcome of a command that appends to a report; after the limit, its stdin is closed."""
    begun, why = time.monotonic(), ""
    with subprocess.Popen(command, cwd=SCRIPT.parents[1], stdin=subprocess.PIPE) as process:
        try:
            status = process.wait(timeout=part.limit)
        except subprocess.TimeoutExpired:
            status, why = None, f"ended after its {part.limit} s"
    found, seconds = report.read(), time.monotonic() - begun
    if status:
        why = f"its process ended with status {status}"
    failed = bool(status) or not all(one["passed"] for one in found if one["kind"] == "check")
    name: Status = "OVERRAN" if status is None else "FAILED" if failed else "passed"
    print(f"  {name} after {seconds:.0f} s", flush=True)
    return Outcome(part.name, part.shows, name, seconds, part.limit, found, why)

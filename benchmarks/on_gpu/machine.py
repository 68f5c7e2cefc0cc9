"""The hardware and the versions of a run."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from flowrl.run.prediction.hardware import HARDWARE, Hardware

PACKAGES = ("flowrl", "transformers", "peft", "ray", "vllm", "sglang")


def described(device: str) -> Iterator[tuple[str, str]]:
    """What the machine is, and which versions it has."""
    if device == "cuda":
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        names = Counter(f"{one.name}, {one.total_memory / 2**30:.1f} GiB, sm_{one.major}{one.minor}" for one in devices)
        yield "GPUs", "; ".join(f"{count} x {name}" for name, count in names.items())
        yield "driver", _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield "CUDA, cuDNN, NCCL", f"{torch.version.cuda}, {torch.backends.cudnn.version()}, {nccl}"
    else:
        yield "GPUs", "none: this is the CPU, with tiny sizes; it shows only that the parts run"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield "CPU", f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.machine()}"
    yield "system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    yield "torch", torch.__version__
    yield "packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    yield "commit", _output("git", "describe", "--always", "--dirty")


def show(device: str) -> None:
    """Print `described` as JSON, in a process of its own, so that the others have the whole GPU."""
    print(json.dumps(list(described(device))))


def hardware() -> Hardware | None:
    """What flowrl's table has of the first GPU; None if it is not in it."""
    return known(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory / 2**30)


def known(name: str, memory: float) -> Hardware | None:
    """The hardware of a name such as ``NVIDIA H100 80GB HBM3``, of all with its name that with the closest GiB."""
    words = re.split(r"[\s-]+", name.upper())
    words += [one + other for one, other in itertools.pairwise(words)]  # RTX 4090
    fitting = [one for key, one in HARDWARE.items() if key.partition("-")[0].upper() in words]
    return min(fitting, key=lambda one: abs(one.memory - memory), default=None)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _output(*command: str) -> str:
    """What a command prints; what is missing is named."""
    if shutil.which(command[0]) is None:
        return f"unknown: there is no {command[0]}"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or f"unknown: {done.stderr.strip()}"

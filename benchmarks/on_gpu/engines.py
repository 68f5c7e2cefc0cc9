"""The checks of `gpu_engines.py`: vLLM and SGLang with what only a GPU shows."""

from __future__ import annotations

from importlib.util import find_spec

import gpu_engines
from generate import write_model

from .parts import Target
from .report import Report

INSTALL = {"vllm": "pip install -e '.[vllm,ray,lora]'", "sglang": "pip install -e '.[sglang,ray,lora]'"}


def probe(target: Target, report: Report) -> None:
    """Run every case on each engine that is installed."""
    model = str(write_model(target.folder / "engines", *target.pick((24, 1024), (2, 64))))
    for name, command in INSTALL.items():
        if find_spec(name) is None:
            report.skip(name, f"it is not installed: {command}, perhaps in an environment of its own")
            continue
        for case in gpu_engines.CASES:
            where = gpu_engines.Where(name, model, target.device, target.folder)
            for what, holds, found in gpu_engines.check(case, where):
                if holds:
                    report.check(what, holds == "yes", found)
                else:
                    report.skip(f"{name}, {case}", found)

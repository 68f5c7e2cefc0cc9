"""The checks of `gpu_engines.py`: what vLLM and SGLang do only on a GPU."""

from __future__ import annotations

import gpu_engines
from generate import write_model

from .parts import Target
from .report import Report


def probe_vllm(target: Target, report: Report) -> None:
    """Run every case on vLLM."""
    _probe("vllm", target, report)


def probe_sglang(target: Target, report: Report) -> None:
    """Run every case on SGLang."""
    _probe("sglang", target, report)


def _probe(name: str, target: Target, report: Report) -> None:
    model = str(write_model(target.folder / "engines", *target.pick((24, 1024), (2, 64))))
    for case in gpu_engines.CASES:
        for what, holds, found in gpu_engines.check(case, gpu_engines.Where(name, model, target.device, target.folder)):
            if holds:
                report.check(what, holds == "yes", found)
            else:
                report.skip(f"{name}, {case}", found)

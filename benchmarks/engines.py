"""The three rollout engines on the same weights and prompts: start-up, tokens per second, syncs and agreement.

``.venv-engines/bin/python benchmarks/engines.py`` after `make engines` measures all three, in a few minutes; it skips
engines that are not installed and lists them. With ``quick`` it measures one model with small calls.

Every call has new prompts, each for a group of rows, as in GRPO. Start-up excludes imports, except for SGLang, which
imports in the process that it starts. The first call includes compilation that is not cached on disk. Log-probs are
compared with those of a trainer in float32. `LLM.generate` is vLLM's own loop over the same prompts and seeds.

The second table shows episodes: concurrent, and one after the other.
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
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # otherwise vLLM logs every sync

import torch
from generate import SAID, TURNS, by_requests, write_model
from harness import medians, table
from transformers.utils import logging

from flowrl import Key
from flowrl.backends import SGD, TorchRollout, TorchTrainer
from flowrl.backends.sglang.engine import SGLang
from flowrl.backends.vllm.engine import VLLM
from flowrl.data.text.tokenizer import assemble
from flowrl.protocols.protocols import Sampled, Sampling

SHARPER = 6.0  # random weights give nearly uniform distributions, on which engines agree too easily
CONTEXT: Any = SimpleNamespace(seed=0, rank=0, world_size=1)


class Size(NamedTuple):
    """Size of a call: prompts, rows per prompt, tokens per prompt, and the most new tokens."""

    groups: int
    group: int
    prompt: int
    new: int

    @property
    def rows(self) -> int:
        return self.groups * self.group

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=self.new)


WHOLE, QUICK = Size(8, 8, 128, 48), Size(2, 4, 128, 12)
SIZES = {"2 layers of 64": (2, 64), "4 layers of 256": (4, 256)}
CASES = [("2 layers of 64", "float32"), ("4 layers of 256", "float32"), ("4 layers of 256", "bfloat16")]
ALONE = 2  # episodes played one after the other
HEADS = ["", "start-up, s", "first, s", "tokens/s", "sync, ms", "sync, MB", "mean |Δ log-prob|", "max |Δ log-prob|"]
EPISODE_HEADS = ["", "concurrent, episodes/s", "one by one, episodes/s", "ratio", "cached"]


def backends(model: str, dtype: Any, size: Size) -> dict[str, Any]:
    """Each engine by the package that it needs, with room for one call."""
    rows, longest = size.rows, size.prompt + TURNS * (size.new + SAID)
    cache = 2 * rows * longest
    return {
        "torch": TorchRollout(model, dtype=dtype),
        "vllm": VLLM(model, dtype=dtype, max_model_len=longest, max_num_seqs=rows, kv_cache_bytes=1 << 30),
        "sglang": SGLang(model, dtype=dtype, max_model_len=longest, max_num_seqs=rows, cache_tokens=cache),
    }


def prompts_of(call: int, size: Size) -> torch.Tensor:
    """Prompts of the numbered call, int64 ``[batch prompt]``; the same for every engine."""
    draw = torch.Generator().manual_seed(call)
    return torch.randint(8, 100, (size.groups, size.prompt), generator=draw).repeat_interleave(size.group, 0)


def generate(engine: Any, call: int, size: Size) -> Sampled:
    """The answers to the prompts of the numbered call."""
    prompts = prompts_of(call, size)
    row_ids = [f"{call}/{row}" for row in range(len(prompts))]
    sampled: Sampled = engine.generate(
        prompts, torch.ones_like(prompts, dtype=torch.bool), row_ids, size.sampling, Key.of(call)
    )
    return sampled


def generate_by_vllm(engine: Any, call: int, size: Size) -> None:
    """The answers of vLLM's own loop."""
    from vllm import SamplingParams

    settings: dict[str, Any] = dict(max_tokens=size.new, stop_token_ids=[*engine.tokenizer.ends], ignore_eos=True)
    seeds = [Key.of(call).response(f"{call}/{row}").bits & (2**63 - 1) for row in range(size.rows)]
    each = [SamplingParams(**settings, seed=seed, logprobs=0, detokenize=False) for seed in seeds]
    prompts = [{"prompt_token_ids": ids} for ids in prompts_of(call, size).tolist()]
    engine._llm.generate(prompts, each, use_tqdm=False)


def play(engine: Any, call: int, size: Size, count: int, together: bool) -> None:
    """Episodes from the prompts of the numbered call, concurrent or one after the other."""
    prompts, episodes = prompts_of(call, size).tolist()[:count], by_requests(engine)
    for i in [0] if together else range(count):
        episodes(prompts if together else [prompts[i]], size.sampling, call + i)


def disagreement(engine: Any, trainer: Any, size: Size) -> torch.Tensor:
    """``|log-prob of the engine - log-prob of the trainer|`` of each sampled token of one call, in nats."""
    prompts, sampled = prompts_of(0, size), generate(engine, 0, size)
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
    """The result of `call`, and its seconds."""
    begun = time.perf_counter()
    return call(), time.perf_counter() - begun


def compare_episodes(engines: dict[str, Any], seconds: float, size: Size) -> list[list[str]]:
    """A row of the table of episodes for each engine, with the fraction of cached tokens if it reports that."""
    rows, calls = [], 0

    def played(engine: Any, count: int, together: bool) -> None:
        nonlocal calls
        calls += 1
        play(engine, 1000 + 10 * calls, size, count, together)

    for name, engine in engines.items():
        known = getattr(engine, "cached_tokens", None)
        given = getattr(engine, "context_tokens", 0)
        ways = {
            "at once": partial(played, engine, size.rows, True),
            "alone": partial(played, engine, ALONE, False),
        }
        times = medians(ways, seconds / 2, least=3 if seconds else 1)
        rates = size.rows / times["at once"], ALONE / times["alone"]
        share = "" if known is None else f"{(engine.cached_tokens - known) / (engine.context_tokens - given):.0%}"
        rows.append([name, f"{rates[0]:.1f}", f"{rates[1]:.2f}", f"{rates[0] / rates[1]:.1f}", share])
    return rows


def compare(
    model: str, dtype: str, installed: dict[str, bool], seconds: float, size: Size
) -> tuple[list[list[str]], ...]:
    """A row of both tables for each engine."""
    trainer = TorchTrainer(model, SGD(lr=0.1)).build(CONTEXT)
    with torch.no_grad():
        for _, weight in trainer.weights():
            weight.mul_(SHARPER if weight.ndim > 1 else 1.0)
    engines: dict[str, Any] = {}
    starts, firsts, tokens, calls = {}, {}, {}, {}
    for name, backend in backends(model, dtype, size).items():
        if installed[name]:
            engines[name], starts[name] = timed(partial(backend.build, CONTEXT))
            engines[name].sync(trainer)
            _, firsts[name] = timed(partial(generate, engines[name], 0, size))
            tokens[name], calls[name] = 0, 0

    def answer(name: str) -> None:
        calls[name] += 1
        tokens[name] += int(generate(engines[name], calls[name], size).response_mask.sum())

    def answer_by_vllm() -> None:
        calls["LLM.generate"] += 1
        generate_by_vllm(engines["vllm"], calls["LLM.generate"], size)

    ways: dict[str, Callable[[], None]] = {name: partial(answer, name) for name in engines}
    if installed["vllm"]:
        calls["LLM.generate"], ways["LLM.generate"] = 0, answer_by_vllm
    answers = medians(ways, seconds)
    syncs = medians({name: partial(engine.sync, trainer) for name, engine in engines.items()}, seconds / 4)
    rows = []
    for name, engine in engines.items():
        differences = disagreement(engine, trainer, size)
        rows.append(
            [
                name,
                f"{starts[name]:.1f}",
                f"{firsts[name]:.1f}",
                f"{tokens[name] / calls[name] / answers[name]:,.0f}",
                f"{1e3 * syncs[name]:.1f}",
                f"{engine.receipt.bytes / 1e6:.2f}",
                f"{differences.mean():.1e}",
                f"{differences.max():.1e}",
            ]
        )
    if installed["vllm"]:
        rate = tokens["vllm"] / calls["vllm"] / answers["LLM.generate"]
        rows.append(["LLM.generate", "", "", f"{rate:,.0f}", *[""] * 4])
    episodes = compare_episodes(engines, seconds, size)
    for name, engine in engines.items():
        if name != "torch":
            engine.close()
    return rows, episodes


def main(quick: bool) -> None:
    """Print the table."""
    installed = {name: importlib.util.find_spec(name) is not None for name in ("torch", "vllm", "sglang")}
    if installed["vllm"]:
        importlib.import_module("vllm")
    tables: tuple[list[list[str]], ...] = ([], [])
    size = QUICK if quick else WHOLE
    with tempfile.TemporaryDirectory() as base:
        for case, dtype in CASES[:1] if quick else CASES:
            model = write_model(Path(base) / f"{case} in {dtype}", *SIZES[case], positions=512)
            of_case = compare(model, dtype, installed, seconds=0.0 if quick else 12.0, size=size)
            for rows, found in zip(tables, of_case, strict=True):
                rows += [[f"{case}, {dtype}, {name}", *cells] for name, *cells in found]
    rows = tables[0]
    rows += [[f"{name}: not installed (make engines)", *[""] * 7] for name, there in installed.items() if not there]
    rows_in_all = f"{size.groups} prompts of {size.prompt} tokens, {size.group} rows each, at most {size.new} new"
    table(f"Rollout engines: {rows_in_all}; {os.cpu_count()} cores", HEADS, rows)
    table(f"Episodes: {TURNS} turns, {SAID} tokens between two of them, the same prompts", EPISODE_HEADS, tables[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    main("quick" in sys.argv[1:])

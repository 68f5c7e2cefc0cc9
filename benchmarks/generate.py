"""Tokens per CPU-second of `TorchRollout` and of transformers' `model.generate`, on the same weights and prompts: one
thread, alternating calls, the median of the ratios, because other load on the machine slows both.

`TorchRollout` also returns log-probs, and samples each row with its own key. It computes a prompt that several rows
share once, removes finished rows from the batch, and in episodes continues from the KV cache of earlier turns.

The limit is the model alone: a pass over each distinct prompt, then a pass per token over the unfinished rows, without
attention to earlier tokens and without sampling. No decoder that calls the model's own layers is faster.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from flowrl import Key
from flowrl.backends import TorchRollout
from flowrl.demo.model import make_tokenizer
from flowrl.protocols.protocols import Request, Sampling
from flowrl.run.engine.build import EngineBuilder

ROUNDS = 5
TURNS, SAID = 3, 40  # turns of an episode; tokens between two turns

Answer = Callable[[Sequence[list[int]], Sampling, int], list[list[int]]]
"""Answers to contexts, by a seed."""


def write_model(
    folder: str | Path, layers: int, width: int, *, grouped: int = 1, positions: int = 256, vocabulary: int = 0
) -> str:
    """Write a random Llama with the demo's tokenizer; return the folder.

    Args:
        folder: output folder.
        layers, width: size of the model; heads have width 32.
        grouped: query heads per key head.
        positions: longest sequence, in tokens.
        vocabulary: number of tokens; 0 for the tokenizer's.
    """
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=vocabulary or len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32 // grouped,
        max_position_embeddings=positions,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def by_generate(engine: Any) -> Answer:
    """Batches of the engine's `generate`."""

    def answer(contexts: Sequence[list[int]], sampling: Sampling, seed: int) -> list[list[int]]:
        names = [str(i) for i in range(len(contexts))]
        sampled = engine.generate(*engine.tokenizer.pad_left(contexts), names, sampling, Key.of(seed))
        return [ids[mask].tolist() for ids, mask in zip(*sampled[:2], strict=True)]

    return answer


def by_transformers(engine: Any) -> Answer:
    """Batches of the `generate` of the engine's model."""
    engine.model.generation_config.eos_token_id = None

    def answer(contexts: Sequence[list[int]], sampling: Sampling, seed: int) -> list[list[int]]:
        prompts, mask = engine.tokenizer.pad_left(contexts)
        stops = list(sampling.stop_token_ids)
        settings: Any = dict(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=sampling.max_new_tokens)
        with torch.no_grad():
            whole: Tensor = engine.model.generate(
                prompts, attention_mask=mask.long(), eos_token_id=stops or None, pad_token_id=0, **settings
            )
        rows = whole[:, prompts.shape[1] :].tolist()
        return [row[: next((i + 1 for i, t in enumerate(row) if t in stops), len(row))] for row in rows]

    return answer


def alone(model: Any, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
    """The least computation of the model for these answers; see the module."""
    distinct = [list(ids) for ids in dict.fromkeys(map(tuple, prompts))]
    width, lengths = max(map(len, distinct)), torch.tensor(list(map(len, answers)))
    with torch.inference_mode():
        padded = torch.tensor([ids + ids[-1:] * (width - len(ids)) for ids in distinct])
        model(input_ids=padded, use_cache=False, logits_to_keep=1)
        for token in range(1, int(lengths.max())):
            rows = int((lengths > token).sum())
            model(input_ids=torch.zeros(rows, 1, dtype=torch.int64), use_cache=False)


def reply(turn: int, row: int) -> list[int]:
    """The environment's tokens after a turn."""
    return torch.randint(8, 100, (SAID,), generator=torch.Generator().manual_seed(1000 * turn + row)).tolist()


def in_turns(answer: Answer) -> Answer:
    """Episodes in batches: rows wait for the slowest of each turn, and contexts are recomputed."""

    def episodes(prompts: Sequence[list[int]], sampling: Sampling, seed: int) -> list[list[int]]:
        contexts, answered = list(prompts), [list[int]() for _ in prompts]
        for turn in range(TURNS):
            for i, ids in enumerate(answer(contexts, sampling, seed + turn)):
                answered[i] += ids
                contexts[i] = [*contexts[i], *ids, *reply(turn, i)]
        return answered

    return episodes


def by_requests(engine: Any) -> Answer:
    """Episodes as requests: each continues as soon as it can, from its cache."""

    def episodes(prompts: Sequence[list[int]], sampling: Sampling, seed: int) -> list[list[int]]:
        key, contexts, turns = Key.of(seed), list(prompts), [0] * len(prompts)
        answered = [list[int]() for _ in prompts]

        def ask(i: int) -> None:
            draws = key.response(str(i), turns[i])
            engine.submit(Request(str(i), contexts[i], sampling, draws, retain_cache=turns[i] + 1 < TURNS))

        for i in range(len(prompts)):
            ask(i)
        while min(turns) < TURNS:
            for i in map(int, engine.step()):
                ids = engine.take(str(i)).ids
                answered[i] += ids
                contexts[i] = [*contexts[i], *ids, *reply(turns[i], i)]
                turns[i] += 1
                if turns[i] < TURNS:
                    ask(i)
        return answered

    return episodes


def compare(
    ways: dict[str, Answer], rows: int, lengths: tuple[int, int], group: int, sampling: Sampling, model: Any = None
) -> list[str]:
    """Tokens per second of each way, and of the `model` alone if given; then the speedup of the first."""
    rates: dict[str, list[float]] = {name: [] for name in (*ways, *([] if model is None else ["alone"]))}
    for seed in range(ROUNDS + 1):
        draw = torch.Generator().manual_seed(seed)
        sizes = torch.randint(lengths[0], lengths[1] + 1, (rows // group,), generator=draw).tolist()
        prompts = [torch.randint(8, 100, (n,), generator=draw).tolist() for n in sizes]
        prompts = [prompt for prompt in prompts for _ in range(group)]
        answers: dict[str, list[list[int]]] = {}
        for name in list(ways)[:: (-1) ** seed]:
            started = time.process_time()
            answers[name] = ways[name](prompts, sampling, seed)
            rates[name].append(sum(map(len, answers[name])) / (time.process_time() - started))
        if model is not None:
            answered, started = answers[next(iter(ways))], time.process_time()
            alone(model, prompts, answered)
            rates["alone"].append(sum(map(len, answered)) / (time.process_time() - started))
    first, *others = [of_way[1:] for of_way in rates.values()]
    ratios = [statistics.median(a / b for a, b in zip(first, other, strict=True)) for other in others]
    return [f"{statistics.median(r):,.0f}" for r in (first, *others)] + [f"{ratio:.2f}" for ratio in ratios]


def main() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    fixed = Sampling(1.0, 0, 1.0, 32, ignore_eos=True)
    natural = Sampling(1.0, 0, 1.0, 256, stop_token_ids=(2,), ignore_eos=True)  # one token in 128 ends a row
    batches = [
        ("128 rows of 32, prompts of 32", 128, (32, 32), 1, fixed),
        ("the same in groups of 8", 128, (32, 32), 8, fixed),
        ("prompts of 16 to 48", 128, (16, 48), 1, fixed),
        ("64 rows of up to 256, prompts of 32", 64, (32, 32), 1, natural),
        ("prompts of 16 to 48", 64, (16, 48), 1, natural),
    ]
    turns = [
        ("64 episodes of 3 turns of up to 64", Sampling(1.0, 0, 1.0, 64, (2,), ignore_eos=True)),
        ("up to 128, one token of 32 ends", Sampling(1.0, 0, 1.0, 128, (2, 20, 40, 60), ignore_eos=True)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, 4, 128, grouped=2, positions=2048, vocabulary=128)
        engine = TorchRollout(folder, device="cpu", frozen=True).build(EngineBuilder({}, seed=0))
        ours, theirs = by_generate(engine), by_transformers(engine)
        ways = {"flowrl": ours, "transformers": theirs}
        rows = [[name, *compare(ways, *case, model=engine.model)] for name, *case in batches]
        heads = ["", "flowrl", "model.generate", "model alone", "times generate", "of the model alone"]
        table("Tokens per second, and the limit of the model alone", heads, rows)
        ways = {"requests": by_requests(engine), "flowrl": in_turns(ours), "transformers": in_turns(theirs)}
        rows = [[name, *compare(ways, 64, (32, 32), 1, sampling)] for name, sampling in turns]
        heads = ["", "requests", "generate", "model.generate", "times generate", "times model.generate"]
        table("Tokens per second in episodes, as requests and as a batch per turn", heads, rows)


if __name__ == "__main__":
    main()

"""Log-probs of tokens, from given logits (compared with verl) and through a head (compared with whole distributions).

Calls alternate. verl's function is used if verl is installed, as by ``make race``; otherwise its CPU code is
reimplemented here. Times are CPU time of one thread. Memory is the increase of the process's peak.

    python benchmarks/log_probs.py [seconds per table]
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from harness import table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowrl.backends.torch.score.tiles import LMHead, score_tokens

VOCABULARY = 32_000
Gain = Callable[[], Tensor]


def written_out(logits: Tensor, labels: Tensor) -> Tensor:
    """`logprobs_from_logits` of verl 0.9.1 on a CPU: row by row."""
    if logits.dtype == torch.float32:
        chosen = logits.gather(-1, labels[..., None])[..., 0]
        return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    rows = zip(logits, labels, strict=True)
    return torch.stack([row.log_softmax(-1).gather(-1, label[..., None])[..., 0] for row, label in rows])


try:
    from verl.utils.torch_functional import logprobs_from_logits as verl

    VERL = "verl"
except ImportError:
    verl, VERL = written_out, "verl, reimplemented"


def medians(cases: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The median CPU time per call of each case, in seconds; calls alternate, and the first round does not count."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, taken.values())) < 4:
        for name, call in cases.items():
            started = time.process_time()
            call()
            taken[name].append(time.process_time() - started)
    return {name: statistics.median(of_case[1:]) for name, of_case in taken.items()}


def ready(logits: Tensor, labels: Tensor, entropy: str = "none") -> tuple[Tensor, ...]:
    """flowrl, from given logits."""
    return score_tokens(entropy, LMHead(), 1024, logits, labels, torch.ones(len(labels)))  # type: ignore[arg-type]


def forward_and_backward(score: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> None:
    logits.grad = None
    score(logits, labels).sum().backward()


def without_gradient(score: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> None:
    with torch.no_grad():
        score(logits, labels)


def of_logits(seconds: float) -> None:
    """Against verl's function."""
    rows = []
    for tokens, run in ((4096, without_gradient), (1024, forward_and_backward), (4096, forward_and_backward)):
        for dtype in (torch.float32, torch.bfloat16):
            logits = torch.randn(tokens, VOCABULARY).to(dtype)
            logits.requires_grad_(run is forward_and_backward)
            labels = torch.randint(VOCABULARY, (tokens,))
            scores = {VERL: verl, "flowrl": lambda x, y: ready(x, y)[0]}
            found = medians({name: partial(run, score, logits, labels) for name, score in scores.items()}, seconds)
            name = f"{tokens} tokens, {str(dtype)[6:]}, {run.__name__.replace('_', ' ')}"
            peer, own = found.values()
            rows.append([name, f"{1e3 * peer:.0f}", f"{1e3 * own:.0f}", f"{peer / own:.2f}"])
    table(f"Log-probs of given logits over {VOCABULARY} tokens", ["", f"{VERL} ms", "flowrl ms", "faster by"], rows)


def whole(layer: nn.Linear, states: Tensor, labels: Tensor) -> Tensor:
    return layer(states).log_softmax(1).gather(1, labels[:, None])[:, 0]


def in_chunks(size: int, layer: nn.Linear, states: Tensor, labels: Tensor) -> Tensor:
    pieces = zip(states.split(size), labels.split(size), strict=True)
    return torch.cat([checkpoint(whole, layer, *piece, use_reentrant=False) for piece in pieces])


def tiles(layer: nn.Linear, states: Tensor, labels: Tensor) -> Tensor:
    return score_tokens("none", LMHead(layer), 1024, states, labels, torch.ones(len(labels)))[0]


def back_to_the_head(score: Callable[..., Tensor], layer: nn.Linear, states: Tensor, labels: Tensor) -> None:
    score(layer, states, labels).sum().backward()
    layer.zero_grad()


def through_head(seconds: float, hidden: int = 512, tokens: int = 512) -> None:
    """Forward and backward from states through a head: time and memory."""
    cases = {"whole": whole, "chunks of 1024": partial(in_chunks, 1024), "chunks of 64": partial(in_chunks, 64)}
    rows = []
    for size in (VOCABULARY, 152_000):
        layer, states = nn.Linear(hidden, size, bias=False), torch.randn(tokens, hidden).requires_grad_()
        labels, scores = torch.randint(size, (tokens,)), cases | {"flowrl": tiles}
        calls = {name: partial(back_to_the_head, score, layer, states, labels) for name, score in scores.items()}
        found = medians(calls, seconds)
        own = layer.weight.numel() * 4 / 2**30
        for name, call in calls.items():
            over = f"{peak(call) - own:.3f}"
            rows.append([f"{size}: {name}", f"{1e3 * found[name]:.0f}", f"{found[name] / found['flowrl']:.2f}", over])
    heads = ["", "ms", "vs flowrl", "GiB above the head's gradient"]
    table(f"{tokens} tokens through a head of {hidden}, forward and backward", heads, rows)


def peak(call: Callable[[], object]) -> float:
    """Increase of the process's peak memory during `call`, in GiB, as counted by Linux."""

    def counted(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    ctypes.CDLL(None).malloc_trim(0)  # return free memory first
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = counted("VmRSS")
    call()
    return (counted("VmHWM") - before) / 2**20


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    budget = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    of_logits(budget)
    through_head(budget)

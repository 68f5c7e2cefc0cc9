"""Cases that `test_memory.py` runs in one process and on meshes: settings that save memory, and the main program of a
rank.

``python -m tests.backends.torch.meshes.memory_cases RANK FOLDER AXES`` runs every case as one rank of a gloo group, and
pickles the results; ``AXES`` is JSON.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flowrl.backends import AdamW, Muon
from flowrl.backends.torch.optimizers import streamed
from tests.backends.torch.meshes.context_cases import ADAMW, MINIS, PPO, Ranks
from tests.backends.torch.meshes.processes import main
from tests.backends.torch.train.fsdp_cases import weights

SETTINGS: dict[str, dict[str, Any]] = {
    "the optimizer": {"offload": "optimizer"},
    "parameters": {"offload": "parameters"},
    "all": {"offload": True},
    "every second block": {"gradient_checkpointing": 2},
    "inputs of blocks": {"gradient_checkpointing": "offload"},
    "gathered": {"reshard_after_forward": False},
    "gathered, of the optimizer": {"reshard_after_forward": False, "offload": "optimizer"},
}
"""Settings that change no bit."""
MUON = Muon(lr=2e-4)
EIGHT_BIT = AdamW(lr=0.002, eps=1e-5, bits=8)
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
_numbers = itertools.count()


def trained(ranks: Ranks, updates: int = 1, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """An engine, and its weights after some updates of four mini-batches."""
    engine = ranks.trainer(**{"optimizer": ADAMW, "grad_clip": 1.0} | settings)
    for _ in range(updates):
        step(ranks, engine)
    return engine, weights(engine)


def step(ranks: Ranks, engine: Any) -> None:
    batch = ranks.batch()
    engine.update(batch, ranks.minis(batch, PPO, *MINIS), PPO)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


def exact(ranks: Ranks) -> dict[str, bool]:
    """Whether each setting gives the weights, and the log-probs after them, of a trainer without."""
    engine, plain = trained(ranks)
    log_probs, found = engine.log_probs(ranks.batch()), {}
    for name, settings in SETTINGS.items():
        other, after = trained(ranks, **settings)
        found[name] = same(plain, after) and torch.equal(other.log_probs(ranks.batch()), log_probs)
    return found


def resumed(ranks: Ranks, first: dict[str, Any], then: dict[str, Any]) -> bool:
    """Whether training goes on to the bit from a checkpoint of other settings, and from a copy of the state."""
    engine, _ = trained(ranks, **first)
    engine.save_checkpoint(folder := str(ranks.folder / f"checkpoint-{ranks.sizes}-{next(_numbers)}"))
    state = engine.state_dict()
    other, again = ranks.trainer(**{"grad_clip": 1.0} | then), ranks.trainer(**{"grad_clip": 1.0} | then)
    other.load_checkpoint(folder)
    if ranks.mesh.ranks > 1:  # an offloaded state of one process has no shards
        again.load_state_dict(state)
    else:
        again.load_checkpoint(folder)
    for one in (engine, other, again):
        step(ranks, one)
    return same(weights(engine), weights(other)) and same(weights(engine), weights(again))


def resumes(ranks: Ranks) -> dict[str, bool]:
    """Whether a change of `offload`, and of nothing, continues to the bit."""
    offloads: dict[str, Any] = {"none": False, "optimizer": "optimizer", "parameters": "parameters", "all": True}
    pairs = [("none", "optimizer"), ("optimizer", "parameters"), ("parameters", "all"), ("all", "none")]
    found = {
        f"{a} to {b}": resumed(
            ranks, {"optimizer": ADAMW, "offload": offloads[a]}, {"optimizer": ADAMW, "offload": offloads[b]}
        )
        for a, b in pairs
    }
    optimizers = {"Muon": MUON} | ({"8 bits": EIGHT_BIT} if HAS_TORCHAO else {})
    for name, optimizer in optimizers.items():
        both = {"optimizer": optimizer}
        found[name] = resumed(ranks, both, both | {"offload": "optimizer"})
    return found


def muon(ranks: Ranks) -> dict[str, Any]:
    """Weights after four mini-batches, also with states, or parameters, in CPU memory."""
    found = {offload: trained(ranks, optimizer=MUON, offload=offload)[1] for offload in (False, "optimizer", True)}
    return {"close": found[False], "same": same(found[False], found["optimizer"]) and same(found[False], found[True])}


def experts(ranks: Ranks) -> dict[str, Any]:
    """Muon on layers that store experts together."""
    engine, batch = ranks.trainer("mixtral", optimizer=MUON, grad_clip=1.0), ranks.batch("mixtral")
    engine.update(batch, ranks.minis(batch, PPO, *MINIS), PPO)
    return {"close": weights(engine)}


def eight_bit(ranks: Ranks) -> dict[str, Any]:
    """Weights, whether an offloaded state gives the same, and a checkpoint for other meshes."""
    if not HAS_TORCHAO:
        return {}
    engine, after = trained(ranks, optimizer=EIGHT_BIT)
    engine.save_checkpoint(str(ranks.folder / f"eight-{ranks.sizes}"))
    return {"close": after, "same": same(after, trained(ranks, optimizer=EIGHT_BIT, offload="optimizer")[1])}


CASES: dict[str, Callable[[Ranks], dict[str, Any]]] = {
    "exact": exact,
    "resumes": resumes,
    "muon": muon,
    "experts": experts,
    "eight bit": eight_bit,
}


def results(folder: Path, mesh: Any, rank: int, every: bool) -> dict[str, Any]:
    streamed.BUCKET_BYTES = 1 << 14  # several buckets
    ranks = Ranks(folder, mesh, rank)
    return {name: case(ranks) for name, case in CASES.items()}


if __name__ == "__main__":
    main(results)

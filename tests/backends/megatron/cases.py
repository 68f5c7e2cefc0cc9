"""Cases that `test_trainer.py` runs with `TorchTrainer` in one process and with `MegatronTrainer` on meshes, and the
main program of a rank.

``python -m tests.backends.megatron.cases RANK FOLDER AXES`` runs some cases as one rank of a gloo group on
megatron-core, and pickles the results; ``AXES`` is JSON. With ``every`` it runs all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowrl.backends import SGD, MegatronTrainer, Mesh, TorchRollout, TorchTrainer
from tests.backends.megatron import on_cpu
from tests.backends.torch.meshes import context_cases as shared
from tests.backends.torch.meshes.context_cases import ADAMW, ALL, MINIS, OVER_ROWS, PPO, ROWS
from tests.backends.torch.meshes.processes import main, name_of
from tests.backends.torch.train.fsdp_cases import error_of, weights
from tests.support.models import PAD, ragged
from tests.support.rows.cut_rows import cut

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "qwen2": {"num_key_value_heads": 4},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 32},
}
"""Grouped keys and slower rotary positions; biases of queries, keys and values; tied weights, and norms of queries and
keys. The vocabulary, of 85 tokens, does not divide by two."""


@dataclass(frozen=True)
class Ranks(shared.Ranks):
    """A rank of a mesh, whose trainers are of a backend."""

    backend: type = TorchTrainer

    def trainer(self, kind: str = "llama", **settings: Any) -> Any:
        return self.build(self.backend, kind, **{"optimizer": ADAMW, "grad_clip": 1.0} | settings)


def scores(ranks: Ranks, kind: str) -> dict[str, Any]:
    """All scores, of some rows too: those of a data rank, or none."""
    engine, batch = ranks.trainer(kind), ragged(ROWS)
    top = engine.top_log_probs(batch, 3)
    close = {"log_probs": engine.log_probs(batch), "top": top.log_probs, "norms": engine.logit_norms(batch)}
    rows = [3, 5] if ranks.position.data_rank == 0 else []
    own = engine.log_probs(shared._rows(batch, rows))
    return {"close": close, "exact": {"ids": top.ids}, "own": (rows, own)}


def gradient(ranks: Ranks, kind: str = "llama", **settings: Any) -> dict[str, Any]:
    """One step of a rate that leaves little of the weights but their gradients. A padding token was sampled."""
    engine, batch = ranks.trainer(kind, optimizer=SGD(lr=1e3), grad_clip=None, **settings), ranks.batch(kind)
    (row, token), *_ = batch.response_mask.nonzero().tolist()
    ids = batch.input_ids.clone()
    ids[row, token - batch.response_mask.shape[1]] = PAD
    batch, before = batch._replace(input_ids=ids), weights(engine)
    metrics = engine.update(batch, ranks.minis(batch, PPO, ALL), PPO)
    return {"close": {name: after - before[name] for name, after in weights(engine).items()}, "metrics": [metrics]}


def over_rows(ranks: Ranks, name: str) -> dict[str, Any]:
    """A loss across the tokens of a row, the rows of a group, or all rows."""
    objective, engine, batch = OVER_ROWS[name], ranks.trainer(tokens=20), ranks.batch()
    uid = np.array([f"{row % 3}" for row in ALL], dtype=object)
    whole = None if name == "sequences" else batch._asdict() | {"uid": uid}
    metrics = engine.update(batch, ranks.minis(batch, objective, ALL, whole=whole), objective)
    return {"close": weights(engine), "metrics": [metrics]}


def segments(ranks: Ranks) -> dict[str, Any]:
    """Rows of several segments, each read by itself; one row has more tokens than a micro-batch."""
    batch = cut(ranks.batch(), [[3, 7], [], [1], [2], [], [], []])
    engine = ranks.trainer(tokens=24)
    found = engine.log_probs(batch)
    metrics = engine.update(batch, ranks.minis(batch, PPO, ALL), PPO)
    return {"close": weights(engine), "after": {"log_probs": found}, "metrics": [metrics]}


def training(ranks: Ranks, kind: str) -> dict[str, Any]:
    """Eight mini-batches of AdamW; a checkpoint in between, from which the second half is the same to the bit."""
    engine, batch = ranks.trainer(kind), ranks.batch(kind)
    metrics = [engine.update(batch, ranks.minis(batch, PPO, *MINIS), PPO)]
    engine.save_checkpoint(
        folder := str(ranks.folder / f"checkpoint-{kind}-{name_of(ranks.mesh)}-{ranks.backend.__name__}")
    )
    metrics.append(engine.update(batch, ranks.minis(batch, PPO, *MINIS), PPO))
    after = weights(engine)
    other = ranks.trainer(kind)
    other.load_checkpoint(folder)
    other.update(batch, ranks.minis(batch, PPO, *MINIS), PPO)
    same = all(torch.equal(x, after[name]) for name, x in weights(other).items())
    exact = {"resumed": torch.tensor(same), "version": torch.tensor(other.version)}
    return {"close": after, "after": {"log_probs": other.log_probs(batch)}, "metrics": metrics, "exact": exact}


def sync(ranks: Ranks, kind: str) -> dict[str, Any]:
    """A rollout engine receives the weights before and after an update; so does a folder."""
    engine, batch = ranks.trainer(kind), ranks.batch(kind)
    rollout = TorchRollout(str(ranks.folder / kind), device="cpu").build(shared.Ranks(ranks.folder))
    digests = [rollout.sync(engine).digest]
    engine.update(batch, ranks.minis(batch, PPO, ALL), PPO)
    digests.append(rollout.sync(engine).digest)
    engine.save_pretrained(folder := str(ranks.folder / f"saved-{kind}-{name_of(ranks.mesh)}"))
    return {"digests": digests, "folder": folder}


def refused(ranks: Ranks) -> dict[str, Any]:
    """Rows with a hole are refused on all ranks, and leave the engine usable."""
    engine, batch = ranks.trainer(), ragged(ROWS)
    mask = batch.attention_mask.clone()
    mask[0, 3] = False
    hole = batch._replace(attention_mask=mask)
    return {"error": error_of(lambda: engine.log_probs(hole)), "close": {"after": engine.log_probs(batch)}}


CASES: dict[str, Callable[[Ranks], dict[str, Any]]] = {
    **{f"scores {kind}": lambda ranks, kind=kind: scores(ranks, kind) for kind in KINDS},
    **{f"gradient {kind}": lambda ranks, kind=kind: gradient(ranks, kind) for kind in KINDS},
    "gradient checkpointed": lambda ranks: gradient(ranks, gradient_checkpointing=True),
    "segments": segments,
    **{f"training {kind}": lambda ranks, kind=kind: training(ranks, kind) for kind in ("llama", "qwen3")},
    **{name: lambda ranks, name=name: over_rows(ranks, name) for name in OVER_ROWS},
    "bfloat16": lambda ranks: gradient(ranks, "qwen3", dtype="bfloat16"),
    **{f"sync {kind}": lambda ranks, kind=kind: sync(ranks, kind) for kind in ("llama", "qwen3")},
    "refused": refused,
}


QUICK = ("scores qwen2", "gradient llama", "training qwen3")
"""Cases that run on every commit."""


def results(folder: Path, mesh: Mesh, rank: int, every: bool) -> dict[str, Any]:
    ranks = Ranks(folder, mesh, rank, backend=MegatronTrainer)
    return {name: case(ranks) for name, case in CASES.items() if every or name in QUICK}


if __name__ == "__main__":
    on_cpu.install()
    importlib.import_module("flowrl.backends.megatron.model")  # before ranks are forked
    main(results)

"""Cases that `test_expert_parallel.py` runs in one process and on meshes with the axis ``expert``, and the main program
of a rank.

``python -m tests.backends.torch.meshes.expert_cases RANK FOLDER AXES`` runs every case as one rank of a gloo group, and
pickles the results; ``AXES`` is JSON. With ``architectures`` it runs those in place of the cases.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from flowrl.backends import LoRA, Mesh
from tests.backends.torch.meshes import context_cases as shared
from tests.backends.torch.meshes import mesh_cases
from tests.backends.torch.meshes.context_cases import ADAMW, ALL, MINIS, PPO, Ranks
from tests.backends.torch.meshes.mesh_cases import ARCHITECTURES as DENSE_AND_EXPERTS
from tests.backends.torch.meshes.mesh_cases import checkpoint
from tests.backends.torch.meshes.processes import main
from tests.backends.torch.meshes.shares import share_of
from tests.backends.torch.train.fsdp_cases import weights
from tests.support.architectures import EXPERTS, SETTINGS

KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS | {"head_dim": 16},
    "mixtral": mesh_cases.KINDS["mixtral"],
    "qwen2_moe": DENSE_AND_EXPERTS["qwen2_moe"],
}
"""The last one has shared experts."""
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{
        kind: DENSE_AND_EXPERTS[kind]
        for kind in ("deepseek_v3", "dots1", "glm4_moe", "minimax_m2", "olmoe", "qwen3_next")
    },
    **{kind: SETTINGS[kind] for kind in ("gpt_oss",)},
    "phimoe": {"num_local_experts": 4},
}
"""Further architectures with a plan."""


def make_inputs(folder: Path) -> None:
    """The models; ``unused`` is one whose router chooses only the first two of four experts."""
    mesh_cases.make_inputs(folder, KINDS | {"olmoe": EXPERTS | {"num_experts_per_tok": 1}})
    (folder / "olmoe").rename(folder / "unused")
    (folder / "olmoe.pt").rename(folder / "unused.pt")
    stored = load_file(path := folder / "unused" / "model.safetensors")
    for name in stored:
        if name.endswith("mlp.gate.weight"):
            stored[name][1] = -stored[name][0]
            stored[name][2:] = 0
    save_file(stored, path, metadata={"format": "pt"})


def training(ranks: Ranks, kind: str) -> dict[str, Any]:
    """Eight mini-batches of AdamW; a checkpoint in between, from which the second half is the same to the bit."""
    engine, batch = ranks.trainer(kind, optimizer=ADAMW, grad_clip=1.0), ranks.batch(kind)
    metrics = [engine.update(batch, ranks.minis(batch, PPO, *MINIS), PPO)]
    engine.save_checkpoint(folder := f"{checkpoint(ranks)}-{kind}")
    metrics.append(engine.update(batch, ranks.minis(batch, PPO, *MINIS), PPO))
    after = weights(engine)
    other = ranks.trainer(kind, optimizer=ADAMW, grad_clip=1.0)
    other.load_checkpoint(folder)
    other.update(batch, ranks.minis(batch, PPO, *MINIS), PPO)
    same = all(torch.equal(x, after[name]) for name, x in weights(other).items())
    return {"close": after, "metrics": metrics, "exact": {"resumed": torch.tensor(same)}}


def other_checkpoint(ranks: Ranks) -> dict[str, Any]:
    """The weights of one process, to the bit, and what is learned from them."""
    engine, batch = ranks.trainer("mixtral", optimizer=ADAMW, grad_clip=1.0), ranks.batch("mixtral")
    engine.load_checkpoint(f"{checkpoint(Ranks(ranks.folder))}-mixtral")
    exact = {name: x.clone() for name, x in weights(engine).items()}
    engine.update(batch, ranks.minis(batch, PPO, *MINIS), PPO)
    return {"exact": exact, "close": weights(engine)}


def adapter(ranks: Ranks) -> dict[str, Any]:
    """An adapter of attention and shared experts."""
    engine, batch = ranks.trainer("qwen2_moe", lora=LoRA(3, 6)), ranks.batch("qwen2_moe")
    metrics = engine.update(batch, ranks.minis(batch, PPO, ALL, *MINIS), PPO)
    trained = {n: x.clone() for n, x in engine.adapter_weights()}
    shares = [share_of(engine, torch.bfloat16), share_of(engine, None, "adapter_weights")]
    return {"close": trained, "after": weights(engine), "metrics": [metrics], "shares": shares}


CASES: dict[str, Callable[[Ranks], dict[str, Any]]] = {
    "scores": lambda ranks: mesh_cases.scores(ranks, "qwen3_moe"),
    **{f"gradient {kind}": lambda ranks, kind=kind: shared.gradient(ranks, kind) for kind in (*KINDS, "unused")},
    "gradient checkpointed": lambda ranks: shared.gradient(ranks, "qwen3_moe", gradient_checkpointing=True),
    "gradient offloaded": lambda ranks: shared.gradient(ranks, "mixtral", offload=ranks.mesh.ranks > 1),
    **{f"training {kind}": lambda ranks, kind=kind: training(ranks, kind) for kind in KINDS},
    "other checkpoint": other_checkpoint,
    "balancing in one": lambda ranks: shared.balancing(ranks, 400),
    "balancing in several": lambda ranks: shared.balancing(ranks, 20),
    "pairs": lambda ranks: shared.over_rows(ranks, "pairs", "mixtral"),
    "critic": lambda ranks: shared.critic(ranks, "mixtral"),
    "adapter": adapter,
    "sync": mesh_cases.sync,
    "bfloat16": lambda ranks: shared.gradient(ranks, "qwen3_moe", dtype="bfloat16", gradient_checkpointing=True),
}


def architectures(ranks: Ranks) -> dict[str, Any]:
    """The gradient of each architecture."""
    return {kind: shared.gradient(ranks, kind) for kind in ARCHITECTURES}


def results(folder: Path, mesh: Mesh, rank: int, every: bool) -> dict[str, Any]:
    ranks = Ranks(folder, mesh, rank)
    return {"architectures": architectures(ranks)} if every else {name: case(ranks) for name, case in CASES.items()}


if __name__ == "__main__":
    main(results)

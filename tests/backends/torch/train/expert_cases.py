"""Cases that `test_experts.py` runs in one process and on two ranks; see `fsdp_cases`.

``python -m tests.backends.torch.train.expert_cases RANK SIZE FOLDER`` runs them as one rank of a gloo group.
"""

from __future__ import annotations

import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from flowrl.backends import SGD, AdamW, LoRA, TorchScorer, TorchTrainer
from flowrl.backends.torch.train import saving, sharded, shards
from flowrl.backends.torch.train.tensor_file import TensorFile
from flowrl.sync.digest import tensor_digest, weights_digest
from flowrl.sync.probe import Probe
from flowrl.sync.weight_selection import rounded
from tests.backends.torch.meshes.shares import share_of
from tests.backends.torch.train.fsdp_cases import (
    ALL,
    PPO,
    STEPS,
    Ranks,
    last_gradient,
    minis,
    policy_batch,
    sequences,
    weights,
)
from tests.backends.torch.train.live_bytes import LiveBytes

KINDS = ("qwen3_moe", "mixtral", "qwen2_moe", "deepseek_v3")
"""The last two have shared experts; the last one has a layer without experts, too."""

BUCKET = 60_000


def digests(engine: Any, dtype: torch.dtype | None) -> dict[str, str]:
    return {name: tensor_digest(name, tensor) for name, tensor in rounded(engine.weights(), dtype)}


def syncing(ranks: Ranks, kind: str) -> dict[str, Any]:
    """What a sync sends, in float32 and rounded, and the bytes that ranks gather for it."""
    engine, gather, found = ranks.trainer(kind), sharded._all_gather, dict[str, Any]()

    def counting(output: Any, *args: Any, **kwargs: Any) -> None:
        found["gathered"][-1] += output.nbytes
        gather(output, *args, **kwargs)

    found["gathered"] = []
    sharded._all_gather = counting
    for name, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
        found["gathered"].append(0)
        found[name] = digests(engine, dtype)
    sharded._all_gather = gather
    found["shares"] = [share_of(engine, dtype) for dtype in (None, torch.bfloat16)]
    return found


def memory(ranks: Ranks) -> dict[str, Any]:
    """The peaks of live bytes while a deep model is loaded, and while it is gathered."""
    shards._READ_BYTES, mesh = 8192, TorchScorer(ranks.model("deep"), ranks=ranks.world_size, device="cpu").join(ranks)
    with LiveBytes() as live:
        lm, gathered, _ = shards.load_sharded(mesh, ranks.model("deep"), True, None, None, 0)
        loading, kept = live.peak, live.now
    sizes = {name: tensor.nbytes for name, tensor in lm.named_parameters()}
    with LiveBytes() as live:
        digest = weights_digest(shards.gathered_weights(mesh, lm, BUCKET))
    with LiveBytes() as dealt:
        rounds = sum(1 for weights in shards.dealt_weights(mesh, lm, BUCKET) for _ in [weights_digest(weights)])
    saving._FILE_BYTES, opened = 200_000, []
    saving.TensorFile = lambda path, *args: opened.append(Path(path).name) or TensorFile(path, *args)
    with LiveBytes() as saved:
        saving.save_gathered(mesh, lm, str(ranks.folder / "deep-saved"), shards.gathered_weights(mesh, lm, BUCKET))
    block: Any = lm.get_submodule("model.layers.3")
    ends: list[Any] = [lm.get_input_embeddings(), lm.get_output_embeddings()]
    whole: list[bool] = []
    hook = block.register_forward_hook(lambda *_: whole.extend(not isinstance(end.weight, DTensor) for end in ends))
    with torch.no_grad():
        gathered.call(lm, torch.arange(5, 15)[None])
    hook.remove()
    layer = sum(size for name, size in sizes.items() if ".layers.0." in name)
    own = sum(p.to_local().nbytes for p in lm.parameters())
    return {
        "loading": loading,
        "kept": kept,
        "gathering": live.peak,
        "dealing": dealt.peak,
        "rounds": rounds,
        "saving": saved.peak,
        "opened": opened,
        "ends": whole,
        "layer": layer,
        "all": sum(sizes.values()),
        "shard": own,
        "digest": digest,
    }


def training(ranks: Ranks, kind: str) -> dict[str, Any]:
    """A gradient, two epochs from a checkpoint of either number of ranks, with the load-balancing loss."""
    aux = {} if kind == "deepseek_v3" else {"router_aux_loss_coef": 0.01}
    engine, batch = ranks.trainer(kind, max_tokens=40, optimizer=SGD(lr=0.1, momentum=0.9)), policy_batch(ranks, kind)
    probe = Probe(prompts=[[7, 8, 9], [10, 11, 12, 13]], responses=[[20, 21, 22, 23], [24, 25, 26, 27]])
    found: dict[str, Any] = {"scores": engine.log_probs(sequences()), "probe": probe.score(engine)}
    found["metrics"] = engine.update(batch, minis(batch, PPO, ALL), PPO)
    found["gradient"] = last_gradient(engine)
    adam = ranks.trainer(kind, max_tokens=40, optimizer=AdamW(lr=0.002, eps=1e-5), **aux)
    adam.update(batch, minis(batch, PPO, *STEPS), PPO)
    adam.save_checkpoint(str(ranks.folder / f"{kind}-checkpoint-{ranks.world_size}"))
    adam.save_pretrained(str(ranks.folder / f"{kind}-saved-{ranks.world_size}"))
    found["saved"] = weights(adam)
    adam.update(batch, minis(batch, PPO, *STEPS), PPO)
    found["after"] = weights(adam)
    if (other := ranks.folder / f"{kind}-checkpoint-{3 - ranks.world_size}").exists():
        adam.load_checkpoint(str(other))
        found["loaded"] = weights(adam)
        adam.update(batch, minis(batch, PPO, *STEPS), PPO)
        found["resumed"] = weights(adam)
    return found


def lora(ranks: Ranks, kind: str) -> dict[str, Any]:
    """An adapter of attention and shared experts, merged and alone, rounded and not."""
    settings: dict[str, Any] = {"lora": LoRA(r=3, alpha=6), "optimizer": SGD(lr=0.05, momentum=0.9), "max_tokens": 40}
    engine, batch = ranks.trainer(kind, **settings), policy_batch(ranks, kind)
    fresh = digests(engine, torch.bfloat16)
    engine.update(batch, minis(batch, PPO, ALL), PPO)
    adapter = {name: tensor.clone() for name, tensor in engine.adapter_weights()}
    return {"fresh": fresh, "over": engine.adapter_of, "adapter": adapter, "after": weights(engine)}


def cases(ranks: Ranks) -> dict[str, Any]:
    found: dict[str, Any] = {f"syncing {kind}": syncing(ranks, kind) for kind in KINDS}
    found |= {f"training {kind}": training(ranks, kind) for kind in KINDS[:3]}
    found["lora"] = lora(ranks, "qwen2_moe")
    if ranks.world_size > 1:
        found["memory"] = memory(ranks)
    else:
        found["memory"] = weights_digest(ranks.build(TorchTrainer, "deep").weights())
    return found


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'group'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    (folder / f"found-{rank}.pickle").write_bytes(pickle.dumps(cases(Ranks(rank, size, folder))))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

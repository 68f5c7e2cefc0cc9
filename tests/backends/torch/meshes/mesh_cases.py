"""Cases that `test_tensor_parallel.py` runs in one process and on meshes with the axes ``tensor`` and ``replicate``,
and the main program of a rank.

``python -m tests.backends.torch.meshes.mesh_cases RANK FOLDER AXES`` runs every case as one rank of a gloo group, and
pickles the results; ``AXES`` is JSON. With ``architectures`` it runs those in place of the cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from flowrl.backends import SGD, LoRA, Mesh, TorchRollout, TorchScorer
from tests.backends.torch.meshes import context_cases as shared
from tests.backends.torch.meshes.context_cases import ADAMW, ALL, MINIS, PPO, ROWS, Ranks
from tests.backends.torch.meshes.processes import main, name_of
from tests.backends.torch.meshes.shares import share_of
from tests.backends.torch.train.fsdp_cases import Shared, error_of, last_gradient, weights
from tests.support.architectures import SETTINGS
from tests.support.models import EOS, PAD, VOCAB, char_tokenizer, ragged

SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""A plain decoder; tied weights, with norms of queries and keys; and experts."""

_EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_LATENT: dict[str, Any] = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1, n_group=1, topk_group=1,
    first_k_dense_replace=1,
)  # fmt: skip
_WIDE: dict[str, Any] = dict(head_dim=16)
_PLAIN = (
    "arcee cohere cohere2 ernie4_5 exaone4 gemma granite mistral olmo olmo2 olmo3 phi phi3 qwen2 smollm3 starcoder2"
)
_WITH_HEAD_DIM = "gemma2 gemma3_text glm glm4 helium ministral seed_oss vaultgemma"
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in _PLAIN.split()},
    **{kind: _WIDE for kind in _WITH_HEAD_DIM.split()},
    **{kind: _EXPERTS for kind in ("olmoe", "qwen3_moe")},
    "deepseek_v3": SETTINGS["deepseek_v3"] | {"num_attention_heads": 4, "num_key_value_heads": 4},
    "dots1": _LATENT,
    "glm4_moe": _LATENT | _WIDE,
    "minimax_m2": _WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_next": SETTINGS["qwen3_next"] | {"num_attention_heads": 4, "num_key_value_heads": 2},
}
"""Further architectures with a tensor-parallel plan."""
NOT_SPLIT = {
    "llama4_text": dict(num_local_experts=4, intermediate_size_mlp=96, head_dim=16, attention_chunk_size=64),
}
"""One whose layers do not compute in parts."""


def make_inputs(folder: Path, kinds: Mapping[str, Mapping[str, Any]] = KINDS) -> None:
    """Models, and columns with log-probs close to the model's."""
    draw = torch.Generator().manual_seed(1)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(ragged(ROWS).response_mask.shape, generator=draw)

    for kind, settings in kinds.items():
        write_model(folder / kind, kind, SIZES | dict(settings))
        log_probs = Ranks(folder).build(TorchScorer, kind).log_probs(ragged(ROWS))
        columns = {"old_log_probs": log_probs + noise(0.2), "ref_log_prob": log_probs + noise(0.2)}
        torch.save(columns | {"advantages": 1 + noise(0.5), "returns": noise(1.0)}, folder / f"{kind}.pt")


def write_model(folder: Path, kind: str, settings: dict[str, Any]) -> None:
    """Write a tiny random model of an architecture, and its tokenizer."""
    ids = dict(vocab_size=VOCAB, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**ids, **settings), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.08)
    model.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)


def architectures(ranks: Ranks) -> dict[str, Any]:
    """The gradient of each architecture, and the error of one that cannot be split."""
    found: dict[str, Any] = {kind: shared.gradient(ranks, kind) for kind in ARCHITECTURES}
    [refused] = NOT_SPLIT
    return found | {refused: error_of(lambda: ranks.trainer(refused))}


def scores(ranks: Ranks, kind: str) -> dict[str, Any]:
    found = shared.scores(ranks, kind)
    return {"close": {name: x.float() for name, x in (found.get("exact", {}) | found["close"]).items()}}


def dense(ranks: Ranks) -> dict[str, Any]:
    """What each process sends of models without experts."""
    return {"shares": [share_of(ranks.trainer(kind), torch.bfloat16) for kind in ("llama", "qwen3")]}


def training(ranks: Ranks) -> dict[str, Any]:
    """Eight mini-batches of AdamW; a checkpoint in between, from which the second half is the same to the bit."""
    engine, batch = ranks.trainer("qwen3", optimizer=ADAMW, grad_clip=1.0), ranks.batch("qwen3")
    metrics = [engine.update(batch, ranks.minis(batch, PPO, *MINIS), PPO)]
    engine.save_checkpoint(folder := checkpoint(ranks))
    metrics.append(engine.update(batch, ranks.minis(batch, PPO, *MINIS), PPO))
    after = weights(engine)
    other = ranks.trainer("qwen3", optimizer=ADAMW, grad_clip=1.0)
    other.load_checkpoint(folder)
    other.update(batch, ranks.minis(batch, PPO, *MINIS), PPO)
    same = all(torch.equal(x, after[name]) for name, x in weights(other).items())
    return {"close": after, "metrics": metrics, "exact": {"resumed": torch.tensor(same)}}


def checkpoint(ranks: Ranks) -> str:
    """The folder of a mesh's checkpoint."""
    return str(ranks.folder / f"checkpoint-{name_of(ranks.mesh)}")


def other_checkpoint(ranks: Ranks) -> dict[str, Any]:
    """Continue from the checkpoint of one process."""
    engine, batch = ranks.trainer("qwen3", optimizer=ADAMW, grad_clip=1.0), ranks.batch("qwen3")
    engine.load_checkpoint(checkpoint(Ranks(ranks.folder)))
    exact = {name: x.clone() for name, x in weights(engine).items()}
    engine.update(batch, ranks.minis(batch, PPO, *MINIS), PPO)
    return {"exact": exact, "close": weights(engine)}


def adapter(ranks: Ranks) -> dict[str, Any]:
    """Train an adapter; the reference has none. Start another one from it."""
    engine, batch = ranks.trainer(lora=LoRA(3, 6), gradient_checkpointing=True), ranks.batch()
    reference = TorchScorer().build(Shared(engine))
    before = reference.log_probs(batch)
    metrics = engine.update(batch, ranks.minis(batch, PPO, ALL, *MINIS), PPO)
    trained = {n: x.clone() for n, x in engine.adapter_weights()}
    engine.save_pretrained(folder := str(ranks.folder / f"adapter-{name_of(ranks.mesh)}"))
    again = ranks.trainer(lora=LoRA(3, 6, adapter_path=f"{folder}/adapter"))
    same = all(torch.equal(x, trained[name]) for name, x in again.adapter_weights())
    unchanged = torch.equal(before, reference.log_probs(batch))
    exact = {"started": torch.tensor(same), "reference": torch.tensor(unchanged)}
    after = weights(engine) | {"reference": before}
    shares = [share_of(engine, torch.bfloat16), share_of(engine, None, "adapter_weights")]
    return {"close": trained, "after": after, "metrics": [metrics], "exact": exact, "shares": shares}


def sync(ranks: Ranks) -> dict[str, Any]:
    """A rollout engine receives the weights before and after an update; so does a folder."""
    engine, batch = ranks.trainer("mixtral"), ranks.batch("mixtral")
    rollout = TorchRollout(str(ranks.folder / "mixtral"), device="cpu").build(Ranks(ranks.folder))
    digests = [rollout.sync(engine).digest]
    engine.update(batch, ranks.minis(batch, PPO, ALL), PPO)
    digests.append(rollout.sync(engine).digest)
    engine.save_pretrained(folder := str(ranks.folder / f"saved-{name_of(ranks.mesh)}"))
    shares = [share_of(engine, dtype) for dtype in (None, torch.bfloat16)]
    return {"digests": digests, "folder": folder, "shares": shares}


def cached(ranks: Ranks) -> dict[str, Any]:
    """Log-probs of some rows, and of all, from a cache that has those."""
    folder, batch = str(ranks.folder / f"cache-{name_of(ranks.mesh)}"), ragged(ROWS)
    some = batch._replace(**{n: x[[1, 2, 6]] for n, x in batch._asdict().items() if x is not None})
    first = ranks.build(TorchScorer, cache=folder).log_probs(some)
    return {"close": {"first": first, "all": ranks.build(TorchScorer, cache=folder).log_probs(batch)}}


def turns(ranks: Ranks) -> dict[str, Any]:
    engine, batch = ranks.trainer(offload=ranks.mesh.ranks > 1), ranks.batch()
    before = engine.log_probs(batch)
    engine.sleep()
    error = error_of(lambda: engine.log_probs(batch))
    engine.wake()
    again = torch.equal(before, engine.log_probs(batch))
    metrics = engine.update(batch, ranks.minis(batch, PPO, ALL), PPO)
    exact = {"refused": torch.tensor(error.endswith("[engine.asleep]")), "again": torch.tensor(again)}
    return {"exact": exact, "close": last_gradient(engine), "metrics": [metrics]}


def small_momentum(ranks: Ranks) -> dict[str, Any]:
    """Momentum without buffers of replicas that differ: weights after two updates of SGD."""
    engine, batch = ranks.trainer("qwen3", optimizer=SGD(lr=0.05, momentum=0.9), grad_clip=0.5), ranks.batch("qwen3")
    metrics = [engine.update(batch, ranks.minis(batch, PPO, ALL), PPO) for _ in range(2)]
    return {"close": weights(engine), "metrics": metrics}


CASES: dict[str, Callable[[Ranks], dict[str, Any]]] = {
    **{f"scores {kind}": lambda ranks, kind=kind: scores(ranks, kind) for kind in KINDS},
    **{f"gradient {kind}": lambda ranks, kind=kind: shared.gradient(ranks, kind) for kind in KINDS},
    "gradient checkpointed": lambda ranks: shared.gradient(ranks, "qwen3", gradient_checkpointing=True),
    "training": training,
    "other checkpoint": other_checkpoint,
    "momentum": small_momentum,
    **{name: lambda ranks, name=name: shared.over_rows(ranks, name) for name in ("pairs", "covariance")},
    "balancing": lambda ranks: shared.balancing(ranks, 20),
    "critic": shared.critic,
    "reward model": shared.reward_model,
    "adapter": adapter,
    "cached": cached,
    "turns": turns,
    "sync": sync,
    "dense": dense,
    "bfloat16": lambda ranks: shared.gradient(ranks, "qwen3", dtype="bfloat16", gradient_checkpointing=True),
}


def results(folder: Path, mesh: Mesh, rank: int, every: bool) -> dict[str, Any]:
    ranks = Ranks(folder, mesh, rank)
    return {"architectures": architectures(ranks)} if every else {name: case(ranks) for name, case in CASES.items()}


if __name__ == "__main__":
    main(results)

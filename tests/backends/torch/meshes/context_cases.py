"""Cases that `test_context.py` runs in one process and on meshes whose processes share rows, and the main program of a
rank.

``python -m tests.backends.torch.meshes.context_cases RANK FOLDER AXES`` runs every case as one rank of a gloo group,
and pickles the results; ``AXES`` is JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pytest import MonkeyPatch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from flowrl.backends import (
    SGD,
    AdamW,
    LoRA,
    Mesh,
    TorchCritic,
    TorchRewardModel,
    TorchRewardTrainer,
    TorchScorer,
    TorchTrainer,
)
from flowrl.backends.torch.score.rows import last_of
from flowrl.data.balance import Shard
from flowrl.operators import DPO, GSPO, BradleyTerry, KLCov, KLLoss, PPOClip, ValueClip
from flowrl.operators.losses.objective import TokenObjective
from flowrl.operators.updates.mini_batches import rank_parts, record
from flowrl.protocols.mesh import Position
from tests.backends.torch.meshes.processes import main
from tests.backends.torch.train.fsdp_cases import LiveBytes, error_of, last_gradient, values_of, weights
from tests.support.models import EOS, PAD, VOCAB, Ragged, char_tokenizer, ragged
from tests.support.rows.cut_rows import cut

ONE = Mesh()
ROWS = 7
ALL = range(ROWS)
MINIS = ([4, 2, 0], [1, 3, 5, 6], [6, 2, 0], [5, 1, 3, 4])
PPO = TokenObjective(PPOClip(dual_clip=3.0), kl=KLLoss("k3", 0.05), entropy=0.01)
ADAMW = AdamW(lr=0.002, eps=1e-5, weight_decay=0.1)
OVER_ROWS = {
    "sequences": TokenObjective(GSPO(), kl=KLLoss("k3", 0.05)),
    "pairs": TokenObjective(DPO(0.5), "seq-mean-token-mean", entropy=0.01),
    "covariance": TokenObjective(KLCov(0.2)),
}
KINDS = {
    "llama": (LlamaConfig, {"num_key_value_heads": 2}),
    "gemma3_text": (Gemma3TextConfig, {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 4}),
    "gpt2": (GPT2Config, {}),
    "mixtral": (MixtralConfig, {"num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""Four heads over fewer KV heads, windows of four tokens, learned positions, and experts."""


def make_inputs(folder: Path) -> None:
    """Models, and columns with log-probs close to the model's."""
    draw = torch.Generator().manual_seed(1)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(ragged(ROWS).response_mask.shape, generator=draw)

    ids = dict(vocab_size=VOCAB, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None)
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    for kind, (config, settings) in KINDS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config(**ids, **sizes, **settings), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.08)
        model.save_pretrained(folder / kind)
        char_tokenizer().save_pretrained(folder / kind)
        log_probs = Ranks(folder).build(TorchScorer, kind).log_probs(ragged(ROWS))
        columns = {"old_log_probs": log_probs + noise(0.2), "ref_log_prob": log_probs + noise(0.2)}
        torch.save(columns | {"advantages": 1 + noise(0.5), "returns": noise(1.0)}, folder / f"{kind}.pt")


@dataclass(frozen=True)
class Ranks:
    """A `BuildContext`: a rank of a mesh, and the folder of models and columns."""

    folder: Path
    mesh: Mesh = ONE
    rank: int = 0
    seed: int = 0
    device: str = "cpu"

    @property
    def world_size(self) -> int:
        return self.mesh.ranks

    @property
    def position(self) -> Position:
        return self.mesh.position(self.rank)

    @property
    def sizes(self) -> str:
        """Those of the mesh, for names of folders."""
        return "-".join(map(str, astuple(self.mesh)))

    def build(self, backend: type, kind: str = "llama", tokens: int = 40, **settings: Any) -> Any:
        """An engine whose micro-batches are the same on every mesh."""
        most = tokens // self.mesh.context
        settings |= {"device": self.device, "mesh": self.mesh, "max_tokens": most}
        return backend(str(self.folder / kind), **settings).build(self)

    def trainer(self, kind: str = "llama", **settings: Any) -> Any:
        return self.build(TorchTrainer, kind, **{"optimizer": SGD(lr=0.1, momentum=0.9), "grad_clip": None} | settings)

    def batch(self, kind: str = "llama") -> Any:
        """The columns of all rows."""
        columns = ragged(ROWS)._asdict() | torch.load(self.folder / f"{kind}.pt")
        scores = {"token_level_scores": columns["advantages"], "values": columns["returns"] / 2}
        names = ("pull", "uid", "absent")
        return record({n: x for n, x in (columns | scores).items() if n not in names})

    def minis(self, batch: Any, loss: TokenObjective, *parts: Sequence[int], whole: Any = None) -> Any:
        """Mini-batches of these rows, with the token weights of `loss`."""
        at = self.position
        shard = Shard(at.data_rank, self.mesh.data_ranks, None, None) if self.mesh.data_ranks > 1 else None
        index = [torch.tensor(rows) for rows in parts]
        return rank_parts(index, loss.weights, batch.response_mask, batch.attention_mask, shard, whole)


def scores(ranks: Ranks, kind: str) -> dict[str, Any]:
    """All scores of rows that are cut, and of rows that are shorter than the cut or have a hole in their masks."""
    engine, batch = ranks.build(TorchScorer, kind), ragged(ROWS)
    short = Ragged(*(x if x is None else x[:, 6:8] if getattr(x, "shape", ())[1:] == (16,) else x for x in batch))
    short = short._replace(response_mask=short.attention_mask[:, 1:], pull=batch.pull[:, :1])
    mask = batch.attention_mask.clone()
    mask[0, 3] = False
    hole = batch._replace(attention_mask=mask)
    top = engine.top_log_probs(batch, 3)
    exact = {"log_probs": engine.log_probs(batch), "ids": top.ids, "states": engine.last_states(batch).states}
    # A product with few tokens may be computed by another kernel.
    close = {"top": top.log_probs, "norms": engine.logit_norms(batch), "hole": engine.log_probs(hole)}
    close |= {"short": engine.log_probs(_rows(short, [0])), "one": engine.log_probs(_rows(batch, [3]))}
    rows = [3, 5] if ranks.position.data_rank == 0 else []  # the others are idle
    own = rows, engine.log_probs(_rows(batch, rows))
    if kind == "mixtral":  # an expert computes other numbers of tokens at a time
        return {"close": exact | close, "own": own}
    return {"exact": exact, "close": close, "own": own}


def cached(ranks: Ranks) -> dict[str, Any]:
    """A second engine computes only rows that the first has not."""
    folder, batch = str(ranks.folder / f"cache-{ranks.sizes}"), ragged(ROWS)
    first = ranks.build(TorchScorer, cache=folder).log_probs(_rows(batch, [1, 2, 6]))
    return {"close": {"first": first, "all": ranks.build(TorchScorer, cache=folder).log_probs(batch)}}


def gradient(ranks: Ranks, kind: str = "llama", **settings: Any) -> dict[str, Any]:
    engine, batch = ranks.trainer(kind, **settings), ranks.batch(kind)
    metrics = engine.update(batch, ranks.minis(batch, PPO, ALL), PPO)
    return {"close": last_gradient(engine), "after": weights(engine), "metrics": [metrics]}


def segments(ranks: Ranks) -> dict[str, Any]:
    """Rows of several segments, each read by itself; one row has more tokens than a micro-batch."""
    batch = cut(ranks.batch(), [[3, 7], [], [1], [2], [], [], []])
    engine = ranks.trainer(tokens=24)
    found = engine.log_probs(batch)
    metrics = engine.update(batch, ranks.minis(batch, PPO, ALL), PPO)
    return {"close": last_gradient(engine), "after": {"log_probs": found}, "metrics": [metrics]}


def training(ranks: Ranks) -> dict[str, Any]:
    """Eight mini-batches of AdamW; a checkpoint in between, from which the second half is the same to the bit."""
    engine, batch = ranks.trainer(optimizer=ADAMW, grad_clip=1.0), ranks.batch()
    metrics = [engine.update(batch, ranks.minis(batch, PPO, *MINIS), PPO)]
    engine.save_checkpoint(folder := str(ranks.folder / f"checkpoint-{ranks.mesh.fsdp}-{ranks.mesh.context}"))
    metrics.append(engine.update(batch, ranks.minis(batch, PPO, *MINIS), PPO))
    after = weights(engine)
    other = ranks.trainer(optimizer=ADAMW, grad_clip=1.0)
    other.load_checkpoint(folder)
    other.update(batch, ranks.minis(batch, PPO, *MINIS), PPO)
    same = all(torch.equal(x, after[name]) for name, x in weights(other).items())
    return {"close": after, "metrics": metrics, "exact": {"resumed": torch.tensor(same)}}


def over_rows(ranks: Ranks, name: str, kind: str = "llama") -> dict[str, Any]:
    """A loss across the tokens of a row, the rows of a group, or all rows."""
    objective, engine, batch = OVER_ROWS[name], ranks.trainer(kind, tokens=20), ranks.batch(kind)
    uid = np.array([f"{row % 3}" for row in ALL], dtype=object)
    whole = None if name == "sequences" else batch._asdict() | {"uid": uid}
    metrics = engine.update(batch, ranks.minis(batch, objective, ALL, whole=whole), objective)
    return {"close": last_gradient(engine), "after": weights(engine), "metrics": [metrics]}


def balancing(ranks: Ranks, tokens: int) -> dict[str, Any]:
    """The load-balancing loss counts once, over one micro-batch and over several."""
    return gradient(ranks, "mixtral", tokens=tokens, router_aux_loss_coef=0.3)


def critic(ranks: Ranks, kind: str = "llama") -> dict[str, Any]:
    settings: dict[str, Any] = {"optimizer": SGD(lr=0.01, momentum=0.9), "grad_clip": None}
    engine, batch = ranks.build(TorchCritic, kind, **settings), ranks.batch(kind)
    loss = TokenObjective(ValueClip(0.2))
    metrics = [engine.update(batch, ranks.minis(batch, loss, ALL), loss)]
    slope = last_gradient(engine)  # the head starts at 0, so the body has a gradient from the second step on
    metrics.append(engine.update(batch, ranks.minis(batch, loss, *MINIS), loss))
    after = values_of(engine.state_dict()["weights"])
    return {"close": slope, "after": after | {"values": engine.values(ragged(ROWS))}, "metrics": metrics}


def reward_model(ranks: Ranks) -> dict[str, Any]:
    settings: dict[str, Any] = {"optimizer": SGD(lr=0.05, momentum=0.9), "grad_clip": None}
    engine, batch = ranks.build(TorchRewardTrainer, tokens=20, **settings), ragged(ROWS)
    loss = TokenObjective(BradleyTerry(), "seq-mean-token-mean")
    columns = {
        "token_level_scores": last_of(batch.response_mask) * torch.linspace(0.0, 1.0, ROWS)[:, None],
        "uid": np.array([f"{row % 3}" for row in ALL], dtype=object),
        "margin": torch.full((ROWS,), 0.1),
    }
    found = {"before": engine.rewards(batch)}
    metrics = engine.update(batch, ranks.minis(batch, loss, ALL, whole=columns), loss)
    name = f"reward-{ranks.sizes}"
    engine.save_pretrained(str(ranks.folder / name))
    if ranks.mesh.ranks > 1:
        dist.barrier()
    found |= {"after": engine.rewards(batch), "saved": ranks.build(TorchRewardModel, name).rewards(batch)}
    return {"close": last_gradient(engine), "after": found, "metrics": [metrics]}


def adapter(ranks: Ranks) -> dict[str, Any]:
    engine, batch = ranks.trainer(lora=LoRA(3, 6)), ranks.batch()
    metrics = engine.update(batch, ranks.minis(batch, PPO, ALL, *MINIS), PPO)
    return {"close": {n: x.clone() for n, x in engine.adapter_weights()}, "metrics": [metrics]}


def memory(ranks: Ranks) -> dict[str, Any]:
    """The most live bytes of a forward and backward pass, without context and with it, over a row as many times longer,
    with and without gradient checkpointing."""
    peaks: dict[Any, list[int]] = {}
    for checkpointing in (False, True):
        for mesh in (Mesh(fsdp=ranks.mesh.fsdp), ranks.mesh):
            tokens = 512 * mesh.context
            settings = {"logprob_chunk": 64, "gradient_checkpointing": checkpointing}
            scorer = replace(ranks, mesh=mesh).trainer(tokens=tokens, **settings)._scorer
            ids, every = torch.randint(6, VOCAB, (1, tokens)), torch.ones(1, tokens, dtype=torch.bool)
            columns = ids, every, torch.arange(tokens)[None], every[:, 1:], torch.ones(1)
            row = record(dict(zip((*TOKENS, "temperature"), columns, strict=True)))
            passes = []
            for _ in range(3):  # the first allocates gradients, and gloo's threads free sent tensors a moment later
                with Peak() as live:
                    scorer.log_probs(row, 64, "value")[0].sum().backward()
                passes.append(live.peak)
            peaks.setdefault(checkpointing, []).append(min(passes[1:]))
    return {"peaks": peaks}


def refused(ranks: Ranks) -> dict[str, Any]:
    """A model whose rotary frequencies depend on the largest position of its input."""
    rotate = LlamaRotaryEmbedding.forward

    def stretched(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        return rotate(self, x, position_ids * (1 + position_ids.max() / 4))

    with MonkeyPatch.context() as patch:
        patch.setattr(LlamaRotaryEmbedding, "forward", stretched)
        return {"error": error_of(lambda: ranks.build(TorchScorer))}


TOKENS = ("input_ids", "attention_mask", "position_ids", "response_mask")


class Peak(LiveBytes):
    """Also the most live bytes."""

    peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.now)
        return out


def _rows(batch: Any, rows: list[int]) -> Any:
    return batch._replace(**{name: x[rows] for name, x in batch._asdict().items() if x is not None})


CASES: dict[str, Callable[[Ranks], dict[str, Any]]] = {
    **{f"scores {kind}": lambda ranks, kind=kind: scores(ranks, kind) for kind in KINDS},
    **{f"gradient {kind}": lambda ranks, kind=kind: gradient(ranks, kind) for kind in KINDS},
    "gradient checkpointed": lambda ranks: gradient(ranks, "gemma3_text", gradient_checkpointing=True),
    "cached": cached,
    "segments": segments,
    "training": training,
    **{name: lambda ranks, name=name: over_rows(ranks, name) for name in OVER_ROWS},
    "balancing in one": lambda ranks: balancing(ranks, 400),
    "balancing in several": lambda ranks: balancing(ranks, 20),
    "critic": critic,
    "reward model": reward_model,
    "adapter": adapter,
    "bfloat16": lambda ranks: gradient(ranks, dtype="bfloat16", gradient_checkpointing=True),
    "memory": memory,
    "refused": refused,
}


def results(folder: Path, mesh: Mesh, rank: int, every: bool) -> dict[str, Any]:
    ranks = Ranks(folder, mesh, rank)
    return {name: case(ranks) for name, case in CASES.items()}


if __name__ == "__main__":
    main(results)

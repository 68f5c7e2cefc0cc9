"""Cases that `test_fsdp.py` runs in one process and on two ranks, and the main program of a rank.

``python -m tests.backends.torch.train.fsdp_cases RANK SIZE FOLDER`` runs every case as one rank of a gloo group, and
pickles the results.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flowrl.backends import SGD, AdamW, LoRA, TorchCritic, TorchScorer, TorchTrainer
from flowrl.data.balance import Shard
from flowrl.data.metrics import Metrics
from flowrl.operators import DPO, GKD, KLCov, KLLoss, PPOClip, ValueClip
from flowrl.operators.losses.objective import TokenObjective
from flowrl.operators.updates.mini_batches import rank_parts, record
from flowrl.protocols.protocols import MiniBatch
from flowrl.schedules import Cosine
from tests.backends.torch.train.live_bytes import LiveBytes
from tests.backends.torch.train.reward_case import reward_model
from tests.support.models import ragged

ROWS = 7
PPO = TokenObjective(PPOClip(dual_clip=3.0), kl=KLLoss("k3", 0.05), entropy=0.01)
TIMEOUT = 30  # seconds; the process group timeout of the last case


@dataclass(frozen=True)
class Ranks:
    """A `BuildContext`: rank and number of ranks; and the folder of models, rollouts and checkpoints."""

    rank: int
    world_size: int
    folder: Path
    seed: int = 0

    def model(self, kind: str) -> str:
        return str(self.folder / f"{kind}-0")

    def rollouts(self, kind: str) -> dict[str, Tensor]:
        return torch.load(self.folder / f"{kind}.pt")

    def build(self, backend: type, kind: str, **settings: Any) -> Any:
        settings = {"device": "cpu", "ranks": self.world_size} | settings
        return backend(self.model(kind), **settings).build(self)

    def trainer(self, kind: str, **settings: Any) -> Any:
        return self.build(TorchTrainer, kind, **{"optimizer": SGD(lr=1.0), "grad_clip": None} | settings)

    def own_rows(self, rows: Sequence[int]) -> list[int]:
        """The rows of this rank: the second has the last two, the first all others; a single process has all."""
        return list(rows) if self.world_size == 1 else list(rows[:-2]) if self.rank == 0 else list(rows[-2:])


class Shared:
    """A `BuildContext` with one engine."""

    seed, rank, world_size = 0, 0, 1

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def engine(self, role: str) -> Any:
        return self._engine


def sequences(rows: Sequence[int] | None = None) -> Any:
    batch: Any = ragged(ROWS)
    index = torch.tensor(range(ROWS) if rows is None else rows, dtype=torch.int64)
    return batch._replace(
        **{
            name: column[index.numpy()] if name == "uid" else column[index]
            for name, column in batch._asdict().items()
            if column is not None
        }
    )


TOKENS = ("input_ids", "attention_mask", "position_ids", "response_mask")


def policy_batch(ranks: Ranks, kind: str) -> Any:
    columns = sequences()._asdict() | ranks.rollouts(kind)
    return record({n: columns[n] for n in (*TOKENS, "temperature", "old_log_probs", "advantages", "ref_log_prob")})


def value_batch(ranks: Ranks, kind: str) -> Any:
    columns = sequences()._asdict() | ranks.rollouts(kind)
    return record({name: columns[name] for name in (*TOKENS, "values", "returns")})


def minis(batch: Any, loss: Any, *parts: Sequence[int]) -> list[MiniBatch]:
    """Mini-batches of these rows, with the token weights of `loss`."""
    shard = Shard(dist.get_rank(), dist.get_world_size(), None, None) if dist.is_initialized() else None
    index = [torch.tensor(rows) for rows in parts]
    return rank_parts(index, loss.weights, batch.response_mask, batch.attention_mask, shard)


ALL = range(ROWS)
# Two epochs; one mini-batch of one row, and two with an odd number of rows.
STEPS = ([4], [0, 1, 2, 3, 5, 6], [6, 2, 0], [5, 1, 3, 4])


def weights(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}


def values_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
        for name, tensor in state.items()
    }


def log_probs(ranks: Ranks, kind: str) -> dict[str, Any]:
    """Log-probs of the rank's own rows, of all rows, and of one row on rank 0 and none on rank 1."""
    engine = ranks.build(TorchScorer, kind, max_tokens=20)
    own = ranks.own_rows(ALL)
    found = {"own": engine.log_probs(sequences(own)), "all": engine.log_probs(sequences())}
    none = engine.log_probs(sequences([] if ranks.rank == 1 else [3]))
    return found | {"none": none, "rows": own}


def last_gradient(engine: Any) -> dict[str, Tensor]:
    """The gradient of the first step of SGD with momentum, from its momentum buffers."""
    learner = engine.learner
    buffers = [(name, learner.optimizer.state[x]["momentum_buffer"]) for name, x in learner._names.items()]
    return {name: tensor.clone() for name, tensor in learner.mesh.full(buffers, 1 << 20)}


def gradient(ranks: Ranks, kind: str, **settings: Any) -> dict[str, Any]:
    engine = ranks.trainer(kind, max_tokens=40, optimizer=SGD(lr=0.1, momentum=0.9), **settings)
    before, batch = weights(engine), policy_batch(ranks, kind)
    metrics = engine.update(batch, minis(batch, PPO, ALL), PPO)
    return {"before": before, "after": weights(engine), "gradient": last_gradient(engine), "metrics": metrics}


def training(ranks: Ranks, kind: str, optimizer: Any) -> dict[str, Any]:
    """Two epochs of mini-batches with gradient clipping and a schedule."""
    engine, batch = (
        ranks.trainer(kind, optimizer=optimizer, grad_clip=1.0, schedule=Cosine(1.0, 0.0, steps=12), max_tokens=40),
        policy_batch(ranks, kind),
    )
    metrics = [engine.update(batch, minis(batch, PPO, *STEPS), PPO) for _ in range(2)]
    return {
        "after": weights(engine),
        "metrics": metrics,
        "version": engine.version,
        "log_probs": engine.log_probs(sequences()),
    }


PAIRS = TokenObjective(DPO(0.5), "seq-mean-token-mean", entropy=0.01)
COVARIANCE = TokenObjective(KLCov(0.2))
DISTILLED = TokenObjective(GKD(0.5))


def over_rows(ranks: Ranks, objective: TokenObjective, max_tokens: int = 20) -> dict[str, Any]:
    """An objective across rows, whose rows are split over ranks and micro-batches."""
    engine = ranks.trainer("llama", max_tokens=max_tokens, optimizer=SGD(lr=0.1, momentum=0.9))
    batch = policy_batch(ranks, "llama")
    uid = np.array([f"{row % 3}" for row in range(ROWS)], dtype=object)
    columns = batch._asdict() | {"uid": uid, "token_level_scores": batch.advantages}
    shard = Shard(dist.get_rank(), dist.get_world_size(), None, None) if dist.is_initialized() else None
    index = [torch.tensor(rows) for rows in (ALL, [6, 3, 0], [1, 4, 5, 2])]
    parts = rank_parts(index, objective.weights, batch.response_mask, batch.attention_mask, shard, columns)
    metrics = engine.update(batch, parts[:1], objective)
    slope = last_gradient(engine)
    return {"gradient": slope, "metrics": [metrics, engine.update(batch, parts, objective)], "after": weights(engine)}


def distribution(ranks: Ranks) -> dict[str, Any]:
    """A loss of distributions in chunks of two tokens, on all rows, and on one row that one rank has alone. Ranks have
    different numbers of chunks: a head that is gathered for each would wait for the other rank."""
    teacher = ranks.build(TorchScorer, "qwen2").top_log_probs(sequences(), 3)
    engine = ranks.trainer("llama", optimizer=SGD(lr=0.1, momentum=0.9), max_tokens=40, logprob_chunk=2)
    columns = {name: column for name, column in sequences()._asdict().items() if name in (*TOKENS, "temperature")}
    batch = record(columns | {f"teacher_{name}": column for name, column in teacher._asdict().items()})
    parts = [minis(batch, DISTILLED, rows) for rows in (ALL, [4])]
    metrics = [engine.update(batch, part, DISTILLED) for part in parts]
    chunks = [-(-int((part.weights > 0).sum()) // 2) for [part] in parts]
    return {"gradient": last_gradient(engine), "metrics": metrics, "chunks": chunks}


def critic(ranks: Ranks, **settings: Any) -> dict[str, Any]:
    engine = ranks.build(TorchCritic, "critic", optimizer=SGD(lr=0.005, momentum=0.9), grad_clip=None, **settings)
    batch, loss = value_batch(ranks, "llama"), TokenObjective(ValueClip(0.2))
    own = ranks.own_rows(ALL)
    found = engine.values(sequences(own))
    metrics = [engine.update(batch, minis(batch, loss, ALL), loss)]
    slope = last_gradient(engine)
    metrics.append(engine.update(batch, minis(batch, loss, *STEPS), loss))
    engine.save_pretrained(str(ranks.folder / f"saved-critic-{ranks.world_size}"))
    after = values_of(engine.state_dict()["weights"])
    return {
        "own": found,
        "rows": own,
        "metrics": metrics,
        "gradient": slope,
        "after": after,
        "all": engine.values(sequences()),
    }


def resuming(ranks: Ranks) -> dict[str, Any]:
    """Train, save, and continue training: directly, from a state dict, from a checkpoint, and from the checkpoint of
    the other number of ranks if it exists."""
    optimizer, schedule = AdamW(lr=0.003, eps=1e-5), Cosine(1.0, 0.0, steps=20)
    settings: dict[str, Any] = {"optimizer": optimizer, "grad_clip": 1.0, "schedule": schedule}
    batch = policy_batch(ranks, "qwen2")

    def continue_training(engine: Any) -> dict[str, Any]:
        metrics = engine.update(batch, minis(batch, PPO, *STEPS), PPO)
        return {"metrics": metrics.compute(), "after": weights(engine), "version": engine.version}

    engine = ranks.trainer("qwen2", **settings)
    fresh = ranks.folder / f"fresh-{ranks.world_size}"
    engine.save_checkpoint(str(fresh))  # before the first step the optimizer has no state
    engine.update(batch, minis(batch, PPO, *STEPS), PPO)
    folder = ranks.folder / f"checkpoint-{ranks.world_size}"
    engine.save_checkpoint(str(folder))
    twin = ranks.trainer("qwen2", **settings)
    twin.load_state_dict(engine.state_dict())
    found = {"straight": continue_training(engine), "state": continue_training(twin)}
    engine.load_checkpoint(str(folder))  # into an engine that was trained further
    found["back"] = continue_training(engine)
    other = ranks.folder / f"checkpoint-{3 - ranks.world_size}"
    if other.exists():
        engine.load_checkpoint(str(other))
        found["other"] = continue_training(engine)
    engine.load_checkpoint(str(fresh))
    found["fresh"] = continue_training(engine)
    llama, sgd = ranks.trainer("llama", **settings), ranks.trainer("qwen2")
    found["no checkpoint"] = error_of(lambda: engine.load_checkpoint(str(ranks.folder)))
    found["another model"] = error_of(lambda: llama.load_checkpoint(str(folder)))
    found["another optimizer"] = error_of(lambda: sgd.load_checkpoint(str(folder)))
    found["twice"] = error_of(lambda: engine.save_checkpoint(str(folder)))
    return found


def lora(ranks: Ranks, kind: str, modules: tuple[str, ...] = (), **settings: Any) -> dict[str, Any]:
    """Train an adapter with odd r, and start one from it; the reference has none, before and after training."""
    settings |= {"lora": LoRA(3, 6, "all-linear", modules), "optimizer": SGD(lr=0.05, momentum=0.9), "max_tokens": 40}
    engine, batch = ranks.trainer(kind, **settings), policy_batch(ranks, kind)
    reference = TorchScorer().build(Shared(engine))
    found: dict[str, Any] = {"fresh": weights(engine), "reference": [reference.log_probs(batch)]}
    found["metrics"] = [engine.update(batch, minis(batch, PPO, ALL), PPO)]
    engine.save_checkpoint(f"{ranks.folder}/{kind}-lora-checkpoint-{ranks.world_size}")

    def continue_training() -> dict[str, Tensor]:
        found["metrics"].append(engine.update(batch, minis(batch, PPO, *STEPS), PPO))
        return dict(engine.adapter_weights())

    found["adapter"] = {name: tensor.clone() for name, tensor in continue_training().items()}
    found["reference"].append(reference.log_probs(batch))
    found |= {"after": weights(engine), "log_probs": engine.log_probs(batch), "over": engine.adapter_of}
    engine.save_pretrained(saved := str(ranks.folder / f"{kind}-lora-saved-{ranks.world_size}"))
    settings["lora"] = LoRA(r=3, alpha=6, modules_to_save=modules, adapter_path=f"{saved}/adapter")
    found["started"] = dict(ranks.trainer(kind, **settings).adapter_weights())
    if Path(other := f"{ranks.folder}/{kind}-lora-checkpoint-{3 - ranks.world_size}").exists():
        engine.load_checkpoint(other)
        found["other"] = continue_training()
    return found


def not_finite(ranks: Ranks) -> dict[str, Any]:
    """NaN in a row of one rank: all ranks refuse the mini-batch without a change of weights."""
    engine, batch = ranks.trainer("llama"), policy_batch(ranks, "llama")
    poisoned = batch._replace(advantages=batch.advantages.index_fill(0, torch.tensor([5]), float("nan")))
    error = error_of(lambda: engine.update(poisoned, minis(batch, PPO, [0, 1], ALL), PPO))
    engine.update(batch, minis(batch, PPO, ALL), PPO)
    return {"error": error, "after": weights(engine), "version": engine.version}


def bad_rows(ranks: Ranks) -> dict[str, Any]:
    """Rows that one rank refuses: all ranks raise, and can continue."""
    engine, batch = ranks.trainer("llama"), sequences()
    bad = batch._replace(temperature=batch.temperature * 0) if ranks.rank == ranks.world_size - 1 else batch
    return {"error": error_of(lambda: engine.log_probs(bad)), "all": engine.log_probs(batch)}


def gathering(ranks: Ranks) -> dict[str, Any]:
    """Gather all weights in buckets of several sizes; returns the peak of live bytes."""
    engine = ranks.trainer("llama")
    sizes = {name: tensor.nbytes for name, tensor in engine.weights()}
    peaks = {}
    for bucket in (1, 20_000, 60_000):
        peaks[bucket] = 0
        with LiveBytes() as live:
            for _ in engine.weights(bucket_bytes=bucket):
                end = time.monotonic() + 1  # gloo's threads free sent tensors a moment later
                while live.now > 2 * max(bucket, *sizes.values()) + 1024 and time.monotonic() < end:
                    time.sleep(0.001)
                peaks[bucket] = max(peaks[bucket], live.now)
    engine.save_pretrained(str(ranks.folder / f"saved-{ranks.world_size}"))
    allocated = sum(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in engine.model.parameters())
    return {"peaks": peaks, "sizes": sizes, "allocated": allocated}


def buffers(ranks: Ranks, kind: str) -> dict[str, Any]:
    """Buffers of a model that was created on the meta device."""
    return {name: tensor.clone() for name, tensor in ranks.trainer(kind).model.named_buffers()}


def other_folders(ranks: Ranks) -> dict[str, Any]:
    """Folders with tensor names without the body's prefix, or with pickles: loaded by transformers, then sharded."""
    return {kind: weights(ranks.build(TorchTrainer, kind)) for kind in ("body", "pickled")}


def turns(ranks: Ranks) -> dict[str, Any]:
    engine, batch = ranks.trainer("llama"), policy_batch(ranks, "llama")
    before = engine.log_probs(batch)
    engine.sleep()
    errors = [
        error_of(lambda: engine.log_probs(batch)),
        error_of(lambda: engine.update(batch, minis(batch, PPO, ALL), PPO)),
    ]
    engine.wake()
    return {"errors": errors, "same": torch.equal(before, engine.log_probs(batch))}


def wrong_group(ranks: Ranks) -> dict[str, Any]:
    return {"error": error_of(lambda: ranks.trainer("llama", ranks=3))}


BOTH: dict[str, Callable[[Ranks], dict[str, Any]]] = {
    **{f"log_probs {kind}": lambda r, kind=kind: log_probs(r, kind) for kind in ("llama", "gpt2")},
    **{f"gradient {kind}": lambda r, kind=kind: gradient(r, kind) for kind in ("llama", "qwen2", "gpt2", "gemma2")},
    "gradient checkpointed": lambda r: gradient(r, "qwen2", gradient_checkpointing=True),
    "gradient offloaded": lambda r: gradient(r, "qwen2", offload=r.world_size > 1),
    **{
        f"bfloat16 {kind}": lambda r, kind=kind: gradient(r, kind, dtype="bfloat16", gradient_checkpointing=True)
        for kind in ("llama", "gpt2")
    },
    "training sgd": lambda r: training(r, "llama", SGD(lr=0.05, momentum=0.9)),
    "training adamw": lambda r: training(r, "qwen2", AdamW(lr=0.002, eps=1e-5, weight_decay=0.1)),
    "pairs": lambda r: over_rows(r, PAIRS),
    "covariance": lambda r: over_rows(r, COVARIANCE),
    "distribution": distribution,
    "critic": critic,
    "critic checkpointed": lambda r: critic(r, gradient_checkpointing=True),
    "reward model": reward_model,
    "resuming": resuming,
    "lora llama": lambda r: lora(r, "llama"),
    "lora gpt2": lambda r: lora(r, "gpt2", ("wpe", "ln_f"), offload=r.world_size > 1, gradient_checkpointing=True),
    "lora qwen2": lambda r: lora(r, "qwen2", dtype="bfloat16"),
    "not finite": not_finite,
    "bad rows": bad_rows,
    "gathering": gathering,
    **{f"buffers {kind}": lambda r, kind=kind: buffers(r, kind) for kind in ("llama", "gpt2", "gemma2")},
    "other folders": other_folders,
    "turns": turns,
    "wrong group": wrong_group,
}
NIGHTLY = {
    "log_probs gpt2",
    "gradient gpt2",
    "gradient gemma2",
    "bfloat16 gpt2",
    "training sgd",
    "critic",
    "lora llama",
    "buffers gpt2",
    "buffers gemma2",
}
"""Further models and optimizers of cases that run on every commit."""


def cases(every: bool) -> dict[str, Callable[[Ranks], dict[str, Any]]]:
    return {name: case for name, case in BOTH.items() if every or name not in NIGHTLY}


def error_of(act: Callable[[], Any]) -> str:
    """The error that `act` raises, as ``Class: message``."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Failing:
    """A loss that raises if `fails`."""

    wants_entropy = False
    of_distribution, of_tokens = None, True

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __call__(self, output: Tensor, entropy: Any, batch: Any, weights: Tensor, metrics: Metrics) -> Tensor:
        if self.fails:
            raise ArithmeticError("planted")
        return (weights * output).sum()


def failed_rank(ranks: Ranks) -> dict[str, Any]:
    """One rank raises during an update; the other waits for it until the timeout."""
    done = ranks.folder / "done"
    engine, batch = ranks.trainer("llama"), policy_batch(ranks, "llama")
    error = error_of(lambda: engine.update(batch, minis(batch, PPO, ALL), Failing(ranks.rank == 1)))
    if ranks.rank == 0:
        done.touch()
    while not done.exists():
        time.sleep(0.05)
    return {"error": error}


def main(rank: int, size: int, folder: Path, every: bool) -> None:
    torch.set_num_threads(1)

    def group(name: str, seconds: int) -> None:
        store, timeout = f"file://{folder / name}", timedelta(seconds=seconds)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)

    ranks, found = Ranks(rank, size, folder), {}
    group("first-group", 300)  # imports of one rank may take much longer than of the other
    for name, case in cases(every).items():
        found[name] = case(ranks)
    dist.destroy_process_group()
    group("second-group", TIMEOUT)
    found["failed_rank"] = failed_rank(ranks)
    (folder / f"found-{rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), "nightly" in sys.argv[4:])

"""Checkpoints that `test_checkpoints.py` writes on real meshes, and reads on all others.

``python -m tests.backends.torch.meshes.checkpoint_cases RANK FOLDER`` is one of four processes; a mesh has the first of
them.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowrl.backends import AdamW, LoRA, Mesh, TorchCritic
from flowrl.backends.torch.train import saving
from flowrl.sync.digest import weights_digest
from flowrl.sync.weight_selection import rounded
from tests.backends.torch.meshes.context_cases import Ranks
from tests.backends.torch.meshes.mesh_cases import SIZES, write_model
from tests.backends.torch.meshes.processes import name_of

MESHES: tuple[Mesh, ...] = (
    Mesh(),
    Mesh(fsdp=2),
    Mesh(fsdp=4),
    Mesh(tensor=2),
    Mesh(tensor=4),
    Mesh(fsdp=2, tensor=2),
    Mesh(replicate=2, fsdp=2),
    Mesh(replicate=2, tensor=2),
    Mesh(fsdp=2, expert=2),
    Mesh(fsdp=2, tensor=2, expert=2),
    Mesh(replicate=2, fsdp=2, expert=2),
)
ENGINES = ("experts", "adapter", "critic")
PROCESSES = 4


def make_inputs(folder: Path) -> None:
    """A mixture of experts, and a decoder."""
    heads: dict[str, Any] = SIZES | {"num_key_value_heads": 4}
    write_model(folder / "mixtral", "mixtral", heads | {"num_local_experts": 4, "num_experts_per_tok": 2})
    write_model(folder / "llama", "llama", heads)


def build(ranks: Ranks, name: str) -> Any:
    optimizer = AdamW(lr=0.01)
    if name != "experts":
        ranks = replace(ranks, mesh=replace(ranks.mesh, expert=1))
    if name == "critic":
        return ranks.build(TorchCritic, "llama", optimizer=optimizer, grad_clip=None)
    if name == "adapter":
        return ranks.trainer("llama", optimizer=optimizer, lora=LoRA(3, 6, "all-linear", ("lm_head",)))
    return ranks.trainer("mixtral", optimizer=optimizer)


def step(engine: Any) -> None:
    """Two steps with gradients that depend on each weight alone, so that all meshes have the same bits after them."""
    learner = engine.learner
    for _ in range(2):
        for parameter in learner._parameters:
            parameter.grad = parameter.detach() * 0.5 + 0.25
        learner._step("a test")
    learner.optimizer.zero_grad(set_to_none=True)
    learner.version = 7


def state(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint, unsharded; a collective."""
    learner = engine.learner
    for name, parameter in learner._names.items():
        yield from learner.mesh.full([(name, parameter.detach())], 1 << 20)
        for key, value in sorted(learner.optimizer.state[parameter].items()):
            yield from learner.mesh.full([(f"{key} {name}", value)], 1 << 20)
    yield "progress", torch.tensor([learner._steps, learner.version])


def digest(engine: Any) -> str:
    return weights_digest((name, tensor.detach()) for name, tensor in state(engine))


def writing(ranks: Ranks) -> dict[str, Any]:
    saving._FILE_BYTES, found = 100_000, {}
    for name in ENGINES:
        engine = build(ranks, name)
        step(engine)
        engine.save_checkpoint(f"{ranks.folder}/{name}-{name_of(ranks.mesh)}")
        found[name] = digest(engine)
        if name == "experts":
            engine.save_pretrained(f"{ranks.folder}/saved-{name_of(ranks.mesh)}")
            found["sent"] = weights_digest(rounded(engine.weights(), torch.bfloat16))
    return found


def reading(ranks: Ranks) -> dict[str, Any]:
    """The digests after each checkpoint is read, over weights that are 0."""
    found: dict[str, Any] = {}
    for name in ENGINES:
        engine = build(ranks, name)
        for mesh in MESHES:
            with torch.no_grad():
                for parameter in engine.learner._parameters:
                    parameter.zero_()
            engine.load_checkpoint(f"{ranks.folder}/{name}-{name_of(mesh)}")
            found[f"{name} {name_of(mesh)}"] = digest(engine)
    return found


def run(case: Callable[[Ranks], dict[str, Any]], mesh: Mesh, rank: int, folder: Path) -> None:
    """One case on a mesh, whose results are pickled."""
    name, wait = f"{case.__name__}-{name_of(mesh)}", timedelta(seconds=300)
    if mesh.ranks > 1:
        store = f"file://{folder / f'group-{name}'}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=mesh.ranks, timeout=wait)
    (folder / f"{name}-{rank}.pickle").write_bytes(pickle.dumps(case(Ranks(folder, mesh, rank))))
    if mesh.ranks > 1:
        dist.destroy_process_group()


def wait_for_all(rank: int, folder: Path) -> None:
    store, wait = f"file://{folder / 'all'}", timedelta(seconds=600)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES, timeout=wait)
    dist.barrier()
    dist.destroy_process_group()


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    forks = multiprocessing.get_context("fork")  # torch caches meshes with their groups, so each has a process

    def fork(*call: Any) -> None:
        process = forks.Process(target=call[0], args=call[1:])
        process.start()
        process.join()
        assert process.exitcode == 0, call

    for case in (writing, reading):
        for mesh in MESHES:
            if rank < mesh.ranks:
                fork(run, case, mesh, rank, folder)
        if case is writing:
            fork(wait_for_all, rank, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

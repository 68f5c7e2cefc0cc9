"""Updates on meshes of processes, each with a GPU, against one process: FSDP, copies, tensor, context and expert."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2]))

from flowrl.backends import Mesh
from tests.backends.torch.meshes.context_cases import Ranks, gradient
from tests.backends.torch.meshes.mesh_cases import KINDS, make_inputs

from .parts import Target, child
from .report import Report

WITHIN = 1e-5
"""The largest relative error: sums in another order, in float32."""
MESHES = {
    2: (Mesh(fsdp=2), Mesh(replicate=2), Mesh(tensor=2), Mesh(fsdp=2, context=2), Mesh(fsdp=2, expert=2)),
    4: (
        Mesh(fsdp=4),
        Mesh(replicate=2, fsdp=2),
        Mesh(fsdp=2, tensor=2),
        Mesh(fsdp=4, context=4),
        Mesh(fsdp=4, context=2, expert=2),
        Mesh(fsdp=2, tensor=2, expert=4),
    ),
    8: (
        Mesh(fsdp=8),
        Mesh(replicate=2, fsdp=2, tensor=2),
        Mesh(fsdp=8, context=4),
        Mesh(replicate=2, fsdp=4, expert=4),
    ),
}
"""By number of processes; the models have four heads, two key heads and four experts."""


def compare(target: Target, report: Report) -> None:
    """Check the gradient, and the weights after an update, of each mesh that this machine has devices for."""
    make_inputs(target.folder, KINDS)
    alone = _gradients(Ranks(target.folder, device=target.device))
    for size, meshes in MESHES.items():
        if size > target.count:
            report.skip(f"meshes of {size} processes", f"there are {target.count} devices")
            continue
        ranks = _run(target, size)
        for mesh in meshes:
            for kind in _kinds(mesh):
                each = [rank[_name(mesh)][kind] for rank in ranks]
                errors = [_error(rank[what], alone[kind][what]) for rank in each for what in ("close", "after")]
                text = f"relative error at most {max(errors):.1e} on {size} processes"
                report.check(f"{_name(mesh)}, {kind}", max(errors) <= WITHIN, text)


def _kinds(mesh: Mesh) -> tuple[str, ...]:
    """The models of a mesh: only one has experts."""
    return ("mixtral",) if mesh.expert > 1 else tuple(KINDS)


def _name(mesh: Mesh) -> str:
    axes = {axis: size for axis, size in dataclasses.asdict(mesh).items() if size > 1}
    return ", ".join(f"{axis} {size}" for axis, size in axes.items())


def _gradients(ranks: Ranks) -> dict[str, Any]:
    """By model, the gradient and the weights after an update, on the CPU."""
    return {kind: _on_cpu(gradient(ranks, kind)) for kind in _kinds(ranks.mesh)}


def _on_cpu(found: Mapping[str, Any]) -> dict[str, Any]:
    return {what: {name: x.double().cpu() for name, x in found[what].items()} for what in ("close", "after")}


def _error(found: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> float:
    assert found.keys() == truth.keys()
    away = sum(float((found[name] - x).square().sum()) for name, x in truth.items())
    return float((away / sum(float(x.square().sum()) for x in truth.values())) ** 0.5)


def _run(target: Target, size: int) -> list[dict[str, Any]]:
    """By process, its results by mesh; each process sees one GPU."""
    processes = []
    for rank in range(size):
        command = child("meshes:run_rank", target.device, rank, size, target.folder)
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": _visible(rank)} if target.on_gpu else {})
        processes.append(subprocess.Popen(command, env=environment))
    assert [process.wait() for process in processes] == [0] * size, "a process of a mesh failed; see its output"
    return [pickle.loads(_results(target.folder, size, rank).read_bytes()) for rank in range(size)]


def _visible(rank: int) -> str:
    """The GPU of a rank, among those that this process may see."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[rank] if given else str(rank)


def _results(folder: Path, size: int, rank: int) -> Path:
    return folder / f"mesh-{size}-{rank}.pickle"


def run_rank(device: str, rank: str, size: str, folder: str) -> None:
    """Run all meshes of a size as one of their processes."""
    torch.set_num_threads(1)
    me, count, base = int(rank), int(size), Path(folder)
    kind, store = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", f"file://{base / f'group-{size}'}"
    dist.init_process_group(kind, init_method=store, rank=me, world_size=count, timeout=timedelta(seconds=120))
    found = {_name(mesh): _gradients(Ranks(base, mesh, me, device=device)) for mesh in MESHES[count]}
    _results(base, count, me).write_bytes(pickle.dumps(found))
    dist.destroy_process_group()

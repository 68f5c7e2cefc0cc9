"""Tests of `boxes.py`, and of checkpoints on meshes: what torch gives each process, and what it reads, in one process.

Torch's fake process group is any rank of any number, and its collectives do nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from flowrl.backends.torch.optimizers.specs import zeros_of
from flowrl.backends.torch.train import checkpoint
from flowrl.backends.torch.train.boxes import Cut, boxes, cut_of, local_shape
from flowrl.backends.torch.train.mesh import ProcessMesh
from flowrl.backends.torch.train.sharded import Sharded
from flowrl.protocols.mesh import Mesh
from tests.support.errors import raises

MESHES: tuple[Mesh, ...] = (
    Mesh(),
    Mesh(fsdp=2),
    Mesh(fsdp=4),
    Mesh(tensor=2),
    Mesh(tensor=4),
    Mesh(fsdp=2, tensor=2),
    Mesh(replicate=2, fsdp=2),
    Mesh(replicate=2, fsdp=2, tensor=2),
)
SHAPES: dict[str, tuple[int, ...]] = {
    "column": (12, 6),  # cut along its rows by tensor parallelism, too
    "row": (6, 8),
    "experts": (4, 8, 3),  # gate and up projections as one, cut separately
    "norm": (7,),
    "value": (1, 6),  # fewer rows than ranks
}
CUTS: dict[str, Any] = {"column": Shard(0), "row": Shard(1), "experts": _StridedShard(1, split_factor=2)}
"""By tensor parallelism; other tensors are replicated."""


class Seat(Sharded):
    """A process of a mesh, without its groups."""

    all_or_none = nullcontext  # type: ignore[assignment]

    def __init__(self, spec: Mesh, rank: int) -> None:
        self.spec, self.position, self.device = spec, spec.position(rank), torch.device("cpu")


@contextmanager
def process(spec: Mesh, rank: int) -> Iterator[DeviceMesh]:
    """This process as one of a mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=spec.ranks)
    try:
        sizes = (spec.replicate, spec.fsdp, spec.tensor)
        yield init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "fsdp", "tensor"))
    finally:
        dist.destroy_process_group()


def cut_by(name: str, spec: Mesh) -> Any:
    """How tensor parallelism places a tensor; None if it leaves it whole."""
    return CUTS.get(name) if spec.tensor > 1 else None


def placed(local: Tensor, name: str, spec: Mesh, mesh: DeviceMesh) -> DTensor:
    """A part as FSDP2 places it over what tensor parallelism has cut; see the test of that below."""
    placements: list[Any] = [Replicate(), Shard(0)]
    if (cut := cut_by(name, spec)) is None:
        mesh = mesh["replicate", "fsdp"]
    else:
        placements = [Replicate(), _StridedShard(0, split_factor=spec.tensor) if cut.dim == 0 else Shard(0), cut]
    shape = torch.Size(SHAPES[name])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def chunks(tensor: Tensor, size: int, at: int, dim: int) -> Tensor:
    """What torch.chunk gives one of several processes, which may be nothing."""
    pieces = tensor.chunk(size, dim)
    return pieces[at] if at < len(pieces) else tensor.narrow(dim, 0, 0)


def local_of(tensor: Tensor, name: str, spec: Mesh, rank: int) -> Tensor:
    """The part of a tensor, written again: tensor parallelism first, then FSDP."""
    at = spec.position(rank)
    if (cut := cut_by(name, spec)) is not None:
        joined = tensor.chunk(getattr(cut, "split_factor", 1), cut.dim)
        tensor = torch.cat([chunks(one, spec.tensor, at.tensor, cut.dim) for one in joined], cut.dim)
    return chunks(tensor, spec.fsdp, at.fsdp, 0)


def tensors(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


class Engine:
    """The weights of one process and their optimizer after a step, from full tensors; blank without them."""

    def __init__(self, spec: Mesh, rank: int, mesh: DeviceMesh, full: Sequence[dict[str, Tensor]] | None) -> None:
        self.mesh = ProcessMesh(torch.device("cpu")) if spec.ranks == 1 else Seat(spec, rank)
        self.rank, self.spec = rank, spec

        def made(name: str, values: dict[str, Tensor] | None) -> Tensor:
            whole = torch.zeros(SHAPES[name]) if values is None else values[name].clone()
            return (
                whole if spec.ranks == 1 else placed(local_of(whole, name, spec, rank).contiguous(), name, spec, mesh)
            )

        given = full or [None] * 3
        self.weights = {name: nn.Parameter(made(name, given[0])) for name in SHAPES}
        self.optimizer = torch.optim.AdamW(self.weights.values())
        if full is not None:
            for name, weight in self.weights.items():
                moments = {"exp_avg": made(name, full[1]), "exp_avg_sq": made(name, full[2])}
                self.optimizer.state[weight] = {"step": torch.tensor(3.0), **moments}
        self.extra = {"progress": torch.tensor([5, 6] if full else [0, 0])}

    def save(self, folder: Path) -> None:
        checkpoint.save(str(folder), self.mesh, self.weights, self.optimizer, self.extra)

    def load(self, folder: Path) -> None:
        def zeros(weight: nn.Parameter) -> dict[str, Tensor]:
            return {key: zeros_of(self.optimizer, weight, key) for key in ("step", "exp_avg", "exp_avg_sq")}

        checkpoint.load(str(folder), self.mesh, self.weights, self.optimizer, zeros, self.extra)

    def assert_equal(self, full: Sequence[dict[str, Tensor]]) -> None:
        assert self.extra["progress"].tolist() == [5, 6]
        for name, weight in self.weights.items():
            state = self.optimizer.state[weight]
            assert state["step"] == 3
            for found, values in zip((weight.detach(), state["exp_avg"], state["exp_avg_sq"]), full, strict=True):
                local = found.to_local() if isinstance(found, DTensor) else found
                assert torch.equal(local, local_of(values[name], name, self.spec, self.rank)), name


@pytest.mark.parametrize("spec", MESHES[1:], ids=repr)
def test_boxes_are_what_torch_gives(spec: Mesh) -> None:
    for rank in range(spec.ranks):
        for name, shape in SHAPES.items():
            truth = torch.arange(math.prod(shape)).view(shape)
            placement = cut_by(name, spec)
            cut = None if placement is None else Cut(placement.dim, getattr(placement, "split_factor", 1))
            place = Seat(spec, rank).place_of(cut)
            found = torch.full(local_shape(shape, cut, place), -1)
            for box in boxes(shape, cut, place):
                found[box.local] = truth[box.whole]
            assert torch.equal(found, local_of(truth, name, spec, rank)), (name, rank)


@pytest.mark.parametrize("cut", [Shard(0), Shard(1), _StridedShard(1, split_factor=2)], ids=repr)
@pytest.mark.parametrize("rank", range(4))
def test_the_place_of_a_tensor_is_read_from_torch(cut: Any, rank: int) -> None:
    """FSDP2 shards a layer that is already split."""
    spec, truth = Mesh(fsdp=2, tensor=2), torch.arange(96.0).view(12, 8)
    with process(spec, rank) as mesh:
        layer, at = nn.Linear(8, 12, bias=False), spec.position(rank)
        joined = truth.chunk(getattr(cut, "split_factor", 1), cut.dim)
        own = torch.cat([chunks(one, 2, at.tensor, cut.dim) for one in joined], cut.dim)
        split = DTensor.from_local(own, mesh["tensor"], [cut], run_check=False, shape=truth.shape, stride=(8, 1))
        layer.weight = nn.Parameter(split)
        fully_shard(layer, mesh=mesh["fsdp"])
        weight: Any = layer.weight
        found = torch.full_like(local := weight.to_local().detach(), -1)
        for box in boxes(truth.shape, cut_of(weight), Seat(spec, rank).place_of(cut_of(weight))):
            found[box.local] = truth[box.whole]
        assert torch.equal(found, local)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("experts", [4, 6])  # two processes shard two experts, and three
def test_experts_are_cut_before_they_are_sharded(experts: int, rank: int) -> None:
    spec, truth = Mesh(fsdp=2, tensor=2, expert=2), torch.arange(experts * 6.0).view(experts, 2, 3)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=spec.ranks)
    try:
        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "expert"))
        layer, half = nn.Module(), truth.chunk(2)[rank % 2]
        layer.weight = nn.Parameter(DTensor.from_local(half, mesh["expert"], [Shard(0)], run_check=False))
        fully_shard(layer, mesh=mesh["shard"])
        weight: Any = layer.weight
        found = torch.full_like(local := weight.to_local().detach(), -1)
        cut = cut_of(weight)
        for box in boxes(truth.shape, cut, Seat(spec, rank).place_of(cut)):
            found[box.local] = truth[box.whole]
        assert torch.equal(found, local)
        assert torch.equal(local, chunks(half, 2, rank // 2, 0))
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Tensor]]]:
    """A checkpoint of each mesh, with the same tensors, and the tensors."""
    folder, full = tmp_path_factory.mktemp("meshes"), [tensors(seed) for seed in range(3)]
    for number, spec in enumerate(MESHES):
        for rank in reversed(range(spec.ranks)):  # in any order; the folder is refused only if it has a part already
            with process(spec, rank) as mesh:
                (folder / f"{number}-{rank}").mkdir()
                Engine(spec, rank, mesh, full).save(folder / f"{number}-{rank}")
        (folder / f"{number}").mkdir()
        for path in folder.glob(f"{number}-*/*"):
            path.rename(folder / f"{number}" / path.name)
    return folder, full


@pytest.mark.parametrize("spec", MESHES, ids=repr)
def test_a_checkpoint_of_any_mesh_loads_on_every_other(spec: Mesh, saved: Any) -> None:
    folder, full = saved
    for rank in range(spec.ranks):
        with process(spec, rank) as mesh:
            engine = Engine(spec, rank, mesh, None)
            for number in range(len(MESHES)):
                for tensor in (*engine.weights.values(), *engine.extra.values()):
                    tensor.detach().zero_()
                engine.load(folder / f"{number}")
                engine.assert_equal(full)


def test_each_element_is_stored_once(saved: Any) -> None:
    folder, full = saved
    for number, spec in enumerate(MESHES):
        parts = [load_file(path) for path in (folder / f"{number}").iterdir()]
        assert len(parts) == spec.ranks
        for name, tensor in full[0].items():
            assert sum(part[f"weights.{name}"].numel() for part in parts if f"weights.{name}" in part) == tensor.numel()


def test_checkpoints_without_boxes_are_read_by_rows(tmp_path: Path) -> None:
    """As older versions wrote them: rows in the order of ranks, unsharded tensors in the first file."""
    full, spec = [tensors(seed) for seed in range(3)], Mesh(fsdp=2)
    for rank in range(2):
        rows = {
            f"{prefix}.{name}": local_of(tensor, name, spec, rank).contiguous()
            for prefix, values in zip(("weights", "optimizer.exp_avg", "optimizer.exp_avg_sq"), full, strict=True)
            for name, tensor in values.items()
        }
        steps = {f"optimizer.step.{name}": torch.tensor(3.0) for name in SHAPES} | {"progress": torch.tensor([5, 6])}
        save_file(rows | (steps if rank == 0 else {}), tmp_path / f"part-0000{rank + 1}-of-00002.safetensors")
    for spec in (Mesh(), Mesh(fsdp=2, tensor=2)):
        for rank in range(spec.ranks):
            with process(spec, rank) as mesh:
                engine = Engine(spec, rank, mesh, None)
                engine.load(tmp_path)
                engine.assert_equal(full)


@pytest.mark.parametrize("change", ["shape", "boxes", "missing"])
def test_boxes_that_are_not_the_tensor_are_refused(change: str, tmp_path: Path) -> None:
    spec = Mesh()
    with process(spec, 0) as mesh:
        engine = Engine(spec, 0, mesh, [tensors(seed) for seed in range(3)])
        engine.save(tmp_path)
        (path,) = tmp_path.iterdir()
        with safe_open(path, framework="pt") as file:
            found = json.loads(file.metadata()["boxes"])
        held = load_file(path)
        box = found["weights.row"]
        if change == "shape":
            box["shape"] = [8, 6]
        elif change == "boxes":
            box["boxes"] = [[[[0, 3], [0, 8]], [[0, 3], [0, 8]]]]
        else:
            box["shape"] = [7, 8]
        save_file(held, path, metadata={"boxes": json.dumps(found)})
        with raises("checkpoint.mismatch", differ=("weights.row",)):
            engine.load(tmp_path)


def test_a_save_that_fails_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, full = Mesh(), [tensors(seed) for seed in range(3)]

    def full_disk(*args: Any) -> None:
        raise OSError("no space left on device")

    with process(spec, 0) as mesh:
        engine = Engine(spec, 0, mesh, full)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.TensorFile, "write", full_disk)
            with raises("checkpoint.damaged"):
                engine.save(tmp_path)
        with raises("checkpoint.missing"):
            engine.load(tmp_path)
        engine.save(tmp_path)
        engine.load(tmp_path)
        engine.assert_equal(full)

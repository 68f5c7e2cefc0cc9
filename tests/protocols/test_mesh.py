"""Tests of `mesh.py` against lists of processes written by hand and by nested loops, and of
`backends/torch/on_mesh.py`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.backends import Mesh, TorchCritic, TorchRewardModel, TorchRewardTrainer, TorchScorer, TorchTrainer
from flowrl.data.balance import Shard, split_rows
from flowrl.distributed.hosts.shards import shard
from flowrl.files.values import decode, encode
from flowrl.operators.updates.mini_batches import rank_parts
from flowrl.protocols.mesh import Position
from tests.support.errors import raises
from tests.support.models import tiny_folder

MESHES = [
    {"replicate": r, "fsdp": f, "tensor": t, "context": c}
    for r, f, t, c in itertools.product((1, 2, 3), (1, 2, 3, 4, 6, 8), (1, 2, 3, 4), (1, 2, 3, 4))
    if f % c == 0
]


def processes(
    replicate: int, fsdp: int, tensor: int, context: int, expert: int = 1, pipeline: int = 1
) -> list[Position]:
    """The processes of a mesh, outer to inner, by nested loops over data ranks and parts of rows."""
    found: list[Position] = []
    for copy, stage in itertools.product(range(replicate), range(pipeline)):
        for batch in range(fsdp // context):
            for part in range(context):
                for t in range(tensor):
                    rank = len(found)
                    of_rows = part == t == 0 and stage == pipeline - 1
                    data_rank = copy * (fsdp // context) + batch
                    within = rank % (fsdp * tensor)
                    found.append(
                        Position(
                            rank,
                            copy,
                            stage,
                            batch * context + part,
                            t,
                            within % expert,
                            within // expert,
                            data_rank,
                            part,
                            of_rows,
                            rank == 0,
                            rank,
                        )
                    )
    return found


@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "-".join(map(str, axes.values())))
def test_every_process_is_what_nested_loops_say(axes: dict[str, int]) -> None:
    mesh, expected = Mesh(**axes), processes(**axes)
    assert list(mesh.positions) == expected and mesh.ranks == len(expected)
    assert mesh.data_ranks == len({one.data_rank for one in expected})
    assert sum(one.reports for one in mesh.positions) == mesh.data_ranks
    assert [one.share for one in mesh.positions] == list(range(mesh.shares))
    for axis, same in (("tensor", "fsdp replicate pipeline"), ("context", "data_rank pipeline tensor")):
        groups: dict[Any, list[int]] = {}
        for one in expected:
            groups.setdefault(tuple(getattr(one, name) for name in same.split()), []).append(one.rank)
        assert sorted(mesh.together(axis)) == sorted(map(tuple, groups.values()))
        assert {len(group) for group in mesh.together(axis)} == {axes[axis]}


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 2), (2, 1, 2, 1, 1, 2), (2, 4, 2, 2, 4, 3)])
def test_processes_of_a_pipeline_are_what_nested_loops_say(sizes: tuple[int, ...]) -> None:
    mesh, expected = Mesh(*sizes), processes(*sizes)
    assert list(mesh.positions) == expected
    step = mesh.fsdp * mesh.tensor
    first = [tuple(range(low, low + step * mesh.pipeline, step)) for low in range(step)]
    assert mesh.together("pipeline")[:step] == first
    assert [one.rank for one in mesh.positions if one.reports_shared] == [(mesh.pipeline - 1) * step]
    rows = [[one.pipeline for one in expected if one.data_rank == rank] for rank in range(mesh.data_ranks)]
    assert [sorted(set(stages)) for stages in rows] == [list(range(mesh.pipeline))] * mesh.data_ranks


def test_a_mesh_of_twelve_by_hand() -> None:
    """Two replicas of four processes by fsdp, in pairs that share rows: as SCALE counts them."""
    mesh = Mesh(replicate=2, fsdp=2, tensor=3, context=2)
    assert [one.data_rank for one in mesh.positions] == [0] * 6 + [1] * 6
    assert [one.part for one in mesh.positions] == [0, 0, 0, 1, 1, 1] * 2
    assert [one.tensor for one in mesh.positions] == [0, 1, 2] * 4
    assert [one.rank for one in mesh.positions if one.reports] == [0, 6]
    assert mesh.together("tensor") == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]
    assert mesh.together("context") == [(0, 3), (1, 4), (2, 5), (6, 9), (7, 10), (8, 11)]


@pytest.mark.parametrize("sizes", [(1, 2, 1, 1, 2), (1, 4, 1, 2, 2), (2, 2, 2, 1, 2), (1, 2, 2, 1, 4), (3, 2, 4, 2, 8)])
def test_neighbors_have_the_experts_together(sizes: tuple[int, ...]) -> None:
    """Consecutive processes, never of two replicas; of the others of a replica, some have the same ones."""
    mesh, expected = Mesh(*sizes), processes(*sizes)
    assert list(mesh.positions) == expected
    replicate, fsdp, tensor, _, expert = sizes
    together = [tuple(range(first, first + expert)) for first in range(0, mesh.ranks, expert)]
    assert mesh.together("expert") == together
    assert mesh.expert_shards * expert == fsdp * tensor
    for group in mesh.together("shard"):
        assert len(group) == mesh.expert_shards
        assert len({(expected[rank].replicate, expected[rank].expert) for rank in group}) == 1
    assert len(mesh.together("shard")) == replicate * expert


def test_one_axis_has_a_data_rank_for_each_process() -> None:
    for ranks in range(1, 9):
        mesh = Mesh(fsdp=ranks)
        assert [(one.data_rank, one.part, one.reports) for one in mesh.positions] == [
            (r, 0, True) for r in range(ranks)
        ]
        assert [one.leads for one in mesh.positions] == [True] + [False] * (ranks - 1)


@pytest.mark.parametrize("axes", [axes for axes in MESHES if axes["replicate"] < 3 and axes["fsdp"] < 5])
def test_every_row_is_computed_once(axes: dict[str, int]) -> None:
    """Of a node and of each mini-batch: once by each coordinate of tensor and context, the same by all of them."""
    mesh, generator = Mesh(**axes), torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 50, (11,), generator=generator)
    dealt = shard("row", 11, mesh.data_ranks, tokens.numpy(), None)
    mask = torch.ones(11, 1, dtype=torch.bool)
    batches = torch.randperm(11, generator=generator).split(4)
    for tensor, part in itertools.product(range(mesh.tensor), range(mesh.context)):
        peers = [one for one in mesh.positions if (one.tensor, one.part) == (tensor, part)]
        rows = np.concatenate([dealt[one.data_rank] for one in peers])
        assert sorted(rows.tolist()) == list(range(11))
        trained = []
        for one in peers:
            own = Shard(one.data_rank, mesh.data_ranks, None, tokens)
            trained.append(rank_parts(batches, lambda mask: mask.float(), mask, mask, own))
        for number, batch in enumerate(batches):
            rows = torch.cat([parts[number].rows for parts in trained])
            assert sorted(rows.tolist()) == sorted(batch.tolist())
    assert [rows.tolist() for rows in split_rows(tokens, mesh.data_ranks)] == [rows.tolist() for rows in dealt]


def test_axes_that_do_not_divide_are_refused() -> None:
    with raises("mesh.axes", axis="context", given=3, expected=4):
        Mesh(fsdp=4, context=3)
    with raises("mesh.axes", axis="expert", given=4, expected=6):
        Mesh(fsdp=3, tensor=2, expert=4)
    with raises("parameter.invalid"):
        Mesh(fsdp=0)
    assert Mesh(fsdp=2, tensor=2, expert=4).ranks == 4  # experts are cut over fsdp and tensor


@pytest.mark.parametrize("backend", [TorchTrainer, TorchScorer, TorchCritic, TorchRewardTrainer, TorchRewardModel])
def test_a_backend_has_one_mesh(backend: Any) -> None:
    assert backend("model", ranks=8).geometry == backend("model", mesh=Mesh(fsdp=8)).geometry == Mesh(fsdp=8)
    assert backend("model").geometry == Mesh()
    with raises("mesh.ranks", ranks=2):
        backend("model", ranks=2, mesh=Mesh(fsdp=2))
    with raises("mesh.pipeline", given=2, backend=backend.__name__):
        backend("model", mesh=Mesh(pipeline=2))


def test_a_mesh_survives_a_file() -> None:
    spec = TorchTrainer("model", mesh=Mesh(replicate=2, fsdp=4))
    assert decode(json.loads(json.dumps(encode(spec, "here"))), "here", None) == spec


SIZES = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_experts": 6,
    "num_hidden_layers": 10,
}


@pytest.mark.parametrize(
    ("axes", "size", "axis", "given"),
    [
        ({"tensor": 3}, "num_attention_heads", "tensor * context", 3),
        ({"tensor": 4}, "num_key_value_heads", "tensor", 4),
        ({"fsdp": 16, "context": 16}, "num_attention_heads", "tensor * context", 16),
        ({"tensor": 2, "fsdp": 8, "context": 8}, "num_attention_heads", "tensor * context", 16),
        ({"fsdp": 4, "expert": 4}, "num_experts", "expert", 4),
        ({"pipeline": 4}, "num_hidden_layers", "pipeline", 4),
    ],
)
def test_sizes_that_axes_do_not_divide_are_refused(axes: dict[str, int], size: str, axis: str, given: int) -> None:
    with raises("mesh.does-not-divide", size=size, found=SIZES[size], axis=axis, given=given, path="here"):
        Mesh(**axes).refuse_unfit("TorchTrainer", "here", SIZES)


def test_key_heads_divide_the_parts_of_a_row_or_are_divided_by_them() -> None:
    for parts in (1, 2, 4, 8):
        Mesh(fsdp=parts, context=parts).refuse_unfit("TorchTrainer", "here", SIZES)
    with raises("mesh.does-not-divide", size="num_key_value_heads", found=6):
        Mesh(fsdp=4, context=4).refuse_unfit("TorchTrainer", "here", SIZES | {"num_key_value_heads": 6})
    with raises("mesh.does-not-divide", size="intermediate_size", axis="tensor"):
        Mesh(tensor=2).refuse_unfit("TorchTrainer", "here", SIZES | {"intermediate_size": 95})


def test_a_model_that_does_not_fit_is_refused_by_its_configuration_alone(tmp_path: Path) -> None:
    folders = {kind: Path(tiny_folder(tmp_path, kind)) for kind in ("llama", "qwen2", "gpt2")}
    for folder in folders.values():
        (folder / "model.safetensors").unlink()
    for backend in (TorchTrainer, TorchScorer, TorchCritic):
        with raises("mesh.does-not-divide", size="num_key_value_heads", found=1, given=2):
            backend(str(folders["llama"]), mesh=Mesh(tensor=2)).refuse_missing()
        with raises("mesh.no-plan", architecture="gpt2", axis="tensor"):
            backend(str(folders["gpt2"]), mesh=Mesh(fsdp=2, tensor=2)).refuse_missing()
        with raises("mesh.no-plan", architecture="llama", axis="expert"):
            backend(str(folders["llama"]), mesh=Mesh(fsdp=2, expert=2)).refuse_missing()
        backend(str(folders["qwen2"]), mesh=Mesh(tensor=2)).refuse_missing()
        backend(str(folders["gpt2"]), mesh=Mesh(fsdp=2)).refuse_missing()

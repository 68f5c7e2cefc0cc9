"""Runs the cases of a module as the ranks of a mesh, in processes of one gloo group, and compares their results."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flowrl.backends import Mesh
from tests import ROOT
from tests.backends.torch.train.test_fsdp import merged, relative_error

Results = Mapping[str, Any]
"""By case, the results of a process."""


def name_of(mesh: Mesh) -> str:
    return "-".join(map(str, dataclasses.astuple(mesh)))


def main(results: Callable[[Path, Mesh, int, bool], Results]) -> None:
    """``python -m MODULE RANK FOLDER AXES``: pickle the results of a rank; ``AXES`` is JSON.

    Args:
        results: of the rank of a mesh whose inputs are in a folder; with a further argument, those of further
            cases.
    """
    torch.set_num_threads(1)
    folder, mesh = Path(sys.argv[2]), Mesh(**json.loads(sys.argv[3]))
    rank = _forked(mesh.ranks) if sys.argv[1] == "all" else int(sys.argv[1])
    store = f"file://{folder / f'group-{name_of(mesh)}'}"
    wait = timedelta(seconds=300)  # imports of one rank may take much longer than of the other
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=mesh.ranks, timeout=wait)
    found = results(folder, mesh, rank, len(sys.argv) > 4)
    dist.destroy_process_group()
    (folder / f"found-{name_of(mesh)}-{rank}.pickle").write_bytes(pickle.dumps(found))


def _forked(ranks: int) -> int:
    """Fork a process for each rank, and return its rank there; this one exits when they have ended."""
    children = []
    for rank in range(ranks):
        if not (child := os.fork()):
            return rank
        children.append(child)
    sys.exit(max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children))


def run(folder: Path, mesh: Mesh, cases: str, *which: str, forked: bool = False) -> list[dict[str, Any]]:
    """The results of the ranks of a mesh, of a module of cases.

    Args:
        forked: the ranks are forked from one process, which has imported `cases`.
    """
    axes, name = json.dumps(dataclasses.asdict(mesh)), name_of(mesh)
    (folder / f"group-{name}").unlink(missing_ok=True)  # of an earlier run
    logs = {rank: folder / f"log-{name}-{rank}.txt" for rank in (["all"] if forked else range(mesh.ranks))}
    processes = []
    for rank, log in logs.items():
        command = [
            sys.executable,
            "-m",
            cases if "." in cases else f"{__package__}.{cases}",
            str(rank),
            str(folder),
            axes,
            *which,
        ]
        with log.open("w") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
        processes.append(process)
    try:
        codes = [process.wait(timeout=600) for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
    assert not any(codes), "\n".join(log.read_text()[-3000:] for log in logs.values())
    files = [folder / f"found-{name}-{rank}.pickle" for rank in range(mesh.ranks)]
    return [pickle.loads(file.read_bytes()) for file in files]


def assert_as_one(expected: Results, mesh: Mesh, ranks: Sequence[Results], bound: float) -> None:
    """Every rank has the results of one process in a case: ``exact`` ones to the bit, ``close`` ones and weights
    ``after`` mini-batches up to `bound`, and together they have its ``metrics``."""
    for rank in ranks:
        for name, tensor in expected.get("exact", {}).items():
            assert torch.equal(rank["exact"][name], tensor), name
        for group in ("close", "after"):
            if group in expected:
                assert relative_error(rank[group], expected[group]) < bound
    counted = [one for one, at in zip(ranks, mesh.positions, strict=True) if at.reports]
    for step, metrics in enumerate(expected.get("metrics", ())):
        assert merged([one["metrics"][step] for one in counted]) == pytest.approx(metrics.compute(), rel=1e-5, abs=1e-6)

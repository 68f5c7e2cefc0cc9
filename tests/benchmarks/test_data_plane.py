"""`benchmarks/ray_dataplane.py`: it has every column of the step that it moves."""

from __future__ import annotations

import pytest
import torch

from flowrl.columns import lookup
from flowrl.graphs import ppo
from tests import ROOT
from tests.support.kernel import exact


def test_benchmark_columns_cover_every_column_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import ray_dataplane

    graph, columns = ppo(exact), ray_dataplane.columns_of(4, 8, 16)
    for node in graph.nodes.values():
        assert set(ray_dataplane.written(node)) <= columns.keys(), node.name
    for name, column in columns.items():
        known = lookup(name)
        assert known is not None and len(column) == 4 and column.ndim == len(known.axes)
        if isinstance(column, torch.Tensor):
            assert str(column.dtype).removeprefix("torch.") == known.dtype, name

"""Rows that several processes share: which tokens each computes and scores, and which architectures can be cut.

`train/test_context.py` compares log-probs, gradients and trainings of several processes with those of one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.backends import Mesh, TorchCritic, TorchScorer, TorchTrainer
from flowrl.backends.torch.load import skeleton
from flowrl.backends.torch.score.context import Context, Ulysses, refuse_uncut
from flowrl.backends.torch.score.rows import TokenInputs, packed
from tests.backends.torch.train.trainers import CONTEXT
from tests.support.architectures import SETTINGS, architecture
from tests.support.errors import raises
from tests.support.models import tiny_folder

CUT = ["llama", "qwen2", "gpt2", "granite", "cohere", "phi"]
CUT += ["afmoe", "deepseek_v3", "gemma3_text", "mistral", "mixtral", "phimoe"]
UNCUT = {
    "gemma2": "attn_logit_softcapping",
    "vaultgemma": "attn_logit_softcapping",
    "bloom": "its attention is 'eager'",
    "falcon": "its attention is 'eager'",
    "gpt_oss": "its attention is 'eager'",
    "jamba": "layers of linear_attention",
    "mamba": "layers of linear_attention",
    "mamba2": "layers of linear_attention",
    "minimax": "layers of linear_attention",
    "qwen3_next": "layers of linear_attention",
    "deepseek_v4": "layers of heavily_compressed_attention",
    "recurrent_gemma": "recurrent layers",
    "rwkv": "recurrent layers",
    "xlstm": "recurrent layers",
}


def processes(size: int) -> list[Ulysses]:
    group: Any = None  # they do not communicate here
    return [Ulysses(size, place, group) for place in range(size)]


def rows_of(lengths: list[int]) -> tuple[TokenInputs, Tensor, Tensor]:
    """Rows of these lengths with ids from 1, and the rows and columns of all tokens but the last of each row."""
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = 1 + torch.arange(mask.numel()).view_as(mask)
    scored = mask & (torch.arange(width) < torch.tensor(lengths)[:, None] - 1)
    return TokenInputs(ids, mask, torch.arange(width).expand_as(mask), scored), *scored.nonzero(as_tuple=True)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.integers(2, 5))
def test_processes_compute_consecutive_parts_and_score_each_token_once(lengths: list[int], size: int) -> None:
    batch, rows, columns = rows_of(lengths)
    moved = packed(batch)
    lines, places = moved.find(rows, columns)
    parts = [each.part(moved, lines, places) for each in processes(size)]
    tokens = sum(lengths)
    widths = {part.rows.input_ids.shape[1] for part in parts}
    assert widths == {-(-tokens // size)}  # rows shorter than the cut are padded, so that all take part
    for name in ("input_ids", "position_ids"):
        joined = torch.cat([getattr(part.rows, name)[0] for part in parts])
        assert torch.equal(joined[:tokens], getattr(moved, name)[0]) and not joined[tokens:].any()
    assert int(sum(part.counted.sum() for part in parts)) == tokens
    assert all(part.rows.attention_mask.all() for part in parts)
    (runs,) = {part.within["packed"] for part in parts}
    assert sum(n * length for n, length in runs) == size * widths.pop() and runs[: len(moved.runs or ())] == moved.runs
    found = torch.zeros(len(rows), dtype=torch.int64)
    for part in parts:
        found[part.own] += part.rows.input_ids[part.lines, part.places]
    assert torch.equal(found, batch.input_ids[rows, columns])


def test_a_row_is_cut_as_in_a_worked_example() -> None:
    """Rows of 2 and 5 tokens over four processes: the second row is cut three times, and one token is padding."""
    batch, rows, columns = rows_of([5, 2])
    moved = packed(batch)
    parts = [each.part(moved, *moved.find(rows, columns)) for each in processes(4)]
    assert [part.rows.input_ids[0].tolist() for part in parts] == [[6, 7], [1, 2], [3, 4], [5, 0]]
    assert [part.rows.position_ids[0].tolist() for part in parts] == [[0, 1], [0, 1], [2, 3], [4, 0]]
    assert [part.own.tolist() for part in parts] == [[4], [0, 1], [2, 3], []]  # type: ignore[union-attr]
    assert [part.counted[0].tolist() for part in parts] == [[True] * 2] * 3 + [[True, False]]
    assert parts[0].within["packed"] == ((1, 2), (1, 5), (1, 1))


def test_rows_with_masked_inner_tokens_are_computed_whole_and_scored_in_parts() -> None:
    batch, rows, columns = rows_of([5, 2])
    batch.attention_mask[0, 1] = False
    moved = packed(batch)
    parts = [each.part(moved, *moved.find(rows, columns)) for each in processes(3)]
    assert all(part.rows is moved and part.within == {} for part in parts)
    assert [part.own.tolist() for part in parts] == [[0, 1], [2, 3], [4]]  # type: ignore[union-attr]
    assert [int(part.counted.sum()) for part in parts] == [6, 0, 0]


def test_one_process_computes_and_scores_all_tokens() -> None:
    batch, rows, columns = rows_of([5, 2])
    moved = packed(batch)
    part = Context().part(moved, *moved.find(rows, columns))
    assert part.rows is moved and part.own == slice(None) and part.within == moved.within


# --- architectures ---------------------------------------------------------------------------------------------------


def folder_of(kind: str, path: Path) -> str:
    return architecture(path, kind) if kind in SETTINGS else tiny_folder(path, kind)


@pytest.mark.parametrize("kind", CUT)
def test_architectures_with_fused_attention_in_all_layers_can_be_cut(kind: str, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path)
    refuse_uncut(skeleton(folder), folder, "TorchTrainer")


@pytest.mark.parametrize("kind", UNCUT)
def test_other_architectures_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path)
    lm = skeleton(folder)
    with raises("mesh.no-context", path=folder, architecture=type(lm).__name__) as error:
        refuse_uncut(lm, folder, "TorchTrainer")
    assert UNCUT[kind] in str(error.value)


@pytest.mark.parametrize("backend", [TorchTrainer, TorchScorer, TorchCritic])
def test_backends_refuse_an_architecture_before_it_loads(backend: Any, tmp_path: Path) -> None:
    folder, mesh = architecture(tmp_path, "jamba"), Mesh(fsdp=2, context=2)
    (tmp_path / "jamba" / "model.safetensors").unlink()
    for refuse in (backend(folder, mesh=mesh).refuse_missing, lambda: backend(folder, mesh=mesh).build(CONTEXT)):
        with raises("mesh.no-context", path=folder):
            refuse()
    with raises("mesh.no-context", path=(plain := tiny_folder(tmp_path))):
        backend(plain, mesh=mesh, attention="eager").refuse_missing()

"""Files of prompts, and a tokenizer with one token per character."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from flowrl.data.proto.dataproto import DataProto
from flowrl.data.sources.file_source import FilePath
from flowrl.data.sources.prompts import PromptData, PromptStream


class Characters:
    """A replacement for `ChatTokenizer`: one id per character of all contents; counts its calls."""

    unknown_id: int | None = None
    folder = "characters"
    longest_token = 10

    def __init__(self) -> None:
        self.calls = 0

    def prompt_ids(self, messages: Sequence[dict[str, Any]], template_kwargs: Any = None) -> list[int]:
        self.calls += 1
        return [ord(c) for m in messages for c in m["content"]]

    def pad_left(self, rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
        return ids, ids != 0


def record(i: int, content: str | None = None) -> dict[str, Any]:
    return {
        "prompt": [{"role": "system", "content": "add"}, {"role": "user", "content": content or "x" * (i + 1)}],
        "data_source": f"source-{i % 2}",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"index": i, "split": "train"},
    }


def write_jsonl(path: Path, records: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, records: Sequence[Any]) -> str:
    pq.write_table(pa.Table.from_pylist(list(records)), path)
    return str(path)


def load(path: FilePath | tuple[FilePath, ...], seed: int = 0, **settings: Any) -> PromptStream:
    return PromptData(path, **settings).load(Characters(), seed)  # type: ignore[arg-type]


def truths(batch: DataProto) -> list[Any]:
    return list(batch["ground_truth"])

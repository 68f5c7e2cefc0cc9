"""Folders of runs in format 2, written without the code that records them: seeded, and as large as a test needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flowrl.files.graph_io import graph_to_dict
from flowrl.graph import Graph

BEGIN = 1_760_000_000.0
SECONDS = {"generate": 0.9, "old_log_prob": 0.3, "ref_log_prob": 0.3, "reward": 0.2, "update_actor": 0.8}
METRICS = {
    "reward/mean": "reward",
    "reward/thinks": "reward",
    "response_length/mean": "generate",
    "kl/ref": "ref_log_prob",
    "actor/entropy": "update_actor",
    "actor/grad_norm": "update_actor",
    "actor/pg_loss": "update_actor",
}


@dataclass
class WrittenRun:
    """A run of `graph` (GRPO) with `prompts` groups of `size` rows a step, of which learning is made up.

    Args:
        texts: steps between two steps with texts; 0 writes none.
        texts_of: the responses to write instead of made-up ones, repeated as needed.
    """

    graph: Graph
    folder: Path
    steps: int = 12
    prompts: int = 8
    size: int = 4
    texts: int = 1
    status: str = "finished"
    name: str = "grpo"
    seed: int = 0
    texts_of: Sequence[str] = ()

    def write(self) -> Path:
        """Write the folder; returns its path."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.random = np.random.default_rng(self.seed)
        self.hard = self.random.normal(0.0, 1.2, 4 * self.prompts)
        self._describe()
        with (self.folder / "metrics.jsonl").open("w") as metrics, (self.folder / "spans.jsonl").open("w") as spans:
            self._validate(metrics, 0)
            for first in range(1, self.steps + 1, 100):
                steps = range(first, min(first + 100, self.steps + 1))
                tables = [self._step(step, metrics, spans) for step in steps]
                self._table("rows", f"step-{steps[0]:06d}-{steps[-1]:06d}", pa.concat_tables(tables))
        return self.folder

    def _describe(self) -> None:
        described = {
            "format": 2,
            "status": self.status,
            "id": f"{self.seed:08x}",
            "started": BEGIN,
            "ended": None if self.status == "running" else BEGIN + 3.0 * self.steps,
            "host": "node-1",
            "pid": 1,
            "command": "flowrl run train.py:training",
            "git": {"commit": "3f97180c", "dirty": False},
            "starts": [{"step": 0, "time": BEGIN}],
            "metrics": METRICS,
            "graph": graph_to_dict(self.graph, portable=False),
            "training": {"steps": self.steps, "prompts": self.prompts, "seed": self.seed},
            "versions": {"python": "3.11.7", "flowrl": "0.1.0", "torch": "2.13.0"},
        }
        (self.folder / "run.json").write_text(json.dumps(described, indent=2))

    def _solved(self, step: int, prompt: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """How probable a right answer is."""
        done = 5.0 * step / max(self.steps, 1) - 2.0
        rate: np.ndarray[Any, Any] = 1.0 / (1.0 + np.exp(self.hard[prompt % len(self.hard)] - done))
        return rate

    def _step(self, step: int, metrics: Any, spans: Any) -> pa.Table:
        rows, time = self.prompts * self.size, BEGIN + 3.0 * step
        position = (step - 1) * self.prompts + np.arange(self.prompts)
        prompt = np.repeat(position % len(self.hard), self.size)
        uid = [f"{p // len(self.hard)}/{p % len(self.hard)}/0" for p in position for _ in range(self.size)]
        score = (self.random.random(rows) < self._solved(step, prompt)).astype(float)
        groups = score.reshape(-1, self.size)
        spread = np.repeat(groups.std(1), self.size)
        advantage = (score - np.repeat(groups.mean(1), self.size)) / (spread + 1e-6)
        tokens = self.random.integers(12, 28, rows)
        kl = np.abs(self.random.normal(0, 0.02 * step / self.steps, rows)) * tokens
        row_id = [f"{one}#{i % self.size}" for i, one in enumerate(uid)]
        table = {
            **{"step": np.full(rows, step), "round": pa.nulls(rows, pa.int64()), "row": np.arange(rows)},
            **{"row_id": row_id, "uid": uid, "prompt": prompt, "data_source": ["addition"] * rows, "score": score},
            **{"reward/thinks": score, "prompt_tokens": np.full(rows, 9), "response_tokens": tokens},
            **{
                "truncated": tokens >= 27,
                "version_min": np.full(rows, step - 1),
                "version_max": np.full(rows, step - 1),
            },
            **{"advantage": advantage, "advantage_max": advantage, "kl": kl, "mismatch": kl * 1e-4},
            **{"optimizer_step": np.arange(rows) * 2 // rows, "loss_weight": 1.0 / tokens},
            **{"group_size": np.full(rows, self.size), "group_spread": spread, "fate": ["trained"] * rows},
        }
        self._report(metrics, step, time, {"reward/mean": score.mean(), "reward/thinks": score.mean()}, tokens, kl)
        self._spans(spans, step, time - 3.0, int(tokens.sum()))
        if step % max(1, self.steps // 4) == 0:
            self._validate(metrics, step)
        if self.texts and (step - 1) % self.texts == 0:
            self._texts(step, row_id, prompt, score)
        return pa.table(table)

    def _report(
        self, file: Any, step: int, time: float, reward: Mapping[str, float], tokens: Any, kl: np.ndarray[Any, Any]
    ) -> None:
        line = {
            **{"step": step, "time": time, **reward, "response_length/mean": tokens.mean()},
            **{"kl/ref": kl.sum() / tokens.sum(), "actor/entropy": 0.5 * np.exp(-2.0 * step / self.steps)},
            **{"actor/grad_norm": 0.8 + 0.1 * self.random.normal(), "actor/pg_loss": 0.1 * self.random.normal()},
            **{f"timing/{node}": seconds for node, seconds in SECONDS.items()},
            **{"timing/step": sum(SECONDS.values()), "total/rows": step * len(tokens)},
            **{"total/tokens": step * int(tokens.sum()), "total/seconds": 3.0 * step},
        }
        file.write(json.dumps(line) + "\n")

    def _validate(self, file: Any, step: int) -> None:
        prompts = np.arange(24)
        score = (self.random.random(24) < self._solved(step, prompts)).astype(float)
        file.write(json.dumps({"step": step, "val/reward/mean": score.mean(), "time": BEGIN + 3.0 * step}) + "\n")
        with (self.folder / "predictions.jsonl").open("a") as predictions:
            for i in prompts:
                line = {"step": step, "validation": "val", "row_id": f"0/{i}/0#0", "uid": f"0/{i}/0"}
                line |= {"prompt": [{"role": "user", "content": f"{i + 10}+{i + 40}="}], "score": float(score[i])}
                predictions.write(
                    json.dumps(line | {"response": str(2 * i + 50), "ground_truth": str(2 * i + 50)}) + "\n"
                )

    def _spans(self, file: Any, step: int, start: float, tokens: int) -> None:
        for name in ("repeat", "generate", "old_log_prob", "ref_log_prob", "reward", "group_advantage", "update_actor"):
            file.write(json.dumps({"open": name, "time": start}) + "\n")
            end = start + SECONDS.get(name, 0.001)
            span = {"name": name, "place": "this process", "kind": "node", "start": start, "end": end, "step": step}
            file.write(json.dumps(span | {"rows": self.prompts * self.size, "tokens": tokens, "bytes": 0}) + "\n")
            start = end

    def _texts(
        self, step: int, row_id: Sequence[str], prompt: np.ndarray[Any, Any], score: np.ndarray[Any, Any]
    ) -> None:
        said = self.texts_of or [f"<think>{a} plus {a + 30}</think>{2 * a + 30}" for a in range(10, 99)]
        table = {
            "row_id": row_id,
            "prompt": [json.dumps([{"role": "user", "content": f"{p + 10}+{p + 40}="}]) for p in prompt],
            "response": [said[i % len(said)] for i in range(len(row_id))],
            "ground_truth": [json.dumps(str(2 * p + 50)) for p in prompt.tolist()],
            "episode": pa.nulls(len(row_id), pa.string()),
        }
        self._table("texts", f"step-{step:06d}", pa.table(table))

    def _table(self, kind: str, name: str, table: pa.Table) -> None:
        (self.folder / kind).mkdir(exist_ok=True)
        pq.write_table(table, self.folder / kind / f"{name}.parquet", compression="zstd", compression_level=1)

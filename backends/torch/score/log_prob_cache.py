"""A cache of log-probs on disk: a frozen model scores each row once, in this run or an earlier one."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, cast

import numpy as np
import torch
import xxhash
from torch import Tensor

from flowrl.backends.torch.score.engine import FrozenEngine, Residence
from flowrl.backends.torch.score.model import TorchModel
from flowrl.backends.torch.score.rows import Budget, SequenceInputs, take
from flowrl.errors import BindError
from flowrl.records import Sequences
from flowrl.sync.buckets import BUCKET_BYTES
from flowrl.sync.digest import weights_digest


class LogProbCache:
    """The log-probs of rows by their content, in a SQLite file: ``<digest of the model>-<dtype>.sqlite``.

    Processes of one machine may share the file.
    """

    def __init__(self, folder: str, model: str, dtype: torch.dtype) -> None:
        self.path = os.path.join(folder, f"{model}-{str(dtype).removeprefix('torch.')}.sqlite")
        with self._opened(folder) as file:
            file.execute("CREATE TABLE IF NOT EXISTS rows (key BLOB PRIMARY KEY, log_probs BLOB) WITHOUT ROWID")

    def read(self, keys: Sequence[bytes]) -> dict[bytes, np.ndarray]:
        """The stored log-probs of these rows, float32 ``[tokens on the mask]`` each."""
        with self._opened() as file:
            rows = (file.execute("SELECT log_probs FROM rows WHERE key = ?", (key,)).fetchone() for key in keys)
            return {key: np.frombuffer(row[0], np.float32) for key, row in zip(keys, rows, strict=True) if row}

    def write(self, found: Mapping[bytes, np.ndarray]) -> None:
        """Store the log-probs of rows, all or none."""
        with self._opened() as file:
            rows = [(key, log_probs.tobytes()) for key, log_probs in found.items()]
            file.executemany("INSERT OR IGNORE INTO rows VALUES (?, ?)", rows)

    @contextmanager
    def _opened(self, create: str | None = None) -> Iterator[sqlite3.Connection]:
        """The open file, in a transaction."""
        try:
            if create is not None:
                os.makedirs(create, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=60.0)) as file, file:
                yield file
        except (sqlite3.Error, OSError) as error:
            raise BindError(
                f"The cache of log-probs {self.path!r} cannot be read or written ({error}). Free space on its disk, "
                f"delete the file if it is damaged, or pass another folder: TorchScorer(model, cache='runs/cache').",
                code="model.log-prob-cache",
                path=self.path,
                error=type(error).__name__,
            ) from error


class CachedEngine(FrozenEngine):
    """A `FrozenEngine` that computes the log-probs of a row once; see `TorchScorer`."""

    def __init__(
        self, folder: str, scorer: TorchModel, budget: Budget, logprob_chunk: int, residence: Residence, cache: str
    ) -> None:
        super().__init__(folder, scorer, budget, logprob_chunk, residence)
        self._cache = LogProbCache(cache, _digest(scorer), scorer.dtype)

    @torch.no_grad()
    def log_probs(self, batch: Sequences) -> Tensor:
        """As `TorchScorerEngine.log_probs`; only rows that are not in the cache are computed."""
        inputs = SequenceInputs(*(getattr(batch, name) for name in SequenceInputs._fields))
        mask, keys = inputs.response_mask.bool().cpu(), list(row_keys(inputs))
        stored = self._cache.read(keys)
        found = torch.tensor([key in stored for key in keys], dtype=torch.int64, device=self._scorer.device)
        # Rows that other ranks write now may be visible to only some of the processes with the same rows.
        missing = (self._scorer.mesh.agreed(found) == 0).nonzero().flatten().cpu()
        computed = super().log_probs(cast(Any, take(inputs, missing))).cpu()  # a collective, even without rows
        new = {keys[row]: computed[i][mask[row]].numpy() for i, row in enumerate(missing.tolist())}
        self._cache.write(new)
        out = torch.zeros(mask.shape)
        for row, key in enumerate(keys):
            out[row, mask[row]] = torch.from_numpy(np.copy((stored if key in stored else new)[key]))
        return out.to(inputs.response_mask.device)


def _digest(scorer: TorchModel) -> str:
    """The xxh3-128 of what the log-probs of a row depend on: weights, configuration and attention. A collective."""
    config = scorer.module.config
    settings = {**config.to_dict(), "_name_or_path": None, "attention": config._attn_implementation}
    weights = weights_digest(scorer.weights(BUCKET_BYTES))
    text = f"{weights}\n{json.dumps(settings, sort_keys=True, default=str)}"
    return xxhash.xxh3_128_hexdigest(text.encode())


def row_keys(inputs: SequenceInputs) -> Iterator[bytes]:
    """The xxh3-128 of each row: its attended tokens, their positions, which of them are scored, and the
    temperature; padding does not count."""
    ids, attended, places, mask, temperature = (column.cpu().numpy() for column in inputs)
    prompt = ids.shape[1] - mask.shape[1]
    for row in range(len(ids)):
        on = attended[row].astype(bool)
        scored = np.concatenate([np.zeros(prompt, dtype=bool), mask[row].astype(bool)])
        hasher = xxhash.xxh3_128(np.float32(temperature[row]).tobytes())
        for column in (ids[row].astype(np.int64), places[row].astype(np.int64), scored):
            hasher.update(np.ascontiguousarray(column[on]).tobytes())
        yield hasher.digest()

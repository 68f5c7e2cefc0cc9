"""The case of `fsdp_cases.py` with a loss of distributions, which the ranks compute in different numbers of chunks."""

from __future__ import annotations

from typing import Any

from flowrl.backends import SGD, TorchScorer
from flowrl.operators import GKD
from flowrl.operators.losses.objective import TokenObjective
from flowrl.operators.updates.mini_batches import record
from tests.support.models import ragged

CHUNK = 2  # tokens
OBJECTIVE = TokenObjective(GKD(0.5))
READ = ("input_ids", "attention_mask", "position_ids", "response_mask", "temperature")


def distribution(ranks: Any, minis: Any, last_gradient: Any) -> dict[str, Any]:
    """An update on all rows and on one row, which one rank has alone; a head that is gathered for each chunk would wait
    for the other rank."""
    teacher = ranks.build(TorchScorer, "qwen2").top_log_probs(ragged(7), 3)
    settings = {"optimizer": SGD(lr=0.1, momentum=0.9), "max_tokens": 40, "logprob_chunk": CHUNK}
    engine = ranks.trainer("llama", **settings)
    columns = {name: column for name, column in ragged(7)._asdict().items() if name in READ}
    columns |= {f"teacher_{name}": column for name, column in teacher._asdict().items()}
    batch = record(columns)
    parts = [minis(batch, OBJECTIVE, rows) for rows in (range(7), [4])]
    metrics = [engine.update(batch, part, OBJECTIVE) for part in parts]
    chunks = [-(-int((part.weights > 0).sum()) // CHUNK) for [part] in parts]
    return {"gradient": last_gradient(engine), "metrics": metrics, "chunks": chunks}

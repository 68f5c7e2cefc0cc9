"""`DataProto`s for tests: sequences padded by Python loops, and hypothesis strategies for mixed columns."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from flowrl.data.proto.column_math import objects
from flowrl.data.proto.dataproto import DataProto

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def rollout(prompts: list[list[int]], responses: list[list[int]], prompt: int = 0, response: int = 0) -> DataProto:
    """Sequences padded by Python loops: prompts on the left, responses on the right."""
    prompt = max([prompt, *map(len, prompts)])
    response = max([response, *map(len, responses)])
    left = [[0] * (prompt - len(p)) + p for p in prompts]
    right = [r + [0] * (response - len(r)) for r in responses]
    both = [p + r for p, r in zip(left, right, strict=True)]

    def matrix(rows: list[list[int]], width: int) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)

    ids, sampled = matrix(both, prompt + response), matrix(right, response)
    return DataProto(
        {
            "prompts": matrix(left, prompt),
            "responses": sampled,
            "input_ids": ids,
            "attention_mask": ids != 0,
            "response_mask": sampled != 0,
            "values": sampled / 7,
            "policy_version": torch.arange(len(prompts)),
            "uid": objects(f"u{len(p)}" for p in prompts),
        },
        {"step": 3},
    )


tokens = st.lists(st.integers(1, 99), max_size=5)
rows_of_tokens = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=7)


@st.composite
def protos(draw: st.DrawFn, min_rows: int = 0) -> DataProto:
    """Columns of several dtypes with random bytes (so NaN and infinities too), and of any JSON objects."""
    n = draw(st.integers(min_rows, 6))
    columns: dict[str, Tensor | np.ndarray] = {}
    for dtype in draw(
        st.sets(st.sampled_from(["float32", "bfloat16", "float16", "int64", "uint8", "float64"]), min_size=1)
    ):
        kind = getattr(torch, dtype)
        shape = (n, *draw(st.lists(st.integers(0, 3), max_size=2)))
        raw = draw(st.binary(min_size=8 * 9 * n, max_size=8 * 9 * n))
        flat = torch.frombuffer(bytearray(raw), dtype=kind) if raw else torch.empty(0, dtype=kind)
        columns[f"x_{dtype}"] = flat[: int(np.prod(shape))].reshape(shape)
    columns["flag"] = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool)
    columns["extra_info"] = objects(draw(st.lists(json_values, min_size=n, max_size=n)))
    return DataProto(columns, draw(st.dictionaries(st.text(max_size=4), json_values, max_size=3)))

"""The footprints of engines that generate: their weights and KV cache."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from flowrl.backends.torch.sizing.trace import MicroBatch, Run
from flowrl.backends.torch.sizing.weights import FLOAT, WIDTHS, Model, peaks_of, weights_of
from flowrl.protocols.footprint import CUDA_BYTES, GIB, Demand, Footprint, largest
from flowrl.sync.buckets import BUCKET_BYTES

if TYPE_CHECKING:  # they import this module's neighbors
    from flowrl.backends.hosted.spec import EngineSpec

STEP = 64
"""As `flowrl.backends.torch.generate.slots.STEP`."""

ENGINE_BYTES = 2 * GIB
"""Stated, not measured: what vLLM and SGLang take besides weights and KV cache (activations, CUDA graphs), awake."""

ASLEEP_BYTES = GIB
"""Stated, not measured: what of it they keep asleep, mostly CUDA graphs."""


@functools.cache
def kv_bytes(folder: str, width: int) -> int:
    """Bytes of the keys and values of a token in all layers: two vectors of each KV head (Shazeer 2019,
    arXiv:1911.02150, section 3)."""
    config: Any = Model(folder).skeleton().config.get_text_config(decoder=True)
    heads: int = config.num_attention_heads
    size: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    of_head = 2 * size
    if rotated := getattr(config, "qk_rope_head_dim", None):  # multi-head latent attention caches its expanded heads
        of_head = int(config.qk_nope_head_dim + rotated + config.v_head_dim)
    else:
        heads = getattr(config, "num_key_value_heads", None) or heads
    return int(config.num_hidden_layers) * heads * of_head * width


def slots_bytes(token: int, rows: int, prompt: int, tokens: int) -> tuple[int, int, int]:
    """Bytes of the buffers of `flowrl.backends.torch.generate.slots.Slots`, which are as wide as the longest row and
    grow by at least a half, while the old ones are alive: the most, of rows at their end, and of their prompts."""
    width, before = -(-prompt // STEP) * STEP, 0
    first = width
    while width < tokens:
        wide = -(-(width + 1) // STEP) * STEP
        before, width = width, max(wide, width + width // 2 // STEP * STEP)
    each = rows * token
    return each * (before + width), each * width, each * first


def torch_rollout(spec: Any, demand: Demand) -> Footprint:
    """The footprint of a `flowrl.backends.torch.generate.rollout.TorchRollout`."""
    owner = spec if spec.model is not None else demand.owner
    model = Model(owner.starts_from, attention=owner.attention)
    weights, dtype = weights_of(model), owner.dtype or "float32"
    shares = spec.model is None
    rows = spec.max_rows if demand.rows is None else min(spec.max_rows, demand.rows)
    prompts = rows if demand.prompts is None else min(rows, demand.prompts)
    # a shared model computes under autocast over float32 weights
    width, run = WIDTHS[dtype], Run(shares and dtype == "bfloat16", trains=False)
    grown, full, first = slots_bytes(kv_bytes(model.folder, width), rows, demand.prompt, demand.tokens)
    scores = rows * weights.vocabulary * (width + 2 * FLOAT + 8)  # logits, in float32, probabilities, their float64 sum
    prefill = peaks_of(model, MicroBatch(prompts, demand.prompt, 1, packed=False), run).forward
    prefill = prefill if shares or dtype == "float32" else prefill // 2
    rejoins = demand.rows is None or demand.rows > rows  # rows join while others are long
    generate = largest(
        {"KV cache": grown},
        {"KV cache": full, "logits": scores},
        {"KV cache": full if rejoins else first, "activations": prefill},
    )
    cuda = {"CUDA": CUDA_BYTES} if demand.device == "cuda" else {}
    if shares:
        return Footprint({}, {}, {"generate": generate})
    copy = weights.bytes() * width // FLOAT  # what a sync received, all of it before any of it is used
    received = 0 if demand.in_process and dtype == "float32" else copy
    received = received if spec.lora is None else adapter_bytes(spec)
    return Footprint({"weights": copy, **cuda}, cuda, {"generate": generate, "receive": {"sync buckets": received}})


def hosted(spec: EngineSpec, demand: Demand, cache: int | None) -> Footprint:
    """The footprint of vLLM or SGLang, which take a share of the device for weights and KV cache.

    Args:
        cache: bytes of the KV cache on each device; None is what the share leaves, but at least those of one row.
    """
    width = _width(spec)
    weights = -(-weights_of(Model(spec.starts_from or spec.model)).bytes() * width // FLOAT // spec.tensor_parallel)
    row = token_bytes(spec) * demand.tokens
    left = round(spec.share * demand.room) - weights - ENGINE_BYTES
    parts = {"weights": weights, "KV cache": max(row, left) if cache is None else cache, "engine": ENGINE_BYTES}
    asleep = {"engine": ASLEEP_BYTES, "CUDA": CUDA_BYTES}
    received = BUCKET_BYTES if spec.lora is None else min(BUCKET_BYTES, adapter_bytes(spec))
    return Footprint(parts | {"CUDA": CUDA_BYTES}, asleep, {"receive": {"sync buckets": received}})


def adapter_bytes(spec: Any) -> int:
    """Bytes of an engine's adapter, which a sync sends in float32."""
    return weights_of(Model(spec.starts_from, spec.lora)).bytes(trained=True)


def token_bytes(spec: EngineSpec) -> int:
    """Bytes of the keys and values of a token on each device of vLLM or SGLang."""
    return -(-kv_bytes(spec.starts_from or spec.model, _width(spec)) // spec.tensor_parallel)


def _width(spec: EngineSpec) -> int:
    return WIDTHS[spec.synced_dtype]

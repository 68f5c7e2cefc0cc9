"""The arguments of `vllm.LLM`, and the environment in which it starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flowrl.backends.hosted.spec import EngineSpec

CPU_CACHE_BYTES = 1 << 30
"""On a CPU; by default vLLM takes nearly all memory of the machine for its KV cache."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM supports; other adapters take the next one."""


def arguments_of(spec: EngineSpec, kv_cache_bytes: int | None, seed: int) -> dict[str, Any]:
    """The arguments of `vllm.LLM`, without `engine_args`."""
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": spec.model,
        "tensor_parallel_size": spec.tensor_parallel,
        "dtype": spec.dtype,
        "kv_cache_memory_bytes": kv_cache_bytes,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs + 1,  # with room for a probe
        "enable_prefix_caching": spec.prefix_caching,
        "enable_sleep_mode": current_platform.is_sleep_mode_available(),
        "enforce_eager": cpu,  # compiling takes 25 s there
        # With chunked prefill vLLM rewinds the row's generator, which is not possible on a CPU.
        "enable_chunked_prefill": False if cpu else None,
        "seed": seed,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # that is, none: the graph sets the sampling
    }
    if spec.tensor_parallel > 1:
        from vllm.config import WeightTransferConfig

        from flowrl.backends.vllm import worker as vllm_worker

        arguments["distributed_executor_backend"] = "mp"  # in a placement group of Ray it would start actors
        arguments["worker_extension_cls"] = f"{vllm_worker.__name__}.Extension"
        arguments["weight_transfer_config"] = WeightTransferConfig(backend=vllm_worker.BACKEND)
    if spec.lora is not None:
        rank = next((supported for supported in LORA_RANKS if supported >= spec.lora.r), spec.lora.r)
        arguments |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
    if spec.memory_fraction is not None:
        arguments["gpu_memory_utilization"] = spec.memory_fraction
    elif cpu and kv_cache_bytes is None:
        arguments["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    return arguments


@contextmanager
def environment(workers: int) -> Iterator[None]:
    """Set the variables that vLLM reads while it starts: its scheduler runs in this process, and on a CPU each worker
    has its own cores."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[i::workers] or cores[:1] for i in range(workers)]
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if workers > 1 and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

"""Sends weights to the worker processes of a tensor-parallel vLLM, through its weight-transfer API.

vLLM imports this module in each of its workers. They open tensors on GPUs in place (CUDA IPC); others are sent through
CPU memory (gloo), since NCCL cannot connect two processes that share a GPU, and a CPU has neither. Each worker hashes
what it receives, and loads its shard of each tensor.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from flowrl.sync.buckets import BUCKET_BYTES, in_buckets
from flowrl.sync.digest import Algorithm, tensor_digest
from flowrl.sync.group import TransferGroup, connect
from flowrl.sync.ipc import can_share, export_handles, open_handles

BACKEND = "flowrl"
ADDRESS = "127.0.0.1"  # vLLM's workers are on the machine of the process that starts them
SHARED_MEMORY = "/dev/shm/"
PATIENCE = 120.0  # seconds, for one tensor
c10d: Any = dist  # its annotations lack the stores


@dataclass
class Rendezvous(WeightTransferInitInfo):  # type: ignore[misc]
    """The sender's port, and the number of processes including the sender."""

    port: int
    world_size: int


@dataclass
class Bucket(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Some tensors: their handles, or the names, dtypes and shapes of the next broadcasts, in order; and how to hash
    each."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    algorithms: list[Algorithm]
    handles: bytes


class Receiver(WeightTransferEngine[Rendezvous, Bucket]):  # type: ignore[misc]
    """The receiver, in one worker."""

    init_info_cls = Rendezvous
    update_info_cls = Bucket
    _group: TransferGroup | None = None

    def init_transfer_engine(self, init_info: Rendezvous) -> None:
        """Connect to the sender, which waits for all workers."""
        store = connect(ADDRESS, init_info.port, PATIENCE)
        self._group = _group(store, 1 + self.parallel_config.rank, init_info.world_size)

    def start_weight_update(self) -> None:
        """Prepare vLLM to load weights in the layout of a checkpoint, layer by layer."""
        self.digests: dict[str, str] = {}
        forget_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a bucket. vLLM's own method also synchronizes its device, which raises on a CPU."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
        except BaseException:
            self.shutdown()  # so that no process waits for this worker
            raise

    def receive_weights(self, update_info: Bucket) -> None:
        """Receive the tensors of a bucket one by one, and load this worker's shard of each.

        A worker that fails to load one still receives the rest, because the other workers wait for it in each
        broadcast.
        """
        assert self._group is not None, "it is not connected"
        shared = open_handles(update_info.handles) if update_info.handles else None
        fault: Exception | None = None
        heads = zip(update_info.names, update_info.dtypes, update_info.shapes, update_info.algorithms, strict=True)
        for name, dtype, shape, algorithm in heads:
            if shared is None:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                self._group.broadcast(tensor)
            else:
                tensor = shared[name]
            if fault is None:
                try:
                    self.digests[name] = tensor_digest(name, tensor, algorithm)
                    self.model.load_weights([(name, tensor)])
                except Exception as error:
                    fault = error
        if fault is not None:
            raise fault

    def finish_weight_update(self) -> None:
        """Let vLLM pack the weights for its kernels."""
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Disconnect from the sender."""
        if self._group is not None:
            self._group.leave()


WeightTransferEngineFactory.register_engine(BACKEND, Receiver)


def forget_expert_kernels(model: nn.Module) -> None:
    """Reset the kernels of experts before a reload.

    On a CPU vLLM packs the weights of experts when it creates their kernel; a reload would copy unpacked weights over
    them.
    """
    if current_platform.is_cpu():
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None


def pack_tied_heads(model: nn.Module) -> None:
    """Repack output embeddings after a reload.

    On a CPU vLLM computes logits with a packed copy of the output embedding, made when weights are loaded into the
    layer. A tied layer loads none, so the old copy would remain in use.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


class Extension:
    """Methods of every worker, for `collective_rpc`."""

    weight_transfer_engine: Receiver

    def flowrl_digests(self) -> dict[str, str]:
        """The digest of each tensor of the last update, as this worker received it."""
        return self.weight_transfer_engine.digests

    def flowrl_shared_memory(self) -> list[str]:
        """The names of the shared memory that this worker has mapped."""
        maps = Path("/proc/self/maps")
        lines = maps.read_text().splitlines() if maps.exists() else []
        return [line.partition(SHARED_MEMORY)[2] for line in lines if SHARED_MEMORY in line and line[-1] != ")"]


class Sender:
    """The sender, in the process that started vLLM.

    Args:
        llm: a live `vllm.LLM`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        size = 1 + llm.get_world_size()
        # With our own socket, since a store would listen on all interfaces.
        listener = socket.create_server((ADDRESS, 0))
        port = listener.getsockname()[1]
        store = c10d.TCPStore(
            ADDRESS,
            port,
            size,
            is_master=True,
            timeout=timedelta(seconds=PATIENCE),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(llm.init_weight_transfer_engine, {"init_info": asdict(Rendezvous(port, size))})
            self._group = _group(store, 0, size)
            joined.result()

    def send(
        self, weights: Iterable[tuple[str, Tensor]], algorithm: Callable[[str], Algorithm]
    ) -> tuple[str, list[dict[str, str]]]:
        """Send weights to every worker; returns the transport, and each worker's digests of what it received, by the
        `algorithm` of each name."""
        self._llm.start_weight_update()
        transport = "gloo"
        with ThreadPoolExecutor(1) as pool:
            for each in in_buckets(weights, BUCKET_BYTES):
                bucket = dict(each)
                shared = can_share(bucket.values())
                transport = "cuda ipc" if shared else "gloo"
                info = Bucket(
                    list(bucket),
                    [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
                    [list(tensor.shape) for tensor in bucket.values()],
                    [algorithm(name) for name in bucket],
                    export_handles(bucket) if shared else b"",
                )
                received = pool.submit(self._llm.update_weights, {"update_info": asdict(info)})
                try:
                    for tensor in [] if shared else bucket.values():
                        self._group.broadcast(tensor.cpu().contiguous())
                except Exception:
                    self._group.leave()  # so that no worker waits for the rest
                    received.result()  # raises the error of the workers
                    raise
                received.result()
        self._llm.finish_weight_update()
        return transport, self._llm.collective_rpc("flowrl_digests")


def _group(store: Any, rank: int, size: int) -> TransferGroup:
    return TransferGroup(store, "The process that started vLLM", rank, size, ADDRESS, PATIENCE)

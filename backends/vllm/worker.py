"""How weights reach the worker processes of a tensor-parallel vLLM: through its weight-transfer API.

vLLM imports this module in each of its workers. They open tensors on GPUs where they are (CUDA IPC), and others go
through CPU memory (gloo): NCCL cannot join two processes that share one GPU, and a CPU has neither. Each worker takes
what is its share of a tensor.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
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

from flowrl.backends.hosted.handles import can_share, handles, opened
from flowrl.sync.digest import combine, tensor_digest

BACKEND = "flowrl"
BUCKET_BYTES = 256 << 20
ADDRESS = "127.0.0.1"  # vLLM's workers are on the machine of the process that starts them
SHARED_MEMORY = "/dev/shm/"
PATIENCE = timedelta(seconds=120)  # for one tensor
c10d: Any = dist  # whose annotations hide the stores that it documents


@dataclass
class Meeting(WeightTransferInitInfo):  # type: ignore[misc]
    """Where workers meet the sender, and how many they are with it."""

    port: int
    world_size: int


@dataclass
class Bucket(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Some tensors: handles of them, or what the next broadcasts carry, in order: names, names of dtypes, shapes."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    handles: bytes


class Link:
    """A gloo group of the sender (rank 0) and the workers, apart from whatever groups these processes have.

    Args:
        store: where they meet.
        rank: which one this is.
        world_size: how many they are.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=ADDRESS)]
        options._timeout = PATIENCE
        self._group = c10d.ProcessGroupGloo(c10d.PrefixStore("weights", store), rank, world_size, options)

    def broadcast(self, tensor: Tensor) -> None:
        """Send `tensor` from rank 0; the others receive into theirs.

        Raises:
            RuntimeError: another has left, or died, or makes us wait for too long.
        """
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()

    def leave(self) -> None:
        """Close all connections, so that the others wait no longer. gloo does it when nobody holds the group, which
        is why nobody else may, not even the traceback of an error."""
        self._group = None


class Receiver(WeightTransferEngine[Meeting, Bucket]):  # type: ignore[misc]
    """The end of one worker."""

    init_info_cls = Meeting
    update_info_cls = Bucket
    _link: Link | None = None

    def init_transfer_engine(self, init_info: Meeting) -> None:
        """Join the sender, which waits for all workers."""
        store = c10d.TCPStore(ADDRESS, init_info.port, init_info.world_size, is_master=False, timeout=PATIENCE)
        self._link = Link(store, 1 + self.parallel_config.rank, init_info.world_size)

    def start_weight_update(self) -> None:
        """Let vLLM take weights in the layout of a checkpoint again, layer by layer."""
        self.digests: dict[str, str] = {}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a bucket. What vLLM does besides, to wait for its device, raises where there is only a CPU."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
        except BaseException:
            self.shutdown()  # so that nobody waits for this worker
            raise

    def receive_weights(self, update_info: Bucket) -> None:
        """Receive the tensors of a bucket one by one, and take this worker's share of each.

        A worker that cannot take one receives the others all the same: those that can wait for it in each broadcast,
        and the sender is to hear its error and not theirs.
        """
        assert self._link is not None, "it has left, or never joined"
        shared = opened(update_info.handles) if update_info.handles else None
        fault: Exception | None = None
        for name, dtype, shape in zip(update_info.names, update_info.dtypes, update_info.shapes, strict=True):
            if shared is None:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                self._link.broadcast(tensor)
            else:
                tensor = shared[name]
            if fault is None:
                try:
                    self.digests[name] = tensor_digest(name, tensor)
                    self.model.load_weights([(name, tensor)])
                except Exception as error:
                    fault = error
        if fault is not None:
            raise fault

    def finish_weight_update(self) -> None:
        """Let vLLM pack what has come as its kernels want it."""
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Leave the sender."""
        if self._link is not None:
            self._link.leave()


WeightTransferEngineFactory.register_engine(BACKEND, Receiver)


def pack_tied_heads(model: nn.Module) -> None:
    """Pack output embeddings again, after a reload.

    On a CPU vLLM computes logits with a packed copy of the output embedding. It makes that when weights are loaded into
    the layer; into a tied one none are, so that a reload would leave the old copy in use.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


class Extension:
    """Methods that `collective_rpc` finds on every worker."""

    weight_transfer_engine: Receiver

    def flowrl_digest(self) -> str:
        """Of the weights that the last update brought."""
        return combine(self.weight_transfer_engine.digests)

    def flowrl_shared_memory(self) -> list[str]:
        """The names of the shared memory that this worker has mapped: its own, and what it shares with the others."""
        maps = Path("/proc/self/maps")
        lines = maps.read_text().splitlines() if maps.exists() else []
        return [line.partition(SHARED_MEMORY)[2] for line in lines if SHARED_MEMORY in line and line[-1] != ")"]


class Sender:
    """The end of the process that started vLLM.

    Args:
        llm: a live `vllm.LLM`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        world = 1 + llm.get_world_size()
        # Its socket is ours, since a store would listen on all interfaces.
        listener = socket.create_server((ADDRESS, 0))
        port = listener.getsockname()[1]
        store = c10d.TCPStore(
            ADDRESS,
            port,
            world,
            is_master=True,
            timeout=PATIENCE,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(llm.init_weight_transfer_engine, {"init_info": asdict(Meeting(port, world))})
            self._link = Link(store, 0, world)
            joined.result()

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> tuple[set[str], str]:
        """Carry weights to every worker; returns the digests that the workers took of what came, and the transport.

        Raises:
            RuntimeError: a worker failed, with its reason.
        """
        self._llm.start_weight_update()
        transport = "gloo"
        with ThreadPoolExecutor(1) as pool:
            for bucket in _buckets(weights):
                shared = can_share([tensor for _, tensor in bucket])
                transport = "cuda ipc" if shared else "gloo"
                info = Bucket(
                    [name for name, _ in bucket],
                    [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                    [list(tensor.shape) for _, tensor in bucket],
                    handles(dict(bucket)) if shared else b"",
                )
                received = pool.submit(self._llm.update_weights, {"update_info": asdict(info)})
                try:
                    for _, tensor in [] if shared else bucket:
                        self._link.broadcast(tensor.cpu().contiguous())
                except Exception:
                    self._link.leave()  # so that no worker waits for what comes no more
                    received.result()  # which raises what happened to the workers
                    raise
                received.result()
        self._llm.finish_weight_update()
        return set(self._llm.collective_rpc("flowrl_digest")), transport


def _buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    for name, tensor in weights:
        bucket.append((name, tensor))
        if sum(held.nbytes for _, held in bucket) >= BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket

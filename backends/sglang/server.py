"""The process of an `SGLang` engine: runs `sglang.Engine` and serves the requests of its parent.

On a fault in its scheduler, SGLang kills the process of the engine, so that must not be the trainer's. This process and
all that SGLang starts are one group, which ends with the parent; see `EngineProcess`.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Awaitable
from multiprocessing.connection import Connection
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from flowrl.backends.sglang.requests import RequestPool, ResponseRequest
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.protocols.protocols import Caches
from flowrl.sync.digest import Algorithm, tensor_digest
from flowrl.sync.ipc import open_handles


class Server:
    """Serves one request after another; the ``call`` of a request names a method."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import sglang

        self.engine = sglang.Engine(**arguments)
        self.requests = RequestPool(self.engine.tokenizer_manager, ChatTokenizer(arguments["model_path"]))
        self.digests: dict[str, str] = {}
        self.adapter: list[str] = []  # its name, once there is one
        self.reused = 0  # swaps that kept the caches, which later requests must not reuse

    def describe(self, body: bytes) -> dict[str, Any]:
        """The engine's vocabulary, dtype, cache size, and limit of renormalized log-probs."""
        info = self.engine._scheduler_init_result.scheduler_infos[0]
        args = self.engine.server_args
        return {
            "vocabulary": self.engine.tokenizer_manager.model_config.vocab_size,
            "dtype": str(self.engine.tokenizer_manager.model_config.dtype).removeprefix("torch."),
            "cached_tokens": info["max_total_num_tokens"],
            "support": args.sampling_mask_max_tokens,
        }

    def generate(self, body: bytes, new: list[ResponseRequest], seconds: float) -> dict[str, Any]:
        """Start requests, and compute until some responses end, for at most `seconds`; those that ended, by name."""
        return {"responses": self._wait(self.requests.some(new, seconds, **self._alike()))}

    def _alike(self) -> dict[str, Any]:
        """Arguments of all current requests."""
        return {"lora_path": self.adapter[0] if self.adapter else None, "cache_salt": f"{self.reused} swaps"}

    def drop(self, body: bytes, name: str) -> None:
        """Abort a request."""
        self.requests.drop(name)

    def score(self, body: bytes, rows: list[list[int]], width: int) -> dict[str, Any]:
        """Log-probs of the last `width` tokens of each row at temperature 1, row by row."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            input_ids=rows,
            sampling_params=[{"max_new_tokens": 1, "temperature": 1.0}] * len(rows),
            return_logprob=True,
            logprob_start_len=[len(row) - width - 1 for row in rows],
            **self._alike(),
        )
        outputs = self._wait(anext(aiter(self.engine.tokenizer_manager.generate_request(request, None))))
        scored = [output["meta_info"]["input_token_logprobs"][-width:] for output in outputs]
        return {"log_probs": [log_prob for row in scored for log_prob, _, _ in row]}

    def begin(self, body: bytes, caches: Caches | None = None) -> dict[str, Any]:
        """Prepare for new weights; with `caches`, requests in flight pause until `end`.

        ``"reuse"`` returns those without a token.
        """
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._wait(self.requests.drain())
        if caches is not None:
            mode: Any = "retract" if caches == "recompute" else "in_place"
            self._wait(self.engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=mode)))
        self.digests = {}
        _require(self.engine.begin_weight_update())
        return {"without_token": self.requests.without_token if caches == "reuse" else []}

    def take(self, body: bytes, algorithms: dict[str, Algorithm]) -> None:
        """Load some weights from safetensors."""
        self._update(load(body), algorithms)

    def open(self, body: bytes, algorithms: dict[str, Algorithm]) -> None:
        """Load some weights from CUDA IPC handles; copied, since SGLang cannot export handles of foreign memory."""
        self._update({name: tensor.clone() for name, tensor in open_handles(body).items()}, algorithms)

    def _update(self, tensors: dict[str, Tensor], algorithms: dict[str, Algorithm]) -> None:
        self.digests |= {name: tensor_digest(name, tensor, algorithms[name]) for name, tensor in tensors.items()}
        _require(self.engine.update_weights_from_tensor(list(tensors.items()), flush_cache=False))

    def end(self, body: bytes, version: str, caches: Caches | None = None) -> dict[str, Any]:
        """Finish loading weights."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        _require(self.engine.end_weight_update())
        if caches == "reuse":
            self.reused += 1
        else:
            self._flush()
        self._set_version(version)
        if caches is not None:
            self._wait(self.engine.tokenizer_manager.continue_generation(ContinueGenerationReqInput()))
        return {"digests": self.digests}

    def adapt(
        self, body: bytes, config: dict[str, Any], version: str, algorithms: dict[str, Algorithm]
    ) -> dict[str, Any]:
        """Replace the adapter by one from safetensors."""
        self._wait(self.requests.drain())
        tensors = load(body)
        self.digests = {name: tensor_digest(name, tensor, algorithms[name]) for name, tensor in tensors.items()}
        while self.adapter:
            unloaded = self.engine.unload_lora_adapter(self.adapter.pop())
            _require((unloaded.success, unloaded.error_message))
        loaded = self.engine.load_lora_adapter_from_tensors("policy", tensors, config)
        _require((loaded.success, loaded.error_message))
        self.adapter = ["policy"]
        self._flush()
        self._set_version(version)
        return {"digests": self.digests}

    def _flush(self) -> None:
        """Drop the caches of older weights."""
        flushed = self.engine.flush_cache()
        _require((flushed.success, "the radix cache was not flushed"))

    def _set_version(self, version: str) -> None:
        """Set the version of later tokens."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        self._wait(self.engine.tokenizer_manager.update_weight_version(request))

    def sleep(self, body: bytes) -> None:
        """Release the device's memory."""
        self._wait(self.requests.drain())
        self.engine.release_memory_occupation()

    def wake(self, body: bytes) -> None:
        """Take the memory again."""
        self.engine.resume_memory_occupation()

    def _wait(self, work: Awaitable[Any]) -> Any:
        """Run SGLang's event loop until this is done."""
        return self.engine.loop.run_until_complete(work)


def _require(outcome: tuple[bool, str]) -> None:
    """Raise for a failed update, which SGLang only returns."""
    success, message = outcome
    if not success:
        raise RuntimeError(message)


def serve(requests: Connection, replies: Connection) -> None:
    """Start the engine with the arguments of the first request, then serve others until the parent ends it."""
    arguments, _ = requests.recv(), requests.recv_bytes()
    server = None
    message: dict[str, Any] = {"call": "describe"}
    body = b""
    while True:
        try:
            server = server or Server(arguments)
            reply = getattr(server, message.pop("call"))(body, **message) or {}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.send(reply)
        message, body = requests.recv(), requests.recv_bytes()
        if server is not None:
            _end_if_crashed(server.engine.tokenizer_manager._subprocess_watchdog)


def _end_if_crashed(watchdog: Any) -> None:
    """End this process if one of SGLang's has crashed. Its watchdog signals that only once; an event loop that is idle
    between two requests may miss it, and then wait forever."""
    if any(process.exitcode for process in getattr(watchdog, "_processes", ())):
        os.kill(os.getpid(), signal.SIGKILL)


def main(requests: Connection, replies: Connection) -> None:
    """The main function of the process."""
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        serve(requests, replies)
    signal.pause()  # the parent has ended; SGLang's own shutdown would interfere with the reaper

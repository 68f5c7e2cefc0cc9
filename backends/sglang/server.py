"""The process of an `SGLang` engine: it runs `sglang.Engine` and answers the requests of the process that started it.

SGLang answers a fault in its scheduler by killing the process that holds the engine, so that is never the trainer's.
This process and all that SGLang starts are one group, which ends with the parent; see `EngineProcess`.
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

from flowrl.backends.sglang.answers import Answers, ResponseRequest
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.protocols.protocols import Caches
from flowrl.sync.digest import tensor_digest
from flowrl.sync.ipc import open_handles


class Server:
    """Answers one request after another; every method that is no helper is one, named by the request's ``call``.

    Args:
        arguments: of `sglang.Engine`.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        import sglang

        self.engine = sglang.Engine(**arguments)
        self.answers = Answers(self.engine.tokenizer_manager, ChatTokenizer(arguments["model_path"]))
        self.digests: dict[str, str] = {}
        self.adapter: list[str] = []  # its name, once there is one
        self.kept = 0  # swaps that kept what was computed, which those that begin later must not find

    def describe(self, body: bytes) -> dict[str, Any]:
        """What the engine made of its arguments."""
        info = self.engine._scheduler_init_result.scheduler_infos[0]
        args = self.engine.server_args
        return {
            "vocabulary": self.engine.tokenizer_manager.model_config.vocab_size,
            "dtype": str(self.engine.tokenizer_manager.model_config.dtype).removeprefix("torch."),
            "cached_tokens": info["max_total_num_tokens"],
            "support": args.sampling_mask_max_tokens,
        }

    def generate(self, body: bytes, new: list[ResponseRequest], seconds: float) -> dict[str, Any]:
        """Begin answers, and compute until some have ended, or for so many seconds; those that have, by name."""
        return {"answers": self._wait(self.answers.some(new, seconds, **self._alike()))}

    def _alike(self) -> dict[str, Any]:
        """What all requests of now carry."""
        return {"lora_path": self.adapter[0] if self.adapter else None, "cache_salt": f"{self.kept} swaps"}

    def drop(self, body: bytes, name: str) -> None:
        """Let an answer go that was begun."""
        self.answers.drop(name)

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
        """Weights are about to come; with `caches` under answers that are under way, which stand still until `end`.

        Returns:
            with ``"reuse"``, those of which no token has come.
        """
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._wait(self.answers.settled())
        if caches is not None:
            mode: Any = "retract" if caches == "recompute" else "in_place"
            self._wait(self.engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=mode)))
        self.digests = {}
        _require(self.engine.begin_weight_update())
        return {"undrawn": self.answers.undrawn if caches == "reuse" else []}

    def take(self, body: bytes) -> None:
        """Some weights, as safetensors."""
        self._update(load(body))

    def open(self, body: bytes) -> None:
        """Some weights, as handles. They are copied: SGLang makes handles of its own, which it cannot of memory that is
        another process's."""
        self._update({name: tensor.clone() for name, tensor in open_handles(body).items()})

    def _update(self, tensors: dict[str, Tensor]) -> None:
        self.digests |= {name: tensor_digest(name, tensor) for name, tensor in tensors.items()}
        _require(self.engine.update_weights_from_tensor(list(tensors.items()), flush_cache=False))

    def end(self, body: bytes, version: str, caches: Caches | None = None) -> dict[str, Any]:
        """All weights have come."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        _require(self.engine.end_weight_update())
        if caches == "reuse":
            self.kept += 1
        else:
            self._forget()
        self._bear(version)
        if caches is not None:
            self._wait(self.engine.tokenizer_manager.continue_generation(ContinueGenerationReqInput()))
        return {"digests": self.digests}

    def adapt(self, body: bytes, config: dict[str, Any], version: str) -> dict[str, Any]:
        """Replace the adapter by another, as safetensors."""
        self._wait(self.answers.settled())
        tensors = load(body)
        self.digests = {name: tensor_digest(name, tensor) for name, tensor in tensors.items()}
        while self.adapter:
            gone = self.engine.unload_lora_adapter(self.adapter.pop())
            _require((gone.success, gone.error_message))
        come = self.engine.load_lora_adapter_from_tensors("policy", tensors, config)
        _require((come.success, come.error_message))
        self.adapter = ["policy"]
        self._forget()
        self._bear(version)
        return {"digests": self.digests}

    def _forget(self) -> None:
        """Drop what was computed with older weights."""
        flushed = self.engine.flush_cache()
        _require((flushed.success, "the radix cache was not flushed"))

    def _bear(self, version: str) -> None:
        """From here on, tokens are of this version."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        self._wait(self.engine.tokenizer_manager.update_weight_version(request))

    def sleep(self, body: bytes) -> None:
        """Give the device's memory back."""
        self._wait(self.answers.settled())
        self.engine.release_memory_occupation()

    def wake(self, body: bytes) -> None:
        """Take it again."""
        self.engine.resume_memory_occupation()

    def _wait(self, what: Awaitable[Any]) -> Any:
        """Let SGLang's event loop go on until this is done."""
        return self.engine.loop.run_until_complete(what)


def _require(outcome: tuple[bool, str]) -> None:
    """SGLang reports a failed update by what it returns, and does not raise."""
    success, message = outcome
    if not success:
        raise RuntimeError(message)


def serve(requests: Connection, replies: Connection) -> None:
    """Start the engine that the first request describes, then answer others, until the parent ends it."""
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
    """End this process if one of SGLang's has crashed. Its watchdog signals that once, which an event loop that stands
    still between two requests may miss, and then waits forever."""
    if any(process.exitcode for process in getattr(watchdog, "_processes", ())):
        os.kill(os.getpid(), signal.SIGKILL)


def main(requests: Connection, replies: Connection) -> None:
    """What the process runs."""
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        serve(requests, replies)
    signal.pause()  # the parent is gone; SGLang's own way of ending would come between the keeper and what it cleans up

"""The process of an `SGLang` engine: it runs `sglang.Engine` and answers the requests of the process that started it.

SGLang answers a fault in its scheduler by killing the process that holds the engine, so that is never the trainer's.
This process and all that SGLang starts are one group, which ends with the parent; see `EngineProcess`.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from flowrl.backends.rollout import Watch
from flowrl.data.tokenizer import ChatTokenizer
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
        self.tokenizer = ChatTokenizer(arguments["model_path"])
        self.digests: dict[str, str] = {}
        self.adapter: list[str] = []  # its name, once there is one

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

    def generate(
        self,
        body: bytes,
        prompts: list[list[int]],
        seeds: list[int],
        sampling: dict[str, Any],
        stop: list[str],
        support: bool,
    ) -> dict[str, Any]:
        """Sample; with `support`, log-probs are of the distribution that top-k and top-p leave.

        A response with a string out of `stop` is ended soon after, not at once.
        """
        each = [sampling | {"sampling_seed": seed} for seed in seeds]
        rows = []
        for output in self._generate(prompts, each, stop, return_sampling_mask=support):
            meta = output["meta_info"]
            sampled = [log_prob for log_prob, _, _ in meta["output_token_logprobs"]]
            rows.append(
                {
                    "ids": output["output_ids"],
                    "log_probs": meta["output_token_sampling_logprobs"] if support else sampled,
                    "ended": meta["finish_reason"],
                    "versions": [span["version"] for span in meta["weight_versions"]],
                }
            )
        return {"rows": rows}

    def score(self, body: bytes, rows: list[list[int]], width: int) -> dict[str, Any]:
        """Log-probs of the last `width` tokens of each row at temperature 1, row by row."""
        once = [{"max_new_tokens": 1, "temperature": 1.0}] * len(rows)
        outputs = self._generate(rows, once, logprob_start_len=[len(row) - width - 1 for row in rows])
        scored = [output["meta_info"]["input_token_logprobs"][-width:] for output in outputs]
        return {"log_probs": [log_prob for row in scored for log_prob, _, _ in row]}

    def _generate(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]], stop: Sequence[str] = (), **how: Any
    ) -> list[dict[str, Any]]:
        """Like `sglang.Engine.generate`, which has not all that its requests can carry."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        manager = self.engine.tokenizer_manager
        request = GenerateReqInput(
            input_ids=prompts, sampling_params=sampling, return_logprob=True, stream=bool(stop), **how
        )
        if self.adapter:
            request.lora_path = self.adapter * len(prompts)

        async def run() -> list[dict[str, Any]]:
            if not stop:
                outputs: list[dict[str, Any]] = await anext(aiter(manager.generate_request(request, None)))
                return outputs
            last: dict[int, dict[str, Any]] = {}
            watches = [Watch(self.tokenizer, stop) for _ in prompts]
            seen = [0] * len(prompts)
            async for output in manager.generate_request(request, None):
                row, ids = output["index"], output["output_ids"]
                if any(watches[row].completes(token) for token in ids[seen[row] :]):
                    manager.abort_request(output["meta_info"]["id"])
                seen[row] = len(ids)
                last[row] = output
            return [last[row] for row in range(len(prompts))]

        answers: list[dict[str, Any]] = self.engine.loop.run_until_complete(run())
        return answers

    def begin(self, body: bytes) -> None:
        """Weights are about to come."""
        self.digests = {}
        _require(self.engine.begin_weight_update())

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

    def end(self, body: bytes, version: str) -> dict[str, Any]:
        """All weights have come."""
        _require(self.engine.end_weight_update())
        return self._forget(version)

    def adapt(self, body: bytes, config: dict[str, Any], version: str) -> dict[str, Any]:
        """Replace the adapter by another, as safetensors."""
        tensors = load(body)
        self.digests = {name: tensor_digest(name, tensor) for name, tensor in tensors.items()}
        while self.adapter:
            gone = self.engine.unload_lora_adapter(self.adapter.pop())
            _require((gone.success, gone.error_message))
        come = self.engine.load_lora_adapter_from_tensors("policy", tensors, config)
        _require((come.success, come.error_message))
        self.adapter = ["policy"]
        return self._forget(version)

    def _forget(self, version: str) -> dict[str, Any]:
        """Drop what was computed with older weights, and take a version; the digests of what came."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        flushed = self.engine.flush_cache()
        _require((flushed.success, "the radix cache was not flushed"))
        request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        self.engine.loop.run_until_complete(self.engine.tokenizer_manager.update_weight_version(request))
        return {"digests": self.digests}

    def sleep(self, body: bytes) -> None:
        """Give the device's memory back."""
        self.engine.release_memory_occupation()

    def wake(self, body: bytes) -> None:
        """Take it again."""
        self.engine.resume_memory_occupation()


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


def main(requests: Connection, replies: Connection) -> None:
    """What the process runs."""
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        serve(requests, replies)
    signal.pause()  # the parent is gone; SGLang's own way of ending would come between the keeper and what it cleans up

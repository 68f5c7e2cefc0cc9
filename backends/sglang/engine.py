"""`SGLang`: rollouts by SGLang in its own process, since a fault in its scheduler kills the process of the engine.

Input and output are token ids: SGLang loads no tokenizer, and flowrl decides where a response ends.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from safetensors.torch import save

from flowrl.backends.hosted.arrival import IncomingWeights
from flowrl.backends.hosted.base import HostedRollout, RawResponse
from flowrl.backends.hosted.process import EngineProcess
from flowrl.backends.hosted.spec import EngineSpec
from flowrl.backends.rollout import StopRule
from flowrl.backends.sglang.requests import ResponseRequest
from flowrl.backends.torch.adapter_folder import adapted_modules, adapter_config
from flowrl.backends.torch.load import loading
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import BindError, DataError, EngineError, ParameterError
from flowrl.protocols.footprint import Demand, Footprint
from flowrl.protocols.protocols import BuildContext, Caches, Sampling
from flowrl.sync.buckets import BUCKET_BYTES, in_buckets
from flowrl.sync.ipc import can_share, export_handles
from flowrl.sync.probe import QUESTIONS, Probe

SPARE = 2
"""Tokens of a sequence that SGLang reserves: it ends a response two tokens before its context length."""

TURNS = (0.02, 0.25)
"""The shortest and longest turn in seconds: the wait for a response to end before other work may run, such as episodes
whose environments have replied, or a swap. The first is about a step of a large model. Without new requests, each turn
is twice as long as the one before, up to the second: constant polling costs a tenth of a small model's speed."""

CPU_CACHE_TOKENS = 1 << 16
"""On a CPU; by default SGLang takes nearly all memory of the machine for its KV cache."""


class SGLang(EngineSpec):
    """A rollout engine with its own weights, into which `sync` copies.

    Args:
        model, tensor_parallel, ranks, dtype, memory_fraction, max_model_len, max_num_seqs, prefix_caching, tolerance,
            lora, frozen: as in `flowrl.backends.hosted.spec.EngineSpec`.
        engine_args: further arguments of ``sglang.Engine``, by name.
        cache_tokens: the capacity of the KV cache; None is what `memory_fraction` leaves, or on a CPU without either,
            65,536 or one sequence of full length.
        seed: of SGLang's generator, plus the rank for each further engine; None is the run's. See `SGLangEngine`.
    """

    reserved: ClassVar[Mapping[str, str]] = {
        "model_path": "model",
        "tp_size": "tensor_parallel",
        "dtype": "dtype",
        "mem_fraction_static": "memory_fraction",
        "max_total_tokens": "cache_tokens",
        "context_length": "max_model_len",
        "max_running_requests": "max_num_seqs",
        "disable_radix_cache": "prefix_caching",
        "random_seed": "seed",
        "enable_lora": "lora",
        "max_lora_rank": "lora",
        "lora_target_modules": "lora",
        "max_loras_per_batch": "lora",
    }
    default_share: ClassVar[float] = 0.88
    fixed: ClassVar[Sequence[str]] = ("skip_tokenizer_init", "json_model_override_args", "tokenizer_path")

    cache_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None

    def refuse_swap(self, caches: Caches) -> None:
        """As `EngineSpec.refuse_swap`; caches can be reused only if SGLang does not schedule a step ahead.

        Raises:
            BindError: with these settings the engine cannot swap so.
        """
        super().refuse_swap(caches)
        if caches == "reuse" and not self.engine_args.get("disable_overlap_schedule"):
            raise BindError(
                "With caches='reuse', SGLang would give a token of the old weights the version of the new ones, since "
                "it computes a step while it schedules the next. Set SGLang(..., "
                "engine_args={'disable_overlap_schedule': True}), or Lag(..., spans=True, caches='recompute').",
                code="engine.no-swap",
                engine="SGLang",
                caches=caches,
            )

    def footprint(self, demand: Demand) -> Footprint:
        """See `Backend.footprint`."""
        from flowrl.backends.torch.sizing.sampling import hosted, token_bytes  # here, since it imports transformers

        return hosted(self, demand, None if self.cache_tokens is None else self.cache_tokens * token_bytes(self))

    def build(self, context: BuildContext) -> SGLangEngine:
        """Start the engine; it has no receipt yet, unless it is frozen.

        Raises:
            BindError: SGLang is not installed, or does not start with this folder and these arguments.
            DataError: the folder has no tokenizer.
            SyncError: it is frozen, and does not compute its folder as transformers does.
        """
        seed = context.seed if self.seed is None else self.seed
        # with the same seed, ranks would sample the same responses for the rows of a group
        return SGLangEngine(self, ChatTokenizer(self.model), seed + context.rank)


class SGLangEngine(HostedRollout):
    """A live `SGLang`; see `HostedRollout`.

    SGLang uses the seeds of rows only with ``engine_args={"enable_deterministic_inference": True}`` on a GPU. Otherwise
    it samples all rows from one generator, in the order of its schedule, so the same call may return other tokens. It
    applies top-p and min-p to the full distribution, and can renormalize over a limited number of tokens; a
    `Sampling` that may keep more is a `DataError`.

    The weights travel to its process in buckets; it hashes what it receives, which must equal what the trainer sent.
    """

    name = "SGLang"

    def __init__(self, spec: SGLang, tokenizer: ChatTokenizer, seed: int) -> None:
        super().__init__(spec, tokenizer, seed)
        self._spec: SGLang = spec
        self._longest = _longest(spec)
        self._process: EngineProcess | None = None
        self._about: dict[str, Any] = {}  # see `Server.describe`
        self._new: dict[str, ResponseRequest] = {}  # to be sent to its process together
        self._turn = 0.0  # seconds of the last one
        self._start_first()

    @property
    def _lives(self) -> bool:
        return self._process is not None

    def _ask(self, call: str, body: bytes = b"", **message: Any) -> dict[str, Any]:
        assert self._process is not None
        return self._process.ask(call, body, **message)

    def _limits(self) -> tuple[int, int]:
        return self._about["vocabulary"], self._longest

    def _settings(self, sampling: Sampling, ending: StopRule) -> dict[str, Any]:
        """The fields of `ResponseRequest` that depend only on the `Sampling`."""
        if sampling.penalizes:
            self._refuse_penalties(sampling)
        settings = {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": ending.token_ids,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }
        request = {"sampling": settings, "stop": sampling.stop, "support": False}
        if sampling.temperature == 0 or (sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0):
            return request
        top_k = min(sampling.top_k or self._about["vocabulary"], self._about["vocabulary"])
        if top_k > self._about["support"]:
            raise DataError(
                f"top_k={sampling.top_k}, top_p={sampling.top_p}, min_p={sampling.min_p} may keep any of {top_k} "
                f"tokens, but SGLang renormalizes log-probs over at most {self._about['support']}. Set a smaller "
                f"top_k, such as Generate(top_k={self._about['support']}), or raise the limit: "
                f"engine_args={{'sampling_mask_max_tokens': {top_k}}}.",
                code="engine.unsupported-sampling",
                engine=self.name,
                found=top_k,
                expected=self._about["support"],
            )
        truncation = {"top_k": top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
        return request | {"sampling": settings | truncation, "support": True}

    def _refuse_penalties(self, sampling: Sampling) -> None:
        """Refuse penalties that SGLang would apply to other tokens than `Sampling` states."""
        why = None
        if sampling.repetition_penalty != 1:
            why = (
                "applies repetition_penalty to the tokens of the response alone, not to those of the prompt. Use "
                "frequency_penalty"
            )
        elif not self._spec.engine_args.get("disable_overlap_schedule"):
            why = (
                "counts tokens for penalties one step late when it schedules a step ahead. Pass "
                "SGLang(..., engine_args={'disable_overlap_schedule': True})"
            )
        if why is not None:
            raise DataError(
                f"SGLang {why}, or bind VLLM or TorchRollout.",
                code="engine.unsupported-sampling",
                engine=self.name,
            )

    def _begin(self, name: str, ids: Sequence[int], settings: dict[str, Any], seed: int) -> None:
        self._new[name] = ResponseRequest(name, [*ids], seed, **settings)

    def _advance(self) -> dict[str, RawResponse]:
        new, self._new = [*self._new.values()], {}
        self._turn = TURNS[0] if new else min(2 * self._turn, TURNS[1])
        responses = self._ask("generate", new=new, seconds=self._turn)["responses"]
        return {name: RawResponse(**response) for name, response in responses.items()}

    def _abort(self, name: str) -> None:
        if self._new.pop(name, None) is None:
            self._ask("drop", name=name)

    def _halt(self, caches: Caches | None) -> list[str]:
        if self._spec.lora is not None:
            return []
        without_token: list[str] = self._ask("begin", caches=caches)["without_token"]
        return without_token

    def _take_over(self, arrival: IncomingWeights, caches: Caches | None) -> str:
        transport, version = "pipe", str(arrival.version)
        if self._spec.lora is None:
            for weights in in_buckets(arrival.to_send(), BUCKET_BYTES):
                bucket = dict(weights)
                algorithms = {name: arrival.algorithm(name) for name in bucket}
                if can_share(bucket.values()):
                    transport = "cuda ipc"
                    self._ask("open", export_handles(bucket), algorithms=algorithms)
                else:
                    body = save({name: tensor.cpu().contiguous() for name, tensor in bucket.items()})
                    self._ask("take", body, algorithms=algorithms)
            received = self._ask("end", version=version, caches=caches)["digests"]
        else:
            adapter = {name: tensor.cpu().contiguous() for name, tensor in arrival.to_send()}
            config = adapter_config(adapter, self._spec.lora)
            how = {name: arrival.algorithm(name) for name in adapter}
            received = self._ask("adapt", save(adapter), config=config, version=version, algorithms=how)["digests"]
        arrival.check(received, "SGLang's process")
        return transport

    def _score(self, probe: Probe) -> list[float]:
        scores: list[float] = self._ask("score", rows=probe.rows, width=probe.width)["log_probs"]
        return scores

    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._about["dtype"])
        return dtype

    def _release(self) -> None:
        """The weights wait in CPU memory."""
        self._ask("sleep")

    def _resume(self) -> None:
        self._ask("wake")

    def _stop(self) -> None:
        assert self._process is not None
        self._new.clear()
        process, self._process = self._process, None
        process.close()

    def _start(self) -> None:
        if importlib.util.find_spec("sglang") is None:
            raise BindError(
                f"SGLang({self._spec.model!r}) needs the package sglang, which is not installed. Run pip install "
                f"'flowrl[sglang]' for a GPU; for a CPU run `make engines` and use .venv-engines/bin/python.",
                code="package.not-installed",
                package="sglang",
                extra="sglang",
            )
        folder = tempfile.TemporaryDirectory(prefix="flowrl-sglang-")
        arguments = _arguments(self._spec, self._longest, self._seed, _plain_model(self._spec.model, folder.name))
        if self._spec.lora is not None:
            arguments |= {
                "enable_lora": True,
                "max_lora_rank": self._spec.lora.r,
                "lora_target_modules": adapted_modules(self._due),
                "max_loras_per_batch": 1,
            }
        # EOS is an ordinary stop token, unless it is ignored.
        arguments["json_model_override_args"] = json.dumps({"eos_token_id": None})
        process = EngineProcess(self.name, "flowrl.backends.sglang.server:main", _environment(self._spec), folder)
        try:
            process.send(arguments)
            about = process.reply("its start")
        except BaseException as error:
            process.close()
            if not isinstance(error, EngineError):
                raise
            raise BindError(
                f"SGLang does not start with {self._spec.model!r}: {error.message}\nCheck that it supports the "
                f"architecture, its memory (memory_fraction, cache_tokens), and engine_args.",
                code="engine.does-not-start",
                engine=self.name,
                path=self._spec.model,
                error=type(error).__name__,
            ) from error
        if about["cached_tokens"] < self._longest + SPARE:
            process.close()
            raise BindError(
                f"SGLang's KV cache has room for {about['cached_tokens']} tokens, but one sequence may have "
                f"{self._longest}. Lower max_model_len, or give it more memory (memory_fraction, cache_tokens).",
                code="sglang.cache-too-small",
                found=about["cached_tokens"],
                expected=self._longest,
            )
        self._process, self._about = process, about


def _longest(spec: SGLang) -> int:
    """The most tokens of a sequence; with scaled positions, as many as in the spec."""
    from transformers import AutoConfig

    with loading(spec.model):
        loaded = AutoConfig.from_pretrained(spec.model, local_files_only=True, trust_remote_code=False)
        config = loaded.get_text_config()
    limit: int | None = getattr(config, "max_position_embeddings", None)
    scaled = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") != "default"
    longest = spec.max_model_len or limit
    if longest is None or (limit is not None and longest > limit and not scaled):
        raise ParameterError(
            f"SGLang({spec.model!r}, max_model_len={spec.max_model_len}), but the model has "
            f"{limit or 'no known number of'} positions. Set max_model_len to at most its number of positions.",
            code="sglang.max-model-len",
            found=spec.max_model_len,
            expected=limit,
        )
    return longest


def _dtype(spec: SGLang) -> str:
    """The dtype argument; by default SGLang makes float16 of float32, where other engines make bfloat16."""
    from transformers import AutoConfig

    stored = AutoConfig.from_pretrained(spec.model, local_files_only=True, trust_remote_code=False).dtype
    return "bfloat16" if spec.dtype == "auto" and stored == torch.float32 else spec.dtype


def _arguments(spec: SGLang, longest: int, seed: int, model: str) -> dict[str, Any]:
    """The arguments of `sglang.Engine`."""
    cpu = not torch.cuda.is_available()
    arguments: dict[str, Any] = {
        "model_path": model,
        "skip_tokenizer_init": True,
        "tp_size": spec.tensor_parallel,
        "dtype": _dtype(spec),
        "context_length": longest + SPARE,
        "max_running_requests": spec.max_num_seqs + len(QUESTIONS),  # with room for a probe
        "disable_radix_cache": not spec.prefix_caching,
        "random_seed": seed,
        "sleep_on_idle": True,  # otherwise its scheduler spins on cores that the trainer needs
        "skip_server_warmup": True,
        "log_level": "error",
    }
    if spec.memory_fraction is not None:
        arguments["mem_fraction_static"] = spec.memory_fraction
    if spec.cache_tokens is not None:
        arguments["max_total_tokens"] = spec.cache_tokens
    elif cpu and spec.memory_fraction is None:
        arguments["max_total_tokens"] = max(CPU_CACHE_TOKENS, longest + SPARE)
    if cpu:  # generic torch kernels: those for CPUs are in an unavailable package
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "lora_backend": "torch_native",
        }
    else:
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    return arguments | dict(spec.engine_args)


def _environment(spec: SGLang) -> dict[str, str | None]:
    """Variables of SGLang's process."""
    environment: dict[str, str | None] = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for `SPARE`
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",  # there are many, and an error shows the last lines of its output
    }
    if not torch.cuda.is_available():
        # Several threads make it slower by orders of magnitude; the other variable selects the missing kernels.
        environment |= {"OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": None}
        if spec.tensor_parallel > 1:
            cores = sorted(os.sched_getaffinity(0))
            bound = [str(cores[rank % len(cores)]) for rank in range(spec.tensor_parallel)]
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
    return environment


def _plain_model(model: str, folder: str) -> str:
    """A view of a model's folder without its generation config, which has further tokens that end a response."""
    view = Path(folder) / "model"
    view.mkdir()
    for entry in Path(model).resolve().iterdir():
        if entry.name != "generation_config.json":
            (view / entry.name).symlink_to(entry)
    return str(view)

"""`SGLang`: rollouts by SGLang, in a process of its own, since a fault in its scheduler kills the process it is in.

Token ids go in and token ids come out: SGLang loads no tokeniser, and where a response ends is said by ours.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from safetensors.torch import save
from torch import Tensor

from flowrl.backends.arrival import Arrival, weight_shapes
from flowrl.backends.process import EngineError, EngineProcess
from flowrl.backends.prompts import check_prompts
from flowrl.backends.torch_load import Folder, loading
from flowrl.digest import combine
from flowrl.engines import BuildContext, Sampled, Sampling, Trainer
from flowrl.errors import AsleepError, BindError, DataError, ParameterError, SyncError
from flowrl.keys import Key
from flowrl.probe import TOKENS, refuse_other_weights
from flowrl.records import Receipt
from flowrl.spec import Spec
from flowrl.text import ChatTokenizer

BUCKET_BYTES = 256 << 20
"""Weights cross to SGLang's process in buckets of about this size (a larger tensor is a bucket of its own)."""

SPARE = 2
"""Tokens of a sequence that SGLang keeps for itself: it cuts a response two tokens short of its context length."""

CPU_CACHE_TOKENS = 1 << 16
"""SGLang would take nearly all memory of the machine for its KV cache, which on a CPU others need too."""

RESERVED = {
    "model_path": "model",
    "tp_size": "tensor_parallel",
    "dtype": "dtype",
    "mem_fraction_static": "memory_fraction",
    "max_total_tokens": "cache_tokens",
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "disable_radix_cache": "prefix_caching",
    "random_seed": "seed",
}
"""Engine arguments that are fields here."""

FIXED = ("skip_tokenizer_init", "json_model_override_args", "tokenizer_path")
"""Engine arguments that what the columns of a rollout mean depends on."""


class SGLang(Spec):
    """A rollout engine that holds weights of its own, which `sync` fills.

    Args:
        model: a Hugging Face folder.
        tensor_parallel: devices that share the weights.
        ranks: engines like this, each in a process and on devices of its own, that share the rows out among them; more
            than one needs a place.
        dtype: of weights and arithmetic; ``"auto"`` is the folder's, but bfloat16 where that is float32.
        memory_fraction: of the device's memory, for weights and KV cache together; None is SGLang's default.
        cache_tokens: that the KV cache has room for; None is what `memory_fraction` leaves, or on a CPU without either,
            65,536, or one sequence of full length.
        max_model_len: tokens that prompt and response may have together; None is the model's own limit.
        max_num_seqs: rows that are sampled at a time.
        prefix_caching: compute what prompts have in common once.
        seed: of the generator that SGLang draws from, and that plus its rank of each further engine; None is the run's.
            See `SGLangEngine.generate`.
        tolerance: nats a token by which the engine's log-probs may differ from the trainer's after a sync, on the mean;
            None is 1e-3 in float32 and 0.1 otherwise.
        engine_args: further arguments of `sglang.Engine`, by name.
    """

    probes: ClassVar[bool] = True  # so trainers in other processes send log-probs of the probe with their weights
    collective: ClassVar[bool] = False

    model: Folder
    tensor_parallel: int = Field(default=1, ge=1)
    ranks: int = Field(default=1, ge=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    cache_tokens: int | None = Field(default=None, ge=1)
    max_model_len: int | None = Field(default=None, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    prefix_caching: bool = True
    seed: int | None = None
    tolerance: float | None = Field(default=None, gt=0)
    engine_args: Mapping[str, Any] = Field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.engine_args:
            if name in RESERVED:
                raise ParameterError(f"engine_args={{{name!r}: ...}} is a field of its own; set {RESERVED[name]}=...")
            if name in FIXED:
                raise ParameterError(
                    f"engine_args={{{name!r}: ...}} would change what the rollout's tokens mean; it is not open to "
                    f"choice, so leave it out."
                )

    @property
    def slots_per_rank(self) -> int:
        """Devices that one engine computes on."""
        return self.tensor_parallel

    def build(self, context: BuildContext) -> SGLangEngine:
        """Start the engine; it holds no receipt yet.

        Raises:
            BindError: SGLang is not installed, or does not start with this folder and these arguments.
            DataError: the folder has no tokeniser.
        """
        seed = context.seed if self.seed is None else self.seed
        # with one seed, ranks would give the rows of a group the same answers
        return SGLangEngine(self, ChatTokenizer(self.model), seed + context.rank)


class SGLangEngine:
    """A live `SGLang`.

    An error while it generates or takes over weights leaves SGLang in no known state, so it is ended, and the next sync
    starts it anew.

    Args:
        spec: what to start.
        tokenizer: of its folder.
        seed: of the generator that it draws from.
    """

    def __init__(self, spec: SGLang, tokenizer: ChatTokenizer, seed: int) -> None:
        self._spec, self._tokenizer, self._seed = spec, tokenizer, seed
        self._receipt: Receipt | None = None
        self._asleep = False
        with loading(spec.model):
            self._shapes = weight_shapes(spec.model)
            self._longest = _longest(spec)
        self._process: EngineProcess | None = None
        self._about = self._start()

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

        A response ends with EOS or a stop token, which is part of it, or after `sampling.max_new_tokens`. Log-probs are
        of the distribution that was drawn from: after temperature, top-k and top-p, renormalised; at temperature 0, of
        temperature 1. SGLang takes top-p of the distribution before top-k, not of what top-k leaves.

        Row ``i`` has a seed of its own, from ``key.derive(row_ids[i])``, which SGLang heeds with
        ``engine_args={"enable_deterministic_inference": True}`` on a GPU. Without that it draws for all rows from one
        generator, in whatever order it schedules them, so the same call need not give the same tokens.

        Args:
            prompts: int64 ``[batch prompt]``, padded on the left; padding does not reach SGLang.
            prompt_mask: bool ``[batch prompt]``.
            row_ids: one per row.
            sampling: how tokens are drawn.
            key: where the seeds come from.

        Returns:
            responses, mask and log-probs ``[batch response]``, as wide as the longest response, on the prompts' device.

        Raises:
            SyncError: the engine holds no receipt, or SGLang says that tokens came from weights of another version.
            DataError: prompts that the model cannot take (shapes, padding, vocabulary, length), or a top-p over more
                tokens than SGLang can renormalise.
            AsleepError: the engine sleeps.
            EngineError: SGLang's process died, or failed.
        """
        self._require_awake("generate")
        if self._receipt is None:
            raise SyncError(
                "this rollout engine holds no receipt, so nobody knows which version of the policy it would sample "
                "from; call engine.sync(trainer) first (in a graph: end the step with Sync()(actor))."
            )
        check_prompts(
            prompts,
            prompt_mask,
            row_ids,
            sampling,
            vocabulary=self._about["vocabulary"],
            positions=self._longest,
            folder=self.tokenizer.folder,
        )
        requests = [ids[mask].tolist() for ids, mask in zip(prompts, prompt_mask, strict=True)]
        settings, support = self._settings(sampling)
        seeds = [key.derive(row).bits & (2**63 - 1) for row in row_ids]
        rows: list[dict[str, Any]] = []
        if requests:
            with self._at_stake() as process:
                each = [settings | {"sampling_seed": seed} for seed in seeds]
                rows = process.ask("generate", prompts=requests, sampling=each, support=support)["rows"]
                for row in rows:
                    self._refuse_other(row, sampling)
        width = max((len(row["ids"]) for row in rows), default=0)
        sampled = Sampled(
            torch.full((len(rows), width), self.tokenizer.pad_id),
            torch.zeros(len(rows), width, dtype=torch.bool),
            torch.zeros(len(rows), width),
        )
        for i, row in enumerate(rows):
            length = len(row["ids"])
            sampled.responses[i, :length] = torch.tensor(row["ids"])
            sampled.response_mask[i, :length] = True
            sampled.log_probs[i, :length] = torch.tensor(row["log_probs"])
        return Sampled(*(column.to(prompts.device) for column in sampled))

    def _settings(self, sampling: Sampling) -> tuple[dict[str, Any], bool]:
        """SGLang's parameters, and whether it must renormalise over what top-k and top-p leave."""
        settings = {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": [self.tokenizer.eos_id, *sampling.stop_token_ids],
        }
        if sampling.temperature == 0 or (sampling.top_k == 0 and sampling.top_p == 1):
            return settings, False
        top_k = min(sampling.top_k or self._about["vocabulary"], self._about["vocabulary"])
        if top_k > self._about["support"]:
            raise DataError(
                f"top_k={sampling.top_k}, top_p={sampling.top_p} may leave any of {top_k} tokens, and SGLang "
                f"renormalises log-probs over {self._about['support']} at most; set a smaller top_k, such as "
                f"Generate(top_k={self._about['support']}), or allow for more: "
                f"engine_args={{'sampling_mask_max_tokens': {top_k}}}."
            )
        return settings | {"top_k": top_k, "top_p": sampling.top_p}, True

    def _refuse_other(self, row: Mapping[str, Any], sampling: Sampling) -> None:
        """A row that is not what was asked for."""
        assert self._receipt is not None
        if held := set(row["versions"]) - {str(self._receipt.version)}:
            raise SyncError(
                f"SGLang says that it sampled from weights of version {', '.join(sorted(held))}, and this engine's "
                f"receipt is for version {self._receipt.version}; expected one version: let nobody but engine.sync "
                f"update its weights."
            )
        stops = {self.tokenizer.eos_id, *sampling.stop_token_ids}
        ends = [i for i, token in enumerate(row["ids"]) if token in stops]
        if not (ends == [len(row["ids"]) - 1] or (not ends and len(row["ids"]) == sampling.max_new_tokens)):
            raise EngineError(
                f"SGLang ended a response after {len(row['ids'])} tokens ({row['ended']}); expected EOS, "
                f"a stop token or max_new_tokens={sampling.max_new_tokens}. Call engine.sync(trainer), which starts it "
                f"anew, and give its KV cache more room (cache_tokens, memory_fraction)."
            )

    def sync(self, source: Trainer) -> Receipt:
        """Take over the weights of `source`, forget what was computed with the old ones, and probe the result.

        The weights cross in buckets; digest and bytes of the receipt are those of the tensors as they came, and the
        process of SGLang must have received the same, before SGLang casts and fuses them.

        Raises:
            SyncError: weights are missing, unknown or of another shape; SGLang failed to load them; or the probe finds
                other log-probs than the trainer's. There is no receipt then.
            BindError: SGLang had been ended by an error before, and does not start again.
            AsleepError: the engine sleeps.
        """
        self._require_awake("sync")
        self._receipt = None
        start = time.perf_counter()
        if self._process is None:
            self._about = self._start()
        arrival = Arrival(self._shapes, self._spec.model)
        with self._at_stake() as process:
            try:
                process.ask("begin")
                for bucket in _buckets(arrival.pass_on(source)):
                    process.ask("take", save(bucket))
                received = combine(process.ask("end", version=str(source.version))["digests"])
                log_probs = process.ask("score", tokens=list(TOKENS))["log_probs"]
            except SyncError:
                raise
            except Exception as error:
                raise SyncError(
                    f"the weights of version {source.version} did not get to SGLang ({type(error).__name__}): {error}\n"
                    f"Expected weights of the architecture in {self._spec.model!r}. The engine is ended; the next "
                    f"engine.sync(trainer) starts it anew."
                ) from error
            if received != arrival.digest:
                raise SyncError(
                    f"the weights of version {source.version} have the digest {arrival.digest}, and SGLang's process "
                    f"received {received}; expected the same on both sides: call engine.sync(trainer) again."
                )
            refuse_other_weights("SGLang", log_probs, source, self._tolerance)
        seconds = time.perf_counter() - start
        self._receipt = Receipt(source.version, received, arrival.nbytes, seconds, transport="pipe")
        return self._receipt

    @property
    def _tolerance(self) -> float:
        if self._spec.tolerance is not None:
            return self._spec.tolerance
        return 1e-3 if self._about["dtype"] == "float32" else 0.1

    def sleep(self) -> None:
        """Give the device's memory back; the weights wait in CPU memory. Twice is as good as once."""
        if not self._asleep and self._process is not None:
            with self._at_stake() as process:
                process.ask("sleep")
        self._asleep = True

    def wake(self) -> None:
        """Take the memory back; twice is as good as once."""
        if self._asleep and self._process is not None:
            with self._at_stake() as process:
                process.ask("wake")
        self._asleep = False

    def _require_awake(self, what: str) -> None:
        if self._asleep:
            raise AsleepError(
                f"{what} was called while SGLang sleeps, its memory given back; expected an engine that is awake: call "
                f"engine.wake() first."
            )

    def close(self) -> None:
        """End SGLang with all its processes; twice is as good as once."""
        self._receipt = None
        if self._process is not None:
            process, self._process = self._process, None
            process.close()

    @contextmanager
    def _at_stake(self) -> Iterator[EngineProcess]:
        """Whatever is raised within leaves requests or half of some weights in SGLang, so it is ended."""
        assert self._process is not None
        try:
            yield self._process
        except BaseException:
            self.close()
            raise

    def _start(self) -> dict[str, Any]:
        """Start the process; what the engine says about itself."""
        if importlib.util.find_spec("sglang") is None:
            raise BindError(
                f"SGLang({self._spec.model!r}) needs SGLang, which is not installed here; install it: pip install "
                f"'flowrl[sglang]' for a GPU, or `make engines` for a CPU."
            )
        folder = tempfile.TemporaryDirectory(prefix="flowrl-sglang-")
        arguments = _arguments(self._spec, self._longest, self._seed, _plain_model(self._spec.model, folder.name))
        arguments["json_model_override_args"] = json.dumps({"eos_token_id": self.tokenizer.eos_id})
        process = EngineProcess("SGLang", "flowrl.backends.sglang_server:main", _environment(self._spec), folder)
        try:
            process.send(arguments)
            about = process.reply("its start")
        except BaseException as error:
            process.close()
            if not isinstance(error, EngineError):
                raise
            raise BindError(
                f"SGLang does not start with {self._spec!r}: {error}\nCommon causes are an architecture that it lacks, "
                f"too little memory (memory_fraction, cache_tokens), and engine_args that it does not know."
            ) from error
        if about["cached_tokens"] < self._longest + SPARE:
            process.close()
            raise BindError(
                f"SGLang's KV cache has room for {about['cached_tokens']} tokens, and one sequence may have "
                f"{self._longest}; lower max_model_len, or give it more memory (memory_fraction, cache_tokens)."
            )
        self._process = process
        return about


def _longest(spec: SGLang) -> int:
    """Tokens that a sequence may have."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(spec.model, local_files_only=True).get_text_config()
    limit: int | None = getattr(config, "max_position_embeddings", None)
    longest = spec.max_model_len or limit
    if longest is None or (limit is not None and longest > limit):
        raise ParameterError(
            f"max_model_len={spec.max_model_len} with a model of {limit or 'no known number of'} positions; set "
            f"max_model_len to no more than it has"
        )
    return longest


def _dtype(spec: SGLang) -> str:
    """SGLang itself would make float16 out of float32, where others make bfloat16."""
    from transformers import AutoConfig

    stored = AutoConfig.from_pretrained(spec.model, local_files_only=True).dtype
    return "bfloat16" if spec.dtype == "auto" and stored == torch.float32 else spec.dtype


def _arguments(spec: SGLang, longest: int, seed: int, model: str) -> dict[str, Any]:
    """What `sglang.Engine` is called with."""
    cpu = not torch.cuda.is_available()
    arguments: dict[str, Any] = {
        "model_path": model,
        "skip_tokenizer_init": True,
        "tp_size": spec.tensor_parallel,
        "dtype": _dtype(spec),
        "context_length": longest + SPARE,
        "max_running_requests": spec.max_num_seqs,
        "disable_radix_cache": not spec.prefix_caching,
        "random_seed": seed,
        "sleep_on_idle": True,  # its scheduler would spin otherwise, on cores that the trainer needs
        "skip_server_warmup": True,
        "log_level": "error",
    }
    if spec.memory_fraction is not None:
        arguments["mem_fraction_static"] = spec.memory_fraction
    if spec.cache_tokens is not None:
        arguments["max_total_tokens"] = spec.cache_tokens
    elif cpu and spec.memory_fraction is None:
        arguments["max_total_tokens"] = max(CPU_CACHE_TOKENS, longest + SPARE)
    if cpu:  # generic torch kernels: those for CPUs are in a package that is not to be had
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
        }
    else:
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    return arguments | dict(spec.engine_args)


def _environment(spec: SGLang) -> dict[str, str | None]:
    """Variables of SGLang's process."""
    environment: dict[str, str | None] = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for `SPARE`, where no token ever stands
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",  # there are many, and the last lines of its output are what an error shows
    }
    if not torch.cuda.is_available():
        # More threads than one make it slower by orders of magnitude; the other variable asks for the missing kernels.
        environment |= {"OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": None}
        if spec.tensor_parallel > 1:
            cores = sorted(os.sched_getaffinity(0))
            bound = [str(cores[rank % len(cores)]) for rank in range(spec.tensor_parallel)]
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
    return environment


def _plain_model(model: str, folder: str) -> str:
    """A view of a model's folder without its generation config, which names further tokens that end a response."""
    view = Path(folder) / "model"
    view.mkdir()
    for entry in Path(model).resolve().iterdir():
        if entry.name != "generation_config.json":
            (view / entry.name).symlink_to(entry)
    return str(view)


def _buckets(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Weights in CPU memory, some at a time."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
    if bucket:
        yield bucket

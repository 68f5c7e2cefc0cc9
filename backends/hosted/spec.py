"""`EngineSpec`: the fields that `VLLM` and `SGLang` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from flowrl.backends.torch.load import Folder, FolderBackend
from flowrl.backends.torch.lora import LoRA
from flowrl.errors import BindError, ParameterError
from flowrl.protocols.protocols import Caches, Closable, LiveWeightUpdate, Rollout, Sleeper, StreamingRollout


class EngineSpec(FolderBackend):
    """The common settings of these engines.

    Args:
        model: a Hugging Face folder.
        tensor_parallel: devices that share the weights.
        ranks: replicas, each in its own process and on its own devices, that split the rows among them; more than one
            needs a place.
        dtype: of weights and arithmetic; ``"auto"`` is the folder's, or bfloat16 if that is float32.
        memory_fraction: of the device's memory, for weights and KV cache together; None is the engine's own default.
        max_model_len: the most tokens of prompt and response together, at least 17, so that the probe is meaningful;
            None is the model's own limit.
        max_num_seqs: rows that are sampled at a time.
        prefix_caching: compute common prefixes of prompts once.
        tolerance: by how much the engine's log-probs may differ from the trainer's after a sync, in nats per token on
            average (see `flowrl.sync.probe.refuse_other_weights`); None is 1e-3 if both compute in float32, else 0.05.
        lora: the `LoRA` of an actor that trains an adapter over the weights of this folder: sync then sends only the
            adapter. Without it, the engine gets all weights with the adapter merged.
        frozen: sample with the weights of the folder, without sync: a judge, or a fixed opponent.
        engine_args: further arguments of the engine, by name.
    """

    serves = (Rollout, StreamingRollout, LiveWeightUpdate, Sleeper, Closable)
    reserved: ClassVar[Mapping[str, str]]
    """Engine arguments that are fields of the spec, with the field."""
    fixed: ClassVar[Sequence[str]]
    """Engine arguments that would change the meaning of a rollout's columns."""
    probes: ClassVar[bool] = True  # so trainers in other processes send log-probs of the probe with the weights
    default_share: ClassVar[float]
    """Stated, not measured: the part of a GPU that the engine takes if `memory_fraction` is None."""
    collective: ClassVar[bool] = False  # ranks need no group, and vLLM would take our default group for its own

    model: Folder
    tensor_parallel: int = Field(default=1, ge=1)
    ranks: int = Field(default=1, ge=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    max_model_len: int | None = Field(default=None, ge=17)
    max_num_seqs: int = Field(default=256, ge=1)
    prefix_caching: bool = True
    tolerance: float | None = Field(default=None, gt=0)
    lora: LoRA | None = None
    frozen: bool = False
    engine_args: Mapping[str, Any] = Field(default_factory=dict)

    @property
    def slots_per_rank(self) -> int:
        """Devices of one engine."""
        return self.tensor_parallel

    @property
    def share(self) -> float:
        """See `Backend.share`."""
        return self.default_share if self.memory_fraction is None else self.memory_fraction

    @property
    def receives(self) -> Literal["weights", "adapter_weights"]:
        """The method of a trainer whose tensors `sync` reads."""
        return "weights" if self.lora is None else "adapter_weights"

    def refuse_swap(self, caches: Caches) -> None:
        """As `Backend.refuse_swap`: refuses an adapter.

        Raises:
            BindError: the engine syncs an adapter.
        """
        if self.lora is not None:
            raise BindError(
                f"{type(self).__name__}({self.model!r}, lora=...) cannot replace its adapter with requests in flight: "
                f"SGLang waits until all have ended, and vLLM cannot score a probe next to them. Drop lora, so that "
                f"all weights arrive with the adapter merged, or bind TorchRollout(model, lora=...), or drop spans: "
                f"edit(lag=1).",
                code="engine.no-swap",
                engine=type(self).__name__,
                caches=caches,
            )

    def __post_init__(self) -> None:
        if self.frozen and self.lora is not None:
            raise ParameterError(
                "frozen=True has no sync, so no adapter would arrive. Drop lora or frozen.",
                code="engine.conflicting-settings",
                settings=("frozen", "lora"),
            )
        if self.lora is not None and self.lora.modules_to_save:
            raise ParameterError(
                f"{type(self).__name__} cannot replace {', '.join(self.lora.modules_to_save)} by an adapter: it loads "
                f"low-rank weights only. Drop lora, so that all weights arrive with the adapter merged, or bind "
                f"TorchRollout(model, lora=...).",
                code="engine.conflicting-settings",
                settings=("lora", "modules_to_save"),
            )
        for name in self.engine_args:
            if name in self.reserved:
                field = self.reserved[name]
                raise ParameterError(
                    f"engine_args has {name!r}, which is a field of {type(self).__name__}. Set {field}=... instead.",
                    code="engine.reserved-argument",
                    argument=name,
                    field=field,
                )
            if name in self.fixed:
                raise ParameterError(
                    f"engine_args has {name!r}, which would change the meaning of the rollout's tokens and log-probs. "
                    f"Drop it.",
                    code="engine.reserved-argument",
                    argument=name,
                )

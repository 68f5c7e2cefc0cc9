"""What is set alike for engines by others: the fields that `VLLM` and `SGLang` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from flowrl.backends.torch.load import Folder, FolderBackend
from flowrl.backends.torch.lora import LoRA
from flowrl.errors import BindError, ParameterError
from flowrl.protocols.protocols import Caches, Closable, LiveWeightUpdate, Rollout, Sleeper, StreamingRollout


class EngineSpec(FolderBackend):
    """What is set alike for each of these engines.

    Args:
        model: a Hugging Face folder.
        tensor_parallel: devices that share the weights.
        ranks: engines like this, each in a process and on devices of its own, that share the rows out among them; more
            than one needs a place.
        dtype: of weights and arithmetic; ``"auto"`` is the folder's, but bfloat16 where that is float32.
        memory_fraction: of the device's memory, for weights and KV cache together; None is the engine's own default.
        max_model_len: tokens that prompt and response may have together, 17 at least, so that the probe has something
            to show; None is the model's own limit.
        max_num_seqs: rows that are sampled at a time.
        prefix_caching: compute what prompts have in common once.
        tolerance: by how much the engine's log-probs may differ from the trainer's after a sync, in nats a token on the
            mean (see `flowrl.sync.probe.refuse_other_weights`); None is 1e-3 where both compute in float32, otherwise
            0.05.
        lora: that of an actor which trains an adapter beside the weights of this very folder: sync then sends the
            adapter alone. Without, the engine gets all weights, the adapter merged into them.
        frozen: answer with the weights of the folder, which nothing syncs: a judge, or an opponent that stays as it is.
        engine_args: further arguments of the engine, by name.
    """

    serves = (Rollout, StreamingRollout, LiveWeightUpdate, Sleeper, Closable)
    reserved: ClassVar[Mapping[str, str]]
    """Engine arguments that are fields here."""
    fixed: ClassVar[Sequence[str]]
    """Engine arguments that what the columns of a rollout mean depends on."""
    probes: ClassVar[bool] = True  # so trainers in other processes send log-probs of the probe with their weights
    collective: ClassVar[bool] = False  # ranks need no group, and vLLM would take a default one of ours for its own

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
        """Devices that one engine computes on."""
        return self.tensor_parallel

    @property
    def receives(self) -> Literal["weights", "adapter_weights"]:
        """The method of a trainer whose tensors `sync` reads."""
        return "weights" if self.lora is None else "adapter_weights"

    def refuse_swap(self, caches: Caches) -> None:
        """As `Backend.refuse_swap`: an adapter.

        Raises:
            BindError: naming what it can.
        """
        if self.lora is not None:
            raise BindError(
                f"{type(self).__name__}({self.model!r}, lora=...) takes an adapter, which cannot change under answers: "
                f"SGLang waits until all have ended, and vLLM scores no probe with one beside them; drop lora, so that "
                f"all weights come with the adapter merged into them, or bind TorchRollout(model, lora=...), or do "
                f"without spans: edit(lag=1)."
            )

    def __post_init__(self) -> None:
        if self.frozen and self.lora is not None:
            raise ParameterError("frozen=True takes no sync, so no adapter ever comes; drop lora or frozen")
        for name in self.engine_args:
            if name in self.reserved:
                field = self.reserved[name]
                raise ParameterError(f"engine_args={{{name!r}: ...}} is a field of its own; set the field {field}")
            if name in self.fixed:
                raise ParameterError(
                    f"engine_args={{{name!r}: ...}} would change what the rollout's tokens and log-probs mean; it is "
                    f"not open to choice, so leave it out."
                )

"""`TorchRollout`: sampling with a KV cache in plain PyTorch, from any Hugging Face causal LM.

It either shares the weights of the actor in this process, so that `sync` copies nothing, or has its own model, into
which `sync` copies the weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, cast, runtime_checkable

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from flowrl.backends.hosted.arrival import weights_for
from flowrl.backends.rollout import RequestEngine
from flowrl.backends.torch.device import device_of
from flowrl.backends.torch.generate.cache_batches import CacheBatches
from flowrl.backends.torch.generate.decoder import Decoder, Memory
from flowrl.backends.torch.load import Folder, FolderBackend, load_causal_lm, mix_weights
from flowrl.backends.torch.lora import Adapter, LoRA, require_peft
from flowrl.backends.torch.probes import (
    Attention,
    probe_inputs,
    refuse_other_cache,
    select_attention,
    tolerance,
)
from flowrl.backends.torch.score.engine import Residence, Resident
from flowrl.data.keys import Key
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import BindError, SyncError, type_of
from flowrl.protocols.footprint import Demand, Footprint
from flowrl.protocols.protocols import (
    BuildContext,
    Caches,
    LiveWeightUpdate,
    Request,
    Response,
    Rollout,
    Sampled,
    Sampling,
    Sleeper,
    StreamingRollout,
    Trainer,
)
from flowrl.records import Receipt
from flowrl.spec import non_default
from flowrl.sync.digest import combine, has_digest, named_weights, same_bits, weights_digest
from flowrl.sync.weight_selection import dtype_mismatch

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

_DAMAGED = "is not what was sent"


class TorchRollout(FolderBackend):
    """A rollout engine in this process.

    Args:
        model: a Hugging Face folder; None shares the weights of the role ``actor``.
        dtype: of the weights of an own model, None is float32; a shared model computes as the actor does.
        attention: of an own model, as in `TorchTrainer`.
        max_rows: the most rows in one forward pass, and the most ended rows whose KV is retained for a further turn.
        device: of an own model; None is CUDA if available, else the CPU. A shared model stays on the actor's device.
        memory: GiB that the role takes on a device, in place of the prediction; compared with ``memory=`` of a place.
        ranks: processes, each with its own model, that split the rows among them.
        lora: the `LoRA` of an actor that trains an adapter over the weights of this folder: sync then sends only the
            adapter. Without it, an own model gets all weights with the adapter merged; a shared one has the actor's
            adapter anyway.
        frozen: sample with the weights of the folder, without sync: a judge, or a fixed opponent.
    """

    serves = (Rollout, StreamingRollout, LiveWeightUpdate, Sleeper)
    collective: ClassVar[bool] = False

    model: Folder | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    attention: Attention | None = None
    max_rows: int = Field(default=256, ge=1)
    device: str | None = None
    memory: float | None = Field(default=None, gt=0)
    ranks: int = Field(default=1, ge=1)
    lora: LoRA | None = None
    frozen: bool = False

    @model_validator(mode="after")
    def _refuse_unused(self) -> Self:
        if self.model is None and (unused := ", ".join(n for n in non_default(self) if n != "max_rows")):
            raise ValueError(
                f"without a folder, TorchRollout shares the actor's model, with its dtype, attention, device and "
                f"adapter; drop {unused}, or name a folder"
            )
        if self.frozen and self.lora is not None:
            raise ValueError("frozen=True has no sync, so no adapter would arrive; drop lora or frozen")
        return self

    @property
    def receives(self) -> Literal["weights", "adapter_weights"]:
        """The method of a trainer whose tensors `sync` reads."""
        return "weights" if self.lora is None else "adapter_weights"

    def footprint(self, demand: Demand) -> Footprint:
        """See `Backend.footprint`."""
        from flowrl.backends.torch.sizing.sampling import torch_rollout  # here, since it runs the model

        return torch_rollout(self, demand)

    def build(self, context: BuildContext) -> TorchRolloutEngine:
        """The live engine; it has no receipt yet, unless it is frozen.

        Raises:
            BindError: the folder has no complete causal LM, or `lora` does not fit it; no folder is named and the
                actor's model cannot be shared; or the model computes other logits with its cache than without.
            DataError: the folder has no tokenizer.
        """
        if self.model is not None:
            if self.lora is not None:
                require_peft()
            device = device_of(self, self.device)
            model, adapter, adapter_of = load_causal_lm(self.model, attention=self.attention), None, None
            if self.lora is not None:
                adapter_of = self.lora.over(weights_digest(named_weights(model)))
                adapter = Adapter(model, self.lora, self.model)
                adapter.fill(context.seed)
            for parameter in model.parameters():  # and not the buffers: rotary frequencies stay in float32
                parameter.data = parameter.data.to(getattr(torch, self.dtype or "float32"))
            cast(nn.Module, model).to(device).eval()
            with torch.no_grad():
                select_attention(probe_inputs(model, device), model, self.attention, self.model, tolerance(model.dtype))
            tokenizer = ChatTokenizer(self.model)
            engine = TorchRolloutEngine(model, tokenizer, self.max_rows, adapter=adapter, adapter_of=adapter_of)
            return engine.freeze(weights_digest(named_weights(model))) if self.frozen else engine
        actor = context.engine("actor")
        if not isinstance(actor, SharesModel):
            raise BindError(
                f"TorchRollout() shares the weights of the role 'actor', but the actor is {type_of(actor)} without a "
                f"Hugging Face model in this process. Bind the actor to a TorchTrainer, or name a folder: "
                f"TorchRollout(model).",
                code="engine.cannot-share-weights",
                found=type(actor).__name__,
            )
        if actor.sharded:
            raise BindError(
                "TorchRollout() shares the weights of the role 'actor', but the actor's are sharded (ranks or "
                "offload); sampling needs them unsharded. Name a folder, which sync fills: TorchRollout(model).",
                code="engine.cannot-share-weights",
                found=type(actor).__name__,
            )
        return TorchRolloutEngine(actor.model, ChatTokenizer(actor.folder), self.max_rows, shares=actor)


@runtime_checkable
class SharesModel(Protocol):
    """A trainer with a model in this process, such as `TorchTrainerEngine`: the Hugging Face LM, its folder, whether
    its weights are sharded, and a context in which the model computes as the trainer does."""

    model: PreTrainedModel
    folder: str
    sharded: bool

    @property
    def version(self) -> int: ...

    def computing(self) -> AbstractContextManager[None]: ...


class TorchRolloutEngine(RequestEngine, Resident):
    """A live `TorchRollout`.

    Args:
        shares: the trainer that owns `model`, or None.
        adapter: of an own model, if `sync` copies only the adapter.
        adapter_of: the base weights and scaling of the adapter; see `Adapted`.
    """

    name = "TorchRollout"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: ChatTokenizer,
        max_rows: int,
        shares: SharesModel | None = None,
        adapter: Adapter | None = None,
        adapter_of: str | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self.model = model
        self._adapter, self._adapter_of = adapter, adapter_of
        self._shares = shares
        # A shared model moves with the trainer.
        self.residence = Residence(model.device, [model] if shares is None else [])
        self._memory = self._memory_of(model)
        self._decoder = Decoder(self._memory, tokenizer, max_rows, model.device)
        self._is_decoding = False

    def _memory_of(self, model: PreTrainedModel) -> Memory:
        """The KV memory: slots written in place if they suit the model, else caches of transformers. Raises `BindError`
        if the model computes other logits with its cache than without."""
        from flowrl.backends.torch.generate.slots import Slots, suits

        with evaluating(model), torch.no_grad():
            probe, bound = probe_inputs(model, model.device, rows=2), tolerance(model.dtype)
            batches = CacheBatches(model)
            refuse_other_cache(probe, model, batches.step, batches.new_cache(), self.tokenizer.folder, bound)
            return Slots(model) if suits(model, probe, bound) else batches

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the model's weights."""
        return self.model.dtype

    @property
    def context_tokens(self) -> int:
        """Prompt tokens of all responses so far; a response whose context was recomputed counts again, with the tokens
        that it had sampled."""
        return self._decoder.context_tokens

    @property
    def cached_tokens(self) -> int:
        """How many of these were cached: from earlier turns, or from rows with a common prefix."""
        return self._decoder.cached_tokens

    def sampled_so_far(self, name: str, start: int) -> list[int]:
        """The tokens of a request in flight so far; see `PartialResponses`."""
        with self._alone:
            return self._decoder.sampled_so_far(name, start)

    def _sync(self, source: Trainer) -> Receipt:
        """Copy the weights of `source`, or record the version if the model is its own."""
        self._refuse_sync(self._decoder.begun)
        self._receipt = None
        self._decoder.evict()
        return self._take_over(source)

    def _swap(self, source: Trainer, caches: Caches) -> Receipt:
        """As `_sync`, with requests in flight: with ``caches="recompute"`` they join again with the next step and
        prefill in one forward pass; with ``"reuse"`` they continue where they are."""
        if caches == "recompute":
            self._decoder.evict()
        else:
            self._decoder.seal()
        try:
            return self._take_over(source)
        except BaseException:
            self._decoder.clear()
            raise

    def _take_over(self, source: Trainer) -> Receipt:
        if self._shares is None:
            self._receipt = self._copy(source)
        elif cast(object, source) is self._shares:
            self._receipt = Receipt(source.version, digest="alias", bytes=0, seconds=0.0, transport="alias")
        else:
            raise SyncError(
                f"{self.name} shares the weights of one trainer, but sync got another ({type(source).__name__} at "
                f"version {source.version}). Sync it with the actor, or give it its own folder: TorchRollout(model).",
                code="engine.other-trainer",
                engine=self.name,
                found=type(source).__name__,
                version=source.version,
            )
        return self._receipt

    def _copy(self, source: Trainer) -> Receipt:
        start = time.perf_counter()
        weights = self._synced_weights()
        faults: list[str] = []
        sent: dict[str, str] = {}
        received: dict[str, Tensor] = {}
        unchanged: set[str] = set()  # names of tensors that need no cast, so their digests stay the same
        size = 0
        for name, tensor, digest in weights_for(self._adapter_of, source, checked=False):
            sent[name] = digest
            size += tensor.nbytes
            place = weights.get(name)
            if place is not None and (place.shape, place.dtype) == (tensor.shape, tensor.dtype):
                unchanged.add(name)
            elif not has_digest(name, tensor, digest):
                faults.append(f"{name} {_DAMAGED}")
                continue
            if place is None:
                faults.append(f"{name} is unexpected")
            elif place.shape != tensor.shape:
                faults.append(f"{name} has shape {tuple(tensor.shape)}, not {tuple(place.shape)}")
            elif wrong := dtype_mismatch(tensor.dtype, place.dtype):
                faults.append(f"{name} {wrong}")
            else:
                received[name] = tensor.detach().to(place.dtype)
        faults += [f"{name} is missing" for name in weights if name not in sent]
        if not faults:
            self._load(received)
            for name, tensor in self._synced_weights().items():
                by_digest = name in unchanged
                same = has_digest(name, tensor, sent[name]) if by_digest else same_bits(tensor, received[name])
                if not same:
                    faults.append(f"{name} {_DAMAGED}")
        if faults:
            more = f", and {len(faults) - 5} more" if len(faults) > 5 else ""
            damaged = any(fault.endswith(_DAMAGED) for fault in faults)
            raise SyncError(
                f"The weights of version {source.version} did not arrive in {self.tokenizer.folder!r} as they were "
                f"sent: {', '.join(faults[:5])}{more}; expected all weights of one architecture, bit for bit. The "
                f"engine has no valid weights now: call engine.sync(trainer) with a trainer of the same model.",
                code="sync.damaged" if damaged else "engine.weights-mismatch",
                engine=self.name,
                version=source.version,
                faults=faults,
            )
        return Receipt(source.version, combine(sent), size, time.perf_counter() - start, transport="copy")

    def _synced_weights(self) -> dict[str, Tensor]:
        """The weights that `sync` copies into, by the names under which they are sent."""
        return dict(named_weights(self.model)) if self._adapter is None else self._adapter.weights()

    def _load(self, received: dict[str, Tensor]) -> None:
        """Copy complete weights in the engine's dtype into the model."""
        if self._adapter is None:
            mix_weights(self.model, received)
            return
        slots = self._synced_weights()
        with torch.no_grad():
            for name, tensor in received.items():
                slots[name].copy_(tensor)

    def _require_awake(self, what: str) -> None:
        """Checks this engine, and the trainer that it shares weights with."""
        for engine in (self, self._shares):
            if isinstance(engine, Resident):
                engine.residence.require_awake(what)

    def _limits(self) -> tuple[int, int | None]:
        vocabulary: int = cast(Any, self.model.get_input_embeddings()).num_embeddings
        return vocabulary, getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def _require_receipt(self) -> Receipt:
        """As `RolloutEngine`; raises `SyncError` if shared weights were trained since."""
        receipt = super()._require_receipt()
        if self._shares is not None and self._shares.version != receipt.version:
            raise SyncError(
                f"The weights that {self.name} shares are at version {self._shares.version}, but its receipt is of "
                f"version {receipt.version}, so its rows would have the wrong version. Call engine.sync(trainer) "
                f"after each update (in a graph: end the step with Sync()(actor)).",
                code="engine.version-mismatch",
                engine=self.name,
                found=self._shares.version,
                expected=receipt.version,
            )
        return receipt

    def _knows(self, name: str) -> bool:
        return name in self._decoder

    def _submit(self, request: Request) -> None:
        self._decoder.submit(request)

    def _step(self, version: int) -> list[str]:
        """Sample by `next_token`; a request reads only its own ``key.numbers(max_new_tokens)``."""
        try:
            with self._decoding():
                return self._decoder.step(version)
        except BaseException:
            self._decoder.clear()
            raise

    def _take(self, name: str) -> Response | None:
        return self._decoder.take(name)

    def _drop(self, name: str) -> None:
        self._decoder.drop(name)

    def sleep(self) -> None:
        """As `Resident.sleep`; requests in flight are recomputed once the engine is awake."""
        self._decoder.evict()
        super().sleep()

    def _sample(self, prompts: Tensor, mask: Tensor, row_ids: Sequence[str], sampling: Sampling, key: Key) -> Sampled:
        with self._decoding():
            return super()._sample(prompts, mask, row_ids, sampling, key)

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Prepare the model to decode; does nothing if nested."""
        if self._is_decoding:
            yield
            return
        computing = nullcontext() if self._shares is None else self._shares.computing()
        with evaluating(self.model), torch.no_grad(), computing, self._memory.decoding():
            self._is_decoding = True
            try:
                yield
            finally:
                self._is_decoding = False


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode in the block; restores training mode afterwards. A switch takes as long as several layers."""
    if not any(module.training for module in model.modules()):
        yield
        return
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)

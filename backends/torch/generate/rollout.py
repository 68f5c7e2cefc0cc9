"""`TorchRollout`: sampling with a KV cache in plain PyTorch, from any Hugging Face causal LM.

It either shares the weights of the actor in this process, so that `sync` is an alias, or holds a model of its own that
`sync` fills by copying.
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
from flowrl.backends.torch.load import Folder, FolderBackend, load_causal_lm
from flowrl.backends.torch.lora import Adapter, LoRA, require_peft
from flowrl.backends.torch.probes import (
    Attention,
    probe_inputs,
    refuse_other_cache,
    settle_attention,
    tolerance,
)
from flowrl.backends.torch.score.engine import Residence, Resident
from flowrl.data.keys import Key
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import BindError, SyncError, type_of
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
from flowrl.sync.digest import combine, named_weights, same_bits, tensor_digest, weights_digest
from flowrl.sync.wanted import misfit

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel


class TorchRollout(FolderBackend):
    """A rollout engine in this process.

    Args:
        model: a Hugging Face folder; None shares the weights of the role ``actor``.
        dtype: of the weights of a model of its own, float32 unless said; a shared model computes as the actor does.
        attention: of a model of its own, as in `TorchTrainer`.
        max_rows: at most so many rows are in one forward pass; of as many that have left, what was computed may be kept
            for a further turn.
        device: where a model of its own lives; None is CUDA where there is one, else the CPU. A shared one stays where
            the actor is.
        memory: GiB that the role takes on a device, as far as you know it; held against ``memory=`` of a place.
        ranks: processes that each hold a whole model of their own and sample their share of the rows.
        lora: that of an actor which trains an adapter beside the weights of this very folder: sync then sends the
            adapter alone. Without, a model of its own gets all weights, the adapter merged into them; a shared one has
            the actor's adapter anyway.
        frozen: answer with the weights of the folder, which nothing syncs: a judge, or an opponent that stays as it is.
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
                f"without a model this shares the actor's, which is one, whole, with its own dtype, attention, device "
                f"and adapter; drop {unused}, or name a folder too"
            )
        if self.frozen and self.lora is not None:
            raise ValueError("frozen=True takes no sync, so no adapter ever comes; drop lora or frozen")
        return self

    @property
    def receives(self) -> Literal["weights", "adapter_weights"]:
        """The method of a trainer whose tensors `sync` reads."""
        return "weights" if self.lora is None else "adapter_weights"

    def build(self, context: BuildContext) -> TorchRolloutEngine:
        """The live engine; it holds no receipt yet, unless it is frozen.

        Raises:
            BindError: the folder does not hold a whole causal LM, or one that `lora` does not fit; or no model is named
                and the actor's cannot be shared; or the model does not go on from its cache as it computes without.
            DataError: the folder has no tokeniser.
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
                settle_attention(probe_inputs(model, device), model, self.attention, self.model, tolerance(model.dtype))
            tokenizer = ChatTokenizer(self.model)
            engine = TorchRolloutEngine(model, tokenizer, self.max_rows, adapter=adapter, adapter_of=adapter_of)
            return engine.freeze(weights_digest(named_weights(model))) if self.frozen else engine
        actor = context.engine("actor")
        if not isinstance(actor, SharesModel):
            raise BindError(
                f"TorchRollout() shares the weights of the role 'actor', but that is {type_of(actor)}, which "
                f"holds no Hugging Face model in this process; bind the actor to a TorchTrainer, or name a folder: "
                f"TorchRollout(model)."
            )
        if actor.sharded:
            raise BindError(
                "TorchRollout() shares the weights of the role 'actor', but those are sharded (ranks or offload), and "
                "a rollout samples from whole ones; name a folder, which sync then fills: TorchRollout(model)."
            )
        return TorchRolloutEngine(actor.model, ChatTokenizer(actor.folder), self.max_rows, shares=actor)


@runtime_checkable
class SharesModel(Protocol):
    """A trainer whose model is in this process, as `TorchTrainerEngine` is: the Hugging Face LM, the folder that it
    came from, whether its weights are sharded over ranks, so that nobody else can compute with them, and a context in
    which the model computes as the trainer does."""

    model: PreTrainedModel
    folder: str
    sharded: bool

    @property
    def version(self) -> int: ...

    def computing(self) -> AbstractContextManager[None]: ...


class TorchRolloutEngine(RequestEngine, Resident):
    """A live `TorchRollout`.

    Args:
        model: a causal LM.
        tokenizer: the tokeniser of its folder.
        max_rows: at most so many rows are in one forward pass.
        shares: the trainer whose own module `model` is, or None.
        adapter: of a model of its own, if `sync` is to fill that alone.
        adapter_of: what it is added to, and how; see `Adapted`.

    Raises:
        BindError: the model does not go on from its cache as it computes without.
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
        # What is shared moves with the trainer.
        self.residence = Residence(model.device, [model] if shares is None else [])
        self._memory = self._memory_of(model)
        self._decoder = Decoder(self._memory, tokenizer, max_rows, model.device)
        self._within = False

    def _memory_of(self, model: PreTrainedModel) -> Memory:
        """Where what is computed of rows stands: in place where that suits the model, else as transformers keeps it.

        Raises:
            BindError: the model does not go on from its cache as it computes without.
        """
        from flowrl.backends.torch.generate.slots import Slots, suits

        with evaluating(model), torch.no_grad():
            probe, bound = probe_inputs(model, model.device, rows=2), tolerance(model.dtype)
            cohorts = CacheBatches(model)
            refuse_other_cache(probe, model, cohorts.step, cohorts.new_cache(), self.tokenizer.folder, bound)
            return Slots(model) if suits(model, probe, bound) else cohorts

    @property
    def arithmetic(self) -> torch.dtype:
        """The dtype of the model's weights."""
        return self.model.dtype

    @property
    def context_tokens(self) -> int:
        """Tokens before all answers so far; of one that went on after its context was computed anew, once more, with
        what it had said."""
        return self._decoder.context_tokens

    @property
    def cached_tokens(self) -> int:
        """As many of these were there already: from earlier turns, or since other rows begin alike."""
        return self._decoder.cached_tokens

    def _sync(self, source: Trainer) -> Receipt:
        """Take over the weights of `source`: by copying, or, where the model is its own, by noting the version.

        Where this engine has an adapter, the weights of the adapter are all that is copied; what they are added to must
        be what the trainer adds them to.

        A copy is checked: the tensors that the engine holds afterwards must have the digests of those that were sent.
        Where the engine has another dtype, those that came must have them, and it must hold the same bits as their
        cast. The receipt's digest and bytes are those of the tensors as sent.

        Raises:
            SyncError: requests are under way; names or shapes differ, the engine holds other numbers than were sent,
                `source` is not the trainer that the model is shared with, or has no adapter over the same weights as
                this engine has. But for the first, the engine then holds no receipt.
        """
        self._refuse_sync(self._decoder.begun)
        self._receipt = None
        self._decoder.forget()
        return self._take_over(source)

    def _swap(self, source: Trainer, caches: Caches) -> Receipt:
        """As `_sync`, with requests in flight: with ``caches="recompute"`` they join again with the next step and
        prefill in one forward pass; with ``"reuse"`` they continue where they are."""
        if caches == "recompute":
            self._decoder.forget()
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
                f"this engine shares the weights of one trainer, but was told to sync with another "
                f"({type(source).__name__} at version {source.version}); sync it with the actor, or bind the "
                f"rollout to a folder of its own: TorchRollout(model)."
            )
        return self._receipt

    def _copy(self, source: Trainer) -> Receipt:
        start = time.perf_counter()
        held = self._held()
        faults: list[str] = []
        sent: dict[str, str] = {}
        received: dict[str, Tensor] = {}
        kept: set[str] = set()  # what the engine holds as it is sent, and so with the same digest
        size = 0
        for name, tensor, digest in weights_for(self._adapter_of, source, checked=False):
            sent[name] = digest
            size += tensor.nbytes
            place = held.get(name)
            if place is not None and (place.shape, place.dtype) == (tensor.shape, tensor.dtype):
                kept.add(name)
            elif tensor_digest(name, tensor) != digest:
                faults.append(f"{name} is not what was sent")
                continue
            if place is None:
                faults.append(f"{name} is unexpected")
            elif place.shape != tensor.shape:
                faults.append(f"{name} has shape {tuple(tensor.shape)}, not {tuple(place.shape)}")
            elif wrong := misfit(tensor.dtype, place.dtype):
                faults.append(f"{name} {wrong}")
            else:
                received[name] = tensor.detach().to(place.dtype)
        faults += [f"{name} is missing" for name in held if name not in sent]
        if not faults:
            self._load(received)
            for name, tensor in self._held().items():
                same = tensor_digest(name, tensor) == sent[name] if name in kept else same_bits(tensor, received[name])
                if not same:
                    faults.append(f"{name} is not what was sent")
        if faults:
            more = f", and {len(faults) - 5} more" if len(faults) > 5 else ""
            raise SyncError(
                f"weights of version {source.version} did not arrive in {self.tokenizer.folder!r} as they were sent: "
                f"{', '.join(faults[:5])}{more}; expected all weights of one architecture, bit for bit. The engine "
                f"holds no valid weights now: call engine.sync(trainer) with a trainer of the same model."
            )
        return Receipt(source.version, combine(sent), size, time.perf_counter() - start, transport="copy")

    def _held(self) -> dict[str, Tensor]:
        """The weights that `sync` fills, by the names under which they come."""
        return dict(named_weights(self.model)) if self._adapter is None else self._adapter.weights()

    def _load(self, received: dict[str, Tensor]) -> None:
        """Put weights, which are complete and in the engine's dtype, where the model keeps them."""
        slots = self.model.state_dict() if self._adapter is None else self._held()
        if not received.keys() <= slots.keys():  # some are stored fused (experts): load them as a folder is loaded
            fresh: Any = type(self.model).from_pretrained(
                None, config=self.model.config, state_dict=received, dtype=self.model.dtype
            )
            received = fresh.state_dict()
        with torch.no_grad():
            for name, tensor in received.items():
                slots[name].copy_(tensor)

    def _require_awake(self, what: str) -> None:
        """This engine, and the trainer that it shares weights with."""
        for engine in (self, self._shares):
            if isinstance(engine, Resident):
                engine.residence.require_awake(what)

    def _limits(self) -> tuple[int, int | None]:
        vocabulary: int = cast(Any, self.model.get_input_embeddings()).num_embeddings
        return vocabulary, getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def _require_receipt(self) -> Receipt:
        """As `RolloutEngine`; and weights that are shared must not have been trained since.

        Raises:
            SyncError: they were.
        """
        receipt = super()._require_receipt()
        if self._shares is not None and self._shares.version != receipt.version:
            raise SyncError(
                f"the weights that this rollout engine shares are at version {self._shares.version}, but its receipt "
                f"is of version {receipt.version}, so its rows would carry the wrong version; call "
                f"engine.sync(trainer) after each update (in a graph: end the step with Sync()(actor))."
            )
        return receipt

    def _asked(self, name: str) -> bool:
        return name in self._decoder

    def _submit(self, request: Request) -> None:
        self._decoder.submit(request)

    def _step(self, version: int) -> list[str]:
        """By `next_token`; a request draws from ``key.numbers(max_new_tokens)`` and from nothing of the others.

        So it gets the same tokens in any order and any company, but for rounding: kernels that sum in another order for
        another number of rows move probabilities by about 1e-7, and so may move a draw that falls within that of the
        edge between two tokens.
        """
        try:
            with self._decoding():
                return self._decoder.step(version)
        except BaseException:
            self._decoder.clear()
            raise

    def _take(self, name: str) -> Response | None:
        return self._decoder.take(name)

    def _drop(self, name: str) -> None:
        """Stop a request, drop its response, and forget what was kept of it."""
        self._decoder.drop(name)

    def sleep(self) -> None:
        """As `Resident.sleep`; requests that are under way are computed anew once the engine is awake."""
        self._decoder.forget()
        super().sleep()

    def _sample(self, prompts: Tensor, mask: Tensor, row_ids: Sequence[str], sampling: Sampling, key: Key) -> Sampled:
        with self._decoding():
            return super()._sample(prompts, mask, row_ids, sampling, key)

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """The model as it decodes; within another one, nothing."""
        if self._within:
            yield
            return
        computing = nullcontext() if self._shares is None else self._shares.computing()
        with evaluating(self.model), torch.no_grad(), computing, self._memory.decoding():
            self._within = True
            try:
                yield
            finally:
                self._within = False


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off within; training mode, where it was on, comes back after.

    It takes as long as many a layer to set it, so a model that is evaluated anyway is left as it is.
    """
    if not any(module.training for module in model.modules()):
        yield
        return
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)

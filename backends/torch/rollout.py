"""`TorchRollout`: sampling with a KV cache in plain PyTorch, from any Hugging Face causal LM.

It either shares the weights of the actor in this process, so that `sync` is an alias, or holds a model of its own that
`sync` fills by copying.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, cast, runtime_checkable

import torch
from pydantic import Field, model_validator
from torch import LongTensor, Tensor, nn

from flowrl.backends.hosted.arrival import weights_for
from flowrl.backends.rollout import Ending, RolloutEngine
from flowrl.backends.torch.device import device_of
from flowrl.backends.torch.engine import Residence, Resident
from flowrl.backends.torch.load import Folder, FolderBackend, load_causal_lm
from flowrl.backends.torch.lora import Adapter, LoRA, require_peft
from flowrl.backends.torch.probes import (
    Attention,
    known,
    probe_inputs,
    refuse_other_cache,
    settle_attention,
    tolerance,
)
from flowrl.core.protocols import BuildContext, Rollout, Sampled, Sampling, Sleeper, Trainer
from flowrl.data.keys import Key
from flowrl.data.tokenizer import ChatTokenizer, positions
from flowrl.errors import BindError, DataError, SyncError, type_of
from flowrl.records import Receipt
from flowrl.spec import non_default
from flowrl.sync.digest import combine, named_weights, same_bits, tensor_digest, weights_digest
from flowrl.sync.wanted import misfit

if TYPE_CHECKING:  # they take seconds to import
    from transformers import DynamicCache, PreTrainedModel


class TorchRollout(FolderBackend):
    """A rollout engine in this process.

    Args:
        model: a Hugging Face folder; None shares the weights of the role ``actor``.
        dtype: of the weights of a model of its own, float32 unless said; a shared model computes as the actor does.
        attention: of a model of its own, as in `TorchTrainer`.
        max_rows: at most so many rows are in one forward pass.
        device: where a model of its own lives; None is CUDA where there is one, else the CPU. A shared one stays where
            the actor is.
        memory: GiB that the role takes on a device, as far as you know it; held against ``memory=`` of a place.
        ranks: processes that each hold a whole model of their own and sample their share of the rows.
        lora: that of an actor which trains an adapter beside the weights of this very folder: sync then sends the
            adapter alone. Without, a model of its own gets all weights, the adapter merged into them; a shared one has
            the actor's adapter anyway.
        frozen: answer with the weights of the folder, which nothing syncs: a judge, or an opponent that stays as it is.
    """

    serves = (Rollout, Sleeper)
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


class TorchRolloutEngine(RolloutEngine, Resident):
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
        self._max_rows = max_rows
        self._shares = shares
        # What is shared moves with the trainer.
        self.residence = Residence(model.device, [model] if shares is None else [])
        arguments = inspect.signature(model.forward).parameters
        self._cache = "cache_params" if "cache_params" in arguments else "past_key_values"
        with evaluating(model), torch.no_grad():
            probe, bound = probe_inputs(model, model.device, rows=2), tolerance(model.dtype)
            refuse_other_cache(probe, model, self._forward, self._new_cache(), tokenizer.folder, bound)

    @property
    def arithmetic(self) -> torch.dtype:
        """The dtype of the model's weights."""
        return self.model.dtype

    def sync(self, source: Trainer) -> Receipt:
        """Take over the weights of `source`: by copying, or, where the model is its own, by noting the version.

        Where this engine has an adapter, the weights of the adapter are all that is copied; what they are added to must
        be what the trainer adds them to.

        A copy is checked: the tensors that the engine holds afterwards must have the digests of those that were sent.
        Where the engine has another dtype, those that came must have them, and it must hold the same bits as their
        cast. The receipt's digest and bytes are those of the tensors as sent.

        Raises:
            SyncError: names or shapes differ, the engine holds other numbers than were sent, `source` is not the
                trainer that the model is shared with, or has no adapter over the same weights as this engine has. The
                engine then holds no receipt.
        """
        self._receipt = None
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

    def _sample(self, prompts: Tensor, mask: Tensor, row_ids: Sequence[str], sampling: Sampling, key: Key) -> Sampled:
        """By `next_token`; row ``i`` uses ``key.uniforms(row_ids)[i]`` and nothing of the other rows.

        So it gets the same tokens in any order and any batch, but for rounding: kernels that sum in another order for
        another batch size move probabilities by about 1e-7, and so may move a draw that falls within that of the edge
        between two tokens.

        Raises:
            SyncError: weights that are shared were trained since the receipt.
            DataError: logits that are NaN.
        """
        assert self._receipt is not None
        if self._shares is not None and self._shares.version != self._receipt.version:
            raise SyncError(
                f"the weights that this rollout engine shares are at version {self._shares.version}, but its receipt "
                f"is of version {self._receipt.version}, so its rows would carry the wrong version; call "
                f"engine.sync(trainer) after each update (in a graph: end the step with Sync()(actor))."
            )
        rows, device = len(prompts), self.model.device
        sampled = Sampled(
            torch.full((rows, sampling.max_new_tokens), self.tokenizer.pad_id, device=device),
            torch.zeros(rows, sampling.max_new_tokens, dtype=torch.bool, device=device),
            torch.zeros(rows, sampling.max_new_tokens, device=device),
        )
        uniforms = key.uniforms(row_ids, sampling.max_new_tokens).to(device)
        columns = (prompts.to(device), mask.to(device), uniforms, *sampled)
        computing = nullcontext() if self._shares is None else self._shares.computing()
        with evaluating(self.model), torch.no_grad(), computing:
            for start in range(0, rows, self._max_rows):
                ids, attended, numbers, *out = (column[start : start + self._max_rows] for column in columns)
                self._fill(ids, attended, numbers, sampling, Sampled(*out))
        width = int(sampled.response_mask.any(0).sum())
        return Sampled(*(column[:, :width] for column in sampled))

    def _fill(self, prompts: Tensor, mask: Tensor, uniforms: Tensor, sampling: Sampling, sampled: Sampled) -> None:
        """Sample the responses of some rows into `sampled`; rows that end leave the batch."""
        rows, width = prompts.shape
        ending = Ending(self.tokenizer, sampling)
        stops = torch.tensor(ending.token_ids, dtype=torch.int64, device=prompts.device)
        watches = [ending.watch() for _ in range(rows)] if ending.stop else []
        cache = self._new_cache()
        first, copies = unique_rows(prompts.masked_fill(~mask, -1))
        ids = prompts.masked_fill(~mask, 0)  # padding may hold anything, ids that the vocabulary lacks included
        logits = self._forward(ids[first], mask[first], positions(mask[first]), cache)[copies]
        cache.reorder_cache(cast(LongTensor, copies))

        live = torch.arange(rows, device=prompts.device)  # the rows of `sampled` that the batch now consists of
        attention = nn.functional.pad(mask, (0, sampling.max_new_tokens), value=True)
        position = mask.sum(1, keepdim=True)
        for t in range(sampling.max_new_tokens):
            tokens, log_probs = next_token(logits, uniforms[live, t], sampling)
            sampled.responses[live, t] = tokens
            sampled.response_mask[live, t] = True
            sampled.log_probs[live, t] = log_probs
            ended = torch.isin(tokens, stops)
            if watches:
                pairs = zip(live.tolist(), tokens.tolist(), strict=True)
                ended |= torch.tensor([watches[row].completes(token) for row, token in pairs], device=ended.device)
            on = (~ended).nonzero().squeeze(1)
            if len(on) == 0 or t + 1 == sampling.max_new_tokens:
                return
            if len(on) < len(live):
                live, tokens, attention, position = live[on], tokens[on], attention[on], position[on]
                cache.reorder_cache(cast(LongTensor, on))
            logits = self._forward(tokens[:, None], attention[:, : width + t + 1], position + t, cache)

    def _new_cache(self) -> DynamicCache:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def _forward(self, ids: Tensor, attention: Tensor, position: Tensor, cache: DynamicCache) -> Tensor:
        """Logits of the token after the last column: ``[rows vocab]``."""
        inputs = {
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": position,
            self._cache: cache,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        if self._cache == "cache_params" and ids.shape[1] < attention.shape[1]:
            del inputs["attention_mask"]  # a state-space model keeps no past that could be masked
        return cast(Tensor, self.model(**known(self.model, inputs)).logits[:, -1])


def next_token(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row, by inverting the cumulative distribution at `uniforms`.

    Logits are divided by the temperature, then the `top_k` largest are kept (of equals the lowest ids), then the
    smallest set of the most likely whose probability reaches `top_p` (nucleus sampling, Holtzman et al. 2020,
    arXiv:1904.09751), then renormalised; this distribution is drawn from, and the log-prob is that under it. At
    temperature 0 the most likely token is taken, top-k and top-p have no say, and the log-prob is of temperature 1.

    Args:
        logits: ``[rows vocab]`` of any float dtype; computed on in float32.
        uniforms: float64 ``[rows]`` in [0, 1).
        sampling: temperature, top_k and top_p.

    Returns:
        tokens (int64 ``[rows]``) and log-probs (float32 ``[rows]``).

    Raises:
        DataError: logits are NaN or infinite.
    """
    logits, order = logits.float(), None
    if sampling.temperature > 0:
        logits = logits / sampling.temperature
        if sampling.top_k > 0 or sampling.top_p < 1:
            logits, order = logits.sort(dim=-1, descending=True, stable=True)
        if sampling.top_k > 0:
            logits = logits[:, : sampling.top_k]
        if sampling.top_p < 1:
            reached = logits.softmax(-1).double().cumsum(-1) >= sampling.top_p
            logits[:, 1:].masked_fill_(reached[:, :-1], -torch.inf)
    log_probs = logits.log_softmax(-1)
    if log_probs[:, 0].isnan().any():  # one NaN or +inf makes the whole row NaN
        raise DataError(
            "the model's logits are NaN or infinite, so its weights or their dtype have overflowed; look at "
            "actor/grad_norm of the steps before, and train with a smaller learning rate or in float32 or bfloat16."
        )
    if sampling.temperature > 0:
        cumulative = log_probs.double().exp().cumsum(-1)
        # The first entry above u * total: never one of probability 0, nor, as u < 1, one past the end.
        pick = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    else:
        pick = log_probs.argmax(-1, keepdim=True)
    tokens = pick if order is None else order.gather(1, pick)
    return tokens.squeeze(1), log_probs.gather(1, pick).squeeze(1)


def unique_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Where each distinct row first stands (int64 ``[distinct]``), and which of them each row is (int64 ``[rows]``)."""
    seen: dict[bytes, int] = {}
    first: list[int] = []
    copies: list[int] = []
    for i, row in enumerate(rows.cpu().numpy()):
        j = seen.setdefault(row.tobytes(), len(seen))
        if j == len(first):
            first.append(i)
        copies.append(j)
    return torch.tensor(first, device=rows.device), torch.tensor(copies, device=rows.device)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off within; training mode, where it was on, comes back after."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)

"""A Hugging Face causal LM that scores sequences, with log-probs of a chunk of tokens at a time.

Weights are always float32: with ``bfloat16`` the model runs under `torch.autocast` over float32 master weights, in
trainers and scorers alike, so that an actor and a reference from one folder agree bit for bit until the actor is
trained, and small updates are not rounded away. Dropout is always off, because recomputed log-probs must equal those
that the update sees.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from flowrl.backends.torch.load import load_causal_lm, quiet
from flowrl.backends.torch.lora import Adapter, LoRA
from flowrl.backends.torch.probes import (
    Attention,
    after_head,
    known,
    prepare_checkpointing,
    probe_inputs,
    refuse_blind_to_padding,
    select_attention,
    tolerance,
)
from flowrl.backends.torch.score.blocks import Checkpointing
from flowrl.backends.torch.score.chunks import Score, in_chunks, score_norm, score_top, scores
from flowrl.backends.torch.score.context import Context, Ulysses, refuse_other_outputs
from flowrl.backends.torch.score.rows import Budget, SequenceInputs, from_first_tokens, packed
from flowrl.backends.torch.score.tiles import Entropy, LMHead
from flowrl.backends.torch.train.mesh import Gathered, ProcessMesh
from flowrl.errors import BindError
from flowrl.protocols.protocols import OfDistribution
from flowrl.protocols.scorers import Top
from flowrl.records import Sequences, Tokens
from flowrl.sync.buckets import BUCKET_BYTES
from flowrl.sync.digest import named_weights, weights_digest
from flowrl.sync.weight_selection import rounded

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Dtype = Literal["float32", "bfloat16"]
T = TypeVar("T")


class TorchModel:
    """A causal LM, its device and its compute dtype; see the module's docstring.

    Args:
        dtype: the compute dtype; log-softmax, entropy and all outputs are float32 in either case.
        attention: None is fused attention if it computes the model correctly, else plain.
        with_head: False drops the LM head (a critic needs none; its folder may lack one).
        seed: of a new adapter.
    """

    experts = 0
    """The experts of each layer; set by `watch_routers`."""
    experts_per_token = 0
    """Those that a token chooses."""
    routes: Tensor | None = None
    """`route_sums` of the last pass of `log_probs` with gradients, if routers are watched."""

    def __init__(
        self,
        folder: str,
        dtype: Dtype,
        mesh: ProcessMesh,
        attention: Attention | None,
        gradient_checkpointing: Checkpointing,
        with_head: bool = True,
        lora: LoRA | None = None,
        seed: int = 0,
    ) -> None:
        self.mesh, self.device = mesh, mesh.device
        self.context = Context.of(mesh)
        self._autocast, self._checkpoints = dtype == "bfloat16", bool(gradient_checkpointing)
        self.dtype = torch.bfloat16 if self._autocast else torch.float32
        lm = self._load(folder, with_head, attention, lora, seed)
        bound = tolerance(self._probed_in)
        self.probe(select_attention, self.module, attention, folder, bound)
        self.probe(refuse_blind_to_padding, self.module, folder, bound)
        self.unpacked = self._why_unpacked(attention, folder, bound)
        """Why rows are padded to the longest of their micro-batch; None if they are packed."""
        if isinstance(self.context, Ulysses):
            self.probe(refuse_other_outputs, self.module, self.context, self.unpacked, folder, bound)
        if gradient_checkpointing:
            self.probe(prepare_checkpointing, self.module, gradient_checkpointing, folder)
        self._run, self._output, self._head = lm.base_model, "last_hidden_state", LMHead()
        self.after_head = self.probe(after_head, lm) if with_head else None
        """The function after the head; None without a head, or if it is unknown."""
        layer = lm.get_output_embeddings() if with_head else None
        self._call_head = operator.call if layer is None else mesh.caller(layer)
        plain = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward  # FSDP has subclasses
        if self.after_head is not None and plain:
            self._head = LMHead(layer, self.after_head, getattr(layer, "vocabulary_part", None))
        elif with_head:  # the logits are not a linear head's: take them from the model
            self._run, self._output = lm, "logits"
        if mesh.spec.tensor > 1:
            self._refuse_not_split(folder)
        self.adapter_of: str | None = None
        """The adapter's base weights and scaling; see `Adapted`."""
        if self.adapter is not None:
            self._start_adapter(self.adapter, folder)

    def _load(
        self, folder: str, with_head: bool, attention: Attention | None, lora: LoRA | None, seed: int
    ) -> PreTrainedModel:
        """Load the causal LM, with its adapter, and set what computes with its weights."""
        self.gathered: Gathered
        if self.mesh.sharded:
            from flowrl.backends.torch.train.shards import load_sharded  # here and below, since it takes seconds

            lm, self.gathered, self.adapter = load_sharded(self.mesh, folder, with_head, attention, lora, seed)
        else:
            lm = load_causal_lm(folder, with_head, attention)
            self.adapter = None if lora is None else Adapter(lm, lora, folder)
            if self.adapter is not None:
                self.adapter.fill(seed)
            cast(nn.Module, lm).to(self.device)
        lm.eval()
        self.module: PreTrainedModel = lm if with_head else cast("PreTrainedModel", lm.base_model)
        """All weights."""
        if not self.mesh.sharded:
            self.gathered = self.mesh.gathered(self.module)
        return lm

    def _refuse_not_split(self, folder: str) -> None:
        """Refuse a model whose layers do not compute in parts, forward and backward. Raises `BindError`."""
        try:
            self.score_states(SequenceInputs.idle(self.device), lambda states: states.float().sum(1)).sum().backward()
        except Exception as error:
            raise BindError(
                f"{type(self.module).__name__} in {folder!r} is split by the tensor-parallel plan that transformers "
                f"has for it, but then raises {type(error).__name__} ({error}). Use fsdp in place of tensor.",
                code="mesh.no-plan",
                axis="tensor",
                architecture=self.module.config.model_type,
                path=folder,
            ) from error
        for parameter in self.module.parameters():
            parameter.grad = None

    def watch_routers(self, folder: str) -> None:
        """Set `routes` in later passes; raises `BindError` as `routers_of`."""
        from flowrl.backends.torch.score.routing import routers_of

        self.experts, self.experts_per_token = self.probe(routers_of, self.module, folder)

    @torch.no_grad()
    def count_routes(self, batch: Tokens) -> Tensor:
        """How often the attended tokens of `batch` choose each expert, in all layers: float32 ``[expert]``."""
        with self.autocast():
            sums = self.gathered.call(self._states, batch, self._run, self._output, True)[2]
        assert sums is not None
        return sums[1]

    def _start_adapter(self, adapter: Adapter, folder: str) -> None:
        """Identify and keep the weights of the folder, and read the adapter that training starts from."""
        from flowrl.backends.torch.adapter_folder import read_adapter, warn_of_other_base
        from flowrl.backends.torch.train.shards import gathered_weights, read_rows

        digest = weights_digest(gathered_weights(self.mesh, self.module, BUCKET_BYTES))
        self.adapter_of = adapter.lora.over(digest)
        adapter.keep_base()
        if adapter.lora.adapter_path is not None:
            with self.mesh.all_or_none(f"loading {adapter.lora.adapter_path!r}"):
                weights = read_adapter(adapter, folder)
            if self.mesh.position.leads:
                warn_of_other_base(adapter.lora, folder)
            read_rows(adapter.parameters(), weights, self.mesh)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The autocast region of the model."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            yield

    def _why_unpacked(self, attention: Attention | None, folder: str, bound: float) -> str | None:
        from flowrl.backends.torch.score.packed import why_not_packed

        why = self.probe(why_not_packed, self.module, bound)
        if why is not None and attention != "eager" and self.mesh.position.leads:
            logger.warning("%s in %r computes padding, because %s.", type(self.module).__name__, folder, why)
        return why

    def budget(self, max_tokens: int | None) -> Budget:
        """The size of micro-batches for a spec's `max_tokens`, which each of the processes that share rows computes."""
        budget = Budget.of(max_tokens, self.device, self.unpacked is None)
        return budget._replace(positions=budget.positions * self.context.size)

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return cast(nn.Embedding, self.module.get_input_embeddings()).num_embeddings

    @property
    def _probed_in(self) -> torch.dtype:
        """The compute dtype of probes: float32, unless weights are gathered in bfloat16."""
        return torch.bfloat16 if self._autocast and self.mesh.sharded else torch.float32

    @torch.no_grad()
    def probe(self, ask: Callable[..., T], *args: Any) -> T:
        """Call `ask` on the tokens of `probe_inputs`, with the weights gathered."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._probed_in == torch.bfloat16):
            return self.gathered.call(ask, probe_inputs(self.module, self.device), *args)

    def width(self) -> int:
        """The width of `states`; it is not ``hidden_size`` in models whose body projects its output."""
        return self.probe(lambda probe: int(getattr(self._run(**known(self._run, probe)), self._output).shape[-1]))

    def weights(self, bucket_bytes: int, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The weights under the names that `save_pretrained` writes, sorted, tied ones once, `rounded` to `dtype`; see
        `gathered_weights`.

        Unsharded tensors are the live ones, except that adapted layers are copies with the adapter merged. Weights that
        a model stores in another form (experts) are converted a layer at a time.
        """
        if not self.mesh.sharded and self.adapter is None:
            yield from rounded(named_weights(self.module), dtype)
        else:
            from flowrl.backends.torch.train.shards import gathered_weights

            yield from gathered_weights(self.mesh, self.module, bucket_bytes, self.adapter, dtype)

    def dealt(self, bucket_bytes: int, dtype: torch.dtype | None = None) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """This rank's share of `weights`; see `dealt_weights`."""
        from flowrl.backends.torch.train.shards import dealt_weights

        return dealt_weights(self.mesh, self.module, bucket_bytes, self.adapter, dtype)

    def adapter_weights(self, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """The adapter's weights under the names that PEFT writes, sorted; see `Sharded.full`."""
        assert self.adapter is not None
        return self.mesh.full(self.adapter.weights().items(), bucket_bytes)

    def dealt_adapter(self, bucket_bytes: int) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """This rank's share of `adapter_weights`; see `dealt_adapter`."""
        from flowrl.backends.torch.train.shards import dealt_adapter

        assert self.adapter is not None
        return dealt_adapter(self.mesh, self.adapter, bucket_bytes)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Turn the adapter off in the block."""
        assert self.adapter is not None
        with self.adapter.off():
            yield

    def save_pretrained(self, folder: str, bucket_bytes: int) -> None:
        """Write weights (float32, the adapter merged) and configuration as a Hugging Face folder; see
        `save_gathered`."""
        if not self.mesh.sharded and self.adapter is None:
            with quiet():
                self.module.save_pretrained(folder)
        else:
            from flowrl.backends.torch.train.saving import save_gathered

            save_gathered(self.mesh, self.module, folder, self.weights(bucket_bytes))

    def save_adapter(self, folder: str, model: str, bucket_bytes: int) -> None:
        """Write the adapter over the folder `model` in PEFT's format; a collective, only rank 0 writes."""
        from flowrl.backends.torch.adapter_folder import export_adapter

        assert self.adapter is not None
        first = self.mesh.position.leads
        weights = {name: tensor.cpu() for name, tensor in self.adapter_weights(bucket_bytes) if first}
        with self.mesh.all_or_none("save_pretrained"):
            if first:
                export_adapter(folder, self.adapter, weights, model)

    def score_states(self, batch: Tokens, score: Callable[[Tensor], Tensor]) -> Tensor:
        """`score` of the model's output before each response token under the mask: float32 ``[batch response]``, 0 off
        the mask.

        The output, ``[tokens width]``, is the last hidden state (or the logits, if they are not a linear head's) at
        sequence position ``sequence - response - 1 + t`` for response token ``t``.
        """
        with self.autocast():
            states, own, _ = self.gathered.call(self._states, batch, self._run, self._output)
        mask = batch.response_mask
        return scatter(self.context.whole(score(states), own, int(mask.sum())), mask)

    def last_states(self, batch: Tokens) -> Tensor:
        """The last hidden states before the head: float32 ``[batch response hidden]``, 0 off the mask; otherwise as
        `score_states`."""
        with self.autocast():
            states, own, _ = self.gathered.call(self._states, batch, self.module.base_model, "last_hidden_state")
        found = self.context.whole(states.float(), own, int(batch.response_mask.sum()))
        out = found.new_zeros(*batch.response_mask.shape, found.shape[-1])
        out[batch.response_mask] = found
        return out

    def head(self) -> tuple[int, str] | None:
        """The width and the digest of the head's weights; None if it is not a linear layer. A collective."""
        layer = self.module.get_output_embeddings()
        if not isinstance(layer, nn.Linear):
            return None
        digest = weights_digest(self.mesh.full(layer.named_parameters(), BUCKET_BYTES))
        return layer.weight.shape[1], digest

    def _states(
        self, batch: Tokens, run: nn.Module, output: str, routed: bool = False
    ) -> tuple[Tensor, Tensor | slice, Tensor | None]:
        """The states before the tokens under the mask that this process scores, which of them it scores, and
        `route_sums` if `routed`."""
        moved = from_first_tokens(batch) if self.unpacked else packed(batch)
        rows, tokens = batch.response_mask.nonzero(as_tuple=True)
        before = batch.input_ids.shape[1] - batch.response_mask.shape[1] - 1
        part = self.context.part(moved, *moved.find(rows, tokens + before))
        width = part.rows.input_ids.shape[1]
        # Logits only from the first position that is read.
        kept = width - int(part.places.min()) if len(part.places) else 1
        inputs = part.rows.inputs | {"logits_to_keep": kept}
        run.train(self._checkpoints and torch.is_grad_enabled())
        # Not all models have position_ids (ALiBi) or logits_to_keep (a base model never does).
        outputs = run(**known(run, inputs), **part.within, **({"output_router_logits": True} if routed else {}))
        run.eval()
        states = cast(Tensor, getattr(outputs, output))
        sums = None
        if routed:
            from flowrl.backends.torch.score.routing import route_sums

            sums = self.context.total(route_sums(outputs.router_logits, part.counted, self.experts_per_token))
        return states[part.lines, part.places + (states.shape[1] - width)], part.own, sums

    def log_probs(
        self, batch: Sequences, chunk: int, entropy: Entropy, of: OfDistribution | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs of the response tokens at each row's temperature, and the entropy of their distributions.

        Of the ``[tokens, vocabulary]`` matrix only `chunk` rows exist at a time, in the forward and the backward pass.

        Args:
            entropy: ``"none"``, only its ``"value"``, or its value with the ``"gradient"``.
            of: the function of each distribution in place of the log-prob; its columns are those of `batch`.

        Returns:
            float32 ``[batch response]`` twice (None without entropy), 0 off the mask.
        """
        read = {} if of is None else {name: getattr(batch, name) for name in of.columns}
        columns = [name for name, x in read.items() if isinstance(x, Tensor)]
        if of is not None:  # values that are not columns are the same for all tokens
            same = {name: x for name, x in read.items() if name not in columns}
            of = OfDistribution(tuple(columns), partial(of.loss, **same))
        parts = self.gathered.call(self._scored, batch, chunk, scores(entropy, of), columns)
        if self._routed:
            *parts, self.routes = parts  # type: ignore[assignment]
        scored = [scatter(part, batch.response_mask) for part in parts]
        return scored[0], scored[1] if len(scored) == 2 else None

    def logit_norms(self, batch: Sequences, chunk: int) -> Tensor:
        """``||d log p(token) / d logits||**2`` of the response tokens, in the logits over the temperature.

        Float32 ``[batch response]``, 0 off the mask.
        """
        return scatter(self.gathered.call(self._scored, batch, chunk, in_chunks(score_norm))[0], batch.response_mask)

    def top(self, batch: Sequences, chunk: int, k: int) -> Top:
        """The `k` most likely tokens in place of each response token, at each row's temperature; as `log_probs`."""
        ids, log_probs, rest = self.gathered.call(self._scored, batch, chunk, in_chunks(partial(score_top, k)))
        mask = batch.response_mask
        places = mask[..., None].expand(*mask.shape, k)
        blank = torch.zeros(places.shape, device=mask.device)
        return Top(
            blank.long().masked_scatter(places, ids), blank.masked_scatter(places, log_probs), scatter(rest, mask)
        )

    def _scored(self, batch: Sequences, chunk: int, score: Score, columns: Sequence[str] = ()) -> tuple[Tensor, ...]:
        """`score` of the tokens under the mask, ``[tokens ...]`` each, row by row; `columns` of `batch` are further
        arguments, per token or per row."""
        rows, tokens = batch.response_mask.nonzero(as_tuple=True)
        count = len(rows)
        with self.autocast():
            states, own, sums = self._states(batch, self._run, self._output, self._routed)
            rows, tokens = rows[own], tokens[own]
            targets = batch.input_ids[rows, tokens + (batch.input_ids.shape[1] - batch.response_mask.shape[1])]
            more = (getattr(batch, name) for name in columns)
            picked = (x[rows] if x.ndim == 1 else x[rows, tokens] for x in more)
            found = self._call_head(score, self._head, chunk, states, targets, batch.temperature[rows], *picked)
            scored = tuple(self.context.whole(x, own, count) for x in found)
            return scored if sums is None else (*scored, sums)

    @property
    def _routed(self) -> bool:
        """Whether passes of now set `routes`."""
        return self.experts > 0 and torch.is_grad_enabled()


def scatter(values: Tensor, mask: Tensor) -> Tensor:
    """Put one value per true element of `mask`, in row-major order, into zeros of its shape (float32)."""
    return torch.zeros(mask.shape, device=values.device).masked_scatter(mask, values.float())

"""A Hugging Face causal LM that scores sequences: micro-batches, and log-probs a chunk of tokens at a time.

Weights are float32 whatever `dtype` says: with ``bfloat16`` the arithmetic runs under `torch.autocast` over float32
master weights, in trainers and scorers alike, so that an actor and a reference made from one folder agree bit for bit
until the actor is trained, and small updates are not rounded away. Dropout is off at all times, because log-probs that
are recomputed must be those that the update sees.
"""

from __future__ import annotations

import logging
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
    settle_attention,
    tolerance,
)
from flowrl.backends.torch.score.chunks import Score, in_chunks, score_norm, score_top, scores
from flowrl.backends.torch.score.head import head_digest
from flowrl.backends.torch.score.rows import Budget, from_first_tokens, packed
from flowrl.backends.torch.score.tiles import Entropy, LMHead
from flowrl.backends.torch.train.mesh import Gathered, Mesh
from flowrl.protocols.protocols import OfDistribution
from flowrl.protocols.scorers import Top
from flowrl.records import Sequences, Tokens
from flowrl.sync.buckets import BUCKET_BYTES
from flowrl.sync.digest import named_weights, weights_digest

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Dtype = Literal["float32", "bfloat16"]
T = TypeVar("T")


class TorchModel:
    """A causal LM, its device and its arithmetic; see the module's text for dtypes and dropout.

    Args:
        folder: a Hugging Face folder of a causal LM, with its tokeniser.
        dtype: what the model computes in; log-softmax, entropy and all outputs are float32 in either case.
        mesh: where its weights are.
        attention: what computes attention; None is fused attention where it computes the model, else plain.
        gradient_checkpointing: recompute each layer in the backward pass.
        with_head: False drops the LM head (a critic needs none; its folder may lack one).
        lora: the adapter that is put beside its weights, which are frozen then.
        seed: of a fresh adapter.

    Raises:
        BindError: the folder does not hold a whole causal LM, or the model cannot do what is asked.
    """

    def __init__(
        self,
        folder: str,
        dtype: Dtype,
        mesh: Mesh,
        attention: Attention | None,
        gradient_checkpointing: bool,
        with_head: bool = True,
        lora: LoRA | None = None,
        seed: int = 0,
    ) -> None:
        self.mesh, self.device = mesh, mesh.device
        self._autocast, self._checkpoints = dtype == "bfloat16", gradient_checkpointing
        self.dtype = torch.bfloat16 if self._autocast else torch.float32
        self.gathered: Gathered
        if mesh.sharded:
            from flowrl.backends.torch.train.shards import load_sharded  # here and below, since it takes seconds

            lm, self.gathered, self.adapter = load_sharded(mesh, folder, with_head, attention, lora, seed)
        else:
            lm = load_causal_lm(folder, with_head, attention)
            self.adapter = None if lora is None else Adapter(lm, lora, folder)
            if self.adapter is not None:
                self.adapter.fill(seed)
            cast(nn.Module, lm).to(self.device)
        lm.eval()
        self.module: PreTrainedModel = lm if with_head else cast("PreTrainedModel", lm.base_model)
        """All weights."""
        if not mesh.sharded:
            self.gathered = mesh.gathered(self.module)
        bound = tolerance(self._probed_in)
        self.probe(settle_attention, self.module, attention, folder, bound)
        self.probe(refuse_blind_to_padding, self.module, folder, bound)
        self.unpacked = self._why_unpacked(attention, folder, bound)
        """Why rows are padded to the longest of their micro-batch; None where they run one behind the other."""
        if gradient_checkpointing:
            self.probe(prepare_checkpointing, self.module, folder)
        self._run, self._output, self._head = lm.base_model, "last_hidden_state", LMHead()
        self.after_head = self.probe(after_head, lm) if with_head else None
        """What follows the head; None without a head, or where that cannot be said."""
        layer = lm.get_output_embeddings() if with_head else None
        if self.after_head is not None and type(layer) is nn.Linear:
            self._head = LMHead(layer, self.after_head)
        elif with_head:  # the logits are not those of a head alone: take them from the model
            self._run, self._output = lm, "logits"
        self.adapter_of: str | None = None
        """What the adapter is added to, and how; see `Adapted`."""
        if lora is not None:
            from flowrl.backends.torch.train.shards import gathered_weights

            self.adapter_of = lora.over(weights_digest(gathered_weights(mesh, self.module, BUCKET_BYTES)))

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """The autocast region that the model computes in."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            yield

    def _why_unpacked(self, attention: Attention | None, folder: str, bound: float) -> str | None:
        from flowrl.backends.torch.score.packed import why_not_packed

        why = self.probe(why_not_packed, self.module, bound)
        if why is not None and attention != "eager" and self.mesh.rank == 0:
            logger.warning("%s in %r runs over padded rows, since %s.", type(self.module).__name__, folder, why)
        return why

    def budget(self, max_tokens: int | None) -> Budget:
        """What of a batch runs at a time, by what a spec says."""
        return Budget.of(max_tokens, self.device, self.unpacked is None)

    @property
    def vocabulary(self) -> int:
        """How many token ids the model has, from 0."""
        return cast(nn.Embedding, self.module.get_input_embeddings()).num_embeddings

    @property
    def _probed_in(self) -> torch.dtype:
        """What it computes in while it is probed: float32, but where weights are gathered in bfloat16."""
        return torch.bfloat16 if self._autocast and self.mesh.sharded else torch.float32

    @torch.no_grad()
    def probe(self, ask: Callable[..., T], *args: Any) -> T:
        """What `ask` finds when it runs the model, its weights whole, over the tokens of `probe_inputs`."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._probed_in == torch.bfloat16):
            return self.gathered.call(ask, probe_inputs(self.module, self.device), *args)

    def width(self) -> int:
        """The size of what `states` gives; models whose body projects its output have another than ``hidden_size``."""
        return self.probe(lambda probe: int(getattr(self._run(**known(self._run, probe)), self._output).shape[-1]))

    def weights(self, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """The weights under the names that `save_pretrained` writes, sorted, tied ones once; see `Sharded.full`.

        The tensors are the live ones where they are whole in this process, except that what has an adapter is a copy
        with the adapter merged into it. Of a model that stores several of them fused (experts), ranks gather all
        weights at once, because only the whole can be taken apart.
        """
        if not self.mesh.sharded and self.adapter is None:
            yield from named_weights(self.module)
        else:
            from flowrl.backends.torch.train.shards import gathered_weights

            yield from gathered_weights(self.mesh, self.module, bucket_bytes, self.adapter)

    def adapter_weights(self, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """The adapter's weights under the names that PEFT writes, sorted; see `Sharded.full`."""
        assert self.adapter is not None
        return self.mesh.full(self.adapter.weights().items(), bucket_bytes)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The model computes without its adapter within."""
        assert self.adapter is not None
        with self.adapter.off():
            yield

    def save_pretrained(self, folder: str, bucket_bytes: int) -> None:
        """Write weights (float32, the adapter merged) and configuration as a Hugging Face folder; of several ranks,
        rank 0 does."""
        if not self.mesh.sharded and self.adapter is None:
            with quiet():
                self.module.save_pretrained(folder)
        else:
            from flowrl.backends.torch.train.shards import save_gathered

            save_gathered(self.mesh, self.module, folder, bucket_bytes, self.adapter)

    def states(self, batch: Tokens) -> Tensor:
        """What the model says just before each response token under the mask: ``[tokens, width]``, row by row.

        It is the last hidden state (or the logits, where these are not those of the head alone) at sequence position
        ``sequence - response - 1 + t`` for response token ``t``.
        """
        with self.arithmetic():
            return self.gathered.call(self._states, batch, self._run, self._output)

    def last_states(self, batch: Tokens) -> Tensor:
        """The last hidden states, of which the head makes logits: float32 ``[batch response hidden]``, 0 off the mask;
        otherwise as `states`."""
        with self.arithmetic():
            found = self.gathered.call(self._states, batch, self.module.base_model, "last_hidden_state").float()
        out = found.new_zeros(*batch.response_mask.shape, found.shape[-1])
        out[batch.response_mask] = found
        return out

    def head(self) -> tuple[int, str] | None:
        """The size of the states that the head takes, and the digest of its weights; None of one that is no linear
        layer. A collective."""
        digest = self.gathered.call(head_digest, self.module)
        return None if digest is None else (self.module.get_output_embeddings().weight.shape[1], digest)

    def _states(self, batch: Tokens, run: nn.Module, output: str) -> Tensor:
        moved = from_first_tokens(batch) if self.unpacked else packed(batch)
        rows, tokens = batch.response_mask.nonzero(as_tuple=True)
        before = batch.input_ids.shape[1] - batch.response_mask.shape[1] - 1
        places = tokens + before + moved.shifts[rows]
        width = moved.input_ids.shape[1]
        # Logits from the first position that is read on.
        inputs = moved.inputs | {"logits_to_keep": width - int(places.min()) if len(places) else 1}
        run.train(self._checkpoints and torch.is_grad_enabled())
        # Not all models know position_ids (ALiBi) or logits_to_keep (and a base never does).
        states = cast(Tensor, getattr(run(**known(run, inputs), **moved.within), output))
        run.eval()
        return states[moved.lines[rows], places + (states.shape[1] - width)]

    def log_probs(
        self, batch: Sequences, chunk: int, entropy: Entropy, of: OfDistribution | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs of the response tokens at each row's temperature, and the entropy of what they were drawn from.

        Of the ``[tokens, vocabulary]`` matrix only `chunk` rows exist at a time, in the forward and the backward pass.

        Args:
            batch: what was sampled.
            chunk: tokens whose logits exist at a time.
            entropy: ``"none"``, its ``"value"`` alone, or its value with the ``"gradient"``.
            of: what is given of each distribution in the place of the log-prob; its columns are those of `batch`.

        Returns:
            float32 ``[batch response]`` twice (None where no entropy is wanted), 0 off the mask.
        """
        read = {} if of is None else {name: getattr(batch, name) for name in of.columns}
        beside = [name for name, x in read.items() if isinstance(x, Tensor)]
        if of is not None:  # what is no column is the same for all tokens
            of = OfDistribution(tuple(beside), partial(of.loss, **{n: x for n, x in read.items() if n not in beside}))
        parts = self.gathered.call(self._scored, batch, chunk, scores(entropy, of), beside)
        scored = [scatter(part, batch.response_mask) for part in parts]
        return scored[0], scored[1] if len(scored) == 2 else None

    def logit_norms(self, batch: Sequences, chunk: int) -> Tensor:
        """``||d log p(token) / d logits||**2`` of the response tokens, in the logits over the temperature.

        Float32 ``[batch response]``, 0 off the mask.
        """
        return scatter(self.gathered.call(self._scored, batch, chunk, in_chunks(score_norm))[0], batch.response_mask)

    def top(self, batch: Sequences, chunk: int, k: int) -> Top:
        """The `k` most likely tokens in the place of each response token, at each row's temperature; as `log_probs`."""
        ids, log_probs, rest = self.gathered.call(self._scored, batch, chunk, in_chunks(partial(score_top, k)))
        mask = batch.response_mask
        places = mask[..., None].expand(*mask.shape, k)
        blank = torch.zeros(places.shape, device=mask.device)
        return Top(
            blank.long().masked_scatter(places, ids), blank.masked_scatter(places, log_probs), scatter(rest, mask)
        )

    def _scored(self, batch: Sequences, chunk: int, score: Score, beside: Sequence[str] = ()) -> tuple[Tensor, ...]:
        """What `score` gives for the tokens under the mask: ``[tokens ...]`` each, row by row.

        Args:
            batch, chunk: as in `log_probs`.
            score: given the head, `chunk`, states, targets and temperatures of the tokens, and what is `beside`.
            beside: columns of `batch`, of each token or of each row.
        """
        rows, tokens = batch.response_mask.nonzero(as_tuple=True)
        targets = batch.input_ids[rows, tokens + (batch.input_ids.shape[1] - batch.response_mask.shape[1])]
        with self.arithmetic():
            more = (getattr(batch, name) for name in beside)
            picked = (x[rows] if x.ndim == 1 else x[rows, tokens] for x in more)
            states = self._states(batch, self._run, self._output)
            return score(self._head, chunk, states, targets, batch.temperature[rows], *picked)


def scatter(values: Tensor, mask: Tensor) -> Tensor:
    """Put one value per true element of `mask`, in row-major order, into zeros of its shape (float32)."""
    return torch.zeros(mask.shape, device=values.device).masked_scatter(mask, values.float())

"""The layers of one process, as a ``GPTModel`` of megatron-core, and its weights by the names of a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from flowrl.backends.megatron.architecture import Weight, settings, weights
from flowrl.backends.megatron.mesh import MegatronMesh
from flowrl.backends.torch.train.boxes import boxes, local_shape, part
from flowrl.sync.buckets import aligned, in_buckets
from flowrl.sync.weight_selection import rounds


class Layers(GPTModel):  # type: ignore[misc]
    """A ``GPTModel`` that returns its last hidden states, ``[sequence batch hidden]``, in place of logits."""

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


class _Copy(NamedTuple):
    """Equal parts of a weight of this process, in float32, and of a tensor of a folder.

    Args:
        first: whether no process before this one on the axis ``tensor`` has the same part.
    """

    weight: Tensor
    first: bool
    here: tuple[slice, ...]
    there: tuple[slice, ...]


class Stage:
    """The layers of this process, in a compute dtype, and their trained weights in float32: the same ones, or in
    another dtype copies of them.

    Args:
        config: of the Hugging Face model.
        frequencies: of rotary positions, ``[head size / 2]``.
    """

    def __init__(
        self, config: Any, mesh: MegatronMesh, dtype: torch.dtype, frequencies: Tensor, checkpointing: bool
    ) -> None:
        self._mesh, self._vocabulary = mesh, config.vocab_size
        self.tied = bool(config.tie_word_embeddings)
        own = -(-config.vocab_size // mesh.spec.tensor)
        made = settings(config)
        self.module = Layers(
            config=_transformer_config(made, mesh, dtype, checkpointing),
            transformer_layer_spec=get_gpt_layer_local_spec(
                qk_layernorm=made["qk_layernorm"], normalization=made["normalization"]
            ),
            vocab_size=own * mesh.spec.tensor,  # padded, since megatron-core has parts of equal size
            max_sequence_length=config.max_position_embeddings,
            pre_process=mesh.first,
            post_process=mesh.last,
            share_embeddings_and_output_weights=self.tied,
            position_embedding_type="rope",
        ).to(mesh.device, dtype)
        self.module.rotary_pos_emb.inv_freq = frequencies.to(mesh.device)
        if mesh.first and config.pad_token_id is not None:
            embedding = self.module.embedding.word_embeddings
            embedding.register_forward_hook(partial(_detach_padding, config.pad_token_id))
        self.shards: dict[str, nn.Parameter] = {}
        """The weights that this process trains, by their names in the whole model, as parts of them."""
        self._local: dict[str, nn.Parameter] = {}
        self._trained: dict[str, Tensor] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._weights = dict(weights(config))
        self._copies: dict[str, list[_Copy]] = {}
        self._wrap(config)
        if dtype != torch.float32:
            for parameter in self.module.parameters():
                parameter.register_post_accumulate_grad_hook(self._add_gradient)

    def _wrap(self, config: Any) -> None:
        """Set `shards`, and where the tensors of a folder are in them."""
        layers = config.num_hidden_layers // self._mesh.spec.pipeline
        offset, named = self._mesh.position.pipeline * layers, dict(self.module.named_parameters())
        for name, weight in self._weights.items():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(int(parts[2]) - offset)
            if (parameter := named.get(".".join(parts))) is None:
                continue
            self._local[name], trained = parameter, parameter.detach().float()  # the same memory if it is float32
            self._trained[name] = trained
            self.shards[name] = nn.Parameter(self._shard(trained, weight))
            first = weight.cut is not None or self._mesh.position.tensor == 0
            for box in boxes(weight.shape, weight.cut, self._mesh.place_of(weight.cut)):
                for source in weight.sources:
                    if (common := box.common(source.box)) is not None:
                        self._copies.setdefault(source.name, []).append(_Copy(trained, first, *common))

    def _shard(self, local: Tensor, weight: Weight) -> DTensor:
        """A weight of this process, or its gradient, without padding, as a part of the whole weight."""
        placement: Placement = Replicate()
        if weight.cut is not None:
            dim, blocks, _ = weight.cut
            placement = Shard(dim) if blocks == 1 else _StridedShard(dim, split_factor=blocks)
        sides = local_shape(weight.shape, weight.cut, self._mesh.place_of(weight.cut))
        own = local[tuple(slice(0, size) for size in sides)]
        stride = torch.empty(weight.shape, device="meta").stride()
        return DTensor.from_local(own, self._mesh.tensor, [placement], shape=torch.Size(weight.shape), stride=stride)

    @torch.no_grad()
    def load(self, sources: Mapping[str, Any]) -> None:
        """Read this process's parts of the tensors of a folder, or of slices of them; `follow` then."""
        for trained in self._trained.values():
            trained.zero_()  # what is padded
        for name, copies in self._copies.items():
            for weight, _, here, there in copies:
                weight[here] = sources[name][there].to(weight)

    def gathered(
        self, like: Mapping[str, Tensor], bucket_bytes: int, dtype: torch.dtype | None
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a folder, each `like` one of another device, `rounded` to `dtype`; a collective.

        Each process puts its parts into a bucket of zeros, and the buckets of all are added up, as integers.
        """
        blank = (
            (name, torch.empty(x.shape, dtype=dtype if rounds(name, x, dtype) else x.dtype, device="meta"))
            for name, x in sorted(like.items())
        )
        for bucket in in_buckets(blank, bucket_bytes):
            named = dict(bucket)
            rooms = [aligned(x.nbytes) for x in named.values()]
            memory = torch.zeros(sum(rooms), dtype=torch.uint8, device=self._mesh.device)
            tensors = {
                name: piece[: x.nbytes].view(x.dtype).view(x.shape)
                for piece, (name, x) in zip(memory.split(rooms), named.items(), strict=True)
            }
            for name, tensor in tensors.items():
                for weight, first, here, there in self._copies.get(name, ()):
                    if first:
                        tensor[there] = weight[here].to(tensor.dtype)
            self._mesh.over_weights(memory.view(torch.int32))
            yield from tensors.items()

    @property
    def head(self) -> Tensor:
        """The weights of the head of this process's part of the vocabulary, of the last stage."""
        padded = self.module.shared_embedding_or_output_weight() if self.tied else self.module.output_layer.weight
        start, end = self.vocabulary_part
        return cast(Tensor, padded[: end - start])

    @property
    def vocabulary_part(self) -> tuple[int, int]:
        """First token, and one past the last, of this process's part of the vocabulary."""
        return part(self._vocabulary, self._mesh.position.tensor, self._mesh.spec.tensor)

    def begin(self) -> None:
        """Set all gradients to 0; they add up in float32."""
        for shard in self.shards.values():
            shard.grad = None  # before there are two
        for parameter in self.module.parameters():
            self._gradients[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.dtype == torch.float32:
                parameter.grad = self._gradients[parameter]
        for name, shard in self.shards.items():
            shard.grad = self._shard(self._gradients[self._local[name]], self._weights[name])

    def _add_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._gradients[cast(nn.Parameter, parameter)] += parameter.grad
        parameter.grad = None

    def complete(self) -> None:
        """Add up the gradients of weights of which several processes use copies."""
        if (shared := self._shared()) is not None:
            dist.all_reduce(self._gradients[shared], group=parallel_state.get_embedding_group())
        for name, parameter in self._local.items():
            if self._weights[name].summed:
                dist.all_reduce(self._gradients[parameter], group=self._mesh.tensor.get_group())
        for gradient in self._gradients.values():
            self._mesh.over_copies(gradient)

    @torch.no_grad()
    def follow(self) -> None:
        """Let the layers compute with the trained weights, after they have changed, and release gradients.

        A collective: the head of the last stage gets an embedding of the first one that is tied to it.
        """
        for name, parameter in self._local.items():
            parameter.copy_(self._trained[name])
        if (shared := self._shared()) is not None:
            group = parallel_state.get_embedding_group()
            dist.broadcast(shared.detach(), dist.get_process_group_ranks(group)[0], group)
        self._gradients.clear()
        self.module.zero_grad(set_to_none=True)

    def _shared(self) -> nn.Parameter | None:
        """The weights that this process has of an embedding that is also the head of another stage."""
        if not self.tied or self._mesh.first == self._mesh.last:
            return None
        return cast(nn.Parameter, self.module.shared_embedding_or_output_weight())


def _detach_padding(pad: int, _: nn.Module, read: tuple[Tensor], embedded: Tensor) -> Tensor:
    """Embeddings without a gradient for padding tokens, also if they were sampled; `nn.Embedding` does so in
    transformers."""
    return torch.where((read[0] == pad)[..., None], embedded.detach(), embedded)


def _transformer_config(
    made: dict[str, Any], mesh: MegatronMesh, dtype: torch.dtype, checkpointing: bool
) -> TransformerConfig:
    recompute = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return TransformerConfig(
        **made,
        **(recompute if checkpointing else {}),
        tensor_model_parallel_size=mesh.spec.tensor,
        pipeline_model_parallel_size=mesh.spec.pipeline,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, also without experts
        calculate_per_token_loss=True,  # losses are not divided by the number of micro-batches
        perform_initialization=False,
        # Kernels of Apex and Transformer Engine.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )

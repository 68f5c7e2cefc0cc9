"""Loads a causal LM directly into shards, and gathers its weights by name.

The model is built without storage and sharded; each rank then reads its rows, tensor by tensor, so no rank ever has the
whole model: of experts that are stored separately, those that are in its shard. Buffers that are not stored (rotary
frequencies) are made as `from_pretrained` makes them. Quantized and pickled weights, and folders that lack some, are
loaded by `from_pretrained` into the CPU memory of every rank, and then sharded.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import groupby, islice
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel

from flowrl.backends.torch.conversions import Converted, conversions, targets_of
from flowrl.backends.torch.load import (
    load_causal_lm,
    loading,
    refuse_not_finite,
    skeleton,
    stored_tensors,
    without_use,
)
from flowrl.backends.torch.lora import Adapter, LoRA, base_state
from flowrl.backends.torch.passthrough import untied
from flowrl.backends.torch.probes import Attention
from flowrl.backends.torch.score.blocks import blocks_of
from flowrl.backends.torch.train.boxes import boxes, cut_of
from flowrl.backends.torch.train.expert_parallel import split_experts
from flowrl.backends.torch.train.mesh import Gathered, ProcessMesh, Sent
from flowrl.backends.torch.train.sharded import Sharded
from flowrl.backends.torch.train.tensor_parallel import split_layers
from flowrl.sync.buckets import in_rounds
from flowrl.sync.pieces import Piece, in_pieces
from flowrl.sync.weight_selection import rounded, rounds

_READ_BYTES = 16 << 20
"""The size of the rows that are read from a folder at a time."""


def load_sharded(
    mesh: ProcessMesh, folder: str, with_head: bool, attention: Attention | None, lora: LoRA | None, seed: int
) -> tuple[PreTrainedModel, Gathered, Adapter | None]:
    """The causal LM of a Hugging Face folder in float32, sharded over `mesh`, with access to its gathered weights, and
    its adapter, which is injected before sharding. Without the head, only ``lm.base_model`` is loaded and sharded."""
    assert isinstance(mesh, Sharded)
    with mesh.all_or_none(f"loading {folder!r}"), ExitStack() as files:
        with loading(folder):
            lm = without_storage(folder, attention)
            sources = None if lm is None else sources_of(lm, with_head, stored_tensors(folder, files))
        if lm is None or sources is None:
            lm = load_causal_lm(folder, with_head, attention)
        adapter = None if lora is None else Adapter(lm, lora, folder)
        if adapter is not None and sources is None:
            adapter.fill(seed)
        loaded = _loaded(lm, with_head)
        blocks = blocks_of(loaded)
        experts = [] if mesh.expert is None else split_experts(lm, mesh.expert, mesh.tensor)
        if mesh.tensor is not None:
            split_layers(lm, mesh.tensor, () if adapter is None else adapter.layers, experts)
        call = mesh.gathered(loaded, blocks, _ends(lm, loaded), experts)
        if sources is not None:
            _allocate(call.root, mesh.storage)
            with loading(folder):
                read_rows(base_state(lm), sources, mesh)
                if adapter is not None:
                    read_rows(lm.state_dict(keep_vars=True), adapter.initial(seed), mesh)
                refuse_not_finite(lm, folder)
    return lm, call, adapter


def _loaded(lm: PreTrainedModel, with_head: bool) -> PreTrainedModel:
    return lm if with_head else cast(PreTrainedModel, lm.base_model)


def _ends(lm: PreTrainedModel, loaded: PreTrainedModel) -> list[nn.Module]:
    """The embedding and the head, if they share no weights: they are the largest layers outside blocks, and each
    computes only once in a pass."""
    uses = Counter(id(parameter) for _, parameter in lm.named_parameters(remove_duplicate=False))
    inside = {id(module) for module in loaded.modules()}
    return [
        layer
        for layer in (lm.get_input_embeddings(), lm.get_output_embeddings())
        if isinstance(layer, nn.Embedding | nn.Linear)
        and id(layer) in inside
        and all(uses[id(parameter)] == 1 for parameter in layer.parameters())
    ]


def without_storage(folder: str, attention: Attention | None) -> PreTrainedModel | None:
    """The model with parameters on the meta device and real buffers, or None if its buffers cannot be made so."""
    lm = skeleton(folder, attention)
    if getattr(lm.config, "quantization_config", None) is not None:
        return None
    for module in lm.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            missing = float("nan") if buffer.is_floating_point() else 0
            setattr(module, name, torch.full_like(buffer, missing, device="cpu"))
    lm.initialize_weights()
    stored = lm.state_dict()
    if any(buffer.isnan().any() for name, buffer in lm.named_buffers() if name not in stored):
        return None
    if os.path.isfile(os.path.join(folder, "generation_config.json")):
        lm.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return lm


def sources_of(lm: PreTrainedModel, with_head: bool, stored: Mapping[str, Any]) -> dict[str, Any] | None:
    """The stored tensor of each weight, tied ones once; None if some are missing or have another shape, or others are
    stored, except those that transformers ignores on purpose."""
    targets = targets_of(lm, stored)
    renamed = {target.name: stored[name] for name, target in targets.items() if target.converter is None}
    stored = renamed | conversions(lm, targets, stored)
    state, loaded = (model.state_dict(keep_vars=True) for model in (lm, _loaded(lm, with_head)))
    names: dict[int, list[str]] = {id(tensor): [] for tensor in loaded.values()}
    for name, tensor in state.items():
        if id(tensor) in names:
            names[id(tensor)].append(name)
    sources = {}
    for tied in names.values():
        source = next((stored[name] for name in tied if name in stored), None)
        if source is None or tuple(source.get_shape()) != tuple(state[tied[0]].shape):
            return None
        sources[tied[0]] = source
    others: Any = SimpleNamespace(missing_keys=set(), unexpected_keys=stored.keys() - state)
    lm._adjust_missing_and_unexpected_keys(others)  # without those that transformers ignores, such as old buffers
    return None if without_use(others.unexpected_keys, with_head) else sources


def _allocate(root: nn.Module, storage: torch.device) -> None:
    """Allocate the shards of `root`; its buffers remain."""
    buffers = [(module, *named) for module in root.modules() for named in module.named_buffers(recurse=False)]
    root.to_empty(device=storage)
    for module, name, buffer in buffers:
        setattr(module, name, buffer)


def read_head(folder: str) -> dict[str, Tensor]:
    """``weight``, and perhaps ``bias``, of the head of a folder's causal LM, in float32 on the CPU. Reads nothing else
    if the folder stores the model's tensors one to one."""
    with loading(folder), ExitStack() as files:
        lm = without_storage(folder, None)
        sources = None if lm is None else sources_of(lm, True, stored_tensors(folder, files))
        if lm is None or sources is None:
            lm, sources = load_causal_lm(folder), None
        named = cast(nn.Module, lm.get_output_embeddings()).named_parameters()
        if sources is None:
            return {name: parameter.detach() for name, parameter in named}
        state = lm.state_dict(keep_vars=True)
        by_tensor = {id(state[name]): source for name, source in sources.items()}
        return {name: by_tensor[id(parameter)][:].float() for name, parameter in named}


@torch.no_grad()
def read_rows(state: Mapping[str, Tensor], sources: Mapping[str, Any], mesh: ProcessMesh) -> None:
    """Copy the rows of this rank into the tensors of `state`, from full tensors or slices of files, about `_READ_BYTES`
    at a time."""
    for name, source in sources.items():
        tensor = state[name]
        if isinstance(tensor, DTensor):
            step = max(1, _READ_BYTES * tensor.shape[0] // tensor.nbytes)
            if isinstance(source, Converted) and not source.by_rows:
                step = tensor.shape[0]
            cut = cut_of(tensor)
            for box in boxes(tensor.shape, cut, cast(Sharded, mesh).place_of(cut)):
                own = tensor.to_local()[box.local]
                (first, last), sides = (box.whole[0].start, box.whole[0].stop), box.whole[1:]
                for start in range(first, last, step):
                    end = min(start + step, last)
                    own[start - first : end - first].copy_(source[start:end][(slice(None), *sides)])
        else:
            tensor.copy_(source[:])


def gathered_weights(
    mesh: ProcessMesh,
    model: PreTrainedModel,
    bucket_bytes: int,
    adapter: Adapter | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model as `flowrl.sync.digest.named_weights` of an unsharded one, `rounded` to `dtype`; a
    collective.

    They are gathered in buckets (`Sharded.full`), and those that are stored in another form (experts) a layer at a
    time. Shards are rounded before they are gathered, except for adapted layers: an adapter is gathered first and
    merged into the float32 weights. Without `adapter`, a model that has one yields its base weights.
    """
    pieces, merge = _pieces(mesh, model, bucket_bytes, adapter, dtype)
    for converted, run in groupby(pieces, key=lambda one: one[0].converted):
        for together in ([one] for one in run) if converted else [list(run)]:
            shards = ((one.name, one.tensor.to(one.dtype)) for _, sent in together for one in sent)
            full = merge(mesh.full(shards, bucket_bytes))
            yield from _stored(model, [piece for piece, _ in together], full, dtype)


def dealt_weights(
    mesh: ProcessMesh,
    model: PreTrainedModel,
    bucket_bytes: int,
    adapter: Adapter | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """The weights of `gathered_weights`, each on one rank: the share of this one (`Position.share`), in rounds of at
    most `bucket_bytes` on each rank, or a larger piece. A collective: all ranks must read all rounds, each before the
    next one."""
    pieces, merge = _pieces(mesh, model, bucket_bytes, adapter, dtype)
    for shares in in_rounds([_nbytes(sent) for _, sent in pieces], mesh.spec.shares, bucket_bytes):
        full = merge(mesh.dealt([[one for number in share for one in pieces[number][1]] for share in shares]))
        yield _stored(model, [pieces[number][0] for number in shares[mesh.position.share]], full, dtype)
        del full  # which has what was gathered, before the next round is


def dealt_adapter(mesh: ProcessMesh, adapter: Adapter, bucket_bytes: int) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """The weights of an adapter, each on one rank, as `dealt_weights`."""
    sent = [Sent(name, tensor, tensor.dtype) for name, tensor in adapter.weights().items()]
    for shares in in_rounds([_nbytes([one]) for one in sent], mesh.spec.shares, bucket_bytes):
        yield mesh.dealt([[sent[number] for number in share] for share in shares])


def _pieces(
    mesh: ProcessMesh, model: PreTrainedModel, bucket_bytes: int, adapter: Adapter | None, dtype: torch.dtype | None
) -> tuple[list[tuple[Piece, list[Sent]]], Callable[[Iterator[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]]]:
    """The pieces of a model with their weights, and what merges the adapter into these; a collective."""
    named = untied(model)
    if adapter is None:
        return [(piece, _sent(piece, named, set(), dtype)) for piece in in_pieces(model, named)], lambda full: full
    low_rank = dict(mesh.full(adapter.weights().items(), bucket_bytes))
    adapted = {f"{layer}.weight" for layer in adapter.layers}
    pieces = [(piece, _sent(piece, named, adapted, dtype)) for piece in in_pieces(model, named)]
    return pieces, partial(adapter.merge, adapter=low_rank)


def _nbytes(sent: Iterable[Sent]) -> int:
    return sum(one.tensor.numel() * one.dtype.itemsize for one in sent)


def _sent(piece: Piece, named: Mapping[str, Tensor], adapted: set[str], dtype: torch.dtype | None) -> list[Sent]:
    """The weights of a piece: those that are sharded, and not `adapted`, are rounded before they are gathered if all
    that is stored for the piece is sent rounded."""
    narrows = dtype is not None and all(rounds(name, like, dtype) for name, like in piece.stored.items())

    def dtype_of(name: str, tensor: Tensor) -> torch.dtype:
        narrow = narrows and name not in adapted and isinstance(tensor, DTensor)
        return dtype if narrow and dtype is not None else tensor.dtype

    return [Sent(name, named[name], dtype_of(name, named[name])) for name in piece.names]


def _stored(
    model: PreTrainedModel, pieces: Iterable[Piece], full: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder from those of pieces of the model, in order, `rounded`."""
    for piece in pieces:
        yield from rounded(piece.convert(model, dict(islice(full, len(piece.names)))), dtype)

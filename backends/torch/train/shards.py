"""Loads a causal LM directly into shards, and gathers its weights by name.

The model is built without storage and sharded; each rank then reads its rows, tensor by tensor, so no rank ever has the
whole model. Buffers that are not stored (rotary frequencies) are made as `from_pretrained` makes them. Folders whose
tensors do not match the model's one to one (experts stored separately, quantized or pickled weights) are loaded by
`from_pretrained` into the CPU memory of every rank, and then sharded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from flowrl.backends.torch.load import (
    load_causal_lm,
    loading,
    quiet,
    refuse_not_finite,
    skeleton,
    stored_tensors,
    without_use,
)
from flowrl.backends.torch.lora import Adapter, LoRA, base_state
from flowrl.backends.torch.passthrough import stored_names, untied
from flowrl.backends.torch.probes import Attention
from flowrl.backends.torch.train.mesh import Gathered, ProcessMesh
from flowrl.backends.torch.train.sharded import Sharded


def load_sharded(
    mesh: ProcessMesh, folder: str, with_head: bool, attention: Attention | None, lora: LoRA | None, seed: int
) -> tuple[PreTrainedModel, Gathered, Adapter | None]:
    """The causal LM of a Hugging Face folder in float32, sharded over `mesh`, with access to its gathered weights, and
    its adapter, which is injected before sharding. Without the head, only ``lm.base_model`` is loaded and sharded."""
    assert isinstance(mesh, Sharded)
    with mesh.all_or_none(f"loading {folder!r}"), ExitStack() as files:
        with loading(folder):
            lm = _without_storage(folder, attention)
            sources = None if lm is None else _sources(lm, with_head, stored_tensors(folder, files))
        if lm is None or sources is None:
            lm = load_causal_lm(folder, with_head, attention)
        adapter = None if lora is None else Adapter(lm, lora, folder)
        if adapter is not None and sources is None:
            adapter.fill(seed)
        loaded = _loaded(lm, with_head)
        blocks = [module for module in loaded.modules() if type(module).__name__ in (lm._no_split_modules or ())]
        call = mesh.gathered(loaded, blocks)
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


def _without_storage(folder: str, attention: Attention | None) -> PreTrainedModel | None:
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


def _sources(lm: PreTrainedModel, with_head: bool, stored: Mapping[str, Any]) -> dict[str, Any] | None:
    """The stored tensor of each weight, tied ones once; None if some are stored converted or are missing, or others are
    stored, except those that transformers ignores on purpose."""
    targets = stored_names(lm, stored)
    stored = {target: stored[name] for name, target in targets.items() if target is not None}
    if len(stored) < len(targets):
        return None
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
        lm = _without_storage(folder, None)
        sources = None if lm is None else _sources(lm, True, stored_tensors(folder, files))
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
    """Copy the rows of this rank into the tensors of `state`, from full tensors or slices of files."""
    for name, source in sources.items():
        tensor = state[name]
        if isinstance(tensor, DTensor):
            first, last = cast(Sharded, mesh).rows(tensor.shape[0])
            if first < last:
                tensor.to_local().copy_(source[first:last])
        else:
            tensor.copy_(source[:])


def gathered_weights(
    mesh: ProcessMesh, model: PreTrainedModel, bucket_bytes: int, adapter: Adapter | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model as `flowrl.sync.digest.named_weights` of an unsharded one; a collective.

    They are gathered in buckets (`Sharded.full`). A model with fused weights (experts) is gathered completely first,
    because only gathered weights can be split. An adapter is gathered first and merged into the weights; without
    `adapter`, a model that has one yields its base weights.
    """
    named = untied(model)
    blank = {name: torch.empty(tensor.shape, device="meta") for name, tensor in named.items()}
    written = {id(tensor): name for name, tensor in revert_weight_conversion(model, blank).items()}
    if len(written) == len(blank) and all(id(tensor) in written for tensor in blank.values()):  # at most renamed
        names = {name: written[id(tensor)] for name, tensor in blank.items()}
        ordered = {name: named[name] for name in sorted(named, key=names.__getitem__)}
        yield from ((names[name], tensor) for name, tensor in _merged(mesh, ordered, bucket_bytes, adapter))
    else:
        yield from sorted(revert_weight_conversion(model, dict(_merged(mesh, named, bucket_bytes, adapter))).items())


def save_gathered(
    mesh: ProcessMesh, model: PreTrainedModel, folder: str, bucket_bytes: int, adapter: Adapter | None = None
) -> None:
    """`PreTrainedModel.save_pretrained` of `gathered_weights`; a collective. Rank 0 writes, with all weights in CPU
    memory."""
    first = mesh.position.leads
    gathered = _merged(mesh, untied(model), bucket_bytes, adapter)
    weights = {name: tensor.cpu() for name, tensor in gathered if first}
    with mesh.all_or_none("save_pretrained"):
        if first:
            with quiet():
                model.save_pretrained(folder, state_dict=weights)


def _merged(
    mesh: ProcessMesh, named: Mapping[str, Tensor], bucket_bytes: int, adapter: Adapter | None
) -> Iterator[tuple[str, Tensor]]:
    base = mesh.full(named.items(), bucket_bytes)
    return base if adapter is None else adapter.merge(base, dict(mesh.full(adapter.weights().items(), bucket_bytes)))

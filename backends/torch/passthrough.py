"""The tensors of a model folder that its causal LM does not load, such as a vision tower or layers for multi-token
prediction: a saved folder gets them unchanged, under their names."""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowrl.backends.torch.conversions import targets_of
from flowrl.backends.torch.load import INDEX, loading, stored_files
from flowrl.backends.torch.lora import base_state

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files by which a multimodal model reads images, audio and video."""


@dataclass(frozen=True)
class Passthrough:
    """What a folder stores besides the weights of its causal LM.

    Args:
        folder: the folder that the LM was loaded from.
        unloaded: by file, the tensors that the LM does not have.
        tied: further names of tied weights, each with the name that `save_pretrained` writes.
        config: ``config.json`` of a multimodal model, of which the LM is the language model; else None.
    """

    folder: str
    unloaded: Mapping[str, Sequence[str]]
    tied: Mapping[str, str]
    config: Mapping[str, Any] | None

    @staticmethod
    def of(lm: PreTrainedModel, folder: str) -> Passthrough:
        """What `folder` stores besides `lm`, which was loaded from it; reads no tensor."""
        from transformers.core_model_loading import revert_weight_conversion

        with loading(folder), ExitStack() as files:
            stored = {name: file for file, opened in stored_files(folder, files) for name in opened.keys()}  # noqa: SIM118
            config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        state = base_state(lm)
        first = {id(state[name]): name for name in untied(lm)}
        unloaded, tied = defaultdict(list), {}
        for name, (target, converter, _) in targets_of(lm, stored).items():
            if target not in state:
                unloaded[stored[name]].append(name)
            elif converter is None and first[id(state[target])] != target:
                (tied[name],) = revert_weight_conversion(lm, {first[id(state[target])]: torch.empty(0, device="meta")})
        return Passthrough(folder, unloaded, tied, config if config["model_type"] != lm.config.model_type else None)

    @contextmanager
    def completing(self, folder: str) -> Iterator[None]:
        """Add the rest to `folder`, to which the block saves the LM; `folder` may be the one that it was loaded from.

        Unloaded tensors are copied bit for bit, with one file of them in memory at a time. The configuration of a
        multimodal model gets the dtype of the saved weights.
        """
        drafts = [os.path.join(folder, f"unloaded-{i}.safetensors") for i in range(len(self.unloaded))]
        os.makedirs(folder, exist_ok=True)
        with loading(self.folder), ExitStack() as files:
            opened = dict(stored_files(self.folder, files)) if drafts else {}
            for draft, (file, names) in zip(drafts, self.unloaded.items(), strict=True):
                _save({name: opened[file].get_tensor(name) for name in names}, draft)
        yield
        if self.tied:
            drafts.append(os.path.join(folder, "tied.safetensors"))
            with ExitStack() as files:
                saved = {name: file for _, file in stored_files(folder, files) for name in file.keys()}  # noqa: SIM118
                _save({name: saved[first].get_tensor(first) for name, first in self.tied.items()}, drafts[-1])
        if drafts:
            _index(folder, drafts)
        if self.config is not None:
            self._configure(folder)

    def _configure(self, folder: str) -> None:
        """Write the files of the multimodal model in place of those of its language model."""
        path = Path(folder, "config.json")
        dtype = json.loads(path.read_text(encoding="utf-8"))["dtype"]
        parts = {
            name: part | {"dtype": dtype} if name == "text_config" else part
            for name, part in (self.config or {}).items()
        }
        path.write_text(json.dumps({**parts, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")
        for name in _PROCESSORS:
            source, copy = Path(self.folder, name), Path(folder, name)
            if source.is_file() and not (copy.exists() and copy.samefile(source)):
                shutil.copyfile(source, copy)


def untied(model: PreTrainedModel) -> dict[str, Tensor]:
    """The base weights, sharded as they are, under the names of the state dict; tied ones once."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = base_state(model)
    # Tied weights are detected by their storage, which shards hide: use stand-ins with storage.
    stand_ins: dict[int, Tensor] = {}
    names = remove_tied_weights_from_state_dict(
        {name: stand_ins.setdefault(id(tensor), torch.empty(1)) for name, tensor in state.items()}, model
    )
    return {name: state[name].detach() for name in names}


def _save(tensors: dict[str, Tensor], path: str) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


def _index(folder: str, drafts: Sequence[str]) -> None:
    """Make `drafts` shards of the model in `folder`, with an index."""
    with ExitStack() as files:
        found = [os.path.join(folder, file) for file, _ in stored_files(folder, files)]
    weight_map: dict[str, str] = {}
    size = 0
    for number, path in enumerate([*found, *drafts], 1):
        name = f"model-{number:05d}-of-{len(found) + len(drafts):05d}.safetensors"
        with safe_open(path, framework="pt") as file:
            weight_map |= dict.fromkeys(file.keys(), name)
        with open(path, "rb") as content:
            size += os.path.getsize(path) - 8 - int.from_bytes(content.read(8), "little")
        os.replace(path, os.path.join(folder, name))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    Path(folder, INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

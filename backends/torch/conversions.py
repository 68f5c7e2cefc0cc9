"""Read the tensors of a model folder that transformers converts as it loads them, such as experts: a tensor each in the
folder, and one tensor in memory. Rows of a converted tensor can be read without the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from flowrl.backends.torch.lora import base_state

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter


class Target(NamedTuple):
    """What a stored tensor becomes.

    Args:
        name: in the state dict of the model, of the first tensor if it becomes several.
        converter: None if the tensor is only renamed.
        pattern: of the stored names of `converter`, the one that the tensor has.
    """

    name: str
    converter: WeightConverter | None
    pattern: str | None


def targets_of(lm: PreTrainedModel, names: Iterable[str]) -> dict[str, Target]:
    """The target of each tensor in a folder, as `from_pretrained` maps it.

    As after `from_pretrained`, `save_pretrained` and `flowrl.sync.digest.named_weights` then use the folder's names.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(lm)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    state, prefix = base_state(lm), lm.base_model_prefix
    targets = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        targets[name] = Target(target, None if pattern is None else by_pattern[pattern], pattern)
    lm._weight_conversions = cast(Any, [one for one in conversions if one.was_used()])
    return targets


class _Conversion(NamedTuple):
    """Stored tensors that become one or several of a model together.

    Args:
        first: the name under which transformers collects them.
        stored: their names, and slices of them, by the pattern of their names.
    """

    lm: PreTrainedModel
    first: str
    converter: WeightConverter
    stored: Mapping[str, Sequence[tuple[str, Any]]]

    def run(self) -> dict[str, Tensor]:
        """The tensors of the model by name."""
        converter = deepcopy(self.converter)
        for pattern, sources in self.stored.items():
            for name, source in sources:
                # A function, which transformers calls when it needs the tensor.
                converter.add_tensor(self.first, name, pattern, cast(Any, partial(source.__getitem__, slice(None))))
        found: dict[str, Any] = converter.convert(self.first, model=self.lm, config=self.lm.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in found.items()}

    def of(self, change: Callable[[Sequence[tuple[str, Any]]], Sequence[tuple[str, Any]]]) -> _Conversion:
        """That of other sources of each pattern."""
        return self._replace(stored={pattern: change(sources) for pattern, sources in self.stored.items()})


class Converted:
    """A tensor of a model that is converted from those of a folder as it is read; like a slice of safetensors."""

    def __init__(self, name: str, shape: tuple[int, ...], conversion: _Conversion) -> None:
        self._name, self._shape, self._conversion = name, shape, conversion

    @property
    def by_rows(self) -> bool:
        """Whether each row comes from stored tensors of its own: they are stacked, and joined along other axes."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        stack, *rest = self._conversion.converter.operations
        stacks = isinstance(stack, MergeModulelist) and stack.dim == 0
        return stacks and all(isinstance(one, Concatenate) and one.dim > 0 for one in rest)

    def get_shape(self) -> tuple[int, ...]:
        """The shape of the converted tensor."""
        return self._shape

    def __getitem__(self, rows: slice) -> Tensor:
        """Some rows; reads only the tensors that they come from if the conversion is `by_rows`, else all of them."""
        if self.by_rows:
            return self._conversion.of(lambda sources: sources[rows]).run()[self._name]
        return self._conversion.run()[self._name][rows]


def conversions(lm: PreTrainedModel, targets: Mapping[str, Target], stored: Mapping[str, Any]) -> dict[str, Converted]:
    """The tensors that are converted from slices of stored ones, by name; a name may be unknown to the model."""
    groups: dict[str, _Conversion] = {}
    for name, (first, converter, pattern) in targets.items():
        if converter is not None and pattern is not None:
            group = groups.setdefault(first, _Conversion(lm, first, converter, defaultdict(list)))
            cast(Any, group.stored)[pattern].append((name, stored[name]))
    return {
        name: Converted(name, tuple(tensor.shape), group)
        for group in groups.values()
        for name, tensor in group.of(_blank).run().items()
    }


def _blank(sources: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Tensors of the same shapes on the meta device."""
    return [(name, torch.empty(tuple(source.get_shape()), device="meta")) for name, source in sources]

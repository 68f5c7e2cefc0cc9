"""`LoRA`: adapters of the linear layers of a causal LM with frozen weights (Hu et al. 2021, arXiv:2106.09685).

A layer ``y = W x + b`` becomes ``y = W x + b + (alpha / r) B A x`` with ``A`` of ``[r, in]`` and ``B`` of ``[out, r]``
(section 4.1), by the layers of PEFT. ``A`` is initialized as `torch.nn.Linear` initializes its weights and ``B`` is
zero, so a new adapter changes nothing. PEFT and transformers are imported when an adapter is made.
"""

from __future__ import annotations

import importlib.util
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
from pydantic import Field, model_validator
from safetensors.torch import save_file
from torch import Tensor, nn

from flowrl.data.keys import Key
from flowrl.errors import BindError
from flowrl.spec import Spec

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

_HOLDER = "lm"

PREFIX = "base_model.model."
"""What PEFT writes before the names of adapter weights in a file."""


class LoRA(Spec):
    """Low-rank adapters, without dropout, since recomputed log-probs must equal those that the update sees.

    Args:
        r: the rank.
        alpha: the adapter's output is scaled by ``alpha / r``.
        targets: names of linear layers, such as ``("q_proj", "v_proj")``; each selects all layers whose name ends in
            it. ``"all-linear"`` selects all except the LM head, projections whose weights the kernels of a state-space
            mixer (Mamba) read directly, and layers that compute more than a product (routers).
    """

    r: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0)
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"

    @model_validator(mode="after")
    def _names_some(self) -> Self:
        if not self.targets:
            raise ValueError('targets=() adapts no layer; name some, or pass "all-linear"')
        return self

    def over(self, digest: str) -> str:
        """Identifies the frozen weights, given their digest, and the scaling of an adapter with these settings."""
        return f"base weights {digest}, scaled by {self.alpha / self.r}"


def require_peft() -> None:
    """Raise `BindError` if PEFT is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise BindError(
            "LoRA(...) needs the package peft, which is not installed. Run pip install 'flowrl[lora]'.",
            code="package.not-installed",
            package="peft",
            extra="lora",
        )


class Adapter:
    """The adapter of a causal LM, injected into it here; the LM stays the same object, and its weights are frozen.

    The LM must not be sharded yet. The adapter's own weights are on the meta device until `fill`, or until the caller
    gives them storage.
    """

    def __init__(self, lm: PreTrainedModel, lora: LoRA, folder: str) -> None:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        targets = _targets(lm, lora, folder)
        paths = [f"{_HOLDER}.{target}" for target in targets]
        config = LoraConfig(r=lora.r, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=paths)  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # PEFT finds the right value for each layer
            # In a holder, since PEFT would mistake the names of some architectures for those of transformers 4.
            inject_adapter_in_model(config, nn.ModuleDict({_HOLDER: lm}), low_cpu_mem_usage=True)
        self._layers: dict[str, Any] = {n: layer for n, layer in lm.named_modules() if isinstance(layer, LoraLayer)}
        if sorted(self._layers) != sorted(targets):
            raise BindError(
                f"PEFT adapts other layers of {type(lm).__name__} in {folder!r} than LoRA(targets=...) names; they "
                f"differ in {', '.join(sorted(self._layers.keys() ^ set(targets))[:3])}. Choose other targets.",
                code="lora.unsupported",
                path=folder,
                architecture=type(lm).__name__,
            )
        self._lm, self._scaling = lm, lora.alpha / lora.r
        adapted = {id(parameter) for parameter in self._parameters().values()}
        for parameter in lm.parameters():
            parameter.requires_grad_(id(parameter) in adapted)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """The adapter's weights under the names that they have in the LM."""
        return {
            f"{name}.{part}.default.weight": getattr(layer, part)["default"].weight
            for name, layer in self._layers.items()
            for part in ("lora_A", "lora_B")
        }

    def initial(self, seed: int) -> dict[str, Tensor]:
        """Initial float32 weights by their names in the LM, unsharded; each depends on its name and `seed` only."""
        initial = {}
        for name, parameter in self._parameters().items():
            initial[name] = torch.zeros(parameter.shape)
            if ".lora_A." in name:
                generator = Key.of(seed).derive("lora", name).generator()
                nn.init.kaiming_uniform_(initial[name], a=math.sqrt(5), generator=generator)
        return initial

    def fill(self, seed: int) -> None:
        """Set the adapter to its initial weights, on the CPU."""
        self._lm.load_state_dict(self.initial(seed), strict=False, assign=True)

    def weights(self) -> dict[str, Tensor]:
        """The live weights, sharded as they are, under the names that PEFT writes, sorted."""
        named = {PREFIX + name.replace(".default.", "."): p.detach() for name, p in self._parameters().items()}
        return dict(sorted(named.items()))

    def merge(self, base: Iterable[tuple[str, Tensor]], adapter: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Weights of the LM under its own names, in the order of `base`: ``W + (alpha / r) B A`` for adapted layers.

        Both arguments are unsharded; `adapter` is what `weights` returns.
        """
        from transformers.pytorch_utils import Conv1D

        for name, weight in base:
            layer = name.removesuffix(".weight")
            if name.endswith(".weight") and layer in self._layers:
                a, b = (adapter[f"{PREFIX}{layer}.{part}.weight"] for part in ("lora_A", "lora_B"))
                product = self._scaling * (b @ a)
                weight = weight + (product.T if isinstance(self._layers[layer].get_base_layer(), Conv1D) else product)
            yield name, weight

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable the adapter in the block."""
        try:
            for layer in self._layers.values():
                layer.enable_adapters(False)
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)


def adapted_modules(names: Iterable[str]) -> list[str]:
    """The names of the layers, such as ``q_proj``, that the weights of an adapter belong to."""
    return sorted({name.split(".")[-3] for name in names})


def adapter_config(names: Iterable[str], lora: LoRA) -> dict[str, Any]:
    """The ``adapter_config.json`` that PEFT writes with the weights of an adapter."""
    return {
        "peft_type": "LORA",
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "target_modules": adapted_modules(names),
        "bias": "none",
    }


def save_adapter(folder: str, weights: Mapping[str, Tensor], lora: LoRA) -> None:
    """Write an adapter in PEFT's format to an empty folder; `weights` are from `Adapter.weights`, unsharded."""
    Path(folder, "adapter_config.json").write_text(json.dumps(adapter_config(weights, lora)))
    tensors = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, Path(folder, "adapter_model.safetensors"))


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model without its adapter, under the names that it has without one; tensors are live."""
    state = model.state_dict(keep_vars=True)
    return {name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if ".lora_" not in name}


def _targets(lm: PreTrainedModel, lora: LoRA, folder: str) -> list[str]:
    """The full names of the layers to adapt."""
    linear = _linear(lm)
    if not linear:
        raise BindError(
            f"{type(lm).__name__} in {folder!r} has no linear layer that LoRA(...) can adapt. Train all weights: leave "
            f"`lora` out.",
            code="lora.unsupported",
            path=folder,
            architecture=type(lm).__name__,
        )
    if lora.targets == "all-linear":
        return linear
    found = {target: [n for n in linear if n == target or n.endswith(f".{target}")] for target in lora.targets}
    if missing := [target for target, names in found.items() if not names]:
        there = sorted({name.rpartition(".")[2] for name in linear})
        raise BindError(
            f"LoRA(targets=...) names {', '.join(map(repr, missing))}, but {type(lm).__name__} in {folder!r} has no "
            f"linear layer of that name that can be adapted (embeddings, the LM head, routers and projections that the "
            f"kernels of a state-space mixer read directly cannot be). Name some of {', '.join(there)}, or pass "
            f'"all-linear".',
            code="lora.unknown-target",
            path=folder,
            targets=missing,
            known=there,
        )
    return sorted({name for names in found.values() for name in names})


def _linear(lm: PreTrainedModel) -> list[str]:
    """The full names of the layers that can be adapted."""
    from transformers.pytorch_utils import Conv1D

    head = lm.get_output_embeddings()
    mixers = [name for name, module in lm.named_modules() if hasattr(module, "A_log") and hasattr(module, "D")]
    excluded = {f"{mixer}.{layer}" for mixer in mixers for layer in ("x_proj", "dt_proj", "out_proj")}
    products: dict[type, bool] = {Conv1D: True, nn.Linear: True}
    found = []
    for name, module in lm.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head and name not in excluded:
            kind = type(module)
            if kind not in products:
                products[kind] = _is_product(cast(nn.Linear, module))
            if products[kind]:
                found.append(name)
    return found


def _is_product(layer: nn.Linear) -> bool:
    """Whether a subclass of a linear layer computes a plain product; tested with made-up weights."""
    weights = {name: torch.linspace(-1, 1, p.numel()).view(p.shape) for name, p in layer.named_parameters()}
    x = torch.linspace(1, -0.5, layer.in_features)[None]
    try:
        found = torch.func.functional_call(layer, weights, (x,))
    except Exception:  # its input is not a tensor of its width
        return False
    truth = nn.functional.linear(x, weights["weight"], weights.get("bias"))
    return isinstance(found, Tensor) and found.shape == truth.shape and torch.allclose(found, truth, rtol=1e-3)

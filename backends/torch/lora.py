"""`LoRA`: adapters of the linear layers of a causal LM with frozen weights (Hu et al. 2021, arXiv:2106.09685).

A layer ``y = W x + b`` becomes ``y = W x + b + (alpha / r) B A x`` with ``A`` of ``[r, in]`` and ``B`` of ``[out, r]``
(section 4.1), by the layers of PEFT. ``A`` is initialized as `torch.nn.Linear` initializes its weights and ``B`` is
zero, so a new adapter changes nothing. Modules that are trained in full (``modules_to_save``) keep their place in the
model; a copy of their weights in the folder stands in for them while the adapter is off. PEFT and transformers are
imported when an adapter is made.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from flowrl.backends.torch.load import Folder
from flowrl.data.keys import Key
from flowrl.errors import BindError
from flowrl.hub.models import adapter, adapter_metadata
from flowrl.hub.repositories import Commits, is_commit, is_repository, refuse_revision, resolve
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
        modules_to_save: names of modules that are trained in full and are part of the adapter, such as ``("lm_head",)``
            or ``("embed_tokens", "lm_head")``; each selects as in `targets`.
        adapter_path: the adapter that training starts from, in PEFT's format: a folder, or the name of a repository of
            the Hub. It must have been trained with the settings above. None starts from a new one. Engines that
            generate ignore it, since a sync brings their adapter.
        revision: a branch, tag or commit of the adapter's repository; None is the default branch.
    """

    r: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0)
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    modules_to_save: tuple[str, ...] = ()
    adapter_path: Folder | None = None
    revision: str | None = None

    @model_validator(mode="after")
    def _names_some(self) -> Self:
        if not self.targets:
            raise ValueError('targets=() adapts no layer; name some, or pass "all-linear"')
        return self

    def over(self, digest: str) -> str:
        """Identifies the frozen weights, given their digest, and the scaling of an adapter with these settings."""
        return f"base weights {digest}, scaled by {self.alpha / self.r}"

    @property
    def starts_from(self) -> str | None:
        """``org/name@commit`` or the folder of the adapter that training starts from; None if it is a new one."""
        if self.adapter_path is not None and is_commit(self.revision) and is_repository(self.adapter_path):
            return f"{self.adapter_path}@{self.revision}"
        return self.adapter_path

    def pinned(self, commits: Commits) -> Self:
        """With the commit of the adapter's repository as `revision`; its configuration is then on this machine.

        Raises:
            HubError: see `flowrl.hub.models.adapter_metadata`; or a folder is given a revision.
        """
        if self.adapter_path is None or not is_repository(self.adapter_path):
            refuse_revision(self.adapter_path, self.revision)
            return self
        commit = commits.resolve(self.adapter_path, self.revision)
        adapter_metadata(self.adapter_path, commit)
        return dataclasses.replace(cast(Any, self), revision=commit)  # type: ignore[no-any-return]

    def local(self) -> Self:
        """With the folder of the files of the adapter's repository.

        Raises:
            HubError: see `flowrl.hub.models.adapter`.
        """
        if self.adapter_path is None or not is_repository(self.adapter_path):
            return self
        folder = adapter(self.adapter_path, resolve(self.adapter_path, self.revision))
        return dataclasses.replace(cast(Any, self), adapter_path=str(folder), revision=None)  # type: ignore[no-any-return]


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
        self.modules = _modules_to_save(lm, lora, targets, folder)
        """The full names of `modules_to_save`, sorted."""
        saved = (f"{m}.{p}" for m in self.modules for p, _ in lm.get_submodule(m).named_parameters())
        self.saved = sorted({*saved})
        """The names of their parameters, sorted."""
        self._base: dict[str, Tensor] = {}  # of `modules_to_save`: this rank's weights while they are not in use
        paths = [f"{_HOLDER}.{target}" for target in targets]
        config = LoraConfig(r=lora.r, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=paths)  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # PEFT finds the right value for each layer
            # In a holder, since PEFT would mistake the names of some architectures for those of transformers 4.
            inject_adapter_in_model(config, nn.ModuleDict({_HOLDER: lm}), low_cpu_mem_usage=True)
        self.layers: dict[str, Any] = {n: layer for n, layer in lm.named_modules() if isinstance(layer, LoraLayer)}
        """The adapted layers, PEFT's, by their full names."""
        if sorted(self.layers) != sorted(targets):
            raise BindError(
                f"PEFT adapts other layers of {type(lm).__name__} in {folder!r} than LoRA(targets=...) names; they "
                f"differ in {', '.join(sorted(self.layers.keys() ^ set(targets))[:3])}. Choose other targets.",
                code="lora.unsupported",
                path=folder,
                architecture=type(lm).__name__,
            )
        self.lm, self.lora, self._scaling = lm, lora, lora.alpha / lora.r
        trained = {id(parameter) for parameter in self.parameters().values()}
        for parameter in lm.parameters():
            parameter.requires_grad_(id(parameter) in trained)

    def _low_rank(self) -> dict[str, nn.Parameter]:
        """The low-rank weights under the names that they have in the LM."""
        return {
            f"{name}.{part}.default.weight": getattr(layer, part)["default"].weight
            for name, layer in self.layers.items()
            for part in ("lora_A", "lora_B")
        }

    def parameters(self) -> dict[str, nn.Parameter]:
        """The adapter's weights under the names that they have in the LM."""
        return self._low_rank() | {name: self.lm.get_parameter(name) for name in self.saved}

    def initial(self, seed: int) -> dict[str, Tensor]:
        """Initial float32 low-rank weights by their names in the LM, unsharded; each depends on its name and `seed`
        only."""
        initial = {}
        for name, parameter in self._low_rank().items():
            initial[name] = torch.zeros(parameter.shape)
            if ".lora_A." in name:
                generator = Key.of(seed).derive("lora", name).generator()
                nn.init.kaiming_uniform_(initial[name], a=math.sqrt(5), generator=generator)
        return initial

    def fill(self, seed: int) -> None:
        """Set the low-rank weights to their initial values, on the CPU."""
        self.lm.load_state_dict(self.initial(seed), strict=False, assign=True)

    def keep_base(self) -> None:
        """Copy the weights of `modules_to_save` to the CPU, for `off`: those of the folder, which were just loaded."""
        self._base = {name: _own(self.lm.get_parameter(name)).cpu().clone() for name in self.saved}

    def weights(self) -> dict[str, Tensor]:
        """The live weights, sharded as they are, under the names that PEFT writes, sorted."""
        named = {in_file(name): p.detach() for name, p in self.parameters().items()}
        return dict(sorted(named.items()))

    def merge(self, base: Iterable[tuple[str, Tensor]], adapter: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Weights of the LM under its own names, in the order of `base`: ``W + (alpha / r) B A`` for adapted layers.
        Those of `modules_to_save` are in `base` as trained.

        Both arguments are unsharded; `adapter` is what `weights` returns.
        """
        from transformers.pytorch_utils import Conv1D

        for name, weight in base:
            layer = name.removesuffix(".weight")
            if name.endswith(".weight") and layer in self.layers:
                a, b = (adapter[f"{PREFIX}{layer}.{part}.weight"] for part in ("lora_A", "lora_B"))
                product = self._scaling * (b @ a)
                weight = weight + (product.T if isinstance(self.layers[layer].get_base_layer(), Conv1D) else product)
            yield name, weight

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable the adapter in the block."""
        self._swap()
        try:
            for layer in self.layers.values():
                layer.enable_adapters(False)
            yield
        finally:
            self._swap()
            for layer in self.layers.values():
                layer.enable_adapters(True)

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange the weights of `modules_to_save` with those in `_base`."""
        for name, other in self._base.items():
            place = _own(self.lm.get_parameter(name))
            self._base[name] = place.cpu().clone()
            place.copy_(other)


def in_file(name: str) -> str:
    """The name that PEFT writes for a weight of an adapter, given its name in the LM."""
    return PREFIX + name.replace(".default.", ".")


def _own(parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter, live; the parameter itself if it is not sharded."""
    shard: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return shard.detach()


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


def _modules_to_save(lm: PreTrainedModel, lora: LoRA, targets: list[str], folder: str) -> list[str]:
    """The full names of `modules_to_save`, sorted."""
    modules = {name: module for name, module in lm.named_modules() if name and any(True for _ in module.parameters())}
    names = {m: [n for n in modules if n == m or n.endswith(f".{m}")] for m in lora.modules_to_save}
    if missing := [name for name, found in names.items() if not found]:
        there = sorted({name.rpartition(".")[2] for name in modules} - set(map(str, range(10_000))))
        raise BindError(
            f"LoRA(modules_to_save=...) names {', '.join(map(repr, missing))}, but {type(lm).__name__} in {folder!r} "
            f"has no module of that name with weights. Name some of {', '.join(there)}.",
            code="lora.unknown-target",
            path=folder,
            targets=missing,
            known=there,
        )
    selected = {name for found in names.values() for name in found}
    both = [target for target in targets if any(target == name or target.startswith(f"{name}.") for name in selected)]
    uses: dict[int, int] = {}
    for _, parameter in lm.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    tied = [name for name in selected if any(uses[id(p)] > 1 for p in modules[name].parameters())]
    if both or tied:
        why = f"{both[0]} is also one of its targets" if both else f"{tied[0]} shares its weights with another module"
        fix = "Choose other targets" if both else "Train all weights: leave `lora` out"
        raise BindError(
            f"LoRA(modules_to_save=...) trains modules of {type(lm).__name__} in {folder!r} in full, but {why}. {fix}, "
            f"or leave that module out of modules_to_save.",
            code="lora.unsupported-module",
            path=folder,
            modules=both or sorted(tied),
        )
    return sorted(selected)


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

"""Probes: tests of a model on a few tokens before its first use.

Architectures differ in attention, padding, heads and training mode, and few declare it. Each probe costs one or two
forward passes over about ten tokens.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from flowrl.backends.torch.score.blocks import Checkpointing, checkpoint_blocks
from flowrl.errors import BindError

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

Attention = Literal["sdpa", "eager"]
"""Torch's fused `scaled_dot_product_attention`, or the plain products of an architecture's own code."""

Inputs = dict[str, Any]

LENGTH = 8


def tolerance(dtype: torch.dtype) -> float:
    """The largest `relative_error` by rounding alone; float32 is coarse too if torch multiplies in TF32 or bfloat16."""
    return 1e-3 if dtype == torch.float32 and _multiplies_in_float32() else 0.2


def _multiplies_in_float32() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # it was set by `torch.backends...fp32_precision`
        return False


def relative_error(found: Tensor, truth: Tensor) -> float:
    """The norm of the difference, relative to the norm of `truth`."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def probe_inputs(lm: PreTrainedModel, device: torch.device, rows: int = 1) -> Inputs:
    """Tokens ``[rows LENGTH]`` of any vocabulary, with the model's other inputs."""
    size = cast(nn.Embedding, lm.get_input_embeddings()).num_embeddings
    ids = torch.arange(rows * LENGTH, device=device).view(rows, LENGTH) % size
    positions = torch.arange(LENGTH, device=device).expand(rows, -1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": positions,
        "use_cache": False,
    }


def padded(probe: Inputs, left: int, right: int) -> Inputs:
    """`probe` with padding on both sides."""
    wider = {name: nn.functional.pad(tensor, (left, right)) for name, tensor in probe.items() if name != "use_cache"}
    return {**wider, "use_cache": False}


def known(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs that are parameters of a model; not all have position ids."""
    names = inspect.signature(model.forward).parameters
    return {name: value for name, value in inputs.items() if name in names}


def select_attention(probe: Inputs, lm: PreTrainedModel, named: Attention | None, folder: str, bound: float) -> None:
    """Set the attention of `lm` to an implementation that computes what its architecture defines.

    Fused attention ignores arguments that it does not have, such as the soft cap of Gemma 2, which may show only once
    weights have grown. So it must have every argument of the architecture's plain attention, and give the same numbers.

    Args:
        named: the setting; None is fused attention if it is correct, else plain. If it is fused attention and that is
            not correct, raises `BindError`.
    """
    fused = lm.config._attn_implementation
    if fused == "eager":
        return
    inputs = known(lm, padded(probe, 2, 1))
    kept = inputs["attention_mask"].bool()
    with _ignored_by(fused) as ignored:
        found = lm(**inputs)[0][kept]
    lm.set_attn_implementation("eager")
    if lm.config._attn_implementation != "eager":  # the attention of this architecture cannot change
        return
    distance = relative_error(found, lm(**inputs)[0][kept])
    if not ignored and distance <= bound:
        lm.set_attn_implementation(fused)
    elif named == fused:
        names = ", ".join(sorted(ignored))
        why = f"ignores its {names}" if ignored else f"differs by {distance:.2g} from its plain attention"
        raise BindError(
            f"{type(lm).__name__} in {folder!r} does not support attention={named!r}, which {why}. Bind it with "
            f'attention="eager", or leave `attention` out.',
            code="model.attention",
            path=folder,
            architecture=type(lm).__name__,
            attention=named,
        )


@contextmanager
def _ignored_by(fused: str) -> Iterator[set[str]]:
    """In the block, the arguments of layers that plain attention has and fused attention ignores."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend, ignored = ALL_ATTENTION_FUNCTIONS[fused], set[str]()
    accepted = inspect.signature(attend).parameters

    def noting(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = getattr(sys.modules[type(layer).__module__], "eager_attention_forward", attend)
        needed = inspect.signature(plain).parameters
        ignored.update(n for n, value in kwargs.items() if value is not None and n in needed and n not in accepted)
        return attend(layer, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[fused] = noting
    try:
        yield ignored
    finally:
        del ALL_ATTENTION_FUNCTIONS[fused]


def refuse_blind_to_padding(probe: Inputs, model: PreTrainedModel, folder: str, bound: float) -> None:
    """Raise `BindError` if padding changes a row's outputs, or they are NaN or infinite without padding."""
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        raise BindError(
            f"{type(model).__name__} in {folder!r} has no parameter attention_mask, so it cannot distinguish padding "
            f"from tokens. Bind a model of another architecture.",
            code="model.padding",
            path=folder,
            architecture=type(model).__name__,
        )
    alone = model(**known(model, probe))[0]
    distance = relative_error(model(**known(model, padded(probe, 3, 2)))[0][:, 3:-2], alone)
    if not alone.isfinite().all():
        raise BindError(
            f"{type(model).__name__} in {folder!r} computes NaN or infinity for plain tokens, although its weights are "
            f"finite; its config.json or its weights are not those of its training. Use another copy of the model.",
            code="model.not-finite",
            path=folder,
            architecture=type(model).__name__,
        )
    if not distance <= bound:
        raise BindError(
            f"{type(model).__name__} in {folder!r} cannot distinguish padding from tokens: with padding its outputs "
            f"differ by {distance:.2g} from those of the row alone (expected at most {bound:g}), so batches would be "
            f"wrong. Bind a model of another architecture.",
            code="model.padding",
            path=folder,
            architecture=type(model).__name__,
            distance=distance,
        )


class AfterHead(NamedTuple):
    """The function between a head's output and the logits: ``cap * tanh(scale * x / cap)``.

    Args:
        scale: of Granite and Cohere; 1 for most models.
        cap: of Gemma 2 and later; None is no cap.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        x = x if self.scale == 1.0 else x * self.scale
        return x if self.cap is None else torch.tanh(x / self.cap) * self.cap

    def slope(self, output: Tensor) -> Tensor | float:
        """Its derivative where it returned `output`."""
        return self.scale if self.cap is None else (1 - (output / self.cap).square()) * self.scale


def after_head(probe: Inputs, lm: PreTrainedModel) -> AfterHead | None:
    """The function from ``head(base(x).last_hidden_state)`` to ``lm(x).logits``; None if it is not a scale and a cap,
    or the head has another input.

    A hook replaces the head's output by a wide range, so that a cap shows even if the model's own logits are small.
    """
    head, base = lm.get_output_embeddings(), lm.base_model
    if head is None or base is lm:
        return None
    seen: list[tuple[Tensor, Tensor]] = []

    def widen(module: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        seen.append((args[0], torch.linspace(-100, 100, logits.numel(), device=logits.device).view_as(logits)))
        return seen[-1][1]

    handle = head.register_forward_hook(widen)
    try:
        logits = lm(**known(lm, probe)).logits
    finally:
        handle.remove()
    states = getattr(base(**known(base, probe)), "last_hidden_state", None)
    if len(seen) != 1 or states is None or not torch.allclose(seen[0][0], states, rtol=1e-5, atol=1e-5):
        return None
    given = seen[0][1]
    if torch.equal(given, logits):
        return AfterHead()
    if logits.shape != given.shape:
        return None
    cap = getattr(lm.config.get_text_config(), "final_logit_softcapping", None)
    scale = float(logits.flatten()[-1].double() / given.flatten()[-1].double())
    likely = (AfterHead(scale), AfterHead(cap=cap))
    return next((after for after in likely if torch.allclose(after(given), logits, rtol=1e-5, atol=1e-5)), None)


def prepare_checkpointing(probe: Inputs, lm: PreTrainedModel, which: Checkpointing, folder: str) -> None:
    """Enable gradient checkpointing. Transformers supports it only in training mode, so set dropout and jitter to 0.
    Raises `BindError` if the model does not support it, or computes other outputs in training mode."""
    if not lm.supports_gradient_checkpointing:
        raise BindError(
            f"{type(lm).__name__} in {folder!r} does not support gradient checkpointing. Bind it with "
            f"gradient_checkpointing=False.",
            code="model.gradient-checkpointing",
            path=folder,
            architecture=type(lm).__name__,
        )
    inputs = known(lm, probe)
    evaluated = lm(**inputs)[0]
    if not checkpoint_blocks(lm, which) and which is not True:
        raise BindError(
            f"{type(lm).__name__} in {folder!r} recomputes all of its layers or none, not some of them "
            f"({which!r}). Bind it with gradient_checkpointing=True.",
            code="model.gradient-checkpointing",
            path=folder,
            architecture=type(lm).__name__,
        )
    for module in lm.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)
    lm.train()
    trained = lm(**inputs)[0]
    lm.eval()
    if not torch.allclose(trained, evaluated, rtol=1e-4, atol=1e-5):
        raise BindError(
            f"{type(lm).__name__} in {folder!r} computes other outputs in training mode than in evaluation mode, "
            f"although dropout is off, so its log-probs could not be recomputed. Bind it with "
            f"gradient_checkpointing=False.",
            code="model.gradient-checkpointing",
            path=folder,
            architecture=type(lm).__name__,
        )


def refuse_other_cache(
    probe: Inputs, model: PreTrainedModel, step: Callable[..., Tensor], cache: Any, folder: str, bound: float
) -> None:
    """Raise `BindError` if a model's next-token logits with a cache differ from those without, for rows that are
    padded, repeated, and continued token by token.

    Args:
        step: logits of the token after the last column, given ids, attention mask, position ids and cache.
    """
    try:
        found, truth = _with_and_without(probe, model, step, cache)
        distance = relative_error(found, truth)
        if distance <= bound:
            return
        fault = f"its logits differ by {distance:.2g} (expected at most {bound:g})"
    except Exception as error:
        fault = f"it raises {type(error).__name__}: {error}"
    raise BindError(
        f"{type(model).__name__} in {folder!r} computes other logits with its KV cache than without: {fault}, so "
        f"TorchRollout cannot sample from it. Bind rollout= to VLLM(...) or SGLang(...) if they support this "
        f"architecture, or bind another model.",
        code="model.cache",
        path=folder,
        architecture=type(model).__name__,
    )


def _with_and_without(
    probe: Inputs, model: PreTrainedModel, step: Callable[..., Tensor], cache: Any
) -> tuple[Tensor, Tensor]:
    """Logits after the last three columns of rows of unequal length: in steps with a cache, and in one pass without."""
    rows = padded(probe, 2, 0)
    ids, attention = rows["input_ids"], rows["attention_mask"].bool()
    attention[0, 2] = False
    position = (attention.cumsum(1) - 1).clamp(min=0)
    truth = model(**known(model, rows | {"attention_mask": attention.long(), "position_ids": position})).logits
    start = ids.shape[1] - 2
    found = [step(ids[:, :start], attention[:, :start], position[:, :start], cache)]
    turned = torch.tensor([1, 0, 1], device=ids.device)  # a rollout repeats prompts, and removes ended rows
    cache.reorder_cache(turned)
    for t in range(start, ids.shape[1]):
        column = slice(t, t + 1)
        found.append(step(ids[turned][:, column], attention[turned][:, : t + 1], position[turned][:, column], cache))
    return torch.cat(found), torch.cat([truth[:, start - 1], truth[turned, start], truth[turned, start + 1]])

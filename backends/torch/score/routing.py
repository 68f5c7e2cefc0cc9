"""The routers of mixtures of experts: which experts tokens choose, by the outputs of transformers' models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flowrl.backends.torch.probes import Inputs, known
from flowrl.errors import BindError

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel


def route_sums(logits: Sequence[Tensor], mask: Tensor, choices: int) -> Tensor:
    """Sums over the tokens of all layers, float32 ``[2 expert]``: probabilities, and choices.

    Args:
        logits: of each layer's router, ``[token expert]``.
        mask: bool ``[row column]`` of these tokens; others are padding.
        choices: the experts of a token.
    """
    attended = mask.flatten()
    total = torch.zeros(2, logits[0].shape[-1], device=mask.device)
    for layer in logits:
        probabilities = layer[attended].float().softmax(-1)
        chosen = probabilities.topk(choices, -1).indices.flatten()
        total = total + torch.stack([probabilities.sum(0), chosen.bincount(minlength=total.shape[1]).float()])
    return total


def routers_of(probe: Inputs, lm: PreTrainedModel, folder: str) -> tuple[int, int]:
    """The number of experts, and of those that a token chooses; raises `BindError` if transformers defines no
    load-balancing loss for the architecture."""
    choices: int = getattr(lm.config.get_text_config(), "num_experts_per_tok", None) or 0
    logits: Sequence[Tensor] = ()
    if choices and hasattr(sys.modules[type(lm).__module__], "load_balancing_loss_func"):
        body = lm.base_model
        logits = getattr(body(**known(body, probe), output_router_logits=True), "router_logits", None) or ()
    if not logits:
        raise BindError(
            f"router_aux_loss_coef needs a mixture of experts with a load-balancing loss in transformers, such as "
            f"Mixtral or Qwen3-MoE, but {type(lm).__name__} in {folder!r} has none. Leave router_aux_loss_coef out.",
            code="model.no-router",
            path=folder,
            architecture=type(lm).__name__,
        )
    return logits[0].shape[-1], choices

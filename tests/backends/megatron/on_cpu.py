"""megatron-core on a CPU: what it asks of ``torch.cuda`` is answered for the CPU, in this process from now on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from flowrl.backends import MegatronTrainer
from flowrl.protocols.protocols import BuildContext

if TYPE_CHECKING:  # it imports megatron-core
    from flowrl.backends.megatron.engine import MegatronTrainerEngine


class OnCPU(TorchFunctionMode):
    """Tensors that are made on or moved to ``"cuda"`` are on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        return function(*args, **kwargs)


class MegatronOnCPU(MegatronTrainer):
    """One that replaces ``torch.cuda`` in its processes."""

    def build(self, context: BuildContext) -> MegatronTrainerEngine:
        install()
        return super().build(context)


def install() -> None:
    """Replace ``torch.cuda`` for the rest of the process."""
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    # Recomputed layers restore the state of random numbers.
    torch.cuda.random.get_rng_state = lambda **_: torch.get_rng_state()
    torch.cuda.default_generators = {torch.device("cpu"): torch.default_generator}  # type: ignore[assignment]
    torch.cuda._lazy_call = lambda function, **_: function()
    OnCPU().__enter__()

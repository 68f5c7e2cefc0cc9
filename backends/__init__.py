"""Engines that hold weights: PyTorch in this process, over any Hugging Face causal LM folder; megatron-core; vLLM; and
SGLang. Names are imported on first use, and the libraries of the latter three when one is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

if __name__ != "flowrl.backends":
    raise ImportError(f"this package was imported as {__name__!r}; its one name is flowrl.backends: import that.")

from flowrl.lazy import lazy

if TYPE_CHECKING:
    from flowrl.backends.megatron.trainer import MegatronTrainer
    from flowrl.backends.sglang.engine import SGLang
    from flowrl.backends.torch.generate.rollout import TorchRollout
    from flowrl.backends.torch.lora import LoRA
    from flowrl.backends.torch.optimizers.specs import SGD, AdamW, Muon
    from flowrl.backends.torch.score.model import scatter
    from flowrl.backends.torch.score.reward_model import TorchRewardModel
    from flowrl.backends.torch.score.rows import take
    from flowrl.backends.torch.train.critic import TorchCritic
    from flowrl.backends.torch.train.reward_trainer import TorchRewardTrainer
    from flowrl.backends.torch.train.trainer import TorchScorer, TorchTrainer
    from flowrl.backends.vllm.engine import VLLM
    from flowrl.protocols.backend import Backend
    from flowrl.protocols.mesh import Mesh

__all__ = [
    "SGD",
    "VLLM",
    "AdamW",
    "Backend",
    "LoRA",
    "MegatronTrainer",
    "Mesh",
    "Muon",
    "SGLang",
    "TorchCritic",
    "TorchRewardModel",
    "TorchRewardTrainer",
    "TorchRollout",
    "TorchScorer",
    "TorchTrainer",
    "scatter",
    "take",
]

__getattr__ = lazy(
    __name__,
    {
        "SGD": "torch.optimizers.specs",
        "VLLM": "vllm.engine",
        "AdamW": "torch.optimizers.specs",
        "Backend": ".protocols.backend",
        "LoRA": "torch.lora",
        "MegatronTrainer": "megatron.trainer",
        "Mesh": ".protocols.mesh",
        "Muon": "torch.optimizers.specs",
        "SGLang": "sglang.engine",
        "TorchCritic": "torch.train.critic",
        "TorchRewardModel": "torch.score.reward_model",
        "TorchRewardTrainer": "torch.train.reward_trainer",
        "TorchRollout": "torch.generate.rollout",
        "TorchScorer": "torch.train.trainer",
        "TorchTrainer": "torch.train.trainer",
        "scatter": "torch.score.model",
        "take": "torch.score.rows",
    },
)

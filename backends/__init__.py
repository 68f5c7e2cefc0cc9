"""Engines that hold weights: PyTorch in this process, over any Hugging Face causal LM folder; vLLM; and SGLang. The
latter two are not imported before one is built."""

if __name__ != "flowrl.backends":
    raise ImportError(f"this package was imported as {__name__!r}; its one name is flowrl.backends: import that.")

from flowrl.backends.sglang.engine import SGLang
from flowrl.backends.torch.generate.rollout import TorchRollout
from flowrl.backends.torch.lora import LoRA
from flowrl.backends.torch.score.model import scatter
from flowrl.backends.torch.score.reward_model import TorchRewardModel
from flowrl.backends.torch.score.rows import take
from flowrl.backends.torch.train.critic import TorchCritic
from flowrl.backends.torch.train.learner import SGD, AdamW
from flowrl.backends.torch.train.reward_trainer import TorchRewardTrainer
from flowrl.backends.torch.train.trainer import TorchScorer, TorchTrainer
from flowrl.backends.vllm.engine import VLLM
from flowrl.protocols.backend import Backend

__all__ = [
    "SGD",
    "VLLM",
    "AdamW",
    "Backend",
    "LoRA",
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

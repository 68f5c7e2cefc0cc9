"""Episodes: the policy answers, an environment replies, the policy continues; a batch's episodes run concurrently."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.episodes.chat import Chat, EpisodeOver, current_chat
from flowrl.episodes.environment import Answer, Environment, InvalidToolCall, Reply, Row, ToolCall
from flowrl.episodes.tools import Tool, Toolbox
from flowrl.lazy import lazy

if TYPE_CHECKING:
    from flowrl.episodes.endpoint.endpoint import Endpoint
    from flowrl.episodes.gymnasium import Gym
    from flowrl.episodes.openenv import OpenEnv
    from flowrl.episodes.text_env import TextEnvironment
    from flowrl.episodes.trl import play_as_trl

__all__ = [
    "Answer",
    "Chat",
    "Endpoint",
    "Environment",
    "EpisodeOver",
    "Gym",
    "InvalidToolCall",
    "OpenEnv",
    "Reply",
    "Row",
    "TextEnvironment",
    "Tool",
    "ToolCall",
    "Toolbox",
    "current_chat",
    "play_as_trl",
]

__getattr__ = lazy(
    __name__,
    {
        "Endpoint": "endpoint.endpoint",
        "Gym": "gymnasium",
        "OpenEnv": "openenv",
        "TextEnvironment": "text_env",
        "play_as_trl": "trl",
    },
)

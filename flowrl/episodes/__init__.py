"""Episodes: the policy answers, an environment replies, the policy goes on; all episodes of a batch at once."""

from flowrl.episodes.chat import Chat, EpisodeOver
from flowrl.episodes.environment import Answer, Environment, Reply, Row, ToolCall
from flowrl.episodes.tools import InvalidToolCall, Tool, Toolbox

__all__ = [
    "Answer",
    "Chat",
    "Environment",
    "EpisodeOver",
    "InvalidToolCall",
    "Reply",
    "Row",
    "Tool",
    "ToolCall",
    "Toolbox",
]

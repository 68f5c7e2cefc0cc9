"""Episodes: the policy answers, a world replies, the policy goes on; all episodes of a batch at once."""

from flowrl.episodes.chat import Chat, EpisodeOver
from flowrl.episodes.environment import Answer, Environment, Reply, Row, ToolCall
from flowrl.episodes.tools import Misfit, Tool, Toolbox

__all__ = ["Answer", "Chat", "Environment", "EpisodeOver", "Misfit", "Reply", "Row", "Tool", "ToolCall", "Toolbox"]

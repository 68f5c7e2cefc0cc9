"""`play_as_trl`: episodes with the tools, environments and reward functions of a script of TRL."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from flowrl.data.text.transcript import Message
from flowrl.episodes.chat import Chat, EpisodeOver
from flowrl.episodes.environment import InvalidToolCall, Row
from flowrl.episodes.tools import Toolbox
from flowrl.references import load_object, resolve

Function = Callable[..., Any] | str


async def play_as_trl(
    chat: Chat,
    row: Row,
    *,
    rewards: Mapping[str, float],
    tools: Sequence[Function] = (),
    environment: Function | None = None,
    ground_truth: str = "solution",
    parser: Literal["hermes", "json"] = "hermes",
) -> float:
    """Play an episode as TRL's ``GRPOTrainer`` with ``tools=`` or ``environment_factory=``; its reward.

    As in TRL, tools run one after another in this thread, results are ``str(result)``, and an exception is a result for
    the policy, ``{'error': ...}``. An environment has ``reset(**columns)``, whose text is added to the last message,
    tools as its other methods, and optionally ``get_reward()``. A reward function gets one completion: messages with
    ``tool_calls``, without the text of the calls. Those that return None count 0.

    Args:
        chat, row: of the agent.
        rewards: weights by reference to a function, ``fn(prompts, completions, **columns) -> list[float]``.
        tools: functions, or references to them.
        environment: makes the environment of an episode, or a reference to what does.
        ground_truth: the column that has the ground truth; others are those of `extra_info`.
        parser: the format of tool calls; see `Interact`.
    """
    columns = {**row.extra_info, ground_truth: row.ground_truth}
    messages = [dict(message) for message in row.messages]
    factory = load_object(environment) if isinstance(environment, str) else environment
    world = None if factory is None else factory()
    if world is not None and (text := world.reset(prompt=messages, **columns)) is not None:
        messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{text}"}
    functions = [resolve(tool) if isinstance(tool, str) else tool for tool in tools]
    toolbox = Toolbox([*map(_as_trl, [*functions, *_methods(world)])], parser)
    chat.use_tools(toolbox)
    with suppress(EpisodeOver):  # the answers so far count
        await chat.answer_by_tools(messages)
    completion = [_with_calls(message, toolbox) for message in chat.messages[len(messages) :]]
    given = {name: [value] for name, value in columns.items()}
    more = {} if world is None else {"environments": [world]}
    total = 0.0
    for name, weight in rewards.items():
        values = resolve(name)(prompts=[messages], completions=[completion], **given, **more, log_metric=_ignored)
        values = await values if inspect.isawaitable(values) else values
        total += weight * float(values[0] or 0.0)
    if (own := getattr(world, "get_reward", None)) is not None:
        found = own()
        total += float((await found if inspect.isawaitable(found) else found) or 0.0)
    return total


def _ignored(name: str, value: float) -> None:
    """A metric of a reward function; episodes log none."""


def _methods(world: Any) -> list[Callable[..., Any]]:
    """The tools of an environment."""
    names = [name for name, _ in inspect.getmembers(type(world), inspect.isfunction)]
    return [getattr(world, name) for name in names if name not in ("get_reward", "reset") and name[0] != "_"]


def _as_trl(tool: Callable[..., Any]) -> Callable[..., Any]:
    """A tool whose result is text, also if it raises."""

    @functools.wraps(tool)
    async def called(**arguments: Any) -> str:
        try:
            result = tool(**arguments)
            return str(await result if inspect.isawaitable(result) else result)
        except Exception as error:
            return str({"error": str(error)})

    return called


def _with_calls(message: Message, toolbox: Toolbox) -> dict[str, Any]:
    """A message as reward functions of TRL read it: calls are parsed, and left out of its text."""
    text = str(message.get("content", ""))
    if message.get("role") != "assistant":
        return dict(message)
    try:
        calls = toolbox.calls(text)
    except InvalidToolCall:
        return dict(message)
    if not calls:
        return dict(message)
    parsed = [
        {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}} for call in calls
    ]
    rest = re.sub(r"<tool_call>.*?</tool_call>", "", text, flags=re.DOTALL).strip()
    return {"role": "assistant", "content": rest, "tool_calls": parsed}

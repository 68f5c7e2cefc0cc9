"""A rehearsal: an episode with made-up texts that tests a chat template before anything is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flowrl.data.text.answers import style_of
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.data.text.transcript import Check, Message, Transcript
from flowrl.episodes.chat import Rewrites
from flowrl.episodes.tools import Toolbox, template_arguments
from flowrl.errors import DataError, EpisodeError

logger = logging.getLogger(__name__)

_QUESTION = {"role": "user", "content": "What is 17 and 25?"}
_THOUGHT = "It is best to look again."


def rehearse(
    tokenizer: ChatTokenizer,
    check: Check,
    toolbox: Toolbox | None,
    replies: bool,
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    rewrites: Rewrites = "refuse",
) -> None:
    """Test a chat template on a conversation such as episodes have.

    The policy calls tools, first one and then two at once; then, with `replies`, a user replies. It thinks in each
    answer, since a template may strip the thinking of earlier turns. A template that fails only after thinking is a
    warning, not an error, and so is one that does not write the tools, because prompts may describe them. With
    ``rewrites="segment"``, it may rewrite earlier turns.
    """
    if toolbox is not None:
        if toolbox.format.special:
            toolbox.calls(toolbox.example(), tokenizer)  # one of vLLM may not be there
        _warn_of_unread_tools(tokenizer, toolbox, template_kwargs)
    if check == "off":
        return
    kinds = [kind for kind, used in (("tool calls", toolbox), ("user replies", replies)) if used]
    try:
        play_rehearsal(tokenizer, check, toolbox, replies, template_kwargs, rewrites, thinks=True)
    except (DataError, EpisodeError) as error:
        try:
            play_rehearsal(tokenizer, check, toolbox, replies, template_kwargs, rewrites, thinks=False)
        except (DataError, EpisodeError):
            code = error.code
            raise EpisodeError(
                f"The test episode before loading (thinking, {' and '.join(kinds)}) failed: {error.message}",
                code=code,
                **error.facts,
            ) from error
        logger.warning(
            "The test episode (%s) passes only without thinking in the policy's answers; an answer with "
            "thinking will fail: %s",
            " and ".join(kinds),
            error.message,
        )


def _warn_of_unread_tools(tokenizer: ChatTokenizer, toolbox: Toolbox, template_kwargs: Mapping[str, Any]) -> None:
    """Warn if the chat template does not describe the tools to the policy."""
    try:
        arguments = template_arguments(tokenizer, toolbox, template_kwargs)
        written = tokenizer.conversation_text([_QUESTION], arguments, add_generation_prompt=True)
    except DataError:
        return  # it rejects this conversation or its arguments, which the test episode or the prompts report
    if missing := [name for name in toolbox.names if name not in written]:
        logger.warning(
            "The chat template in %r does not describe the tools %s, so the policy learns of them only from the "
            "prompts. Describe them and the format of calls in the prompts, or use a template that writes `tools`.",
            tokenizer.folder,
            ", ".join(missing),
        )


def play_rehearsal(
    tokenizer: ChatTokenizer,
    check: Check,
    toolbox: Toolbox | None,
    replies: bool,
    template_kwargs: Mapping[str, Any],
    rewrites: Rewrites,
    thinks: bool,
) -> None:
    """Play the conversation, with a thought in each answer or with none.

    Raises:
        DataError: the template rejects the conversation.
        EpisodeError: it rewrites earlier turns, or leaves out a reply.
    """
    arguments = template_arguments(tokenizer, toolbox, template_kwargs)
    transcript, style = Transcript(tokenizer, [_QUESTION], check, arguments), style_of(tokenizer)
    written = tokenizer.conversation_text([_QUESTION], arguments, add_generation_prompt=True)
    for answer, reply in _exchanges(toolbox, replies):
        own_channel = toolbox is not None and toolbox.format.special and reply[0]["role"] == "tool"
        ids = tokenizer.encode(style.written(written, _THOUGHT if thinks else "", answer, own_channel))
        ids = ids if ids[-1] in tokenizer.ends else [*ids, tokenizer.turn_end]
        transcript.answer(ids, [0.0] * len(ids))
        try:
            transcript.reply(reply)
        except EpisodeError as error:
            if error.code != "tokenizer.rewritten-turns" or rewrites == "refuse":
                raise
            transcript = transcript.rewritten(reply)
        written = tokenizer.conversation_text(transcript.template_messages, arguments, add_generation_prompt=True)
        text = reply[0]["content"]
        if written.count(text) < sum(text in message["content"] for message in transcript.messages):
            raise EpisodeError(
                f"The chat template in {tokenizer.folder!r} leaves out the reply {reply[0]!r}, so the policy would "
                f"never read it; it writes {written!r}. Reply in a role that the template supports, such as user, or "
                f"add the role {reply[0]['role']!r} to the template.",
                code="episode.reply-left-out",
                path=tokenizer.folder,
                role=reply[0]["role"],
            )


def _exchanges(toolbox: Toolbox | None, replies: bool) -> Sequence[tuple[str, Sequence[Message]]]:
    """Answers, and the replies to each."""
    found: list[tuple[str, Sequence[Message]]] = []
    if toolbox is not None:
        result = {"role": "tool", "name": toolbox.names[0], "content": "42"}
        found += [(toolbox.example(n), [result] * n) for n in (1, 2 if toolbox.format.several else 1)]
    if replies:
        found += [("42", [{"role": "user", "content": "Are you sure?"}])] * 2
    return found

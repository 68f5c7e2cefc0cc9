"""A rehearsal: an episode with made-up texts, by which a chat template is tried before anything is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.data.text.transcript import Check, Message, Transcript
from flowrl.episodes.tools import Toolbox, template_arguments
from flowrl.errors import DataError, EpisodeError

logger = logging.getLogger(__name__)

_QUESTION = {"role": "user", "content": "What is 17 and 25?"}
_THOUGHT = "<think>\nIt is best to look again.\n</think>\n\n"


def rehearse(
    tokenizer: ChatTokenizer,
    check: Check,
    toolbox: Toolbox | None,
    replies: bool,
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Try a chat template on a conversation of the kind that episodes have.

    The policy calls tools, two at last, which the parser of the toolbox would read, and then is replied to by a user.
    It thinks in each answer, since a template need not keep that of earlier turns. Where that alone is what the
    template cannot go on from, a policy that never thinks can be played, so it is said and not refused: an answer that
    does think is found in its row.

    Args:
        tokenizer: with the template.
        check: how it is held against what is there; ``"off"`` tries nothing.
        toolbox: the tools that the policy may call.
        replies: whether there is an environment, which replies to answers.
        template_kwargs: arguments of the template.

    Raises:
        EpisodeError: it writes earlier turns otherwise once there are more, also of answers that do not think; it does
            not take the messages; or it leaves out what a reply says.
    """
    if check == "off":
        return
    kinds = [kind for kind, there in (("calls of tools", toolbox), ("replies of a user", replies)) if there]
    try:
        _played(tokenizer, check, toolbox, replies, template_kwargs, _THOUGHT)
    except (DataError, EpisodeError) as error:
        try:
            _played(tokenizer, check, toolbox, replies, template_kwargs, "")
        except (DataError, EpisodeError):
            raise EpisodeError(
                f"an episode was tried before anything is loaded (answers that think, {' and '.join(kinds)}), and it "
                f"cannot go on: {error}"
            ) from error
        logger.warning(
            "an episode was tried (%s): it goes on as long as the policy does not think in its answers, and one that "
            "does cannot go on: %s",
            " and ".join(kinds),
            error,
        )


def _played(
    tokenizer: ChatTokenizer,
    check: Check,
    toolbox: Toolbox | None,
    replies: bool,
    template_kwargs: Mapping[str, Any],
    thought: str,
) -> None:
    """Play the conversation, each answer behind this thought."""
    arguments = template_arguments(tokenizer, toolbox, template_kwargs)
    transcript = Transcript(tokenizer, [_QUESTION], check, arguments)
    for said, reply in _exchanges(toolbox, replies):
        ids = [*tokenizer.encode(thought + said), tokenizer.turn_end]
        transcript.answer(ids, [0.0] * len(ids))
        transcript.reply(reply)
        written = tokenizer.conversation_text(transcript.messages, arguments, go_on=True)
        text = reply[0]["content"]
        if written.count(text) < sum(text in message["content"] for message in transcript.messages):
            raise EpisodeError(
                f"the chat template in {tokenizer.folder!r} leaves out what the reply {reply[0]!r} says, so the policy "
                f"would never read it: it writes {written!r}; expected a template that knows the role "
                f"{reply[0]['role']!r}: let the environment reply in another one, such as user, or mend the template."
            )


def _exchanges(toolbox: Toolbox | None, replies: bool) -> Sequence[tuple[str, Sequence[Message]]]:
    """Answers, and what is said to each."""
    found: list[tuple[str, Sequence[Message]]] = []
    if toolbox is not None:
        call, result = toolbox.example, {"role": "tool", "name": toolbox.names[0], "content": "42"}
        found += [(call, [result]), (f"{call}\n{call}", [result, result])]
    if replies:
        found += [("42", [{"role": "user", "content": "Are you sure?"}])] * 2
    return found

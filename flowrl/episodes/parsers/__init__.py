"""Parsers of tool calls by name, a module each; none depends on an engine, so a run means the same anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flowrl.episodes.environment import ToolCall
from flowrl.episodes.parsers.call_format import CallFormat
from flowrl.episodes.parsers.deepseek import DEEPSEEK
from flowrl.episodes.parsers.glm import GLM
from flowrl.episodes.parsers.gpt_oss import GPT_OSS
from flowrl.episodes.parsers.hermes import HERMES
from flowrl.episodes.parsers.kimi import KIMI
from flowrl.episodes.parsers.llama3_json import LLAMA3_JSON
from flowrl.episodes.parsers.mistral import MISTRAL
from flowrl.episodes.parsers.plain_json import PLAIN_JSON, write
from flowrl.episodes.parsers.qwen3_coder import QWEN3_CODER
from flowrl.episodes.parsers.vllm_parsers import PREFIX, of_vllm
from flowrl.errors import DefinitionError, offer

Parser = Callable[[str], Sequence[ToolCall]]
"""Your own parser: the calls in a text; raises `InvalidToolCall` for a malformed call."""

PARSERS: Mapping[str, CallFormat] = {
    "hermes": HERMES,
    "json": PLAIN_JSON,
    "qwen3_coder": QWEN3_CODER,
    "glm": GLM,
    "kimi": KIMI,
    "deepseek": DEEPSEEK,
    "gpt-oss": GPT_OSS,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
}


def call_format(parser: str | Parser) -> CallFormat:
    """The format of a parser: one of `PARSERS`, ``"vllm:NAME"``, or your own function.

    Raises:
        DefinitionError: there is none of this name.
    """
    if callable(parser):
        own = parser
        return CallFormat(lambda text, tools: own(text), write)
    if parser.startswith(PREFIX):
        return of_vllm(parser.removeprefix(PREFIX))
    if parser not in PARSERS:
        raise DefinitionError(
            f"Unknown parser {parser!r}; {offer(parser, PARSERS, 'there are')}",
            code="tool.unknown-parser",
            parser=parser,
            known=tuple(PARSERS),
        )
    return PARSERS[parser]

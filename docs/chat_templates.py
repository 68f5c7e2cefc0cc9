"""The table of chat templates in the docs: how an episode plays under each template that TRL ships.

The templates are those of published models, in the package of TRL. Each gets a tokenizer of bytes that has the special
tokens which the template writes, and plays the test episode that flowrl plays before a run.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
from collections import defaultdict
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.episodes import InvalidToolCall, Toolbox, ToolCall
from flowrl.episodes.chat import Rewrites
from flowrl.episodes.parsers import PARSERS
from flowrl.episodes.rehearsal import play_rehearsal
from flowrl.episodes.tools import template_arguments
from flowrl.errors import DataError, EpisodeError

_SPECIAL = re.compile(
    r"<\|[\w/]+\|?>|<\w+\|>|<\uff5c[\w▁]+\uff5c>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>|<end_of_utterance>"
)
_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_QUESTION = {"role": "user", "content": "What is 17 and 25?"}
CALL = ToolCall("add", {"a": 17, "b": 25})


def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


def templates() -> dict[str, str]:
    """The chat templates that TRL ships, by name."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations, "run make: the environment lacks TRL"
    folder = Path(spec.submodule_search_locations[0], "chat_templates")
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


def tokenizer_of(template: str) -> ChatTokenizer:
    """A tokenizer of bytes with a chat template and its tokens; that of gpt-oss ends calls as the model's does."""
    special = list(dict.fromkeys(["<pad>", "<bos>", "<eos>", *_SPECIAL.findall(template)]))
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *symbols])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=special[3:],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([token for token in _ADDED if token in template])
    tokenizer.chat_template = template
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        if "<|call|>" in special:
            ends = {"eos_token_id": tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])}
            Path(folder, "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
        return ChatTokenizer(folder)


def parser_of(tokenizer: ChatTokenizer) -> str | None:
    """The name of the parser whose calls the chat template writes; None if it writes none that flowrl parses."""
    toolbox = Toolbox([add], "hermes")
    arguments = template_arguments(tokenizer, toolbox, {})
    for given in (CALL.arguments, json.dumps(CALL.arguments)):  # some templates expect a dict, others its text
        for content in ("", None):
            call = {"type": "function", "id": "123456789", "function": {"name": CALL.name, "arguments": given}}
            message = {"role": "assistant", "content": content, "tool_calls": [call]}
            try:
                prompt = tokenizer.conversation_text([_QUESTION], arguments, add_generation_prompt=True)
                written = tokenizer.conversation_text([_QUESTION, message], arguments)
            except DataError:
                continue
            same = next((i for i, pair in enumerate(zip(prompt, written, strict=False)) if pair[0] != pair[1]), None)
            if (name := _parser_for(written[len(prompt) if same is None else same :], toolbox)) is not None:
                return name
    return None


def _parser_for(text: str, toolbox: Toolbox) -> str | None:
    for name in PARSERS:
        try:
            if [*Toolbox([add], name).calls(text)] == [CALL]:
                return name
        except InvalidToolCall:
            continue
    return None


def verdict(tokenizer: ChatTokenizer, parser: str | None, thinks: bool) -> tuple[str, str]:
    """How episodes play: ``"accepted"``, ``"segments"`` or ``"refused"``, and why it is refused.

    Args:
        parser: of the tools; None plays replies of a user.
    """
    toolbox = None if parser is None else Toolbox([add], parser)
    arguments = {"enable_thinking": thinks} if tokenizer.template_reads("enable_thinking") else {}
    modes: tuple[tuple[Rewrites, str], ...] = (("refuse", "accepted"), ("segment", "segments"))
    for rewrites, found in modes:
        try:
            play_rehearsal(tokenizer, "loose", toolbox, toolbox is None, arguments, rewrites, thinks)
            return found, ""
        except (DataError, EpisodeError) as error:
            fault = error
    if fault.code == "tokenizer.template-rejects":
        return "refused", f"the template: {fault.facts['reason'].rstrip('/.')}"
    return "refused", f"leaves out replies of {'a user' if toolbox is None else 'tools'}"


def table() -> list[str]:
    """The rows of the table: templates that play alike share one."""
    rows = ["| template | calls | users | users, thinking | tools | tools, thinking | |", "|" + "---|" * 7]
    alike: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, template in templates().items():
        tokenizer = tokenizer_of(template)
        own = parser_of(tokenizer)
        cells = [verdict(tokenizer, parser, thinks) for parser in (None, own or "hermes") for thinks in (False, True)]
        why = "; ".join(dict.fromkeys(reason for _, reason in cells if reason))
        alike[f"`{own}`" if own else "", *(found for found, _ in cells), why].append(f"`{name}`")
    return rows + [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in alike.items()]


if __name__ == "__main__":
    print("\n".join(table()))

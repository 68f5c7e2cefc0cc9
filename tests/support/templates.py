"""Byte-level BPE tokenizers with common chat templates, reduced to turns, thinking and tools."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowrl.data.text.tokenizer import ChatTokenizer

MERGES = [("t", "h"), ("th", "e"), ("a", "n"), ("an", "d"), ("Ġ", "the"), ("1", "2")]

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Both Qwen templates render consecutive tool replies as one user turn.
_QWEN_TURNS = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m['content'] }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ CONTENT }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN25 = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant."
    "{% if tools %} Call <tools>{{ tools | tojson }}</tools>.{% endif %}<|im_end|>\n{% endif %}"
    + _QWEN_TURNS.replace("CONTENT", "m['content']")
)
# Thinking is rendered only after the last user turn. With thinking disabled, the generation prompt ends with an empty
# think block; earlier turns have none.
QWEN3 = (
    "{% set ns = namespace(asked=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    + _QWEN_TURNS.replace(
        "CONTENT",
        "m['content'].split('</think>')[-1].lstrip() "
        "if m['role'] == 'assistant' and loop.index0 < ns.asked else m['content']",
    )
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
_ALTERNATE = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user, assistant, user, ...') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}" + _ALTERNATE + "{% for m in messages %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}" + _ALTERNATE + "{% for m in messages %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
# Merges all user turns into one, as some templates for single-turn chats do.
MERGING = (
    "{% set ns = namespace(asked='') %}"
    "{% for m in messages if m['role'] == 'user' %}{% set ns.asked = ns.asked + m['content'] %}{% endfor %}"
    "<user>{{ ns.asked }}<end>"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<model>{{ m['content'] }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)
# Both omit tool messages; BARE has no generation prompt.
BARE = "{% for m in messages if m['role'] != 'tool' %}{{ m['content'] }}<end>{% endfor %}"
TOOLLESS = BARE.replace("{{", "<{{ m['role'] }}>{{") + "{% if add_generation_prompt %}<assistant>{% endif %}"
# Refuses consecutive tool replies.
SINGLE = (
    "{% for m in messages %}{% if m['role'] == 'tool' and messages[loop.index0 - 1]['role'] == 'tool' %}"
    "{{ raise_exception('one tool at a time') }}{% endif %}{% endfor %}" + LLAMA3
)

TEMPLATES = {
    "llama3": (LLAMA3, "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    "qwen2.5": (QWEN25, "<|im_end|>", ["<|im_start|>"]),
    "qwen3": (QWEN3, "<|im_end|>", ["<|im_start|>"]),
    "gemma": (GEMMA, "<end_of_turn>", ["<start_of_turn>"]),
    "mistral": (MISTRAL, "</s>", []),
    "merging": (MERGING, "<end>", ["<user>", "<model>"]),
    "toolless": (TOOLLESS, "<end>", ["<user>", "<assistant>"]),
    "bare": (BARE, "<end>", []),
    "single": (SINGLE, "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
}
"""By name: the template, the token that ends a turn, and further tokens of its own."""


# Calls of tools are JSON in the assistant's turn.
_TOOL_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}\n<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MARK, _END = "{% generation %}", "{% endgeneration %}"


def _marked(name: str) -> str:
    """A template with marks around the assistant's text and the token that ends its turn."""
    if name == "tools":
        head, _, rest = _TOOL_CALLS.partition("{{ m['content'] }}")
        body, _, tail = rest.partition("\n{% endfor %}{% if add")
        return _only_for_the_assistant(head, "{{ m['content'] }}" + body, "\n{% endfor %}{% if add" + tail)
    template, end, _ = TEMPLATES[name]
    if name == "mistral":
        return template.replace(
            "{{ m['content'] }}{{ eos_token }}", f"{_MARK}{{{{ m['content'] }}}}{{{{ eos_token }}}}{_END}"
        )
    content = "{{ m['content'] | trim }}" if "| trim" in template else "{{ m['content'] }}"
    head, _, tail = template.rpartition(content + end)
    return _only_for_the_assistant(head, content + end, tail)


def _only_for_the_assistant(head: str, text: str, tail: str) -> str:
    kept = "{{ '' }}"  # jinja would drop a line end after a tag
    return f"{head}{{% if m['role'] == 'assistant' %}}{_MARK}{text}{_END}{{% else %}}{text}{{% endif %}}{kept}{tail}"


def marked_tokenizer_of(name: str) -> tuple[ChatTokenizer, ChatTokenizer]:
    """A tokenizer whose template marks the turns of the assistant by ``{% generation %}``, and the same without."""
    plain = (_TOOL_CALLS, "<|im_end|>", ["<|im_start|>"]) if name == "tools" else TEMPLATES[name]
    return _made(_marked(name), *plain[1:], name), _made(*plain, name)


@cache
def tokenizer_of(name: str) -> ChatTokenizer:
    """A tokenizer with one of `TEMPLATES`; its EOS differs from the end-of-turn token, except for mistral."""
    return _made(*TEMPLATES[name], name)


def _made(template: str, end: str, others: list[str], name: str) -> ChatTokenizer:
    eos = "</s>" if name == "mistral" else "<eos>"
    specials = list(dict.fromkeys(["<pad>", "<bos>", eos, end, *others]))
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate([*specials, *symbols])}, MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token=eos,
        additional_special_tokens=specials[3:],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    folder = Path(mkdtemp(prefix="flowrl-template-"))
    tokenizer.save_pretrained(folder)
    return ChatTokenizer(str(folder))

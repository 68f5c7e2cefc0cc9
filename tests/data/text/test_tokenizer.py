"""Tokenizing, chat templates, padding and joining: ids by hand, and positions as `model.generate` passes them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from flowrl.backends.torch.load import loading, skeleton
from flowrl.data.text.tokenizer import ChatTokenizer, assemble
from tests.support.errors import raises
from tests.support.models import CHARACTERS, EOS, PAD, SPECIALS, VOCAB, char_tokenizer, tiny_folder

USER, ASSISTANT = SPECIALS.index("<|user|>"), SPECIALS.index("<|assistant|>")


def char_ids(text: str) -> list[int]:
    return [len(SPECIALS) + CHARACTERS.index(c) for c in text]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    char_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(folder: str) -> ChatTokenizer:
    return ChatTokenizer(folder)


def test_special_ids_and_vocabulary_size(tokenizer: ChatTokenizer) -> None:
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab_size) == (PAD, EOS, VOCAB)
    assert tokenizer.encode("2+2=4") == char_ids("2+2=4")


@given(text=st.text(alphabet=CHARACTERS, max_size=40))
def test_text_round_trip(tokenizer: ChatTokenizer, text: str) -> None:
    assert tokenizer.encode(text) == char_ids(text)
    assert tokenizer.decode(char_ids(text)) == text


def test_prompt_ids_follow_the_template_and_end_with_the_generation_prompt(tokenizer: ChatTokenizer) -> None:
    one = [{"role": "user", "content": "1+1="}]
    assert tokenizer.prompt_ids(one) == [USER, *char_ids("1+1="), EOS, ASSISTANT]
    three = [*one, {"role": "assistant", "content": "2"}, {"role": "user", "content": "ok"}]
    assert tokenizer.prompt_ids(three) == [
        *[USER, *char_ids("1+1="), EOS],
        *[ASSISTANT, *char_ids("2"), EOS],
        *[USER, *char_ids("ok"), EOS, ASSISTANT],
    ]


@pytest.mark.parametrize(
    ("messages", "facts"),
    [
        ([], {"found": "[]"}),
        ("hello", {"found": "'hello'"}),
        ({"role": "user", "content": "hello"}, {"found": "{'role': 'user', 'content': 'hello'}"}),
        (["hello"], {"index": 0, "found": "'hello'"}),
        ([{"role": "user", "text": "a"}], {"index": 0, "found": ("role", "text")}),
        ([{"content": "a"}], {"index": 0, "found": ("content",)}),
        ([{"role": 3, "content": "a"}], {"index": 0}),
    ],
)
def test_malformed_messages_are_refused(tokenizer: ChatTokenizer, messages: object, facts: dict[str, object]) -> None:
    with raises("tokenizer.bad-messages", **facts):
        tokenizer.prompt_ids(messages)  # type: ignore[arg-type]


def test_an_error_raised_by_the_template_is_reported(tmp_path: Path) -> None:
    core = char_tokenizer()
    core.chat_template = "{{ raise_exception('only users may speak') }}"
    core.save_pretrained(tmp_path)
    with raises("tokenizer.template-rejects", path=str(tmp_path), reason="only users may speak"):
        ChatTokenizer(str(tmp_path)).prompt_ids([{"role": "system", "content": "a"}])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 // 0 }}", "division"),
        ("{% for i in range(10 ** 9) %}{{ i }}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_template_errors_name_the_folder_and_reason(tmp_path: Path, template: str, reason: str) -> None:
    with raises("tokenizer.template-rejects", path=str(tmp_path)) as caught:
        configured(tmp_path, template).prompt_ids([{"role": "user", "content": "a"}])
    assert reason in caught.value.facts["reason"]


def test_a_template_with_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    core = char_tokenizer()
    core.chat_template = "{% for message in messages %}\n{{ message['content' }}\n{% endfor %}"
    core.save_pretrained(tmp_path)
    with raises("tokenizer.template-syntax", path=str(tmp_path), line=2) as caught:
        ChatTokenizer(str(tmp_path)).prompt_ids([{"role": "user", "content": "a"}])
    assert "roles" not in str(caught.value)


def test_a_broken_config_is_not_reported_as_a_missing_tokenizer(tmp_path: Path) -> None:
    char_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with raises("tokenizer.broken-config", path=f"{tmp_path}/config.json"):
        ChatTokenizer(str(tmp_path))


def test_a_tokenizer_without_a_template_encodes_only_text(tmp_path: Path) -> None:
    core = char_tokenizer()
    core.chat_template = None
    core.save_pretrained(tmp_path)
    tokenizer = ChatTokenizer(str(tmp_path))
    with raises("tokenizer.no-chat-template", path=str(tmp_path)):
        tokenizer.prompt_ids([{"role": "user", "content": "a"}])
    assert tokenizer.encode("a") == char_ids("a")


def test_folders_without_a_usable_tokenizer_are_refused(tmp_path: Path) -> None:
    with raises("model.not-found", path=f"{tmp_path}/nowhere"):
        ChatTokenizer(str(tmp_path / "nowhere"))
    with raises("tokenizer.cannot-load", path=str(tmp_path)):
        ChatTokenizer(str(tmp_path))
    core = char_tokenizer()
    core.eos_token = None
    core.save_pretrained(tmp_path)
    with raises("tokenizer.no-eos", path=str(tmp_path)):
        ChatTokenizer(str(tmp_path))


def test_pad_falls_back_to_eos(tmp_path: Path) -> None:
    core = char_tokenizer()
    core.pad_token = None
    core.save_pretrained(tmp_path)
    tokenizer = ChatTokenizer(str(tmp_path))
    assert tokenizer.pad_id == tokenizer.eos_id == EOS
    assert tokenizer.decode([*char_ids("ab"), EOS, EOS, EOS]) == "ab"


def test_decode_removes_special_tokens_and_padding(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.decode([*char_ids("4"), EOS, PAD, PAD]) == "4"
    assert tokenizer.decode([ASSISTANT, *char_ids("4"), EOS]) == "4"
    assert tokenizer.decode([]) == tokenizer.decode([EOS]) == tokenizer.decode([PAD]) == ""
    newline = char_ids("\n")
    assert tokenizer.decode(char_ids("a\nb\n"), stop_token_ids=newline) == "a\nb"
    assert tokenizer.decode(char_ids("a\nb\n")) == "a\nb\n"
    assert tokenizer.decode(char_ids("a\n\n"), stop_token_ids=newline) == "a\n"


def test_decode_keeps_added_tokens_that_are_not_special(tmp_path: Path) -> None:
    core = char_tokenizer()
    core.add_tokens(["<think>", "</think>"])
    core.save_pretrained(tmp_path)
    tokenizer = ChatTokenizer(str(tmp_path))
    assert tokenizer.vocab_size == VOCAB + 2
    ids = [VOCAB, *char_ids("9+6"), VOCAB + 1, *char_ids("15")]
    assert tokenizer.encode("<think>9+6</think>15") == ids
    assert tokenizer.decode([*ids, EOS]) == "<think>9+6</think>15"


def test_pad_left_returns_ids_and_mask(tokenizer: ChatTokenizer) -> None:
    ids, mask = tokenizer.pad_left([[7], [8, 9, 10], [11, 12]])
    assert ids.dtype == torch.int64 and mask.dtype == torch.bool
    assert ids.tolist() == [[PAD, PAD, 7], [8, 9, 10], [PAD, 11, 12]]
    assert mask.tolist() == [[False, False, True], [True, True, True], [False, True, True]]
    assert tokenizer.pad_left([])[0].shape == (0, 0)
    with raises("tokenizer.empty-prompt", row=1):
        tokenizer.pad_left([[1], []])


def test_assemble_worked_example() -> None:
    input_ids, attention, position = assemble(
        prompts=torch.tensor([[PAD, 7, 8], [9, 10, 11]]),
        prompt_mask=torch.tensor([[False, True, True], [True, True, True]]),
        responses=torch.tensor([[12, 13], [14, PAD]]),
        response_present=torch.tensor([[True, True], [True, False]]),
    )
    assert input_ids.tolist() == [[PAD, 7, 8, 12, 13], [9, 10, 11, 14, PAD]]
    assert attention.tolist() == [[False, True, True, True, True], [True, True, True, True, False]]
    assert position.tolist() == [[0, 0, 1, 2, 3], [0, 1, 2, 3, 3]]
    assert (input_ids.dtype, attention.dtype, position.dtype) == (torch.int64, torch.bool, torch.int64)


def test_positions_equal_those_of_transformers_generate(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    passed: list[torch.Tensor] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: passed.append(kwargs["position_ids"]), with_kwargs=True
    )
    prompts, mask = ChatTokenizer(folder).pad_left([[7], [8, 9, 10, 11], [12, 13]])
    with torch.no_grad():
        sequences = model.generate(
            prompts, attention_mask=mask.long(), do_sample=False, max_new_tokens=5, min_new_tokens=5, pad_token_id=PAD
        )
    responses = sequences[:, prompts.shape[1] :]
    _, attention, position = assemble(prompts, mask, responses, torch.ones_like(responses, dtype=torch.bool))
    expected = torch.cat(passed, dim=1)  # without the last sampled token, which has no forward pass
    present = attention[:, :-1]
    assert torch.equal(expected[present], position[:, :-1][present])


def test_responses_are_never_retokenized(tokenizer: ChatTokenizer) -> None:
    """A model may spell out a special token; its text encodes to other ids, so only the sampled ids are kept."""
    sampled = char_ids("<eos>")
    assert tokenizer.encode(tokenizer.decode(sampled)) == [EOS]
    prompts, mask = tokenizer.pad_left([[7]])
    responses = torch.tensor([sampled])
    input_ids, _, _ = assemble(prompts, mask, responses, torch.ones_like(responses, dtype=torch.bool))
    assert input_ids.tolist() == [[7, *sampled]]


# Where a turn ends


def configured(tmp_path: Path, template: str | None = None, **configs: object) -> ChatTokenizer:
    """A tokenizer in a folder with these configuration files."""
    tokenizer = char_tokenizer()
    tokenizer.chat_template = template or "{{ messages[-1]['content'] }}\n"
    tokenizer.save_pretrained(tmp_path)
    for name, config in configs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    return ChatTokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("configs", "ends"),
    [
        ({}, {EOS: ("tokenizer",)}),
        ({"config": {"eos_token_id": 7}}, {EOS: ("tokenizer",), 7: ("config.json",)}),
        ({"config": {"text_config": {"eos_token_id": 0}}}, {0: ("config.json",), EOS: ("tokenizer",)}),
        ({"generation_config": {"eos_token_id": [EOS, 9]}}, {EOS: ("tokenizer", "generation_config.json"), 9: ()}),
        ({"config": {"eos_token_id": None}, "generation_config": {}}, {EOS: ("tokenizer",)}),
        ({"config": {"eos_token_id": [-1, VOCAB, 50256]}}, {EOS: ("tokenizer",)}),  # not ids of any token
    ],
)
def test_every_end_of_turn_id_ends_a_response(
    tmp_path: Path, configs: dict[str, object], ends: dict[int, tuple[str]]
) -> None:
    tokenizer = configured(tmp_path, **configs)
    assert tokenizer.ends == {i: where or ("generation_config.json",) for i, where in ends.items()}
    for i in ends:
        assert tokenizer.decode([*char_ids("ab"), i]) == "ab"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|system|>\n{% endfor %}", 5),
        ("{{ messages[0]['content'] }}{% if messages[1:] %} {{ messages[1]['content'] }} <|system|>{% endif %}", 5),
        ("{{ messages[-1]['content'] }}\nuser: ", None),
        ("{{ raise_exception('no') }}", None),
        ("{% if %}", None),
    ],
)
def test_the_end_of_turn_token_is_read_from_the_template(tmp_path: Path, template: str, ends: int | None) -> None:
    found = configured(tmp_path, template).ends
    assert found == {EOS: ("tokenizer",)} | ({} if ends is None else {ends: ("chat template",)})


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"eos_token_id": "x"}', '{"eos_token_id": [true]}', "\udcff"])
def test_a_broken_configuration_file_is_named(tmp_path: Path, text: str) -> None:
    char_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_bytes(text.encode(errors="surrogateescape"))
    with raises("tokenizer.broken-config", path=f"{tmp_path}/generation_config.json"):
        ChatTokenizer(str(tmp_path))


def test_a_configuration_that_breaks_loading_is_named(tmp_path: Path) -> None:
    char_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 0}')
    with raises("tokenizer.cannot-load", path=str(tmp_path)) as caught:
        ChatTokenizer(str(tmp_path))
    assert "ZeroDivisionError" in str(caught.value)


# Arguments of the template


THINKING = (
    "{{ messages[-1]['content'] }}{% if tools %}{% for t in tools %}{{ t['name'] }}{% endfor %}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}=={% endif %}{{ date_string }}"
)


def test_template_arguments_reach_the_template(tmp_path: Path) -> None:
    tokenizer, messages = configured(tmp_path, THINKING), [{"role": "user", "content": "hi"}]
    assert tokenizer.prompt_ids(messages) == char_ids("hi")
    assert tokenizer.prompt_ids(messages, {"enable_thinking": False}) == char_ids("hi==")
    assert tokenizer.prompt_ids(messages, {"date_string": "1999", "enable_thinking": True}) == char_ids("hi1999")
    assert tokenizer.prompt_ids(messages, {"tools": [{"name": "add"}]}) == char_ids("hiadd")


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("enable_thinkin", "would have no effect"),
        ("thinking", "would have no effect"),
        ("add_generation_prompt", "which flowrl sets itself"),
        ("tokenize", "which flowrl sets itself"),
    ],
)
def test_unused_and_reserved_arguments_are_refused(tmp_path: Path, argument: str, reason: str) -> None:
    with raises("tokenizer.template-argument", argument=argument) as caught:
        configured(tmp_path, THINKING).prompt_ids([{"role": "user", "content": "hi"}], {argument: False})
    assert reason in str(caught.value)


@pytest.mark.parametrize("tools", ["add", [3]])
def test_arguments_rejected_by_the_template_are_reported(tmp_path: Path, tools: object) -> None:
    with raises("tokenizer.template-rejects", path=str(tmp_path)) as caught:
        configured(tmp_path, THINKING).prompt_ids([{"role": "user", "content": "hi"}], {"tools": tools})
    assert f"with the arguments {{'tools': {tools!r}}}" in str(caught.value)


def test_template_arguments_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a file have the same arguments, or none, so the template is searched once for all of them."""
    read: list[str] = []
    findall = re.findall
    tokenizer, messages = configured(tmp_path, THINKING), [{"role": "user", "content": "hi"}]
    monkeypatch.setattr(re, "findall", lambda pattern, text: read.append(text) or findall(pattern, text))
    for arguments in ({}, {"enable_thinking": False}, {"enable_thinking": True}, {"date_string": "1"}):
        tokenizer.prompt_ids(messages, arguments)
    assert read == [THINKING]
    with raises("tokenizer.template-argument", argument="thinking"):
        tokenizer.prompt_ids(messages, {"enable_thinking": True, "thinking": True})


def test_a_broken_template_is_not_blamed_on_the_messages(tmp_path: Path) -> None:
    with raises("tokenizer.template-syntax", line=2):
        configured(tmp_path, "\n{% if %}").prompt_ids([{"role": "user", "content": "hi"}])


def test_code_in_a_folder_is_refused_without_the_advice_to_run_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}')
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "own.py").write_text("raise SystemExit")
    with raises("tokenizer.cannot-load") as error:
        ChatTokenizer(str(tmp_path))
    assert "trust_remote_code" not in str(error.value) and "never runs" in str(error.value)
    with raises("model.not-loadable") as refused, loading(str(tmp_path)):
        skeleton(str(tmp_path))
    assert "trust_remote_code" not in str(refused.value) and "never runs" in str(refused.value)

"""The demonstration's language model: a Hugging Face folder of under 1 MB, built and warm-started in seconds on a CPU.

A character-level Llama of 113,472 parameters is pre-trained on demonstrations of addition until it mostly answers
directly (and is mostly wrong) and sometimes thinks first (and is mostly right). Reinforcement learning starts from
there. The warm start is plain PyTorch and not part of a graph.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor

from flowrl.backends.torch.load import quiet
from flowrl.data.keys import Key
from flowrl.demo import task
from flowrl.demo.verifier import END_THINK, THINK

if TYPE_CHECKING:  # imports of several seconds, which a file that only names `build` does not need
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<|pad|>", "<|unk|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
WORDS = (THINK, END_THINK)
"""Multi-character tokens. They are not special, so that decoding without special tokens keeps them for the verifier."""

CHARACTERS = ("\n", *map(chr, range(32, 127)))
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('this model knows the roles system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

STEPS = 270
BATCH = 128
LEARNING_RATE = 4e-3
WARM_UP_STEPS = 20
MIXED_SHARE = 0.3  # of the steps, the last
DIRECT_SHARE = 0.7  # of the demonstrations in a mixed batch
BUCKET = 16  # tokens
STAMP = "warm_start.json"

OnStep = Callable[[int, int, float], None]
"""Called after each optimizer step with (steps done, total steps, loss in nats per answer token)."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 104 tokens (printable ASCII, ``<think>`` and ``</think>`` as words) with a chat template."""
    return word_tokenizer(
        (*SPECIAL, *CHARACTERS, *WORDS), WORDS, ["<|system|>", "<|user|>", "<|assistant|>"], CHAT_TEMPLATE
    )


def word_tokenizer(
    tokens: Iterable[str], words: Sequence[str], speakers: Sequence[str], template: str
) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per known word, and otherwise one per character.

    Args:
        tokens: all tokens, by id, with ``<|pad|>``, ``<|unk|>`` and ``<|end|>``.
        words: the tokens of several characters; a word must come before its prefixes.
        speakers: the tokens that begin a message.
        template: the chat template.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    pattern = "|".join([*map(re.escape, words), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|end|>",
        additional_special_tokens=list(speakers),
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """An untrained Llama: 2 layers of width 64, 2 heads of 32 (the minimum of vLLM), tied embeddings, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


class Demonstrations(NamedTuple):
    """Right-padded conversations: int64 ``[n sequence]`` tokens and labels (-100 off the answer), ``[n]`` lengths."""

    input_ids: Tensor
    labels: Tensor
    lengths: Tensor


def demonstrations(tokenizer: PreTrainedTokenizerFast, digits: int = 2) -> Demonstrations:
    """Every training problem twice: first all worked, then all direct, in the same order."""
    problems = task.split(digits).train
    answers = [p.worked for p in problems] + [p.answer for p in problems]
    users = [[{"role": "user", "content": p.prompt}] for p in problems]
    encoded = tokenizer.apply_chat_template(users, add_generation_prompt=True, return_dict=False)
    prompts = cast(list[list[int]], encoded) * 2
    responses = tokenizer([a + tokenizer.eos_token for a in answers], add_special_tokens=False)["input_ids"]

    lengths = torch.tensor([len(p) + len(r) for p, r in zip(prompts, responses, strict=True)])
    input_ids = torch.full((len(answers), int(lengths.max())), tokenizer.pad_token_id)
    labels = torch.full_like(input_ids, -100)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        input_ids[i, : lengths[i]] = torch.tensor(prompt + response)
        labels[i, len(prompt) : lengths[i]] = torch.tensor(response)
    return Demonstrations(input_ids, labels, lengths)


def warm_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    steps: int = STEPS,
    on_step: OnStep | None = None,
    *,
    digits: int = 2,
    direct: float = DIRECT_SHARE,
) -> list[float]:
    """Fine-tune `model` in place on demonstrations; returns the loss of each step, in nats per answer token.

    The first 70 % of the steps show worked answers only; in the rest, while the learning rate decays to zero, a share
    `direct` of the answers is direct. Mixed from the start, some seeds learn to add without thinking (two of four
    answered 56 to 65 % of the held-out problems correctly and directly), and thinking has no advantage.

    Deterministic for a seed: it runs on one thread and does not change the global random state.
    """
    data = demonstrations(tokenizer, digits)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS, (steps - step) / (MIXED_SHARE * steps))
    )
    losses = []
    model.train()
    with _one_thread():
        for step, rows in enumerate(_batches(len(data.lengths) // 2, seed, steps, direct)):
            losses.append(_backward(model, data, rows))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if on_step is not None:
                on_step(step + 1, steps, losses[-1])
    model.eval()
    return losses


def _batches(problems: int, seed: int, steps: int, direct_share: float) -> Iterator[Tensor]:
    """Rows of the demonstrations for each step, from consecutive shuffles of all problems."""
    generator = Key.of(seed).derive("warm start").generator()
    epochs = -(-steps * BATCH // problems)
    order = torch.cat([torch.randperm(problems, generator=generator) for _ in range(epochs)])
    for step, batch in enumerate(order[: steps * BATCH].view(steps, BATCH)):
        direct = torch.rand(BATCH, generator=generator) < direct_share
        mixed = step >= (1 - MIXED_SHARE) * steps
        yield batch + problems * direct if mixed else batch


def _backward(model: LlamaForCausalLM, data: Demonstrations, rows: Tensor) -> float:
    """Backpropagate the mean over all answer tokens of `rows`, in buckets of similar length to save padding."""
    tokens = (data.labels[rows] != -100).sum()
    buckets = data.lengths[rows] // BUCKET
    total = 0.0
    for bucket in buckets.unique():
        part = rows[buckets == bucket]
        width = int(data.lengths[part].max())
        # Padding is on the right, where causal attention cannot see it: no attention mask is needed.
        logits = model(input_ids=data.input_ids[part, : width - 1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), data.labels[part, 1:width].flatten(), reduction="sum") / tokens
        loss.backward()
        total += loss.item()
    return total


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run on one thread: more would change the order of summation, and are slower at this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def build(
    folder: str | Path,
    seed: int = 0,
    on_step: OnStep | None = None,
    *,
    steps: int = STEPS,
    digits: int = 2,
    direct: float = DIRECT_SHARE,
) -> Path:
    """Build the warm-started model and its tokenizer as a Hugging Face folder at `folder`; returns its path.

    A complete folder of an earlier call with the same arguments and code is reused if its files have not changed.

    Args:
        steps: steps of the warm start; with fewer steps, worked answers are wrong more often.
        direct: share of direct answers in the last 30 % of the steps.
    """
    folder = Path(folder)
    stamp = folder / STAMP
    made_of = {"seed": seed, "steps": steps, "digits": digits, "direct": direct}
    if stamp.exists() and stamp.read_bytes() == _stamp(folder, made_of):
        return folder
    stamp.unlink(missing_ok=True)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    warm_start(model, tokenizer, seed, steps, on_step, digits=digits, direct=direct)
    with quiet():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    stamp.write_bytes(_stamp(folder, made_of))  # last, so that an incomplete folder has none
    return folder


def _stamp(folder: Path, made_of: Mapping[str, float]) -> bytes:
    """The arguments, and xxh3-128 digests of the code and of every file of the folder, as JSON."""
    code = Path(task.__file__).read_bytes() + Path(__file__).read_bytes()
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != STAMP)
    files = {path.name: _digest(path.read_bytes()) for path in paths}
    return json.dumps({**made_of, "code": _digest(code), "files": files}, indent=2).encode()


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)

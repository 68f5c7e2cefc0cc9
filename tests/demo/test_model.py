"""The demonstration's model: the tokenizer, the warm start, and the folder that is reused or rebuilt.

`test_readme.py` builds the complete model and compares its accuracy before and after training.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from flowrl.demo import model as demo_model
from flowrl.demo import task
from flowrl.demo.task import Problem
from tests.nightly import nightly

pytestmark = pytest.mark.runs

make_demonstrations = demo_model.demonstrations
SHORT = 8  # steps: the fewest that exercise every part of a build


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return demo_model.make_tokenizer()


@pytest.fixture(scope="module", autouse=True)
def data(tokenizer: PreTrainedTokenizerFast) -> Iterator[demo_model.Demonstrations]:
    """The demonstrations of every build; creating them takes most of the time of a build."""
    data = make_demonstrations(tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_model, "demonstrations", lambda tokenizer, digits: data)
        yield data


@pytest.fixture(scope="module")
def short_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model.build(tmp_path_factory.mktemp("short"), seed=3, steps=SHORT)


def test_build_prints_nothing_to_stdout_and_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Commands such as `flowrl check` build the model between their own lines."""
    demo_model.build(tmp_path, steps=SHORT)
    assert capfd.readouterr() == ("", "")


def test_tokenizer_round_trips_every_demonstration(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [f"{p.prompt}{p.worked}" for half in task.split() for p in half]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    # One token per character and per think tag; no unknown token.
    assert [len(i) for i in ids] == [len(t) - len("<think>") - len("</think>") + 2 for t in texts]
    assert not any(tokenizer.unk_token_id in i for i in ids)
    ended = [[*i, tokenizer.eos_token_id, tokenizer.pad_token_id] for i in ids]
    assert tokenizer.batch_decode(ended, skip_special_tokens=True) == texts


def test_think_tags_are_ordinary_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    for word in ("<think>", "</think>"):
        (token,) = tokenizer(word, add_special_tokens=False)["input_ids"]
        assert token not in tokenizer.all_special_ids
        assert tokenizer.decode([token]) == word
    assert tokenizer.decode(tokenizer("<thin k>\t~", add_special_tokens=False)["input_ids"]) == "<thin k><|unk|>~"


def test_the_chat_template_ends_every_turn_and_refuses_unknown_roles(tokenizer: PreTrainedTokenizerFast) -> None:
    user = {"role": "user", "content": "59+36="}
    rendered = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    assert rendered == "<|user|>59+36=<|end|><|assistant|>"
    ids = tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=False)
    assert len(ids) == 9
    conversation = tokenizer.apply_chat_template([user, {"role": "assistant", "content": "95"}], return_dict=False)
    assert conversation == [*ids, *tokenizer("95<|end|>", add_special_tokens=False)["input_ids"]]
    with pytest.raises(Exception, match="knows the roles system, user and assistant, not tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "95"}])


def test_demonstrations_are_reproducible(data: demo_model.Demonstrations) -> None:
    again = make_demonstrations(demo_model.make_tokenizer())
    assert all(torch.equal(*pair) for pair in zip(data, again, strict=True))


def test_only_response_tokens_of_demonstrations_have_labels(
    tokenizer: PreTrainedTokenizerFast, data: demo_model.Demonstrations
) -> None:
    problems = task.split().train
    assert len(data.lengths) == 2 * len(problems)
    for i in (0, 4321, len(problems), len(problems) + 4321):
        problem = problems[i % len(problems)]
        response = problem.worked if i < len(problems) else problem.answer
        tokens, labels = data.input_ids[i, : data.lengths[i]], data.labels[i]
        assert tokenizer.decode(tokens) == f"<|user|>{problem.prompt}<|end|><|assistant|>{response}<|end|>"
        assert tokenizer.decode(labels[labels != -100]) == f"{response}<|end|>"
        assert torch.equal(labels[9 : data.lengths[i]], tokens[9:])
        assert (labels[data.lengths[i] :] == -100).all()


def test_the_model_folder_is_small_and_loads(short_folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(short_folder), AutoTokenizer.from_pretrained(short_folder)
    # Embeddings 104 x 64; per layer four 64 x 64 projections, three of 64 x 192 and two norms; a last norm.
    assert sum(p.numel() for p in model.parameters()) == 104 * 64 + 2 * (4 * 64**2 + 3 * 64 * 192 + 2 * 64) + 64
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    assert sum(path.stat().st_size for path in short_folder.iterdir()) < 1_000_000
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    rebuilt = demo_model.make_tokenizer()
    messages = [{"role": "user", "content": "59+36="}]
    assert tokenizer.get_vocab() == rebuilt.get_vocab()
    assert tokenizer.apply_chat_template(messages, tokenize=False) == rebuilt.apply_chat_template(
        messages, tokenize=False
    )
    worked = tokenizer(Problem(59, 36).worked, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(worked, skip_special_tokens=True) == Problem(59, 36).worked


def test_the_warm_start_loss_is_the_mean_over_response_tokens(
    tokenizer: PreTrainedTokenizerFast, data: demo_model.Demonstrations
) -> None:
    """Loss and gradients of a padded batch equal those of its rows one by one in float64."""
    count = len(data.lengths) // 2
    rows = torch.tensor([0, 5, 17, count + 5, count + 8])
    model = demo_model.make_model(tokenizer, seed=0)
    loss = demo_model._backward(model, data, rows)
    gradients = {name: p.grad.double() for name, p in model.named_parameters()}

    model = demo_model.make_model(tokenizer, seed=0).double()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for row in rows.tolist():
        ids = data.input_ids[row, : data.lengths[row]]
        log_probs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        total = total - sum(log_probs[t - 1, ids[t]] for t in range(9, len(ids)))
        tokens += len(ids) - 9
    (total / tokens).backward()
    assert loss == pytest.approx(total.item() / tokens, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_warm_start_learns_and_is_deterministic(tokenizer: PreTrainedTokenizerFast) -> None:
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    runs, seen = [], []
    for seed in (0, 0, 1):
        model = demo_model.make_model(tokenizer, seed)
        seen.clear()
        losses = demo_model.warm_start(model, tokenizer, seed, 20, lambda *progress: seen.append(progress))
        runs.append((losses, torch.cat([p.flatten() for p in model.parameters()])))
        assert seen == [(i + 1, 20, loss) for i, loss in enumerate(losses)]
    (losses, weights), (losses_again, weights_again), (_, other_weights) = runs
    assert losses[-1] < 0.6 * losses[0]
    assert losses == losses_again
    assert torch.equal(weights, weights_again)
    assert not torch.equal(weights, other_weights)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_finished_folder_is_reused(short_folder: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in short_folder.iterdir()}
    steps: list[int] = []
    assert (
        demo_model.build(short_folder, seed=3, on_step=lambda done, *_: steps.append(done), steps=SHORT) == short_folder
    )
    assert steps == []
    assert {path.name: path.stat().st_mtime_ns for path in short_folder.iterdir()} == before


@pytest.mark.parametrize(
    "damage",
    ["no stamp", "torn weights", "other seed", *map(nightly, ("torn stamp", "no tokenizer", "other steps"))],
)
def test_an_incomplete_or_different_folder_is_rebuilt(short_folder: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in short_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    stamp, weights = folder / demo_model.STAMP, folder / "model.safetensors"
    if damage == "no stamp":
        stamp.unlink()
    elif damage == "torn stamp":
        stamp.write_bytes(stamp.read_bytes()[:-10])
    elif damage == "torn weights":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    seed = 4 if damage == "other seed" else 3
    steps = SHORT + 1 if damage == "other steps" else SHORT
    done: list[int] = []
    demo_model.build(folder, seed, lambda step, *_: done.append(step), steps=steps)
    assert done == list(range(1, steps + 1))
    same = (short_folder / "model.safetensors").read_bytes() == weights.read_bytes()
    assert same == (not damage.startswith("other"))  # the same seed gives bit-equal weights
    AutoTokenizer.from_pretrained(folder)


def test_an_interrupted_build_leaves_no_stamp(short_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    demo_model.build(folder, seed=3, steps=SHORT)

    def stop(step: int, steps: int, loss: float) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_model.build(folder, seed=4, on_step=stop, steps=SHORT)
    assert not (folder / demo_model.STAMP).exists()

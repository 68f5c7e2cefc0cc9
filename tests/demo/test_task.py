"""The demonstration's task and model: the verifier, the split, the data, the tokeniser and the warm start."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from flowrl.demo import model as demo_model
from flowrl.demo import task, verifier
from flowrl.demo.task import Problem

SHORT = 8  # steps: enough to see the machinery at work
TWO_DIGITS = st.integers(10, 99)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return demo_model.make_tokenizer()


@pytest.fixture(scope="module")
def short_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model.build(tmp_path_factory.mktemp("short"), seed=3, steps=SHORT)


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        ("95", 1.0),
        (" 95\n", 1.0),
        ("<think>9+6=15 5+3+1=9</think>95", 1.0),
        ("<think>nonsense</think>95", 1.0),  # only the answer counts
        ("<think>95</think>94<think></think> 95", 1.0),
        ("", 0.0),
        ("94", 0.0),
        ("095", 0.0),
        ("95.", 0.0),
        ("9 5", 0.0),
        ("95 95", 0.0),
        ("<think>9+6=15 5+3+1=9</think>", 0.0),
        ("<think>95", 0.0),  # thinking never ended
        ("95<think>", 0.0),
        ("95</think>94", 0.0),
        ("<think>9+6=15</think>95</think>94", 0.0),
    ],
)
def test_verifier_compares_what_follows_the_last_thought(solution: str, score: float) -> None:
    found = verifier.compute_score("addition", solution, "95", extra_info={"index": 0})
    assert found == score
    assert isinstance(found, float)
    assert verifier.compute_score(data_source="addition", solution_str=solution, ground_truth="95") == score


@pytest.mark.parametrize(("text", "expected"), [("<think>1", True), ("95", False), ("", False), ("95<think>", False)])
def test_thinks(text: str, expected: bool) -> None:
    assert verifier.thinks(text) is expected


@pytest.mark.parametrize(
    ("problem", "worked"),
    [
        (Problem(59, 36), "<think>9+6=15 5+3+1=9</think>95"),
        (Problem(10, 20), "<think>0+0=0 1+2=3</think>30"),
        (Problem(99, 99), "<think>9+9=18 9+9+1=19</think>198"),
        (Problem(64, 53), "<think>4+3=7 6+5=11</think>117"),
    ],
)
def test_demonstrations_by_hand(problem: Problem, worked: str) -> None:
    assert problem.worked == worked
    assert problem.answer == worked.partition("</think>")[2]


@given(TWO_DIGITS, TWO_DIGITS)
def test_worked_demonstrations_are_right_arithmetic(a: int, b: int) -> None:
    problem = Problem(a, b)
    parts = re.fullmatch(r"<think>(\d)\+(\d)=(\d+) (\d)\+(\d)(\+1)?=(\d+)</think>(\d+)", problem.worked)
    assert parts is not None
    units_a, units_b, units, tens_a, tens_b, carry, tens, answer = parts.groups()
    assert (int(tens_a + units_a), int(tens_b + units_b)) == (a, b)
    assert int(units_a) + int(units_b) == int(units)
    assert int(tens_a) + int(tens_b) + (carry is not None) == int(tens)
    assert (carry is not None) == (len(units) == 2)
    assert tens + units[-1] == answer == str(a + b)  # the answer can be read off the two steps
    for response in (problem.answer, problem.worked):
        assert verifier.compute_score("addition", response, str(a + b)) == 1.0
        assert verifier.compute_score("addition", response, str(a + b + 1)) == 0.0


def test_split_is_strict_and_complete() -> None:
    train, heldout = task.split()
    assert len(heldout) == len(set(heldout)) == 500
    assert len(train) == len(set(train)) >= 5000
    seen = set(train)
    assert not any(Problem(a, b) in seen or Problem(b, a) in seen for a, b in heldout)
    assert len({frozenset(problem) for problem in heldout}) == 500  # no twins among the held-out ones either
    everything = {Problem(a, b) for a in range(10, 100) for b in range(10, 100)}
    assert seen | set(heldout) | {Problem(b, a) for a, b in heldout} == everything
    assert 200 < sum(a < b for a, b in heldout) < 300


def test_dataset_has_verls_format(tmp_path: Path) -> None:
    train_path, heldout_path = task.write_dataset(tmp_path / "data", seed=1)
    assert (train_path.name, heldout_path.name) == ("train.jsonl", "heldout.jsonl")
    for path, problems in ((train_path, task.split().train), (heldout_path, task.split().heldout)):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == len(problems)
        for index, row in enumerate(rows):
            assert row["data_source"] == "addition"
            assert row["extra_info"] == {"index": index, "split": path.stem}
            assert row["reward_model"]["style"] == "rule"
            (message,) = row["prompt"]
            assert message["role"] == "user"
            a, b = re.fullmatch(r"(\d\d)\+(\d\d)=", message["content"]).groups()
            assert row["reward_model"]["ground_truth"] == str(int(a) + int(b))
        assert {row["prompt"][0]["content"] for row in rows} == {f"{a}+{b}=" for a, b in problems}


def test_seed_orders_the_training_rows_and_nothing_else(tmp_path: Path) -> None:
    first, again, other = (task.write_dataset(tmp_path / name, seed) for name, seed in [("a", 1), ("b", 1), ("c", 2)])
    contents = [[path.read_text() for path in paths] for paths in (first, again, other)]
    assert contents[0] == contents[1]
    assert contents[0][0] != contents[2][0]
    assert contents[0][1] == contents[2][1]


def test_tokenizer_round_trips_every_demonstration(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [f"{p.prompt}{p.worked}" for half in task.split() for p in half]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    # One token per character, a word of thinking counting as one; nothing unknown.
    assert [len(i) for i in ids] == [len(t) - len("<think>") - len("</think>") + 2 for t in texts]
    assert not any(tokenizer.unk_token_id in i for i in ids)
    ended = [[*i, tokenizer.eos_token_id, tokenizer.pad_token_id] for i in ids]
    assert tokenizer.batch_decode(ended, skip_special_tokens=True) == texts


def test_thinking_words_are_ordinary_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    for word in ("<think>", "</think>"):
        (token,) = tokenizer(word, add_special_tokens=False)["input_ids"]
        assert token not in tokenizer.all_special_ids
        assert tokenizer.decode([token]) == word
    assert tokenizer.decode(tokenizer("<thin k>\t~", add_special_tokens=False)["input_ids"]) == "<thin k><|unk|>~"


def test_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    user = {"role": "user", "content": "59+36="}
    asked = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    assert asked == "<|user|>59+36=<|end|><|assistant|>"
    ids = tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=False)
    assert len(ids) == 9
    whole = tokenizer.apply_chat_template([user, {"role": "assistant", "content": "95"}], return_dict=False)
    assert whole == [*ids, *tokenizer("95<|end|>", add_special_tokens=False)["input_ids"]]
    with pytest.raises(Exception, match="knows the roles system, user and assistant, not tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "95"}])


def test_demonstrations_label_the_answer_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    data = demo_model.demonstrations(tokenizer)
    problems = task.split().train
    assert len(data.lengths) == 2 * len(problems)
    for i in (0, 4321, len(problems), len(problems) + 4321):
        problem = problems[i % len(problems)]
        answer = problem.worked if i < len(problems) else problem.answer
        tokens, labels = data.input_ids[i, : data.lengths[i]], data.labels[i]
        assert tokenizer.decode(tokens) == f"<|user|>{problem.prompt}<|end|><|assistant|>{answer}<|end|>"
        assert tokenizer.decode(labels[labels != -100]) == f"{answer}<|end|>"
        assert torch.equal(labels[9 : data.lengths[i]], tokens[9:])
        assert (labels[data.lengths[i] :] == -100).all()


def test_folder_is_small_and_loads(short_folder: Path) -> None:
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
    fresh = demo_model.make_tokenizer()
    messages = [{"role": "user", "content": "59+36="}]
    assert tokenizer.get_vocab() == fresh.get_vocab()
    assert tokenizer.apply_chat_template(messages, tokenize=False) == fresh.apply_chat_template(
        messages, tokenize=False
    )
    worked = tokenizer(Problem(59, 36).worked, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(worked, skip_special_tokens=True) == Problem(59, 36).worked


def test_backward_is_the_mean_over_answer_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    """Buckets and padding change nothing: the same loss and gradients as row by row in float64."""
    data = demo_model.demonstrations(tokenizer)
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


def test_finished_folder_is_reused(short_folder: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in short_folder.iterdir()}
    steps: list[int] = []
    assert (
        demo_model.build(short_folder, seed=3, on_step=lambda done, *_: steps.append(done), steps=SHORT) == short_folder
    )
    assert steps == []
    assert {path.name: path.stat().st_mtime_ns for path in short_folder.iterdir()} == before


@pytest.mark.parametrize(
    "damage", ["no stamp", "torn stamp", "torn weights", "no tokenizer", "other seed", "other steps"]
)
def test_any_other_folder_is_built_anew(short_folder: Path, tmp_path: Path, damage: str) -> None:
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
    assert same == (not damage.startswith("other"))  # one seed, one set of weights, to the last bit
    AutoTokenizer.from_pretrained(folder)


def test_a_build_that_stops_half_way_leaves_no_stamp(short_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    demo_model.build(folder, seed=3, steps=SHORT)

    def stop(step: int, steps: int, loss: float) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_model.build(folder, seed=4, on_step=stop, steps=SHORT)
    assert not (folder / demo_model.STAMP).exists()


def test_warm_started_model_has_something_to_learn(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """On held-out prompts it answers mostly directly and mostly wrongly, sometimes thinks and is then mostly right.

    Exact, without sampling: the probability of each whole response under the model, at temperature 1.
    """
    model = AutoModelForCausalLM.from_pretrained(demo_model.build(tmp_path / "model", seed=0))
    problems = task.split().heldout
    users = [[{"role": "user", "content": p.prompt}] for p in problems]
    prompts = tokenizer.apply_chat_template(users, add_generation_prompt=True, return_dict=False)

    def probability(texts: list[str]) -> torch.Tensor:
        responses = tokenizer([t + tokenizer.eos_token for t in texts], add_special_tokens=False)["input_ids"]
        rows = [torch.tensor(p + r) for p, r in zip(prompts, responses, strict=True)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        with torch.no_grad():
            log_probs = model(input_ids=ids.clamp(min=0)).logits[:, 8:-1].log_softmax(-1)
        chosen = log_probs.gather(2, ids[:, 9:, None].clamp(min=0))[..., 0]
        return torch.where(ids[:, 9:] >= 0, chosen, 0.0).sum(1).exp()

    with torch.no_grad():
        first = model(input_ids=torch.tensor(prompts)).logits[:, -1].softmax(-1)
    thinks = first[:, tokenizer.convert_tokens_to_ids("<think>")].mean()
    direct = probability([p.answer for p in problems]).mean() / (1 - thinks)
    worked = probability([p.worked for p in problems]).mean() / thinks
    assert 0.2 < thinks < 0.4
    assert direct < 0.2
    assert worked > 0.6

"""`Judge`: prompts in the judge's own tokens, generation as in `Generate`, and unparsed responses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import Metrics
from flowrl.backends import TorchRollout, TorchTrainer
from flowrl.core.operators.ports import PortField
from flowrl.data.keys import Key
from flowrl.errors import BindError
from flowrl.graph import Graph
from flowrl.graphs import grpo
from flowrl.operators import Interact, Judge
from flowrl.operators.reward.judge import conversation
from flowrl.protocols.protocols import Sampling
from flowrl.records import PromptBatch, RolloutBatch
from flowrl.run.engine.build import EngineBuilder
from tests.support.errors import raises
from tests.support.jobs import PROMPTS, column, prompt_batch, rollout_batch
from tests.support.kernel import exact
from tests.support.models import char_tokenizer, tiny_folder
from tests.support.runs import walk

TEMPLATE = "Of {prompt} is {response} like {reference}? {{0 to 9}}"


def length(text: str) -> float:
    """How much the judge has to say."""
    return float(len(text))


def first_digit(text: str) -> float | None:
    found = re.search(r"\d", text)
    return float(found.group()) if found else None


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A frozen judge, whose model is not the policy's."""
    folder = tiny_folder(tmp_path_factory.mktemp("judge"), seed=5)
    return EngineBuilder({"judge": TorchRollout(folder, device="cpu", frozen=True)}, 0).engine("judge")


def answered() -> tuple[RolloutBatch, PromptBatch]:
    """Three answers, of which the second has no token on the mask."""
    prompts = prompt_batch([[10, 11], [12], [13]])
    prompts = prompts._replace(ground_truth=column(["four", "five", 6]))
    rows = rollout_batch(prompts, [[20, 21, 22], [20], [23, 24]])
    mask = rows.response_mask.clone()
    mask[1] = False
    return rows._replace(response_text=column(["4", "gone", "some {braces}"]), response_mask=mask), prompts


def said_to(questions: list[str], engine: Any, key: Key) -> list[str]:
    """Responses of the judge about each row of `answered` that has tokens, computed alone and without padding."""
    tokenizer, texts = char_tokenizer(), []
    for text, row in zip(questions, ("0/0/0", "0/2/0"), strict=True):
        turn = [{"role": "user", "content": text}]
        ids = torch.tensor([tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)])
        sampled = engine.generate(ids, torch.ones_like(ids).bool(), [row], Sampling(1.3, 0, 1.0, 9), key)
        tokens = [i for i in sampled.responses[0][sampled.response_mask[0]].tolist() if i != 1]
        texts.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return texts


def test_the_judge_prompt_uses_the_template_and_its_response_is_parsed(engine: Any) -> None:
    rollout, prompts = answered()
    parsed, metrics, key = [], Metrics(), Key.of(7)

    def parse(text: str) -> float:
        parsed.append(text)
        return len(parsed) + 0.5

    judge = Judge(rollout=engine, template=TEMPLATE, parse=parse, max_new_tokens=9, temperature=1.3)
    scores = judge(rollout, prompts, key=key, metrics=metrics)
    assert scores.tolist() == [[0, 0, 1.5], [0, 0, 0], [0, 2.5, 0]]
    questions = ["Of ? is 4 like four? {0 to 9}", "Of ? is some {braces} like 6? {0 to 9}"]
    assert parsed == said_to(questions, engine, key) and parsed[0] != parsed[1]
    logged = metrics.compute()
    assert (logged["reward/mean"], logged["reward/unparsed"], logged["reward/max"]) == (2.0, 0.0, 2.5)
    assert 0 < logged["judge/response_length/max"] <= 9


@pytest.mark.parametrize("field", ["response", "conversation", "reference", "prompt"])
def test_no_field_of_a_question_can_end_its_turn(field: str, engine: Any) -> None:
    rollout, prompts = answered()
    tokenizer = engine.tokenizer
    tokens = tokenizer.control_tokens
    control = [token for token in (*tokens.special, *tokens.written) if token != "<unk>"]  # which other text may be
    ids = {i for token in control for i in tokenizer.encode(token)}

    def turns(text: str) -> list[int]:
        forged, talk = column([text] * 3), column([[{"role": "user", "content": text}]] * 3)
        judge = Judge(rollout=engine, template=f"{{response}} or {{{field}}}?", parse=length)
        rows = prompts._replace(raw_prompt=talk, ground_truth=forged)
        question = judge._question(rollout._replace(response_text=forged), rows, [0], talk)
        return [i for i in question.prompts[0].tolist() if i in ids]

    harmless = turns("x")
    assert harmless and [turns(text) for text in (*control, "".join(control))] == [harmless] * (len(control) + 1)


def test_a_judge_of_episodes_gets_the_whole_conversation(engine: Any) -> None:
    rollout, prompts = answered()
    turns = [("user", "two and two?"), ("assistant", "let me see"), ("tool", "{4}"), ("assistant", "4")]
    messages = [{"role": role, "content": content} for role, content in turns]
    parsed: list[str] = []
    judge = Judge(
        rollout=engine,
        template="{conversation}|{response}",
        parse=lambda text: parsed.append(text) or 0.5,
        max_new_tokens=9,
        temperature=1.3,
    )
    judge(rollout, prompts, key=Key.of(7), conversation=column([messages, [], messages[:1]]))
    whole = "user: two and two?\n\nassistant: let me see\n\ntool: {4}\n\nassistant: 4|4"
    assert parsed == said_to([whole, "two and two?|some {braces}"], engine, Key.of(7))


def test_a_template_with_conversation_needs_the_conversation_column() -> None:
    plain = grpo(exact, n=3, kl_coef=0.0)
    judge = Judge(template="{conversation}", parse=length).named("reward")
    with raises("edit.no-source", node="reward", port="conversation"):
        plain.edit(replace={"reward": judge})
    played = plain.edit(replace={"generate": Interact(tools=[length], max_turns=2, context=64, max_new_tokens=16)})
    graph = played.edit(replace={"reward": judge})
    assert str(graph["reward"].inputs[PortField("conversation")]) == "interact.conversation"
    assert graph.check() == [] and Graph.from_dict(graph.to_dict()).fingerprint() == graph.fingerprint()
    of_answers = played.edit(replace={"reward": Judge(template="{response}", parse=length).named("reward")})
    assert PortField("conversation") not in of_answers["reward"].inputs


def test_rows_without_tokens_are_not_judged(engine: Any) -> None:
    rollout, prompts = answered()
    rollout = rollout._replace(response_mask=torch.zeros_like(rollout.response_mask))
    metrics = Metrics()
    judge = Judge(rollout=engine, template="{response}", parse=lambda text: 1 / 0)
    assert judge(rollout, prompts, key=Key.of(0), metrics=metrics).eq(0).all()
    assert metrics.compute() == {}


@pytest.mark.parametrize("answer", [None, float("nan"), float("inf")])
def test_unparsed_responses_are_an_error_or_get_the_unparsed_score(answer: Any, engine: Any) -> None:
    rollout, prompts = answered()
    judge = Judge(rollout=engine, template="{response}", parse=lambda text: answer, max_new_tokens=4)
    with raises("judge.unparsed", node="judge", row="0/0/0", found=repr(answer)):
        judge(rollout, prompts, key=Key.of(0))
    metrics = Metrics()
    lenient = Judge(rollout=engine, template="{response}", parse=lambda text: answer, max_new_tokens=4, unparsed=-1.0)
    assert lenient(rollout, prompts, key=Key.of(0), metrics=metrics).sum(-1).tolist() == [-1, 0, -1]
    assert metrics.compute()["reward/unparsed"] == 2


def test_an_error_in_parse_names_the_row_and_the_response(engine: Any) -> None:
    rollout, prompts = answered()
    judge = Judge(rollout=engine, template="{response}", parse=lambda text: float("x" + text), max_new_tokens=4)
    with raises("judge.parse-raised", node="judge", row="0/0/0", error="ValueError"):
        judge(rollout, prompts, key=Key.of(0))


@pytest.mark.parametrize("reference", [None, ""])
def test_a_missing_reference_is_refused(reference: Any, engine: Any) -> None:
    rollout, prompts = answered()
    prompts = prompts._replace(ground_truth=column(["four", "five", reference]))
    with raises("judge.no-reference", node="judge", row="0/2/0"):
        Judge(rollout=engine, template=TEMPLATE, parse=length)(rollout, prompts, key=Key.of(0))
    free = Judge(rollout=engine, template="{prompt}: {response}", parse=length, max_new_tokens=3)
    assert free(rollout, prompts, key=Key.of(0)).shape == (3, 3)


@pytest.mark.parametrize("template", ["how good is it?", "{response} {answer}", "{response} {}", "{response"])
def test_invalid_templates_are_refused(template: str) -> None:
    with raises("judge.invalid-template", given=template):
        Judge(template=template, parse=length)


def test_conversations_are_rendered_with_their_roles() -> None:
    assert conversation([{"role": "user", "content": "hi"}]) == "hi"
    several = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert conversation(several) == "system: be brief\n\nuser: hi"


def judged() -> Graph:
    judge = Judge(template=TEMPLATE, parse=length, max_new_tokens=5)
    return grpo(exact, n=3, max_new_tokens=6, kl_coef=0.0).edit(replace={"reward": judge})


def test_a_graph_with_a_judge_trains_three_steps(tiny: str, tmp_path: Path) -> None:
    """By a judge of another vocabulary, which is no matter, since it reads text."""
    folder = tiny_folder(tmp_path, "qwen2", seed=2)
    tokens = json.loads((file := Path(folder, "tokenizer.json")).read_text())
    vocab = tokens["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokens))
    graph = judged()
    assert graph.check(prompts=3) == []
    assert Graph.from_dict(graph.to_dict()).fingerprint() == graph.fingerprint()
    roles = {"actor": TorchTrainer(tiny, device="cpu"), "rollout": TorchRollout()}
    job = graph.bind(**roles, judge=TorchRollout(folder, device="cpu", frozen=True))
    job.refuse_unready()
    steps = walk(graph, **job.build(0))
    steps.sync()
    for step in range(3):
        result = steps.step(PROMPTS, step, return_nodes=["judge", "generate"])
        scores = result.columns["judge"].columns["token_level_scores"]
        assert scores[~result.columns["generate"].columns["response_mask"]].eq(0).all()
        assert float(scores.sum(-1).double().mean()) == pytest.approx(result.metrics.compute()["reward/mean"])
    with pytest.raises(BindError, match=r"judge=TorchRollout\(folder, frozen=True\)"):
        graph.bind(**roles, judge=TorchRollout(folder, device="cpu")).refuse_unready()

"""Runs with one source per graph input: sampled rows, refused settings, and resuming."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from flowrl import (
    After,
    ByDifficulty,
    DemoBatch,
    DemoData,
    PreferenceData,
    PromptBatch,
    PromptData,
    ReplaySampler,
    Source,
    Training,
    UnpairedData,
    Validation,
    algorithm,
    graphs,
)
from flowrl import columns as c
from flowrl.core.operators.operator import Operator
from flowrl.core.operators.ports import INJECTED
from flowrl.data.metrics import Metrics
from flowrl.data.text.tokenizer import ChatTokenizer
from flowrl.errors import DataError, ParameterError
from flowrl.files.values import decode, encode, refuse_foreign
from flowrl.graph import Graph
from flowrl.operators import Collect, Feedback, Interact, Spread
from flowrl.operators.rows.held_out import pass_at_k
from flowrl.run.training.checkpoint import Checkpoints
from flowrl.run.training.identity import identity_of
from flowrl.run.training.job import Job
from flowrl.run.training.sources import Sources, by_input, refuse_no_feedback
from tests.nightly import nightly
from tests.run.training.interrupted import Stop, Stopper
from tests.support.errors import raises
from tests.support.jobs import bind_tiny, job_of, write_prompts
from tests.support.models import char_tokenizer
from tests.support.rewards import digits
from tests.support.rows.prompt_files import record, write_jsonl
from tests.support.runs import lines, train, without_times

pytestmark = pytest.mark.runs

COUNT = 7  # of demonstrations; prompts are 12
SEEN: list[tuple[str, list[str]]] = []


class LogRows(Operator):
    """Records the uids of its rows."""

    what: str

    def __call__(self, uid: c.Uid, metrics: Metrics = INJECTED) -> None:
        SEEN.append((self.what, uid.tolist()))
        metrics.sum(f"rows/{self.what}", len(uid))


def seen(what: str) -> list[list[str]]:
    return [rows for name, rows in SEEN if name == what]


@pytest.fixture(autouse=True)
def _clear() -> None:
    SEEN.clear()


def demos_in(folder: Path, count: int = COUNT) -> str:
    rows = [{"prompt": f"q{i}", "response": "12"[: 1 + i % 2] * (1 + i % 3)} for i in range(count)]
    return write_jsonl(folder / "demos.jsonl", rows)


def pairs_in(folder: Path, count: int = COUNT) -> str:
    rows = [{"prompt": f"q{i}", "chosen": "12" * (1 + i % 3), "rejected": "ab"} for i in range(count)]
    return write_jsonl(folder / "pairs.jsonl", rows)


@algorithm
def mixed(batch: PromptBatch, demos: DemoBatch) -> Any:
    LogRows("batch")(batch.uid)
    LogRows("demos").named("see_demos")(demos.uid)
    return graphs.grpo_sft(batch, demos, digits, n=3, max_new_tokens=5)


def job(tiny: str, graph: Graph | None = None) -> Job:
    """GRPO with demonstrations on a tiny model, with LogRows at both inputs."""
    return bind_tiny(graph or mixed(), tiny)


def data(folder: Path, **settings: Any) -> dict[str, Any]:
    return {"batch": PromptData(write_prompts(folder / "p.jsonl"), **settings), "demos": DemoData(demos_in(folder))}


def run(job: Job, data: Any, folder: Path, reporters: Any = (), **settings: Any) -> Any:
    settings = {"steps": 4, "prompts": 5, "save_model": False, "seed": 3} | settings
    return Training(job, data, folder=str(folder), **settings).run(reporters)


# ---- rows of each input


def test_every_input_samples_each_row_of_its_source_once_per_epoch(tiny: str, tmp_path: Path) -> None:
    run(job(tiny), data(tmp_path), tmp_path / "run")
    for what, count in (("batch", 12), ("demos", COUNT)):
        sampled = [uid for rows in seen(what) for uid in rows]
        epochs = [sampled[start : start + count] for start in range(0, 20, count)]
        for number, epoch in enumerate(epochs):  # each row once an epoch
            assert {uid.split("/")[0] for uid in epoch} == {str(number)} and len(set(epoch)) == len(epoch)
    orders = [[uid.split("/")[1] for rows in seen(what) for uid in rows][:7] for what in ("batch", "demos")]
    assert orders[0] != orders[1]


def test_an_additional_input_does_not_change_the_rows_of_the_first(tiny: str, tmp_path: Path) -> None:
    sources = data(tmp_path)
    run(job(tiny), sources, tmp_path / "run")
    mixed_rows = seen("batch")
    alone = job_of("grpo", tiny)
    look = alone.edit(insert={"see": After("batch", LogRows("alone"))})
    run(look, sources["batch"], tmp_path / "alone")
    run(look, {"batch": sources["batch"]}, tmp_path / "named")
    assert seen("alone") == mixed_rows * 2
    with_name, without = (without_times(lines(tmp_path / name / "metrics.jsonl")) for name in ("named", "alone"))
    assert with_name == without


def test_rounds_sample_only_the_source_of_their_region(tiny: str, tmp_path: Path) -> None:
    collect = Collect(Spread(0.1), groups=5, rounds=30)
    gated = mixed().edit(insert={"collect": After("reward", collect)}, drop=["log_rows"])
    found = run(job(tiny, gated), data(tmp_path), tmp_path / "run", checkpoint_every=4)
    offered = sum(metrics["collect/offered"] for metrics in found.metrics)
    assert offered > 4 * 5  # more than one round
    assert [len(rows) for rows in seen("demos")] == [5] * 4
    state = Checkpoints(tmp_path / "run/checkpoints", 1).latest()
    assert state is not None
    position = state[1]["data"]
    assert position["batch"]["epoch"] * 12 + position["batch"]["offset"] == offered
    assert position["demos"] == {"epoch": 2, "offset": 20 - 2 * COUNT, "rows": COUNT}


# ---- refused at construction


@pytest.mark.parametrize(
    ("given", "code", "facts"),
    [
        (lambda d: d["batch"], "run.data-columns", {"expected": ("batch", "demos"), "found": "PromptData"}),
        (lambda d: {"batch": d["batch"]}, "run.data-columns", {"missing": "demos"}),
        (lambda d: {**d, "demo": d["demos"]}, "run.data-columns", {"graph": "mixed", "found": "demo"}),
        (lambda d: {}, "run.data-columns", {"missing": "batch"}),
        (lambda d: {"batch": d["demos"], "demos": d["batch"]}, "run.data-columns", {"input": "batch"}),
        (
            lambda d: {**d, "demos": PreferenceData("pairs.jsonl")},
            "run.data-columns",
            {"input": "demos", "source": "PreferenceData", "expected": 1, "found": 2},
        ),
    ],
)
def test_mismatched_data_is_refused(
    given: Callable[[Any], Any], code: str, facts: dict[str, Any], tiny: str, tmp_path: Path
) -> None:
    sources = given(data(tmp_path))
    with raises(code, **facts):
        by_input(mixed(), sources, "Training")
    with raises(code, **facts):
        Training(job(tiny), sources, steps=1, prompts=1)


@pytest.mark.parametrize(
    ("graph", "given", "fits"),
    [
        (graphs.kto(), PreferenceData("a.jsonl"), UnpairedData("a.jsonl")),
        (graphs.dpo(), PromptData("a.jsonl"), PreferenceData("a.jsonl")),
        (graphs.sft(), PromptData("a.jsonl"), DemoData("a.jsonl")),
    ],
    ids=lambda x: type(x).__name__,
)
def test_mismatched_data_names_the_source_that_fits(graph: Graph, given: Source, fits: Source) -> None:
    with raises("run.data-columns") as caught:
        by_input(graph, given, "Training")
    assert f"Pass {type(fits).__name__}(...), or annotate" in caught.value.message
    by_input(graph, fits, "Training")


@pytest.mark.parametrize(
    ("given", "message"),
    [("demos.jsonl", r"expected PromptData\('demos.jsonl'\)"), (3, "data")],
)
def test_objects_that_are_not_sources_are_refused(given: Any, message: str, tiny: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=message):
        Training(job(tiny), {**data(tmp_path), "demos": given}, steps=1, prompts=1)


def test_a_source_that_learns_needs_feedback(tiny: str, tmp_path: Path) -> None:
    sources: Any = {**data(tmp_path), "batch": PromptData("p.jsonl", sampler=ByDifficulty())}
    with raises("run.no-feedback", graph="mixed", input="batch"):
        refuse_no_feedback(mixed(), sources)
    with raises("run.no-feedback", input="batch"):
        Training(job(tiny), sources, steps=1, prompts=1)


def test_feedback_must_score_the_rows_of_the_source(tiny: str, tmp_path: Path) -> None:
    """Feedback for prompts does not satisfy the sampler of demonstrations."""
    with_feedback = job(tiny, mixed().edit(insert={"feedback": After("reward", Feedback())}))
    sources = data(tmp_path, sampler=ByDifficulty())
    Training(with_feedback, sources, steps=1, prompts=1)
    with raises("run.no-feedback", input="demos"):
        Training(
            with_feedback, {**sources, "demos": DemoData("demos.jsonl", sampler=ReplaySampler())}, steps=1, prompts=1
        )


def test_a_missing_file_of_any_source_is_refused(tiny: str, tmp_path: Path) -> None:
    sources = {**data(tmp_path), "demos": DemoData(tmp_path / "gone.jsonl")}
    with pytest.raises(DataError, match=r"gone.jsonl' is not a file.*Correct DemoData\(path=...\)"):
        run(job(tiny), sources, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---- checkpoints


@pytest.mark.parametrize(
    "cut", [(1, "generate"), (3, "imitate"), nightly((2, "update_actor")), nightly((3, "see_demos"))]
)
def test_an_interrupted_run_resumes_with_the_same_rows(cut: Any, tiny: str, tmp_path: Path) -> None:
    sources = data(tmp_path)
    uninterrupted = run(job(tiny), sources, tmp_path / "uninterrupted", checkpoint_every=1)
    rows = {what: seen(what) for what in ("batch", "demos")}
    SEEN.clear()
    with pytest.raises(Stop):
        run(job(tiny), sources, tmp_path / "cut", [Stopper(*cut)], checkpoint_every=1)
    finished = {what: seen(what)[: cut[0]] for what in rows}
    SEEN.clear()
    again = run(job(tiny), sources, tmp_path / "cut", checkpoint_every=1, resume=True)
    assert {what: finished[what] + seen(what) for what in rows} == rows
    assert without_times(list(again.metrics)) == without_times(list(uninterrupted.metrics))


def test_resuming_with_another_source_is_refused(tiny: str, tmp_path: Path) -> None:
    sources = data(tmp_path)
    with pytest.raises(Stop):
        run(job(tiny), sources, tmp_path / "run", [Stopper(2, "generate")], checkpoint_every=1)
    other = tmp_path / "other"
    other.mkdir()
    changed = {"demos": DemoData(demos_in(tmp_path), shuffle=False)}
    with raises("resume.other-run", changed="data"):
        run(job(tiny), {**sources, **changed}, tmp_path / "run", checkpoint_every=1, resume=True)
    changed = {"demos": DemoData(demos_in(other, COUNT + 1))}
    with raises("resume.other-run", changed="content of the data"):
        run(job(tiny), {**sources, **changed}, tmp_path / "run", checkpoint_every=1, resume=True)


# ---- samplers that learn


def learning(tiny: str, gate: bool = False) -> Job:
    found = job_of("grpo", tiny).edit(insert={"feedback": After("reward", Feedback())})
    if gate:
        found = found.edit(insert={"collect": After("feedback", Collect(Spread(0.3), groups=4, rounds=20))})
    return found.edit(insert={"see": After("batch", LogRows("batch"))}) if not gate else found


@pytest.mark.parametrize(
    ("sampler", "gate"),
    [
        (ByDifficulty(0.3), False),
        (ReplaySampler(share=0.5, below=0.4), True),
        nightly(ByDifficulty(0.3), True),
        nightly(ReplaySampler(share=0.5, below=0.4), False),
    ],
    ids=repr,
)
def test_sampler_state_is_in_the_checkpoint(sampler: Any, gate: bool, tiny: str, tmp_path: Path) -> None:
    sources = PromptData(write_prompts(tmp_path / "p.jsonl"), sampler=sampler)
    uninterrupted = run(learning(tiny, gate), sources, tmp_path / "uninterrupted", checkpoint_every=2)
    assert [metrics["data/batch/last_scored_step"] for metrics in uninterrupted.metrics] == [0, 1, 2, 3]
    with pytest.raises(Stop):
        run(learning(tiny, gate), sources, tmp_path / "cut", [Stopper(3, "reward")], checkpoint_every=2)
    again = run(learning(tiny, gate), sources, tmp_path / "cut", checkpoint_every=2, resume=True)
    assert without_times(list(again.metrics)) == without_times(list(uninterrupted.metrics))
    ends = [Checkpoints(tmp_path / name / "checkpoints", 1).latest() for name in ("uninterrupted", "cut")]
    assert ends[0] is not None and ends[1] is not None
    assert ends[0][1]["data"] == ends[1][1]["data"] and ends[0][1]["data"]["last_scored_step"] == 4


def test_feedback_upstream_of_a_gate_includes_dropped_rows(tiny: str, tmp_path: Path) -> None:
    sources = PromptData(write_prompts(tmp_path / "p.jsonl", 40), sampler=ByDifficulty())
    found = run(learning(tiny, gate=True), sources, tmp_path / "run", checkpoint_every=1, steps=1)
    offered = found.metrics[0]["collect/offered"]
    state = Checkpoints(tmp_path / "run/checkpoints", 1).latest()
    assert state is not None and offered > 4
    known = state[1]["data"]["known"]
    assert len(known) == offered and all(a + b > 2 for _, a, b in known.values())  # each has feedback


# ---- validation


def test_validation_on_held_out_demonstrations(tiny: str, tmp_path: Path) -> None:
    @algorithm
    def scored(demos: DemoBatch) -> Any:
        from flowrl.operators import OldLogProb

        return graphs.sft(demos), OldLogProb()(demos)

    held_out = Validation(DemoData(demos_in(tmp_path)), every=2, until="old_log_prob", changes={}, batch=4)
    found = run(job(tiny, scored()), DemoData(demos_in(tmp_path)), tmp_path / "run", validation=held_out)
    assert [metrics["step"] for metrics in found.validations] == [0, 2, 4]


def test_validation_on_both_inputs(tiny: str, tmp_path: Path) -> None:
    both = {"until": ("reward", "see_demos"), "changes": {"repeat.n": 1, "generate.temperature": 0.0}}
    sources = data(tmp_path)
    with raises("run.validation", found=(12, 7)):
        run(job(tiny), sources, tmp_path / "a", validation=Validation(sources, **both))
    (tmp_path / "heldout").mkdir()
    even = {**sources, "demos": DemoData(demos_in(tmp_path / "heldout", 12))}
    found = run(job(tiny), sources, tmp_path / "b", validation=Validation(even, batch=5, **both))
    assert found.validations[0]["val/rows/demos"] == 12
    with raises("run.data-columns", missing="demos"):
        run(job(tiny), sources, tmp_path / "c", validation=Validation({"batch": sources["batch"]}, **both))


def test_validation_on_prompts_only(tiny: str, tmp_path: Path) -> None:
    sources = data(tmp_path)
    found = run(job(tiny), sources, tmp_path / "run", validation=Validation(sources["batch"], every=4))
    assert len(found.validations) == 2 and "val/reward/mean" in found.validations[0]
    assert train(job_of("grpo", tiny), write_prompts(tmp_path / "q.jsonl"), tmp_path / "plain").metrics


@pytest.mark.parametrize(
    ("of_data", "of_episodes", "refused"),
    [
        ({}, {"enable_thinking": False}, True),
        ({"enable_thinking": False}, {}, True),
        ({"enable_thinking": True}, {"enable_thinking": False}, True),
        ({"enable_thinking": False}, {"enable_thinking": False}, False),
        ({}, {"tools": []}, False),  # sources have no tools
    ],
)
def test_source_and_episodes_must_use_the_same_template_arguments(
    of_data: dict[str, Any], of_episodes: dict[str, Any], refused: bool
) -> None:
    operator = Interact(tools=[pass_at_k], chat_template_kwargs=of_episodes)
    graph = graphs.grpo(None).edit(replace={"generate": operator}, drop=["reward"])
    data = PromptData("a.jsonl", chat_template_kwargs=of_data)
    held_out = Validation(data, changes={"repeat.n": 1}, until="interact")
    calls: tuple[Callable[[], Any], ...] = (
        lambda: by_input(graph, data, "Training"),
        lambda: by_input(held_out.graph(graph), data, "Validation"),
    )
    for call in calls:
        with raises("run.chat-template", node="interact") if refused else nullcontext():
            call()


@pytest.mark.parametrize(("own", "refused"), [({"think": True}, True), ({"think": False}, False), ({}, False)])
def test_a_row_with_template_arguments_unlike_its_episodes_is_refused(
    own: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{{ messages[-1].content }}{{ '!' if think else '' }}"
    tokenizer.save_pretrained(tmp_path)
    calm = {"chat_template_kwargs": {"think": False}}
    rows = [record(0), record(1) | {"chat_template_kwargs": own}]
    sources = {"batch": PromptData(write_jsonl(tmp_path / "rows.jsonl", rows), **calm)}
    plain = graphs.grpo(None)
    episodes = plain.edit(replace={"generate": Interact(tools=[pass_at_k], **calm)}, drop=["reward"])
    loaded = ChatTokenizer(str(tmp_path))
    Sources(sources, loaded, 0, plain, ())  # `Generate` uses the token ids of the rows
    with raises("run.chat-template", node="interact", row=1) if refused else nullcontext():
        Sources(sources, loaded, 0, episodes, ())


class TestIdentity:
    """Functions and rows in memory are in the identity of a run by content."""

    def identity(self, source: Source) -> Any:
        graph = job_of("grpo", "model").graph
        return {key: identity_of(graph, {"batch": source}, 0, 2)[key] for key in ("data", "content of the data")}

    def test_a_mapping_counts_by_its_source(self, tmp_path: Path) -> None:
        files = [tmp_path / "a.py", tmp_path / "b.py", tmp_path / "c.py"]
        for file, answer in zip(files, ("1", "1", "2"), strict=True):
            file.write_text(f"def row(r):\n    return {{'prompt': r['prompt'], 'ground_truth': '{answer}'}}\n")
        rows = [{"prompt": "a"}]
        a, b, c = (self.identity(PromptData(rows, map=f"{file}:row")) for file in files)
        assert a == b != c
        assert self.identity(PromptData(rows)) == self.identity(PromptData(list(rows)))
        assert self.identity(PromptData(rows)) != self.identity(PromptData([{"prompt": "b"}]))

    def test_identities_of_earlier_runs_stay(self, tmp_path: Path) -> None:
        found = self.identity(PromptData(write_prompts(tmp_path / "a.jsonl")))["data"]
        assert found == {"max_prompt_length": None, "overlong": "error", "shuffle": True, "chat_template_kwargs": {}}

    def test_rows_in_memory_are_described_but_not_saved(self) -> None:
        data = PromptData([{"prompt": "a"}])
        described = encode(data, "data", portable=False)["path"]
        assert described == {"$rows": data.digests()[0], "count": 1}
        with raises("file.rows-in-memory", where="data.path", found=1):
            encode(data, "data")

    def test_a_mapping_of_a_file_is_not_imported_unasked(self, tmp_path: Path) -> None:
        (tmp_path / "rows.py").write_text("def row(r):\n    return r\n")
        saved = encode(PromptData("a.jsonl", map=f"{tmp_path}/rows.py:row"), "data")
        assert set(saved["map"]) == {"$named", "source"}
        with raises("file.not-imported"):
            refuse_foreign(saved, "run.yaml", "load(..., imports=True)")
        assert decode(saved, "data", True) == PromptData("a.jsonl", map=f"{tmp_path}/rows.py:row")
        (tmp_path / "rows.py").write_text("def row(r):\n    return None\n")
        with raises("file.source-changed"):
            decode(saved, "data", True)

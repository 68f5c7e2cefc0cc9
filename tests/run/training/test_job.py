"""`Job`: an invalid job is refused before a model loads; engines are built once, and closed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import pytest

from flowrl import Colocate, PromptData, Training, backends
from flowrl.backends import Backend, TorchRollout, TorchTrainer
from flowrl.backends.torch.generate.rollout import TorchRolloutEngine
from flowrl.backends.torch.score.engine import TorchScorerEngine, TorchTrainerEngine
from flowrl.errors import BindError, FlowrlError, NodeError
from flowrl.graph import Graph
from flowrl.graphs import grpo
from flowrl.protocols import protocols
from flowrl.protocols.backend import members
from flowrl.protocols.protocols import BuildContext
from flowrl.run.engine.build import EngineBuilder
from flowrl.run.training.job import Job
from tests.support.errors import raises
from tests.support.jobs import PROMPTS, job_of
from tests.support.kernel import RolloutEngine
from tests.support.models import tiny_folder
from tests.support.rewards import digits


class Unbuildable:
    """Backends that fail if a test builds them."""

    class Trainer(Backend):
        serves = (protocols.Trainer,)

        def build(self, context: BuildContext) -> TorchTrainerEngine:
            raise AssertionError("the trainer was built")

    class Scorer(Backend):
        serves = (protocols.Scorer,)

        def build(self, context: BuildContext) -> TorchScorerEngine:
            raise AssertionError("the scorer was built")

    class Rollout(Backend):
        serves = (protocols.Rollout,)

        def build(self, context: BuildContext) -> TorchRolloutEngine:
            raise AssertionError("the rollout was built")


def unbuildable(graph: Graph) -> Job:
    return graph.bind(actor=Unbuildable.Trainer(), ref=Unbuildable.Scorer(), rollout=Unbuildable.Rollout())


def refuse(job: Job, prompts_file: str, **settings: Any) -> str:
    """The error that refuses a training of the job; asserts that nothing is written."""
    with pytest.raises(FlowrlError) as raised:
        Training(job, PromptData(prompts_file), steps=1, prompts=4, folder="nowhere", **settings).run()
    assert not Path("nowhere").exists()
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_ready_job_is_built(prompts_file: str, tmp_path: Path) -> None:
    job = unbuildable(grpo(digits))
    with pytest.raises(AssertionError, match="was built"):
        Training(job, PromptData(prompts_file), steps=1, prompts=4, folder=str(tmp_path)).run()


def test_an_unbound_role_is_refused(prompts_file: str) -> None:
    job = grpo(digits).bind(actor=Unbuildable.Trainer(), rollout=Unbuildable.Rollout())
    facts = {"graph": "grpo", "role": "ref", "node": "ref_log_prob", "expected": "Scorer"}
    with raises("job.unbound-role", **facts):
        Training(job, PromptData(prompts_file), steps=1, prompts=4, folder="nowhere").run()
    with raises("job.unbound-role", **facts), job.eager():
        pass


def test_an_unsupported_lag_is_refused(prompts_file: str) -> None:
    job = unbuildable(grpo(digits).edit(lag=2))
    assert re.match(r"\w*Error: (?s:.*)lag=0", refuse(job, prompts_file))


def test_a_violated_rule_is_refused(prompts_file: str) -> None:
    found = refuse(unbuildable(grpo(digits, n=1)), prompts_file)
    assert found.startswith("RuleError") and "FR003" in found
    found = refuse(unbuildable(grpo(digits, n=2, mini_batch=5)), prompts_file)
    assert found.startswith("RuleError") and "mini_batch=5 does not divide the 8 rows" in found


def test_an_unsuitable_backend_is_refused_by_bind() -> None:
    with raises("backend.missing-protocol", role="actor", backend="Scorer", expected="Trainer"):
        grpo(digits).bind(actor=Unbuildable.Scorer())
    with raises("backend.not-a-backend", role="actor", found="'gpt2'"):
        grpo(digits).bind(actor="gpt2")
    with raises("backend.missing-protocol", role="actor", backend="Backend"):
        grpo(digits).bind(actor=Backend())
    with pytest.raises(BindError, match="no role 'critic' to bind"):
        grpo(digits).bind(critic=Unbuildable.Scorer())


def test_a_backend_bound_without_a_role_is_refused() -> None:
    with raises("graph.unnamed-backend", found="TorchTrainer") as error:
        grpo(digits).bind(TorchTrainer("model"))
    assert "(rollout, actor, ref): bind(rollout=...)" in error.value.message


@pytest.mark.parametrize(("name", "hint"), [("mermaid", "job.graph.mermaid"), ("train", "Training(job, data, steps=")])
def test_a_missing_attribute_of_a_job_is_answered_by_what_has_it(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(hint)):
        getattr(unbuildable(grpo(digits)), name)


def test_a_trainer_without_checkpoints_is_refused_with_checkpoint_every(prompts_file: str) -> None:
    job = unbuildable(grpo(digits))
    found = refuse(job, prompts_file, checkpoint_every=2)
    assert found.startswith("BindError: checkpoint_every=2 saves and restores the role 'actor', but Trainer does not")
    assert "load_checkpoint and save_checkpoint" in found and "or leave checkpoint_every out." in found
    with raises("backend.not-checkpointed", role="actor", backend="Trainer") as caught:
        replace(job, place=Colocate(3, restart="role")).refuse_unready()
    assert "restart='role', gpus=3) saves" in caught.value.message and "or drop restart=" in caught.value.message
    replace(job, place=Colocate(3)).refuse_unready()


def test_an_engine_without_the_protocols_of_its_backend_is_refused() -> None:
    class NoMethods(Backend):
        serves = (protocols.Scorer, protocols.Closable)

        def build(self, context: BuildContext) -> Any:
            return object()

    with raises(
        "backend.incomplete-engine", role="ref", backend="NoMethods", expected="Scorer", missing=("log_probs",)
    ):
        EngineBuilder({"ref": NoMethods()}, seed=0).all()


@pytest.mark.parametrize("name", ["TorchTrainer", "TorchScorer", "TorchCritic", "TorchRollout", "VLLM", "SGLang"])
def test_engines_implement_the_protocols_of_their_backends(name: str) -> None:
    backend = getattr(backends, name)
    engine = get_type_hints(backend.build)["return"]
    for protocol in backend.serves:
        assert members(protocol) <= set(dir(engine))


# ---- engines


def test_engines_are_built_once_with_shared_ones_first(tiny: str) -> None:
    order: list[str] = []

    class RecordsBuild(Backend):
        name: str
        needs: tuple[str, ...] = ()

        def build(self, context: BuildContext) -> Any:
            others = [context.engine(role) for role in self.needs]
            order.append(self.name)
            return (self.name, context.seed, *others)

    engines = EngineBuilder({"a": RecordsBuild("a", ("c",)), "b": RecordsBuild("b"), "c": RecordsBuild("c")}, seed=4)
    assert engines.all() == {"a": ("a", 4, ("c", 4)), "b": ("b", 4), "c": ("c", 4)}
    assert order == ["c", "a", "b"]
    with raises("job.shared-weights", role="a", cycle=("a", "b", "a")):
        EngineBuilder({"a": RecordsBuild("a", ("b",)), "b": RecordsBuild("b", ("a",))}, seed=0).all()
    with raises("job.shared-weights", role="a", owner="x"):
        EngineBuilder({"a": RecordsBuild("a", ("x",))}, seed=0).all()


def test_editing_a_job_edits_its_graph_and_bindings(tiny: str) -> None:
    job = job_of("grpo", tiny)
    other = job.edit(bind={"rollout": TorchRollout(tiny)})
    assert other.graph.bindings["actor"] == job.graph.bindings["actor"]
    assert other.graph.bindings["rollout"] == TorchRollout(tiny)
    assert job.graph.bindings["rollout"] == TorchRollout()
    assert set(job.build()) == {"actor", "ref", "rollout"}


class Closing:
    """A live engine that must be closed."""

    def __init__(self, name: str, closed: list[str]) -> None:
        self.name, self.closed = name, closed

    def close(self) -> None:
        self.closed.append(self.name)
        if self.name == "c":
            raise OSError("c does not end")


@pytest.mark.parametrize("fault", [None, "in the block", "while they are built", "while they are closed"])
def test_engines_are_closed_in_reverse_order(fault: str | None) -> None:
    """Also if the block raises, or building or closing an engine raises."""
    closed: list[str] = []

    class Named(Backend):
        name: str

        def build(self, context: BuildContext) -> Any:
            if self.name == "d":
                raise ValueError("d does not start")
            return object() if self.name == "plain" else Closing(self.name, closed)

    names = ["a", "plain", "b", *{"while they are built": "d", "while they are closed": "c"}.get(fault or "", "")]
    engines = EngineBuilder({name: Named(name) for name in names}, seed=0)
    try:
        with engines.live() as live:
            assert list(live) == names and not closed
            if fault == "in the block":
                raise ValueError("raised in the block")
    except (OSError, ValueError) as error:
        message = str(error)
    else:
        message = "nothing"
    assert (
        message
        == {
            None: "nothing",
            "in the block": "raised in the block",
            "while they are built": "d does not start",
            "while they are closed": "c does not end",
        }[fault]
    )
    assert closed == [name for name in reversed(names) if name in "abc"]


class ClosingRolloutEngine(TorchRolloutEngine):
    closed: ClassVar[list[str]] = []

    def close(self) -> None:
        self.closed.append(self.tokenizer.folder)


class ClosingRollout(TorchRollout):
    def build(self, context: BuildContext) -> ClosingRolloutEngine:
        engine = super().build(context)
        engine.__class__ = ClosingRolloutEngine
        return engine  # type: ignore[return-value]


def test_a_job_closes_its_engines(tiny: str) -> None:
    """With every way to open it."""
    closed = ClosingRolloutEngine.closed
    job = job_of("grpo", tiny).edit(bind={"rollout": ClosingRollout(tiny, device="cpu")})
    with job.open(), pytest.raises(NodeError), job.open() as executor:
        executor.step(PROMPTS, 0)  # before the first sync
    assert closed == [tiny, tiny]
    with job.eager():
        assert len(closed) == 2
    assert closed == [tiny] * 3


def test_a_missing_model_folder_is_reported_before_loading(tiny: str) -> None:
    job = unbuildable(grpo(digits)).edit(bind={"ref": backends.TorchScorer("./nowhere")})
    for place in (None, Colocate(gpus=1)):
        with pytest.raises(BindError, match=r"Role 'ref': The model folder './nowhere' does not exist; expected a"):
            replace(job, place=place).open().__enter__()


def test_models_of_different_vocabularies_are_refused_before_loading(tmp_path: Path) -> None:
    folders = {name: tiny_folder(tmp_path / name) for name in ("one", "two", "three")}
    tokens = json.loads((tmp_path / "two" / "llama-0" / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "two" / "llama-0" / "tokenizer.json").write_text(json.dumps(tokens))
    for file in (tmp_path / "three" / "llama-0").glob("tokenizer*"):
        file.unlink()
    actor = backends.TorchTrainer(folders["one"], device="martian")
    for other in (folders["two"], folders["one"], folders["three"]):
        job = grpo(digits).bind(ref=backends.TorchScorer(other), actor=actor, rollout=TorchRollout())
        if other == folders["two"]:
            with pytest.raises(BindError, match=r"'actor' and 'ref' have different vocabularies: 2 ids differ"):
                job.refuse_unready()
        else:
            job.refuse_unready()


def test_an_engine_without_a_tokenizer_is_refused() -> None:
    class NoTokenizer(Backend):
        serves = (protocols.Rollout,)

        def build(self, context: BuildContext) -> Any:
            return RolloutEngine()

    with raises("backend.incomplete-engine", role="rollout", backend="NoTokenizer", missing=("tokenizer",)):
        EngineBuilder({"rollout": NoTokenizer()}, seed=0).all()


def test_a_reference_that_could_be_trained_is_refused(tiny: str) -> None:
    engines = {"actor": TorchTrainer(tiny), "rollout": TorchRollout()}
    with raises("job.never-trained", role="ref", node="ref_log_prob", backend="TorchTrainer") as error:
        grpo(digits).bind(ref=TorchTrainer(tiny), **engines).refuse_unready()
    assert f"ref=TorchScorer({tiny!r})" in error.value.message
    grpo(digits).bind(ref=backends.TorchScorer(tiny), **engines).refuse_unready()

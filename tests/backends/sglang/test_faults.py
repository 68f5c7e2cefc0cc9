"""Faults of `SGLang` with a toy process: each is reported, and the next sync restarts the engine.

tests/engines/sglang/test_sglang.py tests one fault of the real process on every commit, and the others nightly.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from flowrl.backends import SGLang, TorchTrainer
from flowrl.backends.hosted.process import EngineProcess
from flowrl.backends.hosted.reaper import members
from flowrl.backends.sglang import engine as module
from flowrl.backends.sglang.engine import SGLangEngine
from flowrl.data.metrics import Metrics
from flowrl.errors import EngineError
from flowrl.operators import Interact
from flowrl.protocols.protocols import Sampling
from flowrl.sync.digest import weights_digest
from tests.backends.sglang.toy_server import ENDLESS, WORD
from tests.engines.contract.answers import CONTEXT, GREEDY, KEY, names, ragged, rows
from tests.engines.contract.requests import Counts
from tests.engines.contract.sources import Altered
from tests.operators.engines.test_interact import prompts_of
from tests.support.errors import raises
from tests.support.models import tiny_folder

KILLED = {"engine": "SGLang", "how": "was killed by SIGKILL"}


class ScoresZero(Altered):
    """A trainer that scores every token 0, as the toy does."""

    def log_probs(self, batch: Any) -> Tensor:
        return torch.zeros(batch.response_mask.shape)


def toy_process(name: str, main: str, *rest: Any) -> EngineProcess:
    assert main == "flowrl.backends.sglang.server:main"
    return EngineProcess(name, "tests.backends.sglang.toy_server:main", *rest)


@pytest.fixture(scope="module", autouse=True)
def without_sglang() -> Iterator[None]:
    find = importlib.util.find_spec
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "EngineProcess", toy_process)
        patch.setattr(importlib.util, "find_spec", lambda name: True if name == "sglang" else find(name))
        yield


@pytest.fixture(scope="module")
def trainer(tiny: str) -> ScoresZero:
    return ScoresZero(TorchTrainer(tiny, device="cpu").build(CONTEXT), version=4)


@pytest.fixture(scope="module")
def running(tiny: str, without_sglang: None) -> Iterator[SGLangEngine]:
    engine = SGLang(tiny, dtype="float32").build(CONTEXT)
    yield engine
    engine.close()


@pytest.fixture
def engine(running: SGLangEngine, trainer: Any) -> SGLangEngine:
    running.sync(trainer)
    return running


def process_of(engine: SGLangEngine) -> EngineProcess:
    assert engine._process is not None
    return engine._process


def responses(engine: SGLangEngine, sampling: Sampling = GREEDY) -> list[list[int]]:
    prompts, mask = ragged(engine, [4, 9])
    return rows(engine.generate(prompts, mask, names(2), sampling, KEY))


def refuse_unsynced(engine: SGLangEngine, trainer: Any) -> None:
    """Assert that the engine refuses to generate until the next sync."""
    assert engine.receipt is None
    with raises("engine.no-receipt", engine="SGLang"):
        responses(engine)
    assert engine.sync(trainer).digest == weights_digest(trainer.weights())
    assert responses(engine) == [[WORD] * GREEDY.max_new_tokens] * 2


def test_a_process_killed_during_generation_is_reported_and_restarted_by_the_next_sync(
    engine: SGLangEngine, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = process_of(engine)
    group, reply = process.pid, process.reply

    def killed(call: str) -> dict[str, Any]:
        os.kill(group, signal.SIGKILL)
        return reply(call)

    monkeypatch.setattr(process, "reply", killed)
    with raises("engine.process-died", **KILLED, when="during generate"):
        responses(engine, replace(GREEDY, max_new_tokens=ENDLESS + 1))
    assert not members(group)
    refuse_unsynced(engine, trainer)


def test_a_process_killed_during_a_sync_is_not_reported_as_damaged_weights(engine: SGLangEngine, trainer: Any) -> None:
    os.kill(process_of(engine).pid, signal.SIGKILL)
    with raises("engine.process-died", **KILLED):
        engine.sync(trainer)
    refuse_unsynced(engine, trainer)


def test_a_process_killed_during_episodes_is_reported(engine: SGLangEngine) -> None:
    group = process_of(engine).pid

    class Kills(Counts):
        async def step(self, answer: Any) -> Any:
            if answer.turn == 1:
                os.kill(group, signal.SIGKILL)
            return await super().step(answer)

    interact = Interact(Kills, max_turns=4, context=200, max_new_tokens=8, rollout=engine)
    with raises("engine.process-died", **KILLED):
        interact(prompts_of(engine.tokenizer, 12), key=KEY, metrics=Metrics())
    assert engine.receipt is None and not members(group)


def test_the_digest_detects_weights_damaged_in_transit(
    engine: SGLangEngine, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(bucket: dict[str, Tensor]) -> bytes:
        return save({name: tensor * (1 + 1e-7) for name, tensor in load(save(bucket)).items()})

    with monkeypatch.context() as patch, raises("sync.damaged"):
        patch.setattr(module, "save", damaged)
        engine.sync(trainer)
    refuse_unsynced(engine, trainer)


def test_generation_with_weights_of_another_version_is_refused(engine: SGLangEngine) -> None:
    engine._ask("end", version="13")
    with raises("engine.version-mismatch", engine="SGLang", found=("13",)):
        responses(engine)
    assert engine.receipt is None


@pytest.mark.parametrize(
    ("settings", "code", "facts"),
    [
        ({"engine_args": {"no_such_argument": 1}}, "engine.does-not-start", {"engine": "SGLang"}),
        ({"cache_tokens": 100}, "sglang.cache-too-small", {"found": 100}),
    ],
)
def test_a_failed_start_leaves_no_processes_or_files(
    tiny: str, settings: dict[str, Any], code: str, facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[EngineProcess, Path]] = []

    def recorded(*arguments: Any) -> EngineProcess:
        started.append((process := toy_process(*arguments), Path(arguments[-1].name)))
        return process

    monkeypatch.setattr(module, "EngineProcess", recorded)
    with raises(code, **facts):
        SGLang(tiny, dtype="float32", **settings).build(CONTEXT)
    [(process, folder)] = started
    assert not members(process.pid) and not folder.exists()


@pytest.mark.parametrize(("stored", "dtype"), [("float32", "bfloat16"), ("float16", "auto")])
def test_dtype_auto_is_bfloat16_for_a_float32_folder(
    stored: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked by SGLang's arguments; SGLang's own default would be float16."""
    folder = Path(tiny_folder(tmp_path))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": stored}))
    requests: list[dict[str, Any]] = []

    class Refusing:
        def __init__(self, *arguments: Any) -> None:
            self.close = arguments[-1].cleanup

        def send(self, arguments: dict[str, Any]) -> None:
            requests.append(arguments)
            raise EngineError("Enough.", code="engine.call-failed")

    monkeypatch.setattr(module, "EngineProcess", Refusing)
    with raises("engine.does-not-start"):
        SGLang(str(folder)).build(CONTEXT)
    assert [arguments["dtype"] for arguments in requests] == [dtype]

"""`TorchScorer(cache=...)`: a reference scores each row once, with the bits of a reference without a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl import PreferenceData, Training
from flowrl.backends import SGD, TorchScorer, TorchTrainer
from flowrl.backends.torch.score.log_prob_cache import row_keys
from flowrl.backends.torch.score.model import TorchModel
from flowrl.backends.torch.score.rows import SequenceInputs
from flowrl.graphs import dpo
from flowrl.run.engine.build import EngineBuilder
from tests.support.errors import raises
from tests.support.models import ragged, tiny_folder

PAIRS = [{"prompt": f"q{i}", "chosen": "12" * (1 + i % 3), "rejected": "abcd"[: 1 + i % 4]} for i in range(6)]


def engine(folder: str, **settings: Any) -> Any:
    return EngineBuilder({"ref": TorchScorer(folder, device="cpu", **settings)}, 0).engine("ref")


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each forward pass for log-probs without a gradient."""
    found: list[int] = []
    original = TorchModel.log_probs

    def counted(self: TorchModel, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            found.append(len(batch.input_ids))
        return original(self, batch, *args, **kwargs)

    monkeypatch.setattr(TorchModel, "log_probs", counted)
    return found


def train(tiny: str, folder: Path, cache: Path | None, prompts: int = 3, **settings: Any) -> Any:
    actor = TorchTrainer(tiny, SGD(lr=0.05), device="cpu")
    ref = TorchScorer(tiny, device="cpu", cache=None if cache is None else str(cache))
    data = PreferenceData(PAIRS, shuffle=False)
    job = dpo(beta=0.5).bind(actor=actor, ref=ref)
    return Training(job, data, prompts=prompts, folder=str(folder), **settings).run()


def test_each_row_is_scored_once_with_the_same_bits(tiny: str, tmp_path: Path, scored: list[int]) -> None:
    """Three epochs of two steps: the reference runs in the first two steps only."""
    plain = train(tiny, tmp_path / "plain", None, epochs=3)
    assert sum(scored) == 3 * 12
    scored.clear()
    cached = train(tiny, tmp_path / "cached", tmp_path / "cache", epochs=3)
    assert sum(scored) == 12
    for ours, theirs in zip(cached.metrics, plain.metrics, strict=True):
        assert {k: v for k, v in ours.items() if k.startswith("actor/")} == {
            k: v for k, v in theirs.items() if k.startswith("actor/")
        }
    assert weights(cached.folder) == weights(plain.folder)


def test_a_resumed_run_computes_no_row_again(tiny: str, tmp_path: Path, scored: list[int]) -> None:
    straight = train(tiny, tmp_path / "straight", None, steps=4)
    scored.clear()
    train(tiny, tmp_path / "cut", tmp_path / "cache", steps=2, checkpoint_every=2)
    assert sum(scored) == 12
    resumed = train(tiny, tmp_path / "cut", tmp_path / "cache", steps=4, checkpoint_every=2, resume=True)
    assert sum(scored) == 12 and weights(resumed.folder) == weights(straight.folder)


def weights(folder: Path) -> bytes:
    return (folder / "actor" / "model.safetensors").read_bytes()


def test_rows_are_found_whatever_their_padding_and_company(tiny: str, tmp_path: Path, scored: list[int]) -> None:
    batch, expected = ragged(), engine(tiny).log_probs(ragged())
    cached = engine(tiny, cache=str(tmp_path))
    assert torch.equal(cached.log_probs(batch), expected)
    scored.clear()
    wider = batch._replace(
        input_ids=torch.nn.functional.pad(batch.input_ids, (3, 2), value=77),
        attention_mask=torch.nn.functional.pad(batch.attention_mask, (3, 2)),
        position_ids=torch.nn.functional.pad(batch.position_ids, (3, 2), value=10**6),
        response_mask=torch.nn.functional.pad(batch.response_mask, (0, 2)),
    )
    assert torch.equal(cached.log_probs(wider)[:, :-2], expected)
    some = batch._replace(**{k: v[[4, 1]] for k, v in batch._asdict().items() if isinstance(v, Tensor)})
    assert torch.equal(cached.log_probs(some), expected[[4, 1]]) and scored == []
    mixed = batch._replace(temperature=torch.where(torch.arange(6) == 2, 0.5, batch.temperature))
    found = cached.log_probs(mixed)
    assert scored == [1] and torch.equal(found[[0, 1, 3, 4, 5]], expected[[0, 1, 3, 4, 5]])
    torch.testing.assert_close(found, engine(tiny).log_probs(mixed))


def test_what_is_scored_is_part_of_the_key() -> None:
    batch = ragged(2)
    inputs = SequenceInputs(*(getattr(batch, name) for name in SequenceInputs._fields))
    off = inputs.response_mask.clone()
    off[0, int(off[0].int().argmax())] = False
    changed = [
        inputs._replace(input_ids=(inputs.input_ids + 1) % 50),
        inputs._replace(position_ids=inputs.position_ids + 1),
        inputs._replace(temperature=inputs.temperature * 2),
        inputs._replace(response_mask=off),
    ]
    keys = [next(iter(row_keys(one))) for one in (inputs, *changed)]
    assert len(set(keys)) == 5


def test_another_model_or_dtype_has_its_own_rows(tmp_path: Path) -> None:
    """Weights are compared, not folders: a copy of a model shares its rows."""
    one, same, other = (tiny_folder(tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1)))
    batch, cache = ragged(), str(tmp_path / "cache")
    found = [engine(folder, cache=cache).log_probs(batch) for folder in (one, same, other)]
    assert torch.equal(found[0], found[1]) and not torch.allclose(found[0], found[2], atol=1e-2)
    engine(one, cache=cache, dtype="bfloat16").log_probs(batch)
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_another_configuration_or_attention_of_the_same_weights_has_its_own_rows(tmp_path: Path) -> None:
    """What positions mean is in the configuration, not in the weights."""
    one, other = (tiny_folder(tmp_path / str(i), seed=0) for i in range(2))
    file = Path(other, "config.json")
    config = json.loads(file.read_text())
    config["rope_parameters"]["rope_theta"] = 100.0
    file.write_text(json.dumps(config))
    batch, cache = ragged(), str(tmp_path / "cache")
    assert not torch.equal(engine(one, cache=cache).log_probs(batch), engine(other).log_probs(batch))
    assert torch.equal(engine(other, cache=cache).log_probs(batch), engine(other).log_probs(batch))
    assert torch.equal(
        engine(one, cache=cache, attention="eager").log_probs(batch), engine(one, attention="eager").log_probs(batch)
    )
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_no_rows_are_nothing(tiny: str, tmp_path: Path) -> None:
    empty = ragged()._replace(**{k: v[:0] for k, v in ragged()._asdict().items() if isinstance(v, Tensor)})
    assert engine(tiny, cache=str(tmp_path)).log_probs(empty).shape == (0, 9)


def test_a_damaged_cache_is_refused(tiny: str, tmp_path: Path) -> None:
    engine(tiny, cache=str(tmp_path)).log_probs(ragged())
    [file] = tmp_path.iterdir()
    file.write_bytes(b"damaged" * 1000)
    with raises("model.log-prob-cache", path=str(file)):
        engine(tiny, cache=str(tmp_path))
    (tmp_path / "file").write_text("")
    with raises("model.log-prob-cache", error="FileExistsError"):
        engine(tiny, cache=str(tmp_path / "file"))

"""The card of a trained model: a ``README.md`` for the Hub that says what trained it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import pyarrow as pa

from flowrl.draw import mermaid
from flowrl.errors import DataError, ParameterError
from flowrl.look.recorded_run import RecordedRun

_METRICS = (
    "reward/mean",
    "kl/ref",
    "actor/entropy",
    "response_length/mean",
    "reward_model/loss",
    "reward_model/accuracy",
)
"""The metrics of steps that a card shows, if the run has them."""


def trained_role(run: RecordedRun, role: str | None = None) -> str:
    """The role whose trained model the run folder holds; of several, the one that is named.

    Raises:
        DataError: the folder holds no trained model.
        ParameterError: `role` names none of them, or there are several and `role` is None.
    """
    bindings = run.description.get("graph", {}).get("bindings", {})
    found = [name for name in bindings if (run.path / name / "config.json").is_file()]
    if not found:
        raise DataError(
            f"{run.path} holds no trained model: its status is {run.status!r}, and weights are written at the end of a "
            f"run with save_model=True. Finish the run with --resume.",
            code="run.no-model",
            path=run.path,
            status=run.status,
        )
    if role in found or (role is None and len(found) == 1):
        return role or found[0]
    raise ParameterError(
        f"{run.path} holds the trained models of {', '.join(map(repr, found))}, and role={role!r} is none of them. "
        f"Pass one: --role {found[0]}.",
        code="run.no-model",
        path=run.path,
        role=role,
        known=found,
    )


def model_card(run: RecordedRun, role: str, repository: str) -> str:
    """The card of the model of a role: YAML for the Hub, then algorithm, graph, data, settings and metrics.

    Paths of this machine are left out: of files it names the last part.

    Raises:
        GraphError: the graph needs code that was not imported.
    """
    from huggingface_hub import ModelCardData

    described = run.description
    pins: list[Mapping[str, str]] = described.get("commits", [])
    bound = described["graph"]["bindings"][role]
    base = next((pin for pin in pins if pin["kind"] == "model" and pin["repository"] == bound.get("model")), None)
    data = ModelCardData(
        base_model=None if base is None else base["repository"],
        library_name="transformers",
        pipeline_tag="text-classification" if _is_classifier(run.path / role) else "text-generation",
        tags=["flowrl", "reinforcement-learning", run.graph.name],
        datasets=[pin["repository"] for pin in pins if pin["kind"] == "dataset"] or None,
    )
    name = repository.rpartition("/")[2]
    start = f"`{_last(bound.get('model'))}`" if base is None else f"[{base['repository']}]({_tree(base)})"
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name}",
        f"Trained from {start} by the algorithm `{run.graph.name}` with flowrl {described['versions']['flowrl']}.",
        "## Graph",
        f"```mermaid\n{mermaid.draw(run.graph)}\n```",
        "## Training",
        _table(("setting", "value"), _settings(described, bound)),
        "## Metrics",
        _table(("metric", "first", "last"), _metrics(run)),
    ]
    return "\n\n".join(sections) + "\n"


def _is_classifier(folder: Path) -> bool:
    """Whether a model's folder is a sequence classifier, as those of reward models are."""
    named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or ()
    return any(name.endswith("ForSequenceClassification") for name in named)


def _settings(described: Mapping[str, Any], bound: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    training, identity = described["training"], described["identity"]
    for pin in described.get("commits", []):
        yield f"{pin['kind']} {pin['repository']}", f"commit {pin['commit']}"
    yield "data", _text(training["data"])
    yield "digests of the data", _text(identity["content of the data"])
    yield "steps", str(training["steps"])
    yield "prompts per step", str(training["prompts"])
    yield "seed", str(training["seed"])
    for name in ("optimizer", "schedule", "lora"):
        if bound.get(name) is not None:
            yield name, _text(bound[name])
    yield "versions", ", ".join(f"{package} {version}" for package, version in described["versions"].items())
    yield "fingerprint of the graph", described["fingerprint"]


def _metrics(run: RecordedRun) -> Iterator[tuple[str, str, str]]:
    """First and last value of some metrics of steps, and of the mean rewards of validations."""
    validations = run.validations
    held_out = [name for name in validations.column_names if name.endswith("/reward/mean")]
    for table, names in ((validations, held_out), (run.metrics, _METRICS)):
        for name in names:
            if values := _values(table, name):
                yield name, f"{values[0]:.4g}", f"{values[-1]:.4g}"


def _values(table: pa.Table, name: str) -> list[float]:
    return table[name].drop_null().to_pylist() if name in table.column_names else []


def _tree(pin: Mapping[str, str]) -> str:
    return f"https://huggingface.co/{pin['repository']}/tree/{pin['commit']}"


def _text(value: Any) -> str:
    """A parameter as Python writes it, without those that are not set and the folders of paths."""
    if isinstance(value, Mapping):
        given = {k: v for k, v in value.items() if k[0] != "$" and v not in (None, [], {}, False)}
        inner = ", ".join(f"{name}={_text(one)}" for name, one in given.items())
        return f"{str(value['$type']).rpartition(':')[2]}({inner})" if "$type" in value else inner
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return _last(value) if isinstance(value, str) else str(value)


def _last(value: object) -> str:
    """The last part of an absolute path, else the text."""
    text = str(value)
    return PurePath(text).name if PurePath(text).is_absolute() else text


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)

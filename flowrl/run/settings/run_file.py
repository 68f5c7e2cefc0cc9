"""Trainings as files: what `flowrl.save` writes of a `Training`, for people to edit.

Parameters at their defaults are left out. The graph is that of a graph file; its bindings are by themselves:

.. code-block:: yaml

    flowrl: 2
    data: {$type: PromptData, path: train.jsonl}
    steps: 100
    prompts: 32
    bindings:
      actor: {$type: TorchTrainer, model: model}
    graph: {name: grpo, nodes: ...}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from flowrl.core.graphs.graph import Graph
from flowrl.data.files import write
from flowrl.errors import ParameterError
from flowrl.files import plain
from flowrl.files.concise import changed_parameters, concise
from flowrl.files.graph_io import FORMAT, graph_from_dict, graph_to_dict
from flowrl.files.values import at_place, decode, encode, malformed, refuse_foreign, refuse_other_keys
from flowrl.run.training.job import Job
from flowrl.run.training.training import Training

SETTINGS = tuple(field.name for field in dataclasses.fields(Training) if field.name != "job")
"""The fields of a training that are keys of its file."""
_OF_GRAPH = ("name", "nodes", "sinks", "lag", "allow")
KEYS = ("flowrl", *SETTINGS, "place", "optimize", "bindings", "graph")


def training_to_dict(training: Training) -> dict[str, Any]:
    """A training as JSON-able data.

    Raises:
        GraphError: a parameter cannot be written, such as a lambda.
    """
    job = training.job
    graph = graph_to_dict(job.graph)
    settings = changed_parameters(training, leave_out=frozenset({"job"}))
    place = {} if job.place is None else {"place": concise(encode(job.place, "place"))}
    optimize = {} if job.optimize else {"optimize": False}
    bindings = {role: concise(backend) for role, backend in graph["bindings"].items()}
    of_graph = {key: concise(graph[key]) for key in _OF_GRAPH if key in graph}
    return {"flowrl": FORMAT, **settings, **place, **optimize, "bindings": bindings, "graph": of_graph}


def training_from_dict(kind: type[Graph], data: Mapping[str, Any], imports: bool | None, source: Path) -> Training:
    """The inverse of `training_to_dict`; its graph is of this class. For `imports` see `flowrl.files.values`.

    Raises:
        GraphError: the data is not a training, or names something unknown or not imported.
    """
    refuse_other_keys(data, KEYS, str(source))
    if imports is None:
        call = f"flowrl.load({str(source)!r}, imports=True), or pass --import on the command line"
        refuse_foreign(data, source, call)
    bindings = data.get("bindings", {})
    graph = graph_from_dict(
        kind, {"flowrl": data["flowrl"], "lag": 0, **data["graph"], "bindings": bindings}, imports, source
    )
    found = {name: decode(data[name], name, imports) for name in (*SETTINGS, "place", "optimize") if name in data}
    place, optimize = found.pop("place", None), found.pop("optimize", True)
    if not isinstance(optimize, bool):
        raise malformed(f"{source} has optimize: {optimize!r}; expected true or false.", where=source, key="optimize")
    try:
        return Training(job=Job(graph, place, optimize), **found)
    except ParameterError as error:
        raise at_place(str(source), error) from error


def save(training: Training, path: Path) -> None:
    """Write a training to ``.yaml``/``.yml`` or ``.json``, atomically."""
    is_json, data = plain.is_json(path), training_to_dict(training)
    text = json.dumps(data, indent=2) + "\n" if is_json else yaml.safe_dump(data, sort_keys=False, width=120)
    write(path, text.encode())


def refuse_unsaved(value: Any) -> None:
    """Refuse a job, which has neither data nor a length."""
    if isinstance(value, Job):
        raise malformed(
            "flowrl.save(...) got a job; expected a graph or a training. Pass Training(job, data, steps=..., "
            "prompts=...), or the graph with its bindings: job.graph.",
            where="flowrl.save",
            found="Job",
        )

"""What a run must have in common with the one that it resumes: all but backends, place and how long it goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from flowrl.core.graphs.graph import Graph
from flowrl.data.files import file_digest
from flowrl.data.sources.prompts import PromptData
from flowrl.data.sources.source import Source
from flowrl.edits.edit import edit
from flowrl.errors import BindError
from flowrl.files.graph_io import encode, fingerprint
from flowrl.run.training.sources import identities
from flowrl.spec import Spec

WEIGHTS = (".safetensors", ".bin", ".json")
"""Endings of the files of a model's folder that say what its weights are."""
TOKENISER = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "chat_template")
"""How names of the tokeniser's files begin: a run may go on with another, which `warn_of_changed_prompts` warns of."""


def identity_of(graph: Graph, sources: Mapping[str, Source], seed: int, prompts: int) -> dict[str, Any]:
    """The identity of a run, as JSON-able data: by content, so that files may lie elsewhere.

    Args:
        graph: of the run.
        sources: of its inputs.
        seed: of the run.
        prompts: drawn a step.

    Raises:
        DataError: a file of prompts is missing, or cannot be read.
        BindError: a file of weights cannot be read.
    """
    return {
        "graph": fingerprint(edit(graph.bound({}), lag=0)),  # a run may go on with another, with spans or without
        "seed": seed,
        "prompts": prompts,
        "data": identities(sources, _parameters),
        "content of the data": identities(sources, lambda source: source.digests()),
        "starting model": _weights(graph),
    }


def _parameters(source: Source) -> dict[str, Any]:
    """Those of its identity, as JSON-able data; of a source of another class than `PromptData`, also its class."""
    said = source.identity()
    written = {k: encode(v, f"data.{k}", portable=False) if isinstance(v, Spec) else v for k, v in said.items()}
    kind = type(source)
    return written if kind is PromptData else {**written, "$type": f"{kind.__module__}:{kind.__qualname__}"}


def _weights(graph: Graph) -> dict[str, str | None]:
    """By role, the digest of the folder that its weights start from; None of one that is not on this machine.

    Those of engines that a trainer's weights are carried to do not count: they are not their own.
    """
    synced = {use.role for node in graph.nodes.values() if node.is_sync for use in node.uses if use.mode == "writes"}
    folders = {role: b.starts_from for role, b in graph.bindings.items() if role not in synced and b.starts_from}
    digests = {folder: _digest(Path(folder)) for folder in set(folders.values())}  # roles often share one
    return {role: digests[folder] for role, folder in folders.items()}


def _digest(folder: Path) -> str | None:
    """The xxh3-128 of the files of a model's folder, by name and content, without those of its tokeniser.

    Raises:
        BindError: one cannot be read.
    """
    if not folder.is_dir():
        return None
    digest = xxhash.xxh3_128()
    try:
        files = (file for file in folder.iterdir() if file.suffix in WEIGHTS and file.is_file())
        for file in sorted(file for file in files if not file.name.startswith(TOKENISER)):
            digest.update(f"{file.name}\0{file_digest(file)}\0".encode())
    except OSError as error:
        what = f"{error.filename} cannot be read ({error.strerror})"
        raise BindError(f"{what}; give the right to read it, or bind a backend with another model.") from error
    return digest.hexdigest()

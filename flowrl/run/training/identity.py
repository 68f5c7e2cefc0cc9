"""The identity of a run: what a resumed run must share with the original, all but backends, place and length."""

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
from flowrl.files.graph_io import fingerprint
from flowrl.files.values import encode
from flowrl.references import named_source_hash, source_hash
from flowrl.run.training.sources import identities
from flowrl.spec import Spec

WEIGHTS = (".safetensors", ".bin", ".json")
"""Suffixes of the files in a model's folder that determine its weights."""
_TOKENIZER = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "chat_template")
"""Prefixes of the tokenizer's files: a resumed run may use another, of which `warn_of_changed_prompts` warns."""


def identity_of(graph: Graph, sources: Mapping[str, Source], seed: int, prompts: int) -> dict[str, Any]:
    """The identity of a run as JSON-able data: by content, so that files may be moved."""
    return {
        "graph": fingerprint(edit(graph.bound({}), lag=0)),  # a run may resume with another lag, with spans or without
        "seed": seed,
        "prompts": prompts,
        "data": identities(sources, _parameters),
        "content of the data": identities(sources, lambda source: source.digests()),
        "starting model": _weights(graph),
    }


def _parameters(source: Source) -> dict[str, Any]:
    """The identity of a source as JSON-able data, with its class unless it is `PromptData`."""
    written = {name: _written(source, name, value) for name, value in source.identity().items()}
    kind = type(source)
    return written if kind is PromptData else {**written, "$type": f"{kind.__module__}:{kind.__qualname__}"}


def _written(source: Source, name: str, value: Any) -> Any:
    """A parameter of a source; a function by its source, so that its file may be moved."""
    if value is not None and name in source.references:
        return {"source": named_source_hash(value) if isinstance(value, str) else source_hash(value)}
    return encode(value, f"data.{name}", portable=False) if isinstance(value, Spec) else value


def _weights(graph: Graph) -> dict[str, str | None]:
    """By role, the commit or the digest of its starting weights, and of its starting adapter; None for a folder of
    weights that is not on this machine. Synced roles, whose weights come from a trainer, are left out."""
    synced = {use.role for node in graph.nodes.values() if node.is_sync for use in node.uses if use.mode == "writes"}
    own = {role: b for role, b in graph.bindings.items() if role not in synced and b.starts_from}
    folders = {role: b.starts_from for role, b in own.items() if b.commit is None}
    digests = {folder: _digest(Path(folder)) for folder in set(folders.values())}  # roles often share one
    found = {role: digests[folders[role]] if b.commit is None else b.commit for role, b in own.items()}
    adapters = {f"adapter of {role}": b.starts_from_adapter for role, b in own.items() if b.starts_from_adapter}
    return found | {what: _digest(Path(start)) or start for what, start in adapters.items()}


def _digest(folder: Path) -> str | None:
    """The xxh3-128 of a model's files by name and content, without those of its tokenizer."""
    if not folder.is_dir():
        return None
    digest = xxhash.xxh3_128()
    try:
        files = (file for file in folder.iterdir() if file.suffix in WEIGHTS and file.is_file())
        for file in sorted(file for file in files if not file.name.startswith(_TOKENIZER)):
            digest.update(f"{file.name}\0{file_digest(file)}\0".encode())
    except OSError as error:
        what = f"{error.filename} cannot be read ({error.strerror})"
        raise BindError(
            f"The model file {what}. Make it readable, or bind a backend with another model.",
            code="job.unreadable-model",
            path=error.filename,
            reason=error.strerror,
        ) from error
    return digest.hexdigest()


def backends_of(graph: Graph) -> dict[str, Any]:
    """The backends of a graph by role, as JSON-able data."""
    return {role: encode(one, f"bindings.{role}", portable=False) for role, one in graph.bindings.items()}

"""Encoded specs as a person would write them: public names, and only the parameters that differ from their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from flowrl.files.names import named, short
from flowrl.files.values import encode
from flowrl.references import imported
from flowrl.spec import Spec


def concise(data: Any) -> Any:
    """What `flowrl.files.values.encode` returned, in a shorter form that `decode` reads as the same value.

    Functions lose the hash of their source, so a file that names them is not bound to their present version.
    """
    if isinstance(data, list):
        return [concise(item) for item in data]
    if not isinstance(data, Mapping):
        return data
    if "$named" in data:
        return data["$named"]
    if "$function" in data:
        return {"$function": data["$function"]}
    if "$class" in data:
        return {"$class": short(data["$class"])}
    if "$type" not in data:
        return {key: concise(value) for key, value in data.items()}
    path = data["$type"]
    defaults = _defaults(named(path) if path.isidentifier() else imported(path))
    changed = {k: v for k, v in data.items() if not k.startswith("$") and (k not in defaults or defaults[k] != v)}
    return {"$type": short(path), **{key: concise(value) for key, value in changed.items()}}


def _defaults(spec: Any) -> Mapping[str, Any]:
    """The encoded defaults of a spec's class, or of an operator that is a function."""
    fields = cast(Any, spec if isinstance(spec, type) else type(spec)).__pydantic_fields__
    return {
        name: encode(field.get_default(call_default_factory=True), name, portable=False)
        for name, field in fields.items()
        if not field.is_required()
    }


def changed_parameters(spec: Spec, leave_out: frozenset[str]) -> dict[str, Any]:
    """The encoded parameters of a spec that differ from their defaults, concise, without some."""
    defaults = _defaults(type(spec))
    fields = cast(Any, type(spec)).__pydantic_fields__
    found = {name: encode(getattr(spec, name), name) for name in fields if name not in leave_out}
    return {k: concise(v) for k, v in found.items() if k not in defaults or defaults[k] != v}

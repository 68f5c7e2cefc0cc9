"""`ParameterError` from pydantic's errors: one sentence per parameter, with a code and facts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import ValidationError

from flowrl.errors import FlowrlError, ParameterError, article, offer
from flowrl.peer_names import translated


def by_name(cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a spec by the names of its parameters."""
    return dict(zip(positional(cls), args, strict=False)) | dict(kwargs)


def positional(cls: Any) -> list[str]:
    """The parameters that take arguments by position, in order."""
    return [f.name for f in dataclasses.fields(cls) if f.init and not f.kw_only]


def parts_of(annotation: Any) -> list[Any]:
    """A type and all types in it; of a Literal, the types of its values."""
    if get_origin(annotation) is Literal:
        return [type(value) for value in get_args(annotation)]
    return [annotation, *(part for argument in get_args(annotation) for part in parts_of(argument))]


def _brief(value: Any) -> str:
    """The repr, or for one that is long (a graph, a tensor) the type."""
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"<{type(value).__name__}>"


def parameter_error(
    cls: type, error: ValidationError, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ParameterError:
    """All that is wrong, with the code and facts of one error: a wrong name, else the first, or what it wraps."""
    names = [f.name for f in dataclasses.fields(cast(Any, cls)) if f.init]
    errors = error.errors()
    first = next(filter(_is_misnamed, errors), errors[0])
    raised = first.get("ctx", {}).get("error")
    code, facts = "parameter.invalid", dict[str, Any](spec=cls.__name__)
    if isinstance(raised, FlowrlError) and len(errors) == 1:
        code, facts = raised.code or code, dict(raised.facts)
    elif first["loc"]:
        facts |= {"parameter": parameter_at(first["loc"][0], cls), "given": _brief(first["input"])}
        if _is_misnamed(first):
            code, facts["known"] = _MISNAMED[first["type"]][0], names
    return ParameterError(_describe(cls, names, error, by_name(cls, args, kwargs)), code=code, **facts)


def parameter_at(step: int | str, cls: Any) -> str:
    """The parameter of pydantic's first step to a value: an index for arguments by position."""
    names = positional(cls)
    return names[step] if isinstance(step, int) and step < len(names) else str(step)


def _is_misnamed(error: Mapping[str, Any]) -> bool:
    """Whether a parameter itself is missing or unknown, rather than something in its value."""
    return len(error["loc"]) == 1 and error["type"] in _MISNAMED


def _describe(cls: type, names: Sequence[str], error: ValidationError, given: Mapping[str, Any]) -> str:
    """All that is wrong with the arguments of a spec, each parameter once."""
    sentences: dict[str, None] = {}
    wrong: dict[str, list[str]] = {}  # pydantic reports one error for each member of a union
    known, hints = "", dict[str, str]()
    for e in error.errors():
        # validators and __post_init__ raise sentences
        raised = e.get("ctx", {}).get("error")
        reason = getattr(raised, "message", str(raised)).rstrip(".") if isinstance(raised, Exception) else _reason(e)
        name = parameter_at(e["loc"][0], cls) if e["loc"] else ""
        if not e["loc"]:
            sentences[reason] = None
        elif _is_misnamed(e):
            holder = "" if name in names else translated([name], names, ": {}") or _holder(cls, name)
            sentences[_MISNAMED[e["type"]][1].format(name=name, value=_brief(e["input"])) + holder] = None
            known = f" {offer('' if name in names or holder else name, names, 'It takes')}"
        else:
            path = ".".join([name, *_steps(given.get(name), e["loc"][1:])])
            members = wrong.setdefault(f"{path}={_brief(e['input'])}", [])
            members.append(reason.removeprefix("expected ") if members else reason)
            hints |= {name: hint} if (hint := _hint(e, cls, name)) else {}
    reasons = [f"{what}: {', or '.join(dict.fromkeys(why))}" for what, why in wrong.items()]
    text = "; ".join([*sentences, *reasons])
    return " ".join([f"{cls.__name__}(...): {text}{'' if text.endswith('?') else '.'}{known}", *hints.values()])


_MISNAMED = {
    "missing": ("parameter.missing", "{name} is missing"),
    "missing_argument": ("parameter.missing", "{name} is missing"),
    "unexpected_positional_argument": ("parameter.unknown", "{value} is one argument too many"),
    "unexpected_keyword_argument": ("parameter.unknown", "there is no parameter {name!r} (given {value})"),
}
"""Code and sentence by pydantic's type of error."""


def _holder(cls: Any, name: str) -> str:
    """The parameter whose own parameter has this name: ``", but optimizer=AdamW(lr=...) has one"``."""
    for field, info in cls.__pydantic_fields__.items():
        for part in parts_of(info.annotation):
            if isinstance(part, type) and name in getattr(part, "__pydantic_fields__", ()):
                return f", but {field}={part.__name__}({name}=...) has one"
    return ""


def _reason(error: Mapping[str, Any]) -> str:
    """pydantic's message about a value, in terms of Python."""
    match error["type"]:
        case "dataclass_type" | "dataclass_exact_type":
            return f"expected {error['ctx']['class_name']}(...)"
        case "tuple_type" if isinstance(error["input"], str):
            return f"expected a tuple: ({error['input']!r},)"
        case "missing":  # inside of the value
            return f"it lacks {'item ' if isinstance(error['loc'][-1], int) else ''}{error['loc'][-1]}"
        case "callable_type":
            return "expected a function"
        case "path_type":
            return "expected a path"
        case "dict_type":
            return "expected a dict"
        case _:
            text, start = error["msg"].rstrip("."), "Input should be "
            if not text.startswith(start):
                return f"{text[0].lower()}{text[1:]}"
            what = text.removeprefix(start).partition(", unable to parse")[0]
            what = article(what.removeprefix("a valid ")) if what.startswith("a valid ") else what
            return f"expected {'a number ' if 'than' in error['type'] else ''}{what}"


def _hint(error: Mapping[str, Any], cls: Any, name: str) -> str | None:
    """What to write instead of a value that other libraries take."""
    value = error["input"]
    if error["type"] == "callable_type" and isinstance(value, list | tuple | Mapping):
        return "For several rewards, call one Reward(fn) each, and combine their scores with WeighRewards."
    if error["type"] == "string_type" and callable(getattr(value, "save_pretrained", None)):
        return f'Backends load a folder: call .save_pretrained("folder") and pass {name}="folder".'
    if error["type"] in ("dataclass_type", "dataclass_exact_type") and isinstance(value, str):
        parts = parts_of(cls.__pydantic_fields__[name].annotation)
        kinds = [part for part in parts if hasattr(part, "__pydantic_fields__")]
        found = (made for kind in kinds for made in _subclasses(kind) if made.__name__.lower() == value.lower())
        if (spec := next(found, None)) is not None:
            required = [field for field, info in spec.__pydantic_fields__.items() if info.is_required()]
            return f"Pass {name}={spec.__name__}({', '.join(f'{field}=...' for field in required)})."
    rows = isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value)
    if rows and error["type"] in ("string_type", "dataclass_type"):
        what = "its path" if error["type"] == "string_type" else 'a source of it: PromptData("rows.jsonl")'
        return f"Write the rows to a file, one json.dumps(row) per line, and pass {what}."
    return None


def _subclasses(kind: Any) -> Iterator[Any]:
    """A class and all classes derived from it."""
    yield kind
    for derived in kind.__subclasses__():
        yield from _subclasses(derived)


def _steps(value: Any, path: Sequence[int | str]) -> list[str]:
    """The keys and indices among pydantic's steps into a value; its other steps name members of a union."""
    steps: list[str] = []
    for step in path:
        inside: Any = value
        if hasattr(type(value), "__pydantic_fields__"):  # a spec
            inside = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        if isinstance(inside, list | tuple):
            inside = dict(enumerate(inside))
        if isinstance(inside, Mapping) and step in inside:
            value = inside[step]
            steps.append(str(step))
    return steps

"""Roles: how an operator names the weights it needs, and what it does with them.

``actor: Reads[Scorer] = Role("actor")`` says that the operator reads the weights of the role ``actor`` through the
Protocol `Scorer`; ``Writes[...]`` says that it changes them. A live engine may stand in the field itself, for calls on
tensors; the nodes of a graph only name roles.
"""

from __future__ import annotations

import keyword
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from flowrl.errors import DefinitionError, ParameterError

T = TypeVar("T")


@dataclass(frozen=True)
class RoleRef:
    """A role that is not resolved yet."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier() or keyword.iskeyword(self.name):
            raise ParameterError(
                f"Role({self.name!r}) does not name a role; expected an identifier such as Role('actor'), since "
                f"backends are bound by it: graph.bind(actor=...)."
            )
        if self.name in ("place", "optimize"):
            raise ParameterError(
                f"Role({self.name!r}) could not be bound, since graph.bind({self.name}=...) says how a job runs; give "
                f"the role another name."
            )

    def __repr__(self) -> str:
        return f"Role({self.name!r})"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # protocol look-ups (copy, pickle), some before `name` is there
            raise AttributeError(attribute)
        raise AttributeError(
            f"the role {self.name!r} is a name here, not an engine, so it has no {attribute!r}; engines are there "
            f"inside the `__call__` of an operator, when a job runs it."
        )


def Role(name: str) -> Any:
    """The default of a role field. Typed `Any`, so that the field keeps the Protocol as its type.

    Raises:
        ParameterError: `name` is no identifier that a backend could be bound by.
    """
    return RoleRef(name)


@dataclass(frozen=True)
class Access:
    """Marks a role field: the operator ``reads`` or ``writes`` the role's weights."""

    mode: Literal["reads", "writes"]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def check(value: Any) -> Any:
            if isinstance(value, RoleRef | source):
                return value
            raise ValueError(f"wants a Role, or a live engine that is a {source.__name__}, not {type(value).__name__}")

        return core_schema.no_info_plain_validator_function(check)


Reads = Annotated[T, Access("reads")]
Writes = Annotated[T, Access("writes")]


@dataclass(frozen=True)
class RoleUse:
    """What an operator's field does with a role: the mode, and the Protocol that the engine must meet."""

    mode: Literal["reads", "writes"]
    protocol: type


def role_use(annotation: Any, default: Any) -> RoleUse | None:
    """The `RoleUse` of a field, or None if it is not a role field.

    Raises:
        DefinitionError: a role field whose annotation does not say what is done with which Protocol.
    """
    protocol, *extras = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    access = [extra for extra in extras if isinstance(extra, Access)]
    if not access:
        if isinstance(default, RoleRef) or _names_a_role(annotation):
            raise DefinitionError(
                f"the annotation {annotation!r} does not say what is done with the role; expected Reads[...] or "
                f"Writes[...] of a Protocol by itself, such as `actor: Reads[Scorer] = Role('actor')`."
            )
        return None
    if len(access) > 1:
        raise DefinitionError(
            "the annotation says twice what is done with the role; expected Writes[...] where its weights are written, "
            "else Reads[...]."
        )
    # `_is_protocol` is how `typing` itself tells; an engine in the field is checked by `isinstance`
    if not getattr(protocol, "_is_protocol", False) or not getattr(protocol, "_is_runtime_protocol", False):
        raise DefinitionError(
            f"the annotation takes {getattr(protocol, '__name__', protocol)} for what the engine must have; expected a "
            f"Protocol that is decorated with @runtime_checkable, such as Scorer of flowrl.protocols.protocols."
        )
    return RoleUse(access[0].mode, protocol)


def _names_a_role(annotation: Any) -> bool:
    return isinstance(annotation, Access) or any(map(_names_a_role, get_args(annotation)))

"""Roles: how an operator names the weights it needs, and what it does with them.

``actor: Reads[Scorer] = Role("actor")`` says that the operator reads the weights of the role ``actor`` through the
Protocol `Scorer`; ``Writes[...]`` says that it changes them. A live engine may stand in the field itself, for calls on
tensors; the nodes of a graph only name roles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

T = TypeVar("T")


@dataclass(frozen=True)
class RoleRef:
    """A role that is not resolved yet."""

    name: str

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
    """The default of a role field. Typed `Any`, so that the field keeps the Protocol as its type."""
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


def role_use(annotation: Any) -> RoleUse | None:
    """The `RoleUse` of a field annotation, or None if it is not a role field."""
    if get_origin(annotation) is Annotated:
        protocol, *extras = get_args(annotation)
        for extra in extras:
            if isinstance(extra, Access):
                return RoleUse(extra.mode, protocol)
    return None

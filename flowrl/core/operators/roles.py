"""Roles: the weights that an operator needs, and whether it reads or writes them.

``actor: Reads[Scorer] = Role("actor")`` declares that the operator reads the weights of the role ``actor`` through the
Protocol `Scorer`; ``Writes[...]`` declares that it changes them. ``others: Reads[Mapping[str, Rollout]]`` is a field of
several roles by name. For calls on tensors the field may contain a live engine; the nodes of a graph only name roles.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping
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
                f"Invalid role name {self.name!r}. Use an identifier such as Role('actor'), since backends are bound "
                f"by it: graph.bind(actor=...).",
                code="role.name",
                role=self.name,
            )
        if self.name in ("place", "optimize"):
            raise ParameterError(
                f"Role({self.name!r}) cannot be bound, since graph.bind({self.name}=...) sets how a job runs. Rename "
                f"the role.",
                code="role.name",
                role=self.name,
            )

    def __repr__(self) -> str:
        return f"Role({self.name!r})"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # protocol look-ups (copy, pickle), some before `name` is there
            raise AttributeError(attribute)
        raise AttributeError(
            f"The role {self.name!r} is only a name here, so it has no {attribute!r}. Inside the `__call__` of an "
            f"operator, when a job runs it, the field is the engine."
        )


def Role(name: str) -> Any:
    """The default of a role field. Typed `Any`, so that the field keeps the Protocol as its type.

    Raises:
        ParameterError: `name` is not an identifier, or is reserved.
    """
    return RoleRef(name)


@dataclass(frozen=True)
class Access:
    """Mark of a role field: the operator ``reads`` or ``writes`` the role's weights."""

    mode: Literal["reads", "writes"]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        protocol, several = _protocol_of(source)

        def check(value: Any) -> Any:
            if isinstance(value, RoleRef | protocol):
                return value
            found = type(value).__name__
            raise ValueError(f"expected a Role, or an engine that is a {protocol.__name__}, not {found}")

        def check_each(value: Any) -> Any:
            if not isinstance(value, Mapping):
                found = type(value).__name__
                raise ValueError(f"expected roles by name, such as {{'user': Role('user')}}, not {found}")
            for name in value:
                if not isinstance(name, str) or not name.isidentifier():
                    raise ValueError(f"{name!r} is no name for a role here; expected an identifier, such as 'user'")
            return {name: check(role) for name, role in value.items()}

        return core_schema.no_info_plain_validator_function(check_each if several else check)


Reads = Annotated[T, Access("reads")]
Writes = Annotated[T, Access("writes")]


@dataclass(frozen=True)
class RoleUse:
    """A role field of an operator: the mode, the Protocol that the engine must implement, and whether the field has
    several roles by name."""

    mode: Literal["reads", "writes"]
    protocol: type
    several: bool = False

    def of(self, operator: object, field: str) -> dict[str, Any]:
        """The roles, or live engines, in this field of an operator: by ``field``, or by ``field.name`` of several."""
        value = getattr(operator, field)
        return {f"{field}.{name}": role for name, role in value.items()} if self.several else {field: value}


def _protocol_of(annotated: Any) -> tuple[Any, bool]:
    """The Protocol of a role field, and whether the field has several roles by name."""
    several = get_origin(annotated) is Mapping and get_args(annotated)[:1] == (str,)
    return (get_args(annotated)[1], True) if several else (annotated, False)


def role_use(annotation: Any, default: Any) -> RoleUse | None:
    """The `RoleUse` of a field, or None if it is not a role field."""
    protocol, *extras = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    access = [extra for extra in extras if isinstance(extra, Access)]
    if not access:
        if isinstance(default, RoleRef) or _names_a_role(annotation):
            raise DefinitionError(
                f"The annotation {annotation!r} of a role is neither Reads[...] nor Writes[...]. Write one of them "
                f"with a Protocol, such as `actor: Reads[Scorer] = Role('actor')`.",
                code="role.annotation",
                annotation=annotation,
            )
        return None
    if len(access) > 1:
        raise DefinitionError(
            "The annotation has both Reads[...] and Writes[...], or one of them twice. Use Writes[...] if the operator "
            "writes the role's weights, else Reads[...].",
            code="role.annotation",
            annotation=annotation,
        )
    protocol, several = _protocol_of(protocol)
    # `typing` uses the same attribute; an engine in the field is checked by `isinstance`
    if not getattr(protocol, "_is_protocol", False) or not getattr(protocol, "_is_runtime_protocol", False):
        raise DefinitionError(
            f"The annotation has {getattr(protocol, '__name__', protocol)} as the interface of the engine. Use a "
            f"Protocol that is decorated with @runtime_checkable, such as Scorer of flowrl.protocols.protocols.",
            code="role.annotation",
            annotation=annotation,
        )
    return RoleUse(access[0].mode, protocol, several)


def _names_a_role(annotation: Any) -> bool:
    return isinstance(annotation, Access) or any(map(_names_a_role, get_args(annotation)))

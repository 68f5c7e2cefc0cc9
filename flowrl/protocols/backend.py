"""`Backend`: the frozen spec of an engine, and what it declares about the engine before anything is loaded.

Places, hosts and rules read these declarations alone, so a job is refused before a model loads and not after.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, Protocol

from flowrl.errors import BindError, type_of
from flowrl.protocols.protocols import BuildContext, Caches, Checkpointed, Rollout
from flowrl.spec import Spec


class Backend(Spec):
    """Base of backends: what to load and how; `build` makes the live engine, and nothing is loaded before.

    A subclass sets `serves` and writes `build`. The other traits have defaults; where an engine differs, the subclass
    overrides them by a field, a ``ClassVar`` or a property.
    """

    timeless = True

    serves: ClassVar[tuple[type, ...]] = ()
    """The Protocols of `flowrl.protocols.protocols` that the live engine has, such as ``(Trainer, Checkpointed)``."""

    imports: ClassVar[tuple[str, ...]] = ()
    """The modules that `build` imports and that take long. A host is forked from a process that has imported them."""

    @property
    def ranks(self) -> int:
        """Processes that build this engine together; each rank gets slots of its own."""
        return 1

    @property
    def slots_per_rank(self) -> int:
        """Slots (devices) that one rank computes on."""
        return 1

    @property
    def memory(self) -> float | None:
        """GiB of a slot that the engine takes while it is awake; None is unknown, and is not checked."""
        return None

    @property
    def shares(self) -> str | None:
        """The role whose weights this engine uses, in the same process; None has weights of its own."""
        return None

    @property
    def collective(self) -> bool:
        """Whether several ranks are to be one group of `torch.distributed`."""
        return True

    @property
    def loses_weights_asleep(self) -> bool:
        """Whether an engine that has slept must be synced before it generates."""
        return False

    @property
    def frozen(self) -> bool:
        """Whether an engine that generates does so with the weights that it starts from, and takes no others."""
        return False

    @property
    def receives(self) -> Literal["weights", "adapter_weights"]:
        """The method of a trainer whose tensors the engine's `sync` reads."""
        return "weights"

    @property
    def probes(self) -> bool:
        """Whether the engine's `sync` asks the trainer for log-probs of its `probe`; see `flowrl.sync.probe`."""
        return False

    @property
    def starts_from(self) -> str | None:
        """The folder of this machine whose weights the engine starts with; None has none of its own. A run that is
        resumed must find the same weights there."""
        return None

    @property
    def why_not_fusable(self) -> str | None:
        """Why the log-probs of a trainer's first pass in `update` may not have the bits of those that it gives of the
        same rows as a scorer, on each rank; None where they have. Then a plan may take them from there (see
        `flowrl.core.graphs.fusing`): `update` calls its objective with all rows that have a token to be trained on,
        each once.
        """
        return f"{type(self).__name__} does not say that it trains and scores with the same bits"

    def refuse_missing(self) -> None:
        """Refuse what `build` would not find on this machine, such as a model's folder; nothing is loaded.

        Raises:
            BindError: naming it.
        """

    def refuse_swap(self, caches: Caches) -> None:
        """Refuse a way to change weights under answers that the engine, a `LiveWeightUpdate`, lacks; nothing is loaded.

        Args:
            caches: what is to become of what was computed of them.

        Raises:
            BindError: naming what it can.
        """

    def build(self, context: BuildContext) -> Any:
        """The live engine, which has every Protocol in `serves`."""
        raise NotImplementedError


def refuse_unfit(role: str, backend: Any, node: str, protocol: type) -> None:
    """Refuse a backend whose engine is not what `node` asks of `role`, before anything is loaded.

    Raises:
        BindError: it is no `Backend`, or its engine lacks members, which are named.
    """
    if not isinstance(backend, Backend):
        raise BindError(
            f"the role {role!r} is bound to {backend!r}, which is no backend; bind a spec such as TorchTrainer(model), "
            f"or derive your own from flowrl.backends.Backend."
        )
    served = {name for each in backend.serves for name in members(each)}
    if missing := sorted(members(protocol) - served):
        name, found = type(backend).__name__, ", ".join(each.__name__ for each in backend.serves)
        raise BindError(
            f"the role {role!r} is bound to {name}, but {node} needs a {protocol.__name__} there, and {name} serves "
            f"{found or 'no Protocol'}, which declares no {', '.join(missing)}; bind {role}= to a backend that is a "
            f"{protocol.__name__}, or, where its engine is one, say so: serves = ({protocol.__name__},)."
        )


def refuse_unsynced(role: str, backend: Backend, synced_by: str | None) -> None:
    """Refuse an engine that would never have weights to generate with, or that has some and is sent others.

    Args:
        role: one that generates.
        backend: bound to it.
        synced_by: the node that carries weights to it; None where none does.

    Raises:
        BindError: naming the role and what mends it.
    """
    name = type(backend).__name__
    if synced_by is None and not backend.frozen:
        raise BindError(
            f"nothing carries weights to {role!r}, and {name} generates only with those of a sync; expected a "
            f"Sync(rollout=Role({role!r}))(updated) in the graph, or an engine that keeps the weights of its folder, "
            f"such as a judge's: bind {role}=TorchRollout(folder, frozen=True)."
        )
    if synced_by is not None and backend.frozen:
        raise BindError(
            f"{synced_by} carries weights to {role!r}, whose engine is frozen and keeps those of its folder; bind "
            f"{role}={name}(..., frozen=False), or give what stays as it is a role of its own."
        )


def refuse_uncheckpointed(roles: Iterable[str], bindings: Mapping[str, Backend], asker: str, fix: str) -> None:
    """Refuse trained roles whose engines cannot be saved where that is asked for, before anything is loaded.

    Args:
        roles: the trained ones.
        bindings: backends by role; a role that is not bound yet is passed over.
        asker: what asks for it, as ``"checkpoint_every=5"``.
        mend: how to do without.

    Raises:
        BindError: naming role, backend and what is missing.
    """
    for role in roles:
        if role in bindings and Checkpointed not in bindings[role].serves:
            name = type(bindings[role]).__name__
            raise BindError(
                f"{asker} saves and restores the role {role!r}, but {name} does not serve Checkpointed: its engine "
                f"declares no {', '.join(sorted(members(Checkpointed)))}; give its engine both and list Checkpointed "
                f"in {name}.serves, bind {role}= to a backend that has them, or {fix}."
            )


def refuse_unserved(role: str, backend: Backend, engine: Any) -> None:
    """Refuse a live engine that lacks what its backend has declared.

    Raises:
        BindError: naming the Protocol and the members.
    """
    if Rollout in backend.serves and getattr(engine, "tokenizer", engine) is None:
        raise BindError(
            f"{type(backend).__name__}, bound to the role {role!r}, has built {type_of(engine)} whose "
            f"tokenizer is None; expected the ChatTokenizer of the model's folder, by which prompts become tokens."
        )
    for protocol in backend.serves:
        if missing := sorted(name for name in members(protocol) if not hasattr(engine, name)):
            name = type(backend).__name__
            raise BindError(
                f"{name}, bound to the role {role!r}, says that it serves {protocol.__name__}, but its build gave a "
                f"{type(engine).__name__}, which has no {', '.join(missing)}; add them to the engine, or drop "
                f"{protocol.__name__} from {name}.serves."
            )


@functools.cache
def members(protocol: type) -> frozenset[str]:
    """Names of everything that a Protocol class and its Protocol bases declare."""
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False) and base is not Protocol]
    declared = (name for base in bases for name in (*vars(base), *inspect.get_annotations(base)))
    return frozenset(name for name in declared if not name.startswith("_"))

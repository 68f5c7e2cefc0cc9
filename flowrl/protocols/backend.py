"""`Backend`: the frozen spec of an engine, and what it declares about the engine before anything is loaded.

Places, hosts and rules read only these declarations, so a job is refused before a model loads.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, Protocol, Self

from flowrl.errors import BindError, type_of
from flowrl.hub.repositories import Commits
from flowrl.protocols.footprint import Demand, Footprint
from flowrl.protocols.mesh import Mesh
from flowrl.protocols.protocols import BuildContext, Caches, Checkpointed, Rollout
from flowrl.spec import Spec


class Backend(Spec):
    """Base of backends: what to load and how. Nothing is loaded before `build`.

    A subclass sets `serves` and implements `build`. It overrides other traits with a field, a ``ClassVar`` or a
    property.
    """

    schedulable = False

    serves: ClassVar[tuple[type, ...]] = ()
    """The Protocols of `flowrl.protocols.protocols` that the engine implements, such as ``(Trainer, Checkpointed)``."""

    imports: ClassVar[tuple[str, ...]] = ()
    """Modules that `build` imports and that load slowly. Hosts are forked from a process that has imported them."""

    @property
    def ranks(self) -> int:
        """Processes that form this engine, if each gets rows of its own; see `geometry`."""
        return 1

    @property
    def geometry(self) -> Mesh:
        """The mesh of the processes that form this engine; each gets its own slots."""
        return Mesh(fsdp=self.ranks)

    @property
    def slots_per_rank(self) -> int:
        """Slots (devices) per rank."""
        return 1

    @property
    def memory(self) -> float | None:
        """GiB of a slot that the engine uses while awake, as the user states it; None is not checked, and predicted by
        `footprint`."""
        return None

    @property
    def share(self) -> float | None:
        """The part of a slot's memory that the engine takes while awake, whatever its model needs; None if it takes
        what it needs."""
        return None

    @property
    def shares(self) -> str | None:
        """The role whose weights this engine uses, in the same process; None if it has its own."""
        return None

    @property
    def collective(self) -> bool:
        """Whether several ranks form one group of `torch.distributed`."""
        return True

    @property
    def loses_weights_asleep(self) -> bool:
        """Whether the engine needs a sync after it slept, before it generates."""
        return False

    @property
    def frozen(self) -> bool:
        """Whether an engine that generates keeps the weights it was loaded with and is never synced."""
        return False

    @property
    def receives(self) -> Literal["weights", "adapter_weights"]:
        """The method of a trainer whose tensors the engine's `sync` reads."""
        return "weights"

    @property
    def synced_bytes(self) -> int | None:
        """The bytes of all weights that a trainer sends to the engine in a sync; None if they are not known before it
        is built."""
        return None

    @property
    def synced_dtype(self) -> str:
        """The dtype, such as ``"bfloat16"``, that a trainer rounds matrices to before it sends them to the engine."""
        return "float32"

    @property
    def reads_segments(self) -> bool:
        """Whether a model reads each segment of a row by itself: a token attends to none before the last position 0 of
        its row; see `flowrl.data.segments`."""
        return False

    @property
    def probes(self) -> bool:
        """Whether a sync compares log-probs of the engine's ``probe`` with the trainer's; see `flowrl.sync.probe`."""
        return False

    @property
    def starts_from(self) -> str | None:
        """The local folder of the engine's initial weights; None if it has none of its own. A resumed run must find
        the same weights there."""
        return None

    @property
    def commit(self) -> str | None:
        """``org/name@commit`` if the initial weights are those of a commit on the Hub; None for a folder."""
        return None

    @property
    def starts_from_adapter(self) -> str | None:
        """``org/name@commit`` or the local folder of the adapter that its training starts from; None without one."""
        return None

    def pinned(self, commits: Commits) -> Self:
        """The same backend with the repository of its model, if it names one, resolved to a commit."""
        return self

    def local(self) -> Self:
        """The same backend with a folder on this machine as its model, into which a repository is downloaded; `build`
        is called on it."""
        return self

    @property
    def over_run(self) -> bool:
        """Whether what is built depends on the number of optimizer steps of the run; see `over`."""
        return False

    def over(self, updates: int) -> Self:
        """The same backend for a run that makes this many optimizer steps with its engine."""
        return self

    @property
    def why_not_fusable(self) -> str | None:
        """Why a trainer's log-probs in the first pass of ``update`` may differ in bits from those of `log_probs`.

        None if they are identical on each rank. A plan may then reuse them (see `flowrl.core.graphs.fusing`), and
        ``update`` must call its objective with every row that has a trained token, each once.
        """
        return f"{type(self).__name__} does not declare that it trains and scores with the same bits"

    def footprint(self, demand: Demand) -> Footprint | None:
        """The memory that the engine takes on a slot, predicted from the model's configuration; None if it is unknown.
        `flowrl.run.prediction.memory` asks only if `memory` is None.

        Raises:
            BindError: the model's configuration does not load, or its memory cannot be predicted.
        """
        return None

    def refuse_missing(self) -> None:
        """Refuse files that `build` would not find on this machine, such as a model folder; reads none."""

    def refuse_swap(self, caches: Caches) -> None:
        """Refuse, with a `BindError`, a live weight update that the engine, a `LiveWeightUpdate`, does not support."""

    def refuse_follow(self) -> None:
        """Refuse, with a `BindError`, settings with which the engine, a `Follower`, cannot follow a trainer."""

    def build(self, context: BuildContext) -> Any:
        """Build the engine, which implements every Protocol in `serves`."""
        raise NotImplementedError


def refuse_unfit(role: str, backend: Any, node: str, protocol: type) -> None:
    """Refuse a backend whose engine lacks the Protocol that `node` needs of `role`, before anything is loaded."""
    if not isinstance(backend, Backend):
        raise BindError(
            f"The role {role!r} is bound to {backend!r}, which is not a backend. Bind a spec such as "
            f"TorchTrainer(model), or a subclass of flowrl.backends.Backend.",
            code="backend.not-a-backend",
            role=role,
            node=node,
            found=repr(backend),
        )
    served = {name for each in backend.serves for name in members(each)}
    if missing := sorted(members(protocol) - served):
        name, found = type(backend).__name__, ", ".join(each.__name__ for each in backend.serves)
        raise BindError(
            f"The role {role!r} is bound to {name}, but {node} needs a {protocol.__name__} there. {name} serves "
            f"{found or 'no Protocol'}, which lacks {', '.join(missing)}. Bind {role}= to a backend that serves "
            f"{protocol.__name__}, or add it to {name}.serves if its engine implements it.",
            code="backend.missing-protocol",
            role=role,
            node=node,
            backend=name,
            expected=protocol.__name__,
            missing=missing,
        )


def refuse_unsynced(role: str, backend: Backend, synced_by: str | None) -> None:
    """Refuse an engine that generates and that no sync would update, or a frozen one that a sync writes to."""
    name = type(backend).__name__
    if synced_by is None and not backend.frozen:
        raise BindError(
            f"No node syncs weights to {role!r}, and {name} needs a sync before it generates. Add "
            f"Sync(rollout=Role({role!r}))(updated) to the graph. If the engine should keep the weights of its folder, "
            f"such as a judge's, bind {role}=TorchRollout(folder, frozen=True).",
            code="backend.never-synced",
            role=role,
            backend=name,
        )
    if synced_by is not None and backend.frozen:
        raise BindError(
            f"{synced_by} syncs weights to {role!r}, whose engine is frozen and keeps those of its folder. Bind "
            f"{role}={name}(..., frozen=False), or give the frozen engine its own role.",
            code="backend.frozen",
            role=role,
            backend=name,
            node=synced_by,
        )


def refuse_uncheckpointed(roles: Iterable[str], bindings: Mapping[str, Backend], asker: str, fix: str) -> None:
    """Refuse trained roles whose engines cannot be checkpointed, before anything is loaded.

    Roles that are not bound are skipped. `asker` is the setting that needs checkpoints, such as
    ``"checkpoint_every=5"``.
    """
    for role in roles:
        if role in bindings and Checkpointed not in bindings[role].serves:
            name = type(bindings[role]).__name__
            raise BindError(
                f"{asker} saves and restores the role {role!r}, but {name} does not serve Checkpointed. Give its "
                f"engine {' and '.join(sorted(members(Checkpointed)))} and add Checkpointed to {name}.serves, bind "
                f"{role}= to a backend that serves it, or {fix}.",
                code="backend.not-checkpointed",
                role=role,
                backend=name,
                setting=asker,
            )


def refuse_unserved(role: str, backend: Backend, engine: Any) -> None:
    """Refuse a built engine that lacks members of the Protocols in its backend's `serves`."""
    if Rollout in backend.serves and getattr(engine, "tokenizer", engine) is None:
        raise BindError(
            f"{type(backend).__name__}, bound to the role {role!r}, built {type_of(engine)} whose tokenizer is None. "
            f"Set it to the ChatTokenizer of the model's folder, which encodes the prompts.",
            code="backend.incomplete-engine",
            role=role,
            backend=type(backend).__name__,
            missing=["tokenizer"],
        )
    for protocol in backend.serves:
        if missing := sorted(name for name in members(protocol) if not hasattr(engine, name)):
            name = type(backend).__name__
            raise BindError(
                f"{name}, bound to the role {role!r}, serves {protocol.__name__}, but its build returned "
                f"{type_of(engine)} without {', '.join(missing)}. Add them to the engine, or remove "
                f"{protocol.__name__} from {name}.serves.",
                code="backend.incomplete-engine",
                role=role,
                backend=name,
                expected=protocol.__name__,
                missing=missing,
            )


@functools.cache
def members(protocol: type) -> frozenset[str]:
    """The public members that a Protocol class and its Protocol bases declare."""
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False) and base is not Protocol]
    declared = (name for base in bases for name in (*vars(base), *inspect.get_annotations(base)))
    return frozenset(name for name in declared if not name.startswith("_"))

"""`Mesh`: the processes of an engine on named axes, and what each of them is.

This is the only place that derives from a rank which rows a process computes, which part of a row, whether its metrics
count, and which weights it sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from pydantic import Field

from flowrl.errors import BindError, ParameterError
from flowrl.spec import Spec, written


class Position(NamedTuple):
    """What a process of a `Mesh` is.

    Args:
        rank: its number in the mesh.
        replicate, pipeline, fsdp, tensor: its coordinates.
        expert: its number among those that have the experts of a layer together.
        shard: its number among those of a replica that have the same experts.
        data_rank: whose rows it computes. Processes with the same one compute the same rows.
        part: its part of each row, by `Mesh.context`.
        reports: whether its outputs and metrics count; one process of each data rank, which has the last layers.
        leads: whether it writes folders; the first process does.
        share: which of the `Mesh.shares` of the weights it sends to engines that have no sender on their device.
    """

    rank: int
    replicate: int
    pipeline: int
    fsdp: int
    tensor: int
    expert: int
    shard: int
    data_rank: int
    part: int
    reports: bool
    leads: bool
    share: int

    @property
    def reports_shared(self) -> bool:
        """Whether it reports values that all processes know."""
        return self.reports and self.data_rank == 0


class Mesh(Spec):
    """The processes of an engine, ``replicate * pipeline * fsdp * tensor`` of them, outer to inner.

    Args:
        replicate: copies of the weights, whose gradients are summed (HSDP).
        fsdp: processes that shard each weight along its rows (FSDP2, Zhao et al. 2023, arXiv:2304.11277).
        tensor: processes that split each layer (Shoeybi et al. 2019, arXiv:1909.08053), by transformers' plan for the
            architecture.
        context: neighbors on ``fsdp`` that share each row; divides `fsdp`.
        expert: neighbors on ``fsdp * tensor`` that share the experts of a layer; divides their number.
        pipeline: processes that each have some of the layers (Narayanan et al. 2021, arXiv:2104.04473); divides their
            number. Only `flowrl.backends.megatron.trainer.MegatronTrainer` has it.

    Raises:
        ParameterError: `context` or `expert` does not divide what it splits.
    """

    schedulable: ClassVar[bool] = False

    replicate: int = Field(default=1, ge=1)
    fsdp: int = Field(default=1, ge=1)
    tensor: int = Field(default=1, ge=1)
    context: int = Field(default=1, ge=1)
    expert: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)

    def _check(self) -> None:
        super()._check()
        for axis, over, size in (("context", "fsdp", self.fsdp), ("expert", "fsdp * tensor", self.fsdp * self.tensor)):
            if size % getattr(self, axis):
                raise ParameterError(
                    f"{written(self)}: {axis}={getattr(self, axis)} does not divide {over}={size}. Pass a divisor of "
                    f"{size}.",
                    code="mesh.axes",
                    axis=axis,
                    given=getattr(self, axis),
                    expected=size,
                )

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.replicate * self.pipeline * self.fsdp * self.tensor

    @property
    def neighbors(self) -> int:
        """The consecutive ranks that exchange data in every layer for the rows that they share."""
        return self.tensor * self.context

    @property
    def expert_shards(self) -> int:
        """The processes of a replica that have the same experts, which FSDP shards among them."""
        return self.fsdp * self.tensor // self.expert

    @property
    def data_ranks(self) -> int:
        """The parts that the rows of a batch are split into."""
        return self.replicate * self.fsdp // self.context

    def position(self, rank: int) -> Position:
        """What the process with this rank is."""
        stage, inner = divmod(rank, self.fsdp * self.tensor)
        replicate, pipeline = divmod(stage, self.pipeline)
        fsdp, tensor = divmod(inner, self.tensor)
        shard, expert = divmod(inner, self.expert)
        data_rank, part = divmod(replicate * self.fsdp + fsdp, self.context)
        reports = tensor == 0 and part == 0 and pipeline == self.pipeline - 1
        leads = rank == 0
        axes = (replicate, pipeline, fsdp, tensor, expert, shard)
        return Position(rank, *axes, data_rank, part, reports, leads, rank)

    @property
    def positions(self) -> Sequence[Position]:
        """Those of all processes, in the order of ranks."""
        return [self.position(rank) for rank in range(self.ranks)]

    @property
    def shares(self) -> int:
        """The parts in which weights are sent: one by each process, copies and processes that share rows included."""
        return self.ranks

    def together(self, axis: str) -> list[tuple[int, ...]]:
        """The groups of ranks that differ only on an axis, such as ``"tensor"`` or ``"context"``; that hold one copy of
        the weights (``"weights"``); or that have the same rows (``"rows"``)."""
        same = {
            "replicate": ("pipeline", "fsdp", "tensor"),
            "pipeline": ("replicate", "fsdp", "tensor"),
            "fsdp": ("replicate", "pipeline", "tensor"),
            "tensor": ("replicate", "pipeline", "fsdp"),
            "context": ("data_rank", "pipeline", "tensor"),
            "expert": ("replicate", "pipeline", "shard"),
            "shard": ("replicate", "pipeline", "expert"),
            "weights": ("replicate",),
            "rows": ("data_rank",),
        }[axis]
        groups: dict[tuple[int, ...], list[int]] = {}
        for one in self.positions:
            groups.setdefault(tuple(getattr(one, name) for name in same), []).append(one.rank)
        return [tuple(group) for group in groups.values()]

    def refuse_unfit(self, backend: str, folder: str, sizes: Mapping[str, int]) -> None:
        """Refuse a model whose `sizes` (heads, KV heads, …, by their names in ``config.json``) the axes do not divide.

        Raises:
            BindError: the first size that is not divided.
        """
        attention = self.tensor * self.context
        heads, kv = sizes.get("num_attention_heads", attention), sizes.get("num_key_value_heads", attention)
        wrong = {"num_attention_heads": ("tensor * context", attention, heads % attention)}
        wrong["num_key_value_heads"] = ("tensor", self.tensor, kv % self.tensor)
        if self.context > 1 and not kv % self.tensor:
            own = kv // self.tensor  # repeated if there are fewer of them than parts of a row
            wrong["num_key_value_heads"] = ("tensor * context", attention, own % self.context and self.context % own)
        wrong |= {n: ("tensor", self.tensor, size % self.tensor) for n, size in sizes.items() if n.endswith("_size")}
        wrong["num_hidden_layers"] = ("pipeline", self.pipeline, sizes.get("num_hidden_layers", 0) % self.pipeline)
        wrong["num_experts"] = ("expert", self.expert, sizes.get("num_experts", 0) % self.expert)
        for name, (axis, size, rest) in wrong.items():
            if rest:
                raise BindError(
                    f"{backend}(mesh={written(self)}) splits the model in {folder!r} by {axis}={size}, which does not "
                    f"divide its {name}={sizes[name]}. Choose axes whose product divides it.",
                    code="mesh.does-not-divide",
                    axis=axis,
                    given=size,
                    size=name,
                    found=sizes[name],
                    path=folder,
                )

"""The settings and the update loop of trainers and critics: one optimizer step per mini-batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from flowrl.backends.torch.load import Folder
from flowrl.backends.torch.meshes.passes import Forward, Passes
from flowrl.backends.torch.on_mesh import MeshBackend
from flowrl.backends.torch.optimizers.specs import AdamW, Group, Optimizer, is_matrix, zeros_of
from flowrl.backends.torch.optimizers.streamed import Offload, Streamed
from flowrl.backends.torch.probes import Attention
from flowrl.backends.torch.score.blocks import Checkpointing
from flowrl.backends.torch.score.model import Dtype
from flowrl.backends.torch.score.rows import Budget, Rows, Run, by_segments, micro_batches, take
from flowrl.backends.torch.train.balancing import LoadBalancing
from flowrl.backends.torch.train.mesh import ProcessMesh
from flowrl.data.metrics import Metrics
from flowrl.errors import DataError
from flowrl.protocols.footprint import Demand, Footprint
from flowrl.protocols.protocols import MiniBatch, Objective
from flowrl.schedules import Constant
from flowrl.spec import Schedule

_LONG_RUN = 10**9
"""The optimizer steps for which a schedule as long as the run is checked when it is set, so that any warm-up fits."""


class TrainedSpec(MeshBackend):
    """The common settings of trainers and critics.

    Args:
        model: a Hugging Face folder with a tokenizer.
        optimizer: `AdamW`, `Muon` or `SGD`.
        schedule: the factor of the learning rate: one of `flowrl.schedules`, such as
            ``Cosine(1.0, 0.1, steps=1000, warmup=20)``, or your own `Schedule`. It counts optimizer steps. Without
            ``steps=`` it lasts as long as the run, and with ``warmup=0.03`` the warm-up is that share of it.
        grad_clip: the L2 norm that the gradient of a mini-batch is scaled down to; None does not clip.
        dtype: the compute dtype: ``"bfloat16"`` is autocast over the float32 weights.
        attention: ``"sdpa"`` (fused) or ``"eager"`` (the architecture's own plain products); None is fused attention if
            it computes the same, else plain.
        gradient_checkpointing: recompute layers in the backward pass, to save memory: True is all of them, a number n
            is each n-th, and ``"offload"`` is all of them with their inputs in CPU memory meanwhile.
        max_tokens: positions that a micro-batch may compute, of prompts, responses, and padding if the model needs it;
            micro-batches are formed by length, and gradients do not depend on them. Processes that share rows
            (``Mesh(context=...)``) each compute as many. None is 2048 on a CPU, where small ones are faster, and 16384
            elsewhere.
        device: None is CUDA if available, else the CPU.
        memory: GiB that the role takes on a device, in place of the prediction; compared with ``memory=`` of a place.
        ranks: processes that share the weights by FSDP2, one device each; short for ``mesh=Mesh(fsdp=ranks)``.
        mesh: the processes on several axes; see `flowrl.protocols.mesh.Mesh`.
        offload: what is in CPU memory. ``"optimizer"`` is the optimizer's state, which moves to the device in parts to
            step; ``"parameters"`` is weights and gradients, of which a layer moves to the device to compute; True is
            all of them, and the optimizer then steps on the CPU.
        reshard_after_forward: free a gathered layer after its forward pass, and gather it again in the backward pass;
            False keeps all layers gathered in between, which takes their memory and saves a collective for each.
    """

    model: Folder
    optimizer: Optimizer = AdamW(lr=1e-6)
    schedule: Schedule = Constant(1.0)
    grad_clip: float | None = Field(default=1.0, gt=0)
    dtype: Dtype = "float32"
    attention: Attention | None = None
    gradient_checkpointing: Checkpointing = False
    max_tokens: int | None = Field(default=None, ge=1)
    device: str | None = None
    memory: float | None = Field(default=None, gt=0)
    ranks: int = Field(default=1, ge=1)
    offload: Offload = False
    reshard_after_forward: bool = True

    @field_validator("schedule")
    @classmethod
    def _refuse_useless(cls, schedule: Schedule) -> Schedule:
        one = schedule.over(_LONG_RUN)
        if negative := [step for step in one.sample_steps() if one.at(step) < 0]:
            factor = f"{one!r} is {one.at(negative[0]):g} after {negative[0]} optimizer steps"
            raise ValueError(f"{factor}, which would ascend the loss; expected at least 0")
        if all(one.at(step) == 0 for step in one.sample_steps()):
            raise ValueError(
                f"{schedule!r} is 0 in every step, so nothing would be trained; expected a schedule above 0"
            )
        return schedule

    @property
    def over_run(self) -> bool:
        """Whether `schedule` lasts as long as the run."""
        return self.schedule.over_run

    def over(self, updates: int) -> Self:
        """The same with its schedule in a run of this many optimizer steps."""
        return replace(self, schedule=self.schedule.over(updates)) if self.over_run else self

    def footprint(self, demand: Demand) -> Footprint | None:
        """See `Backend.footprint`; of a body with a scalar head."""
        return self.trained_footprint(demand, None)

    def trained_footprint(self, demand: Demand, chunk: int | None, routed: bool = False) -> Footprint:
        """The footprint of a trainer with a head whose tiles have `chunk` tokens, or with a scalar one."""
        from flowrl.backends.torch.sizing.training import Engine  # here, since it runs the model

        return Engine(self, demand, chunk).trained(self.optimizer, self.gradient_checkpointing, routed)


class Learner:
    """Trains the parameters of a model, in float32.

    Args:
        named: the parameters of a model by name; trained are those that require gradients.
        over: the base weights of an adapter (`Adapted.adapter_of`), for which alone its state is valid.
        balancing: a further loss, of the experts of a mini-batch's tokens.
        passes: how micro-batches are computed; None is one by one.
        blocks: of the transformer, whose matrices `Muon` trains.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        spec: TrainedSpec,
        prefix: str,
        mesh: ProcessMesh,
        budget: Budget,
        over: str | None = None,
        balancing: LoadBalancing | None = None,
        passes: Passes | None = None,
        blocks: Iterable[nn.Module] = (),
    ) -> None:
        self._optimizer = optimizer = spec.optimizer
        self._names = {name: p for name, p in named if p.requires_grad}
        self._parameters = list(self._names.values())
        self._matrices = {p for block in blocks for p in block.parameters() if is_matrix(p.shape)}
        groups = [Group(group, [p for p in group if p in self._matrices]) for group in mesh.alike(self._parameters)]
        self.optimizer, self._groups = optimizer.build(groups, mesh), groups
        self._stepped: torch.optim.Optimizer | Streamed = self.optimizer
        if spec.offload in ("optimizer", "parameters"):
            self._stepped = Streamed(self.optimizer, mesh.device, spec.offload == "parameters")
        self._lr, self._schedule, self._grad_clip = optimizer.lr, spec.schedule, spec.grad_clip
        self.mesh, self._prefix, self._budget, self._over = mesh, prefix, budget, over
        self._balancing, self._passes = balancing, passes or Passes(mesh, balancing)
        self._steps = 0
        self.version = 0

    def update(
        self,
        batch: Rows,
        mini_batches: Sequence[MiniBatch],
        objective: Objective[Rows],
        forward: Forward,
    ) -> Metrics:
        """One optimizer step per mini-batch, in order; then increments `version`.

        The weights of a mini-batch make its objective a sum over rows, so the gradients of micro-batches and ranks add
        up. A micro-batch whose weights are all 0 is not run.

        A collective: each rank passes its part of each mini-batch, and reports its metrics; only the first reports
        values that all ranks know (gradient norm, learning rate), so that the metrics of all ranks merge exactly.
        Raises `DataError` on all ranks if the gradient of a mini-batch is not finite, which then has changed no weight.

        `forward` returns output and entropy, as `objective` needs them, of a micro-batch on the model's device.
        """
        metrics, mesh = Metrics(), self.mesh
        columns: Any = batch
        attended = columns.attention_mask.cpu()
        for index, (rows, weights, whole) in enumerate(mini_batches):
            # Zeros, not None: if all micro-batches of a parameter are skipped, its momentum and decay still apply.
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter)
            part = take(batch, rows)
            runs = self._runs(part, attended[rows], weights, whole is None and objective.of_tokens)
            most = mesh.max_over_ranks(len(runs))  # now, while no rank is in a forward pass
            turns = [*runs, *[None] * (most - len(runs))]
            # Whether one forward pass covers all rows; a micro-batch without weight is not run.
            in_one = mesh.spec.data_ranks == 1 and len(runs) == 1 and len(runs[0].rows) == len(rows)
            if self._balancing is not None:
                self._balancing.begin(part, [None if run is None else run.rows for run in turns], in_one)
            if whole is not None and most and not in_one:
                every = [None if run is None else run.rows for run in turns]
                self._passes.two(part, every, whole, objective, forward, metrics)
            else:
                of = part if whole is None else whole.batch
                self._passes.one(part, of, turns, weights, objective, forward, metrics)
            if self._balancing is not None:
                self._balancing.report(metrics, f"{self._prefix}/aux_loss")
            norm, lr = self._step(f"mini-batch {index} of {len(mini_batches)}")
            if mesh.position.reports_shared:
                metrics.mean(f"{self._prefix}/grad_norm", norm)
                metrics.mean(f"{self._prefix}/lr", lr)
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        return metrics

    def _runs(self, part: Rows, attention_mask: Tensor, weights: Tensor, of_tokens: bool) -> list[Run]:
        """The micro-batches of these rows with some weight, by segments if the objective is `of_tokens`; all of them,
        of whole rows, if experts are balanced."""
        rows = micro_batches(attention_mask, self._budget)
        if self._balancing is not None:
            return [Run(run) for run in rows]
        runs = by_segments(part, rows, self._budget) if of_tokens else [Run(run) for run in rows]
        return [run for run in runs if run.of(weights, attention_mask.shape[1]).any()]

    def _step(self, where: str) -> tuple[float, float]:
        """Clip and step; returns the gradient norm before clipping and the learning rate."""
        total = self.mesh.norm([p.grad for p in self._parameters if p.grad is not None])
        norm, lr = float(total), self._lr * self._schedule.at(self._steps)
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise DataError(
                f"The {self._prefix}'s gradient norm is {norm} in {where}; the step was skipped. Look for NaN or "
                f"infinity in the advantages, returns and log-probs under response_mask, then for a division or an exp "
                f"in the loss. If {self._prefix}/grad_norm has grown over the last steps, lower the learning rate "
                f"({lr:g} here, after {self._steps} optimizer steps), or add a warm-up.",
                code="trainer.not-finite-gradient",
                role=self._prefix,
                where=where,
                norm=norm,
                lr=lr,
            )
        if self._grad_clip is not None:
            for group in self._groups:
                torch.nn.utils.clip_grads_with_norm_(group.parameters, self._grad_clip, total)
        for settings in self.optimizer.param_groups:
            settings["lr"] = (
                lr if isinstance(settings["lr"], float) else settings["lr"].fill_(lr)
            )  # torchao's: a tensor
        self._stepped.step()
        self._steps += 1
        return norm, lr

    def state_dict(self) -> dict[str, Any]:
        """``weights`` (the trained ones by name, tied ones once), ``optimizer``, ``steps``, ``version``, ``over``; the
        tensors are the live ones, as in torch."""
        return {
            "weights": {name: parameter.detach() for name, parameter in self._names.items()},
            "optimizer": self.optimizer.state_dict(),
            "steps": self._steps,
            "version": self.version,
            "over": self._over,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`, bit for bit; raises `DataError` if it is of another model."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self._names.items()}
        given = {name: tuple(tensor.shape) for name, tensor in state["weights"].items()}
        if shapes != given:
            other = sorted({name for name, _ in shapes.items() ^ given.items()})
            raise DataError(
                f"The state has weights of another model than this {self._prefix}: {len(other)} differ in name or "
                f"shape, such as {', '.join(other[:3])}. Bind the model folder that the state was trained from.",
                code="checkpoint.mismatch",
                role=self._prefix,
                differ=other,
            )
        if state["over"] != self._over:
            raise DataError(
                f"The state is of an adapter over {state['over']}, but this {self._prefix} trains one over "
                f"{self._over}. Bind the model folder and the LoRA that the state was trained with.",
                code="checkpoint.mismatch",
                role=self._prefix,
                found=state["over"],
                expected=self._over,
            )
        for name, parameter in self._names.items():
            if _local_shape(parameter) != _local_shape(state["weights"][name]):
                raise DataError(
                    f"The state has another part of {name} than this rank of the {self._prefix}: it is of another "
                    f"number of ranks. Convert it with save_checkpoint(folder) and load_checkpoint(folder).",
                    code="checkpoint.mismatch",
                    role=self._prefix,
                    name=name,
                )
        with torch.no_grad():
            for name, parameter in self._names.items():
                parameter.copy_(state["weights"][name])
        found: dict[str, Any] = state["optimizer"]
        if isinstance(self._stepped, Streamed):  # torch would move all states to their parameters
            self.optimizer.load_state_dict(copy.deepcopy(found | {"state": {}}))
            numbers = [number for group in found["param_groups"] for number in group["params"]]
            stepped = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            for number, parameter in zip(numbers, stepped, strict=True):
                if number in found["state"]:
                    one = copy.deepcopy(found["state"][number])
                    self.optimizer.state[parameter] = self._stepped.at_rest(one)
        else:  # a copy, since torch would use the caller's tensors
            self.optimizer.load_state_dict(copy.deepcopy(found))
        self._steps, self.version = int(state["steps"]), int(state["version"])

    def save_checkpoint(self, folder: str) -> None:
        """Write `state_dict`, which any number of ranks can load; see `checkpoint.save`."""
        from flowrl.backends.torch.train import checkpoint  # late: torch.distributed.checkpoint takes 0.5 s to import

        extra = self._progress(torch.tensor([self._steps, self.version]))
        checkpoint.save(folder, self.mesh, self._names, self.optimizer, extra)

    def load_checkpoint(self, folder: str) -> None:
        """Resume from a checkpoint; see `checkpoint.load`."""
        from flowrl.backends.torch.train import checkpoint  # as above

        progress = torch.zeros(2, dtype=torch.int64)
        extra = self._progress(progress)
        checkpoint.load(folder, self.mesh, self._names, self.optimizer, self._zeros, extra)
        self._steps, self.version = progress.tolist()

    def _zeros(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The optimizer's state of a parameter, where it is between steps."""
        keys = self._optimizer.state_keys(parameter in self._matrices)
        state = {key: zeros_of(self.optimizer, parameter, key) for key in keys}
        return self._stepped.at_rest(state) if isinstance(self._stepped, Streamed) else state

    def _progress(self, progress: Tensor) -> dict[str, Tensor]:
        """The counters; their name identifies the base weights of an adapter, so that it loads over no others."""
        return {"progress" if self._over is None else f"progress over {self._over}": progress}


def _local_shape(tensor: Tensor) -> tuple[int, ...] | None:
    """The shape of this rank's shard; None if the tensor is not sharded."""
    from torch.distributed.tensor import DTensor  # here, since it takes half a second to import

    return tuple(tensor.to_local().shape) if isinstance(tensor, DTensor) else None

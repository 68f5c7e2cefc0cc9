"""The policy and the critic of `cartpole.py`: two small networks on observations, as custom backends.

They implement only what the operators call: log-probs, values and updates (`Trainer`, `Critic`), and actions (`Actor`)
in place of `Generate`'s tokens.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float32
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from flowrl import Backend, Column, Key, Metrics
from flowrl import columns as c
from flowrl.backends import scatter, take
from flowrl.protocols import BuildContext, Checkpointed, Critic, MiniBatch, Objective, Synced, Trainer
from flowrl.records import Receipt
from flowrl.sync import weights_digest

Observations = Annotated[Float32[Tensor, "batch response features"], Column("observations", "observation")]


class Steps(NamedTuple):
    """Columns of episodes that both networks read: observations and actions."""

    observations: Observations
    responses: c.Responses
    response_mask: c.ResponseMask
    policy_version: c.PolicyVersion


@runtime_checkable
class Actor(Synced, Protocol):
    """A policy that acts."""

    def act(self, observations: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        """Actions, int64 ``[rows]``, and their log-probs, float32 ``[rows]``.

        Args:
            observations: float32 ``[rows features]``.
            draws: float64 ``[rows]``, uniform in [0, 1), that select the actions; None is greedy.
        """
        ...


@runtime_checkable
class StateCritic(Critic, Protocol):
    """A critic that also values states without an action."""

    def of_states(self, observations: Tensor) -> Tensor:
        """Values, float32 ``[rows]``, of observations ``[rows features]``."""
        ...


class Network(Backend):
    """Two hidden layers of 64, trained by Adam.

    Args:
        features: size of an observation.
        actions: number of actions.
        lr: learning rate.
    """

    features: int = Field(default=4, ge=1)
    actions: int = Field(default=2, ge=1)
    lr: float = Field(default=1e-3, gt=0)

    def network(self, outputs: int, scale: float, key: Key) -> nn.Sequential:
        """In float64, so that a state's log-prob in float32 does not depend on its batch."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key.bits & (2**63 - 1))
            layers = [nn.Linear(self.features, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
            nn.init.normal_(layers[-1].weight, std=scale)
        return nn.Sequential(*layers).double()


class Policy(Network):
    """A trained policy."""

    serves = (Trainer, Checkpointed)

    def build(self, context: BuildContext) -> "LivePolicy":
        """Untrained, nearly uniform."""
        return LivePolicy(self.network(self.actions, 0.01, Key.of(context.seed).derive("policy")), self.lr)


class Acting(Network):
    """A policy that acts with synced weights."""

    serves = (Actor,)

    def build(self, context: BuildContext) -> "LiveActor":
        """Acts after the first sync."""
        return LiveActor(self.network(self.actions, 0.01, Key.of(context.seed)))


class Values(Network):
    """A trained critic."""

    serves = (StateCritic, Checkpointed)

    def build(self, context: BuildContext) -> "LiveCritic":
        """Untrained, about 0 everywhere."""
        return LiveCritic(self.network(1, 0.01, Key.of(context.seed).derive("critic")), self.lr)


class Learner:
    """Base of the trained networks: an optimizer, and checkpoints."""

    prefix: ClassVar[str]

    def __init__(self, network: nn.Sequential, lr: float) -> None:
        self.network, self.version = network, 0
        self.optimizer = torch.optim.Adam(network.parameters(), lr=lr, eps=1e-5)

    def outputs(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Log-prob and entropy, or value and None, with a gradient; ``[rows response]``, 0 off the mask."""
        raise NotImplementedError

    def update(self, batch: Any, mini_batches: Sequence[MiniBatch], objective: Objective[Any]) -> Metrics:
        """One optimizer step per mini-batch."""
        metrics = Metrics()
        for rows, weights, _ in mini_batches:
            part = take(batch, rows)
            self.optimizer.zero_grad()
            objective(*self.outputs(part), part, weights, metrics).backward()
            norm = nn.utils.clip_grad_norm_(self.network.parameters(), 0.5, error_if_nonfinite=True)
            metrics.mean(f"{self.prefix}/grad_norm", norm)
            self.optimizer.step()
        self.version += 1
        return metrics

    def save_checkpoint(self, folder: str) -> None:
        """Write weights, optimizer state and version."""
        Path(folder).mkdir(parents=True)
        state = self.network.state_dict(), self.optimizer.state_dict(), self.version
        torch.save(state, Path(folder) / "state.pt")

    def load_checkpoint(self, folder: str) -> None:
        """Restore a checkpoint."""
        network, optimizer, self.version = torch.load(Path(folder) / "state.pt")
        self.network.load_state_dict(network)
        self.optimizer.load_state_dict(optimizer)


class LivePolicy(Learner):
    """A `Trainer`."""

    prefix = "actor"

    def outputs(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        mask = batch.response_mask
        log_probs = torch.log_softmax(self.network(batch.observations[mask].double()), -1)
        done = log_probs.gather(-1, batch.responses[mask][:, None])[:, 0]
        return scatter(done.float(), mask), scatter(-(log_probs.exp() * log_probs).sum(-1).float(), mask)

    @torch.no_grad()
    def log_probs(self, batch: Any) -> Tensor:
        """Log-probs of the actions."""
        return self.outputs(batch)[0]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights by name, sorted."""
        yield from sorted(self.network.state_dict().items())

    def save_pretrained(self, folder: str) -> None:
        """Write the weights."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(dict(self.weights()), Path(folder) / "policy.safetensors")


class LiveActor:
    """An `Actor`."""

    def __init__(self, network: nn.Sequential) -> None:
        self.network, self.receipt = network, None

    def sync(self, source: Trainer) -> Receipt:
        """Copy the weights; return their version and digest."""
        start, self.receipt = time.perf_counter(), None
        self.network.load_state_dict(dict(source.weights()))
        state = self.network.state_dict()
        moved, digest = sum(weight.nbytes for weight in state.values()), weights_digest(state.items())
        self.receipt = Receipt(source.version, digest, moved, time.perf_counter() - start, "copy")
        return self.receipt

    @torch.no_grad()
    def act(self, observations: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        log_probs = torch.log_softmax(self.network(observations.double()), -1)
        if draws is None:
            actions = log_probs.argmax(-1)
        else:  # the first action whose cumulative probability exceeds the draw
            actions = (log_probs.exp().cumsum(-1)[:, :-1] <= draws[:, None]).sum(-1)
        return actions, log_probs.gather(-1, actions[:, None])[:, 0].float()


class LiveCritic(Learner):
    """A `StateCritic`."""

    prefix = "critic"

    def outputs(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        return scatter(self.of_states(batch.observations[batch.response_mask]), batch.response_mask), None

    @torch.no_grad()
    def values(self, batch: Any) -> Tensor:
        """Values of the states with an action."""
        return self.outputs(batch)[0]

    def of_states(self, observations: Tensor) -> Tensor:
        return self.network(observations.double())[..., 0].float()

"""Users' losses: the columns that they read become ports of the update, and errors name file and line."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from flowrl import INJECTED, Graph, Loss, Metrics, Now, Operator, State
from flowrl import columns as c
from flowrl.core.operators.loss import Unit
from flowrl.core.operators.ports import FromParameters, PortField
from flowrl.core.operators.roles import Role, Writes
from flowrl.data.balance import Shard
from flowrl.data.keys import Key
from flowrl.draw import mermaid
from flowrl.graphs import grpo, ppo
from flowrl.operators import DPO, PPOClip, Reinforce, UpdateActor, UpdateCritic, ValueHuber
from flowrl.operators.losses.objective import TokenObjective
from flowrl.operators.updates.mini_batches import rank_parts
from flowrl.protocols.protocols import Trainer
from flowrl.records import Tokens, Updated
from flowrl.spec import Spec
from tests.support.errors import raises
from tests.support.kernel import exact, wires


class Entropic(Loss):
    """A loss with a parameter, the entropy, a port that a graph has, and an optional one."""

    coef: float = 0.1

    def __call__(
        self,
        log_probs: c.LogProbs,
        entropies: c.Entropies,
        token_level_scores: c.TokenLevelScores,
        temperature: c.Temperature,
        advantages: c.Advantages | None = None,
        metrics: Metrics = INJECTED,
    ) -> Tensor:
        metrics.mean("actor/heat", temperature.sum(), len(temperature))
        gain = token_level_scores if advantages is None else advantages
        return -gain * log_probs - self.coef * entropies


def test_columns_of_a_loss_are_ports_of_the_update() -> None:
    ports = UpdateActor(Entropic()).signature.ports
    assert list(ports) == ["rollout", "token_level_scores", "ref_log_prob", "token_version", "advantages"]
    assert [name for name, port in ports.items() if port.optional] == ["ref_log_prob", "token_version", "advantages"]
    of_tokens = ["rollout", "old_log_probs", "advantages", "ref_log_prob", "token_version"]
    assert list(UpdateActor().signature.ports) == of_tokens
    assert list(UpdateCritic(ValueHuber()).signature.ports) == ["rollout", "returns"]
    assert UpdateActor().signature is UpdateActor(PPOClip(0.1)).signature, "calls are laid out by it"


@dataclass(frozen=True)
class Tilt:
    """A value: the same for all rows."""

    by: float


class Tilted(Loss):
    """Reads a value and columns."""

    unit: ClassVar[Unit] = "batch"

    def __call__(self, log_probs: c.LogProbs, advantages: c.Advantages, tilt: Tilt) -> Tensor:
        return -(advantages - tilt.by) * log_probs


def test_a_loss_may_read_a_value_which_mini_batches_and_ranks_do_not_split() -> None:
    ports = UpdateActor(Tilted()).signature.ports
    assert list(ports) == ["rollout", "advantages", "tilt", "ref_log_prob", "token_version"]
    objective, mask = TokenObjective(Tilted()), torch.ones(4, 2, dtype=torch.bool)
    advantages, log_probs = torch.arange(8.0).view(4, 2), -torch.rand(4, 2, generator=torch.Generator().manual_seed(0))
    read = {"advantages": advantages, "tilt": Tilt(2.5)}
    shard = Shard(1, 2, torch.tensor([0, 3]), torch.tensor([2, 2, 2, 2]))
    part = rank_parts([torch.tensor([3, 0])], objective.weights, mask, mask[:2], shard, read)[0].replicated
    assert part is not None and part.batch.tilt is read["tilt"]
    output = log_probs[[3, 0]].requires_grad_()
    found = objective(output, None, part.batch, part.weights, Metrics())
    assert found.item() == pytest.approx(float((-(advantages - 2.5) * log_probs)[[3, 0]].mean()))


def test_an_edit_wires_the_ports_of_the_new_loss_and_removes_those_of_the_old_one() -> None:
    graph = grpo(exact)
    edited = graph.edit(set={"update_actor.loss": Entropic(coef=0.2)})
    assert wires(edited, "update_actor")["token_level_scores"] == "reward.token_level_scores"
    assert PortField("old_log_probs") not in edited["update_actor"].inputs
    assert "~ update_actor <- old_log_probs: old_log_prob.old_log_probs -> unwired" in str(graph.diff(edited))
    assert edited.edit(set={"update_actor.loss": PPOClip(0.2)}).diff(graph).changed == {}
    critic = ppo(exact).edit(set={"update_critic.loss": ValueHuber(2.0)})
    assert wires(critic, "update_critic").keys() & {"returns", "values"} == {"returns"}


def test_a_custom_loss_is_saved_pickled_and_drawn() -> None:
    graph = grpo(exact).edit(set={"update_actor.loss": Entropic(coef=0.2)})
    assert Graph.from_dict(graph.to_dict()) == graph
    assert pickle.loads(pickle.dumps(graph["update_actor"].operator)) == graph["update_actor"].operator
    assert "loss=Entropic(coef=0.2)" in mermaid.draw(graph)


def test_columns_are_zero_off_the_mask_and_the_entropy_has_its_gradient() -> None:
    nan = float("nan")
    mask = torch.tensor([[True, False], [True, True]])
    new = torch.tensor([[-1.0, nan], [-2.0, -3.0]], requires_grad=True)
    entropy = torch.tensor([[1.0, nan], [2.0, 3.0]], requires_grad=True)

    class Batch:
        token_level_scores = torch.tensor([[1.0, nan], [0.0, 2.0]])
        temperature = torch.ones(2)
        advantages = None

    objective, metrics = TokenObjective(Entropic(coef=0.5), "seq-mean-token-sum"), Metrics()
    assert objective.wants_entropy
    value = objective(new, entropy, Batch(), objective.weights(mask), metrics)
    value.backward()
    assert value.item() == pytest.approx(((1 - 0.5) + (6 - 0.5 * 5)) / 2)
    assert new.grad is not None and new.grad.tolist() == [[-0.5, 0.0], [0.0, -1.0]]
    assert entropy.grad is not None and entropy.grad.tolist() == [[-0.25, 0.0], [-0.25, -0.25]]
    assert metrics.compute()["actor/heat"] == 1.0


class OfRows(Loss):
    """One number per row, for each of its tokens."""

    unit: ClassVar[Unit] = "row"

    def __call__(self, log_probs: c.LogProbs) -> Tensor:
        return -log_probs.sum(-1)


class OfRowsUndeclared(Loss):
    """The same, but its class does not declare the unit."""

    def __call__(self, log_probs: c.LogProbs) -> Tensor:
        return -log_probs.sum(-1)


class Summed(Loss):
    def __call__(self, log_probs: c.LogProbs) -> Tensor:
        return log_probs.sum()


class Detached(Loss):
    def __call__(self, log_probs: c.LogProbs) -> Tensor:
        return -log_probs.detach()


class TestReturned:
    new = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    mask = torch.tensor([[True, True], [True, False]])

    def value(self, loss: Loss, aggregation: Any = "seq-mean-token-mean") -> float:
        objective, output = TokenObjective(loss, aggregation), self.new.clone().requires_grad_()
        return objective(output, None, None, objective.weights(self.mask), Metrics()).item()

    def test_a_row_loss_is_weighted_by_the_tokens_of_its_row(self) -> None:
        assert self.value(OfRows()) == pytest.approx((3 + 3) / 2)
        assert self.value(OfRows(), "token-mean") == pytest.approx((3 + 3 + 3) / 3)

    def test_a_summed_loss_is_refused(self) -> None:
        with raises("objective.loss-shape", loss="Summed", found=()):
            self.value(Summed())

    def test_a_loss_of_rows_must_declare_its_unit(self) -> None:
        """The rules read the unit; see FR018."""
        with raises("objective.loss-shape", loss="OfRowsUndeclared", found=(2,)):
            self.value(OfRowsUndeclared())

    def test_a_loss_without_a_gradient_is_refused(self) -> None:
        with raises("objective.no-gradient", loss="Detached"):
            self.value(Detached())


def test_a_loss_of_the_other_kind_is_refused() -> None:
    with raises("update.wrong-loss", loss="ValueHuber", expected=("log-probs", "distributions"), found=("values",)):
        UpdateActor(ValueHuber())
    with raises("update.wrong-loss", loss="Reinforce", expected=("values",), found=("log-probs",)):
        UpdateCritic(Reinforce())


def define(call: Any, **body: Any) -> None:
    type("Faulty", (Loss,), {"__call__": call, "__module__": __name__, **body})


def no_model_output(self: Any, advantages: c.Advantages) -> Tensor: ...
def two_model_outputs(self: Any, log_probs: c.LogProbs, new_values: c.NewValues) -> Tensor: ...
def a_record(self: Any, log_probs: c.LogProbs, rollout: Tokens) -> Tensor: ...
def a_key(self: Any, log_probs: c.LogProbs, key: Key = INJECTED) -> Tensor: ...
def a_step(self: Any, log_probs: c.LogProbs, now: Now = INJECTED) -> Tensor: ...
def a_column(self: Any, log_probs: c.LogProbs) -> c.Advantages: ...
def fine(self: Any, log_probs: c.LogProbs) -> Tensor: ...


UNIT = {"unit": "ClassVar[str]"}


@pytest.mark.parametrize(
    ("call", "body", "code", "facts"),
    [
        (no_model_output, {}, "loss.ports", {"found": ()}),
        (two_model_outputs, {}, "loss.ports", {"found": ("log_probs", "new_values")}),
        (a_record, {}, "loss.ports", {"port": "rollout"}),
        (a_key, {}, "loss.unit", {"unit": "token"}),
        (a_step, {}, "loss.ports", {"found": "Now"}),
        (a_column, {}, "operator.return-type", {}),
        (fine, {"unit": "rows", "__annotations__": UNIT}, "loss.unit", {"unit": "rows"}),
        (fine, {"unit": "group", "__annotations__": UNIT}, "loss.unit", {"unit": "group"}),
        (3, {}, "operator.not-a-function", {"found": "an int"}),
    ],
)
def test_a_faulty_class_is_refused_with_file_and_line(
    call: Any, body: dict[str, Any], code: str, facts: dict[str, Any]
) -> None:
    with raises(code, **facts) as error:
        define(call, **body)
    assert re.match(r".*test_loss\.py:\d+: Faulty", str(error.value.facts["where"]))


class Counting:
    """A mixin with state."""

    calls = State(lambda self: 0)


def test_a_loss_with_state_is_refused_where_it_is_defined() -> None:
    """Its value would be on the object, continue in the next run, and restart in a resumed one."""
    with raises("operator.state", state="calls") as own:

        class Counted(Loss):
            calls = State(lambda self: 0)

            def __call__(self, log_probs: c.LogProbs, advantages: c.Advantages) -> Tensor:
                self.calls.value += 1
                return -advantages * log_probs

    assert own.value.message.startswith(f"{__file__}:") and ": Counted.calls is a State" in own.value.message
    with raises("operator.state", state="calls"):

        class Mixed(Counting, PPOClip):
            """Inherits the state."""


def test_a_class_without_call_is_refused() -> None:
    with raises("operator.no-call"):

        class Empty(Loss):
            coef: float = 1.0


def test_a_custom_update_has_the_ports_of_its_loss() -> None:
    class Own(Operator):
        """Trains in another way, with any loss."""

        loss: Loss = Reinforce()
        actor: Writes[Trainer] = Role("actor")

        def __call__(self, rollout: Tokens, **columns: FromParameters) -> Updated: ...

    assert list(Own().signature.ports) == ["rollout", "advantages"]
    assert list(Own(DPO()).signature.ports) == ["rollout", "ref_log_prob", "token_level_scores", "uid"]
    with raises("loss.missing-field"):

        class Without(Operator):
            def __call__(self, rollout: Tokens, **columns: FromParameters) -> Updated: ...


def test_a_loss_cannot_redefine_the_name_of_a_column() -> None:
    class Clash(Loss):
        unit: ClassVar[Unit] = "row"

        def __call__(self, log_probs: c.LogProbs, input_ids: c.Advantages) -> Tensor: ...

    with raises("loss.column-clash", column="input_ids"):
        UpdateActor(Clash()).signature  # noqa: B018


def test_a_state_is_refused_where_the_class_of_a_loss_is_written() -> None:
    """It would count micro-batches, continue in the next run, and miss in checkpoints."""

    class Counting:
        calls = State(lambda self: 0)

    with raises("operator.state", state="calls") as caught:

        class Warm(Counting, Loss):
            def __call__(self, log_probs: c.LogProbs, advantages: c.Advantages) -> Tensor:
                return -advantages * log_probs

    assert f"{__file__}:" in caught.value.message


def test_state_of_a_spec_other_than_an_operator_is_refused_when_read() -> None:
    class Schedule(Spec):
        steps = State(lambda self: 0)

    with raises("operator.state", owner="Schedule", state="steps"):
        Schedule().steps.value += 1  # type: ignore[attr-defined]

"""The true gradient of a stated objective, by sums over all responses.

Everything is float64 and differentiated by torch; no gradient is written as a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.auditing.objective import StatedObjective
from flowrl.auditing.task import Policy, Responses


def gradient(of: Callable[[Policy], Tensor], policy: Policy) -> Tensor:
    """The gradient of a number with respect to a policy's logits: float64 ``[prompts states tokens]``."""
    logits = policy.logits.clone().requires_grad_()
    return torch.autograd.grad(of(Policy(logits, policy.responses)), logits)[0]


@dataclass(frozen=True, eq=False)
class TrueGradient:
    """The stated objective, over the responses of a task.

    `rewards` are float64 ``[prompts responses steps]``, the scores of the tokens of each response; `references` are the
    frozen policies, by role.
    """

    stated: StatedObjective
    rewards: Tensor
    references: Mapping[str, Policy]

    def expected(self, policy: Policy, of: Tensor) -> Tensor:
        """The mean over prompts of the expectation of ``[prompts responses]``."""
        return (policy.by_response(self.stated.temperature).exp() * of).sum(-1).mean()

    def reward(self, policy: Policy) -> Tensor:
        """The expected score."""
        return self.expected(policy, self.rewards.sum(-1))

    def divergence(self, policy: Policy, role: str) -> Tensor:
        """KL of whole responses: ``E[log pi(y) - log ref(y)]``, which has a gradient in both factors."""
        temperature = self.stated.temperature
        log_ratio = policy.by_response(temperature) - self.references[role].by_response(temperature)
        return self.expected(policy, log_ratio)

    def entropy(self, policy: Policy) -> Tensor:
        """The expected sum of the entropies of a response's states."""
        log_probs = policy.by_state(self.stated.temperature)
        each = -(log_probs.exp() * log_probs).sum(-1)[:, policy.responses.states]
        return self.expected(policy, torch.where(policy.responses.mask, each, 0.0).sum(-1))

    def length(self, policy: Policy) -> Tensor:
        """The expected length, in tokens."""
        return self.expected(policy, policy.responses.mask.sum(-1).double().expand(self.rewards.shape[:2]))

    def parts(self, policy: Policy) -> dict[str, Callable[[Policy], Tensor]]:
        """The parts of the objective: ``"loss"`` (with KL in the reward), ``"kl"`` and ``"entropy"``."""
        shaped = [one for one in self.stated.kl if not one.in_loss]
        in_loss = [one for one in self.stated.kl if one.in_loss]

        def loss(policy: Policy) -> Tensor:
            return self.reward(policy) - sum(one.coef * self.divergence(policy, one.role) for one in shaped)

        def kl(policy: Policy) -> Tensor:
            return -sum((one.coef * self.divergence(policy, one.role) for one in in_loss), torch.zeros(()))

        found: dict[str, Callable[[Policy], Tensor]] = {"loss": loss}
        if in_loss:
            found["kl"] = kl
        if self.stated.entropy:
            found["entropy"] = lambda policy: self.stated.entropy * self.entropy(policy)
        return found

    def divergence_by_state(self, policy: Policy, role: str, forward: bool) -> Tensor:
        """KL to the reference state by state, with the distribution of states fixed: only the next token varies.

        ``E[sum_t KL(pi(.|s_t) || ref(.|s_t))]``, or of the reference to the policy with `forward`. A KL term that is
        differentiated token by token can follow at best this.
        """
        temperature = self.stated.temperature
        own, ref = policy.by_state(temperature), self.references[role].by_state(temperature)
        each = (ref.exp() * (ref - own) if forward else own.exp() * (own - ref)).sum(-1)
        in_rows = torch.where(policy.responses.mask, each[:, policy.responses.states], 0.0).sum(-1)
        visited = policy.by_response(temperature).exp().detach()
        return (visited * in_rows).sum(-1).mean()

    def divergences(self, role: str) -> dict[str, Callable[[Policy], Tensor]]:
        """The divergences from a frozen policy that a KL term can follow, by name."""
        own = self.stated.role
        return {
            f"KL({own} || {role})": lambda policy: self.divergence(policy, role),
            f"KL({own} || {role}) token by token": lambda policy: self.divergence_by_state(policy, role, forward=False),
            f"KL({role} || {own}) token by token": lambda policy: self.divergence_by_state(policy, role, forward=True),
        }

    def plain_variance(self, policy: Policy, n: int) -> float:
        """The total variance of plain REINFORCE, without a baseline, from `n` responses per prompt."""
        temperature = self.stated.temperature
        paid = self.rewards.sum(-1)
        for one in self.stated.kl:
            log_ratio = policy.by_response(temperature) - self.references[one.role].by_response(temperature)
            paid = paid - one.coef * log_ratio
        probability = policy.by_response(temperature).exp()
        total = 0.0
        for prompt in range(len(paid)):
            scores = torch.stack([_score(policy, temperature, prompt, y) for y in range(len(policy.responses))])
            samples = paid[prompt, :, None] * scores
            mean = (probability[prompt, :, None] * samples).sum(0)
            total += float((probability[prompt, :, None] * (samples - mean).square()).sum()) / n
        return total / len(paid) ** 2

    def values(self, policy: Policy) -> Tensor:
        """The expected return from each state, of token scores and KL in the reward: ``[prompts states]``."""
        temperature = self.stated.temperature
        paid = self.rewards.clone()
        for one in self.stated.kl:
            if not one.in_loss:
                log_ratio = policy.by_token(temperature) - self.references[one.role].by_token(temperature)
                paid = paid - one.coef * log_ratio
        to_come = paid.flip(-1).cumsum(-1).flip(-1)
        return _over_states(policy.by_response(temperature).exp(), to_come, policy.responses)


def _score(policy: Policy, temperature: float, prompt: int, response: int) -> Tensor:
    """The flat gradient of a response's log-prob with respect to the logits of its prompt."""
    return gradient(lambda one: one.by_response(temperature)[prompt, response], policy)[prompt].flatten()


def _over_states(probability: Tensor, x: Tensor, responses: Responses) -> Tensor:
    """For each state, the mean of `x` over the responses that pass through it: ``[prompts states]``."""
    prompts = len(x)
    weight = probability[..., None].expand(x.shape) * responses.mask
    states = responses.states.expand(x.shape).reshape(prompts, -1)
    sums = torch.zeros(prompts, responses.number, dtype=torch.float64)
    weights = torch.zeros_like(sums)
    sums.scatter_add_(1, states, (weight * x).reshape(prompts, -1))
    weights.scatter_add_(1, states, weight.reshape(prompts, -1))
    return sums / weights

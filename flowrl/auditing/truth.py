"""The gradient that a graph should follow: of what it states, by sums over all responses.

Everything is float64 and differentiated by torch; nothing here is a formula of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.auditing.objective import StatedObjective
from flowrl.auditing.task import Policy, Responses


def gradient(of: Callable[[Policy], Tensor], policy: Policy) -> Tensor:
    """The gradient of a number in a policy's logits: float64 ``[prompts states tokens]``."""
    logits = policy.logits.clone().requires_grad_()
    return torch.autograd.grad(of(Policy(logits, policy.responses)), logits)[0]


@dataclass(frozen=True, eq=False)
class TrueGradient:
    """What is stated, over the responses of a task.

    Args:
        stated: what.
        rewards: float64 ``[prompts responses steps]``, the scores of the tokens of each response.
        references: policies by role, of all KL terms.
    """

    stated: StatedObjective
    rewards: Tensor
    references: Mapping[str, Policy]

    def expected(self, policy: Policy, of: Tensor) -> Tensor:
        """The mean over prompts of what is expected of ``[prompts responses]``."""
        return (policy.by_response(self.stated.temperature).exp() * of).sum(-1).mean()

    def reward(self, policy: Policy) -> Tensor:
        """The expected score."""
        return self.expected(policy, self.rewards.sum(-1))

    def divergence(self, policy: Policy, role: str) -> Tensor:
        """KL of whole responses: ``E[log pi(y) - log ref(y)]``, which has a gradient in both factors."""
        temperature = self.stated.temperature
        apart = policy.by_response(temperature) - self.references[role].by_response(temperature)
        return self.expected(policy, apart)

    def entropy(self, policy: Policy) -> Tensor:
        """The expected sum of the entropies of a response's states."""
        said = policy.by_state(self.stated.temperature)
        each = -(said.exp() * said).sum(-1)[:, policy.responses.states]
        return self.expected(policy, torch.where(policy.responses.mask, each, 0.0).sum(-1))

    def length(self, policy: Policy) -> Tensor:
        """The expected length, in tokens."""
        return self.expected(policy, policy.responses.mask.sum(-1).double().expand(self.rewards.shape[:2]))

    def parts(self, policy: Policy) -> dict[str, Callable[[Policy], Tensor]]:
        """What is made large, by part: ``"loss"`` (with KL that is in the reward), ``"kl"`` and ``"entropy"``."""
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

    def held(self, policy: Policy, role: str, forward: bool) -> Tensor:
        """KL to the reference state by state, where the states are held as they are: only what is said next moves.

        ``E[sum_t KL(pi(.|s_t) || ref(.|s_t))]``, or of the reference to the policy where `forward`. This is what a KL
        term that is differentiated token by token can follow at best.
        """
        temperature = self.stated.temperature
        said, ref = policy.by_state(temperature), self.references[role].by_state(temperature)
        each = (ref.exp() * (ref - said) if forward else said.exp() * (said - ref)).sum(-1)
        in_rows = torch.where(policy.responses.mask, each[:, policy.responses.states], 0.0).sum(-1)
        visited = policy.by_response(temperature).exp().detach()
        return (visited * in_rows).sum(-1).mean()

    def plain_variance(self, policy: Policy, n: int) -> float:
        """The total variance of plain REINFORCE, without a baseline, from `n` answers to each prompt."""
        temperature = self.stated.temperature
        paid = self.rewards.sum(-1)
        for one in self.stated.kl:
            apart = policy.by_response(temperature) - self.references[one.role].by_response(temperature)
            paid = paid - one.coef * apart
        probability = policy.by_response(temperature).exp()
        total = 0.0
        for prompt in range(len(paid)):
            scores = torch.stack([_score(policy, temperature, prompt, y) for y in range(len(policy.responses))])
            samples = paid[prompt, :, None] * scores
            mean = (probability[prompt, :, None] * samples).sum(0)
            total += float((probability[prompt, :, None] * (samples - mean).square()).sum()) / n
        return total / len(paid) ** 2

    def values(self, policy: Policy) -> Tensor:
        """What is still paid from a state on, by tokens of the score and KL in the reward: ``[prompts states]``."""
        temperature = self.stated.temperature
        paid = self.rewards.clone()
        for one in self.stated.kl:
            if not one.in_loss:
                apart = policy.by_token(temperature) - self.references[one.role].by_token(temperature)
                paid = paid - one.coef * apart
        to_come = paid.flip(-1).cumsum(-1).flip(-1)
        return _over_states(policy.by_response(temperature).exp(), to_come, policy.responses)


def _score(policy: Policy, temperature: float, prompt: int, response: int) -> Tensor:
    """The gradient of a response's log-prob in the logits of its prompt, flat."""
    return gradient(lambda one: one.by_response(temperature)[prompt, response], policy)[prompt].flatten()


def _over_states(probability: Tensor, x: Tensor, responses: Responses) -> Tensor:
    """For each state the mean of what the responses that pass through it have there: ``[prompts states]``."""
    prompts = len(x)
    weight = probability[..., None].expand(x.shape) * responses.mask
    states = responses.states.expand(x.shape).reshape(prompts, -1)
    sums = torch.zeros(prompts, responses.number, dtype=torch.float64)
    weights = torch.zeros_like(sums)
    sums.scatter_add_(1, states, (weight * x).reshape(prompts, -1))
    weights.scatter_add_(1, states, weight.reshape(prompts, -1))
    return sums / weights

"""Log-probs of what was sampled, under the policy that sampled it and under the reference."""

from __future__ import annotations

from typing import ClassVar

from flowrl import columns as c
from flowrl.core.operator import Granularity, Operator
from flowrl.core.protocols import Scorer
from flowrl.core.roles import Reads, Role
from flowrl.records import Sequences


class OldLogProb(Operator):
    """The sampled tokens' log-probs, recomputed by the trainer with its weights at the start of the step.

    The ratio of PPO is taken against these and not against the rollout engine's own, since engines differ in kernels,
    precision and sampling masks. Float32 ``[batch response]`` at each row's temperature, 0 off the mask.
    """

    granularity: ClassVar[Granularity] = "row"
    actor: Reads[Scorer] = Role("actor")

    def __call__(self, rollout: Sequences) -> c.OldLogProbs:
        return self.actor.log_probs(rollout)


class RefLogProb(Operator):
    """The sampled tokens' log-probs under the frozen reference, the anchor of KL.

    Float32 ``[batch response]`` at each row's temperature, 0 off the mask.
    """

    granularity: ClassVar[Granularity] = "row"
    ref: Reads[Scorer] = Role("ref")

    def __call__(self, rollout: Sequences) -> c.RefLogProbs:
        return self.ref.log_probs(rollout)

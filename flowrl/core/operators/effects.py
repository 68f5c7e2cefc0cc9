"""`Effect`: what operators and losses declare that they do; rules follow effects along the dataflow."""

from __future__ import annotations

from collections.abc import Set
from enum import StrEnum

from flowrl.errors import DefinitionError, offer
from flowrl.spec import Spec, schedules


class Effect(StrEnum):
    """The effects that flowrl reads; as strings they compare equal to their values, such as ``"kl"``."""

    KL = "kl"
    """It counts KL to the reference, in the reward or in the loss."""
    KL_WITHOUT_GRADIENT = "kl without a gradient"
    """Its KL has a gradient of 0 in expectation."""
    REFERENCE_REGULARIZATION = "reference regularization"
    """Its loss keeps the policy near the reference without a KL term."""
    GREEDY = "greedy"
    """It takes the most likely token."""
    TRUNCATED = "truncated"
    """It samples from the most likely tokens only, by top-k, top-p or min-p."""
    PENALIZED = "penalized"
    """It makes tokens of its context more or less likely, by a repetition, presence or frequency penalty."""
    IMPORTANCE_CORRECTION = "importance correction"
    """It weights by the ratio of the trained policy to the one that sampled."""
    TOKEN_WEIGHTS = "token weights"
    """Its weights differ between the tokens of a row."""
    GROUP_BASELINE = "group baseline"
    """Its baseline comes from the other rows of a prompt."""
    SCALED = "scaled"
    """It divides by a standard deviation."""
    ADVANTAGE_PER_ROW = "advantage per row"
    """It takes the mean of a row's advantages."""
    NONLINEAR = "nonlinear in advantages"
    """Its loss is not proportional to the advantages, so weights on these are not weights on the loss."""
    SEVERAL_RESPONSES = "several responses"
    """It compares several responses to a prompt."""
    REPLAYS = "replays"
    """It adds rows of earlier steps, of at most its parameter `max_age` versions before."""
    RETOKENIZES = "retokenizes"
    """It writes tokens of another tokenizer than that of what it reads."""
    ASKED = "asked"
    """Its rows are episodes as another engine saw them, which its parameter `other` names."""
    SPANS = "spans"
    """It swaps weights while requests are in flight."""
    SAMPLER_FEEDBACK = "sampler feedback"
    """It reports the scores of groups to the sampler that chose their prompts."""
    EXTERNAL = "external"
    """It queries something outside the graph, so another call may return something else."""


class HasEffects(Spec):
    """Base of operators and losses, which declare what they do.

    Raises:
        DefinitionError: an instance has an unknown effect without a namespace; names the nearest one.
    """

    @property
    def effects(self) -> frozenset[str]:
        """What it does, for rules, such as ``{"kl"}``: members of `Effect`, or strings with a namespace for your own
        rules, such as ``{"lab.sparse"}``."""
        return frozenset()

    def _check(self) -> None:
        super()._check()
        if not schedules(self):  # a graph also checks them in the steps that `sample_steps` chooses
            _refuse_unknown(type(self).__name__, self.effects)


def _refuse_unknown(declared_by: str, effects: object) -> None:
    if not isinstance(effects, Set) or not all(isinstance(effect, str) for effect in effects):
        raise DefinitionError(
            f"{declared_by}.effects is {effects!r}. Expected a set of strings, such as frozenset({{'kl'}}).",
            code="operator.invalid-attribute",
            where=declared_by,
            attribute="effects",
            found=repr(effects),
        )
    known = [effect.value for effect in Effect]
    for effect in sorted(effects - set(known)):
        if "." not in effect.strip("."):
            raise DefinitionError(
                f"{declared_by}.effects has {effect!r}, which no rule reads. Give an effect of your own a namespace, "
                f"such as 'lab.sparse', or use one of flowrl's; {offer(effect.lower(), known, 'these are')}",
                code="operator.unknown-effect",
                where=declared_by,
                effect=effect,
                known=known,
            )

"""Rules about losses: whether a loss fits the advantages, rows and optimizer steps of its update."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.lineage import (
    makers,
    own_lineage,
    rearranges_rows,
    rows_of_step,
    rows_per_prompt,
    samplers,
    trained_on,
)
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.loss import Loss
from flowrl.core.operators.operator_validation import sample_steps
from flowrl.protocols.protocols import Trainer
from flowrl.rules.inference import effects
from flowrl.rules.rule import (
    Findings,
    kinds_of_loss,
    losses_of,
    of_kind,
    repeated,
    rule,
    sampling_of,
    writers,
    writes,
)
from flowrl.spec import parameters


@rule(
    "FR015",
    "KL in the loss needs a gradient: that of k1 is noise with mean 0 on the policy's own rows.",
    "OpenRLHF/OpenRLHF#1309",
)
def _kl_has_a_gradient(graph: Graph, prompts: int | None) -> Findings:
    for node, _ in writers(graph, Trainer):
        if Effect.KL_WITHOUT_GRADIENT in effects(graph, node):
            yield (
                node.name,
                f"Its KL uses k1, whose gradient in a loss is 0 in expectation, so it adds noise and does not "
                f"constrain the policy. Use k2 or k3: edit(set={{'{node.name}.kl.estimator': 'k2'}}).",
            )


@rule(
    "FR017",
    "A loss that already keeps the policy near the reference must not be combined with a KL term.",
    "eric-mitchell/direct-preference-optimization#4",
)
def _anchored_once(graph: Graph, prompts: int | None) -> Findings:
    for node, _ in writers(graph, Trainer):
        terms = [n.name for n in own_lineage(graph, node.name) if Effect.KL in effects(graph, n)]
        if Effect.REFERENCE_REGULARIZATION in effects(graph, node) and terms:
            first = terms[0]
            without = f"set={{'{first}.kl': None}}" if first == node.name else f"drop=['{first}']"
            yield (
                node.name,
                f"Its loss already keeps the policy near the reference, and {first} counts KL to it again. Remove the "
                f"KL: edit({without}).",
            )


@rule(
    "FR018",
    "A loss per row must count once per row: summed over tokens, it weights rows by their length.",
    "huggingface/trl#3823",
)
def _once_per_row(graph: Graph, prompts: int | None) -> Findings:
    for node, loss in _losses(graph):
        values = parameters(node.initial_operator)
        aggregation = values.get("aggregation", _BY_ROW)
        if loss.unit in ("row", "group") and aggregation != _BY_ROW:
            no_norm = "" if values.get("norm") is None else f", '{node.name}.norm': None"
            yield (
                node.name,
                f"{type(loss).__name__} is a loss per row, the same at each token, but aggregation={aggregation!r} "
                f"gives longer rows more weight. Average over rows: edit(set={{'{node.name}.aggregation': "
                f"'{_BY_ROW}'{no_norm}}}).",
            )


@rule(
    "FR019",
    "Weights on advantages must be weights on the loss: one per row if it averages them, none if it is not linear.",
    "huggingface/trl#3811",
)
def _advantages_fit_the_loss(graph: Graph, prompts: int | None) -> Findings:
    for node, loss in _losses(graph):
        for n in own_lineage(graph, node.name):
            if Effect.NONLINEAR in effects(graph, node) and n.name != node.name and _corrects(graph, n):
                yield (
                    node.name,
                    f"{type(loss).__name__} is not linear in the advantages, so the weights that {n.name} puts on them "
                    f"do not weight the loss. Drop it: edit(drop=['{n.name}']), or use a loss that is linear: "
                    f"UpdateActor(PPOClip()).",
                )
            by_values = of_kind(graph, n, "value") and writes(n, "advantage")
            if Effect.ADVANTAGE_PER_ROW in effects(graph, node) and (
                by_values or Effect.TOKEN_WEIGHTS in effects(graph, n)
            ):
                source = "values" if by_values else "weights"
                fix = "such as GroupAdvantage()" if by_values else f"edit(set={{'{n.name}.level': 'geometric'}})"
                yield (
                    node.name,
                    f"{type(loss).__name__} averages the advantages of a row, but {n.name} gives each token its "
                    f"own, from {source}. Use one advantage per row, {fix}, or a loss per token: "
                    f"UpdateActor(PPOClip()).",
                )


def _corrects(graph: Graph, node: Node) -> bool:
    """Whether a node weights or rejects advantages by the engine's log-probs."""
    by_ratio = of_kind(graph, node, "log-prob of the rollout") and of_kind(graph, node, "advantage")
    return bool(by_ratio or {Effect.IMPORTANCE_CORRECTION, Effect.TOKEN_WEIGHTS} & effects(graph, node))


@rule(
    "FR020",
    "A loss without a ratio allows one optimizer step: after it, the rows come from an older policy.",
    "huggingface/trl#2341",
)
def _one_step_without_a_ratio(graph: Graph, prompts: int | None) -> Findings:
    for node, loss in _losses(graph):
        kinds = kinds_of_loss(loss)
        if "advantage" not in kinds or any(kind.startswith("log-prob") for kind in kinds):
            continue
        epochs = max(int(parameters(now).get("ppo_epochs", 1)) for now in sample_steps(node.operator))
        size, rows = node.row_divisors.get("mini_batch"), rows_of_step(graph, node.name, prompts)
        reuse = [
            *([f"ppo_epochs={epochs}"] if epochs > 1 else []),
            *([f"mini_batch={size} for {rows} rows"] if size and rows and rows > size else []),
            *([f"prior_updates={node.prior_updates}"] if node.prior_updates else []),
        ]
        if reuse:
            yield (
                node.name,
                f"{type(loss).__name__} has no ratio to the policy that sampled, but with {' and '.join(reuse)} it "
                f"trains on rows of an older policy. Take one optimizer step per batch (ppo_epochs=1, "
                f"mini_batch=None), or use a loss with a ratio: UpdateActor(PPOClip()).",
            )


@rule(
    "FR042",
    "A ratio needs a temperature that is not near 0: divided by it, tiny changes of logits clip every token.",
    "huggingface/trl#3640",
)
def _no_ratio_of_cold_responses(graph: Graph, prompts: int | None) -> Findings:
    for node, loss in _losses(graph):
        if not any(kind.startswith("log-prob") for kind in kinds_of_loss(loss)):
            continue
        for n in makers(graph, node.name):
            path, given = sampling_of(graph, n)
            lowest = min(float(now.get("temperature", 1.0)) for now in given)
            if 0 < lowest < COLD:
                yield (
                    n.name,
                    f"It samples at temperature {lowest:g}, but {node.name} trains on the ratio of log-probs, which "
                    f"a change of a logit by 0.01 multiplies by exp({0.01 / lowest:.3g}). Pass a temperature of at "
                    f"least {COLD}: edit(set={{'{path}.temperature': 1.0}}).",
                )


@rule("FR021", "A loss over groups needs several responses per prompt.", "camel-ai/owl#592")
def _groups_of_several(graph: Graph, prompts: int | None) -> Findings:
    for node, loss in _losses(graph):
        made = any(rearranges_rows(graph, n.name) for n in own_lineage(graph, node.name))
        alone = rows_per_prompt(graph, node.name) == 1 and not made
        if loss.unit == "group" and trained_on(graph, node.name) and alone:
            yield (
                node.name,
                f"{type(loss).__name__} compares the responses to a prompt, but there is only 1. Sample at least 2: "
                f"{repeated(graph, node.name, 2)}.",
            )


@rule("FR022", "Mini-batches must hold whole groups if the loss is over groups.", "huggingface/trl#2858")
def _whole_groups(graph: Graph, prompts: int | None) -> Findings:
    for node, loss in _losses(graph):
        line, group = own_lineage(graph, node.name), rows_per_prompt(graph, node.name)
        if loss.unit != "group" or any(isinstance(n.initial_operator, Gate) for n in line):
            continue  # downstream of a gate, groups have any size
        for field, size in node.row_divisors.items():
            if size % group:
                fitting = max(group, size - size % group)
                yield (
                    node.name,
                    f"{field}={size} splits groups of {group} rows, but {type(loss).__name__} needs whole groups. Use "
                    f"a multiple of {group}: edit(set={{'{node.name}.{field}': {fitting}}}).",
                )


@rule(
    "FR030",
    "Imitating all of the policy's own responses teaches it nothing new: select the good ones first.",
    "huggingface/trl#704",
)
def _imitates_selected(graph: Graph, prompts: int | None) -> Findings:
    for node, loss in _losses(graph):
        roles = {role for writer, role in writers(graph, Trainer) if writer.name == node.name}
        engines = {use.role for use in samplers(graph, node.name)}
        own = any(engines & set(n.writes) and roles & set(n.reads) for n in graph.nodes.values() if n.is_sync)
        chosen = any(_selects(graph, n) for n in own_lineage(graph, node.name))
        if own and not chosen and kinds_of_loss(loss) <= {"mask"}:
            yield (
                node.name,
                f"{type(loss).__name__} imitates every response of the policy itself, right or wrong. Keep the good "
                f"ones, with a Filter after the reward{_kept(graph, node)}, or use a loss that reads advantages: "
                f"UpdateActor(PPOClip()).",
            )


def _kept(graph: Graph, update: Node) -> str:
    """The edit that keeps the best response of each group; empty without scores of several responses."""
    scored = [n.name for n in graph.nodes.values() if writes(n, "score") and not n.is_input]
    several = rows_per_prompt(graph, update.name) > 1
    return f": edit(insert={{'best': After('{scored[0]}', Filter(Ranked(1)))}})" if scored and several else ""


def _selects(graph: Graph, node: Node) -> bool:
    """Whether a node selects responses: a gate, a node that writes other rows, or one that writes them by scores."""
    by_scores = bool(of_kind(graph, node, "score", "reward", "score of a row"))
    rewrites = by_scores and (writes(node, "mask") or writes(node, "tokens"))
    return isinstance(node.initial_operator, Gate) or rewrites or rearranges_rows(graph, node.name)


_BY_ROW = "seq-mean-token-mean"
COLD = 0.1
"""The lowest temperature of responses that a ratio may compare."""


def _losses(graph: Graph) -> Iterator[tuple[Node, Loss]]:
    """The updates of policies that have a loss, with it."""
    for node, _ in writers(graph, Trainer):
        yield from ((node, loss) for loss in losses_of(node))

"""Rules about what an update minimises: whether its loss fits the advantages, rows and steps that it is given."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.core.graphs.gate import Gate
from flowrl.core.graphs.graph import Graph, Node
from flowrl.core.graphs.lineage import own_line, rows_of_step, rows_per_prompt, trained_on
from flowrl.core.operators.effects import Effect
from flowrl.core.operators.loss import Loss
from flowrl.core.operators.operator_validation import sample_steps
from flowrl.protocols.protocols import Synced, Trainer
from flowrl.rules.rule import Findings, of_kind, read_through, rule, writers, writes
from flowrl.spec import parameters


@rule(
    "FR015",
    "KL in the loss has a gradient: that of k1 is noise, whose mean is 0 on the policy's own rows.",
    "OpenRLHF/OpenRLHF#1309",
)
def _kl_has_a_gradient(graph: Graph, prompts: int | None) -> Findings:
    for node, _ in writers(graph, Trainer):
        if Effect.KL_WITHOUT_GRADIENT in node.effects:
            yield (
                node.name,
                f"its KL is by k1, whose gradient in a loss is 0 in expectation, so it holds nothing back and adds "
                f"noise; expected k2 or k3: edit(set={{'{node.name}.kl.estimator': 'k2'}}).",
            )


@rule(
    "FR017",
    "A loss that holds to the reference by itself takes no KL beside it.",
    "eric-mitchell/direct-preference-optimization#4",
)
def _held_once(graph: Graph, prompts: int | None) -> Findings:
    for node, _ in writers(graph, Trainer):
        beside = [n.name for n in own_line(graph, node.name) if Effect.KL in n.effects]
        if Effect.HELD_TO_REFERENCE in node.effects and beside:
            first = beside[0]
            without = f"set={{'{first}.kl': None}}" if first == node.name else f"drop=['{first}']"
            yield (
                node.name,
                f"its loss holds to the reference by itself, and {first} counts KL to it again; expected once: "
                f"edit({without}).",
            )


@rule(
    "FR018",
    "A loss of a whole row counts once a row: summed over tokens, it weighs a row by its length.",
    "huggingface/trl#3823",
)
def _once_a_row(graph: Graph, prompts: int | None) -> Findings:
    for node, loss in _losses(graph):
        aggregation = parameters(node.initial_operator).get("aggregation", _BY_ROW)
        if loss.unit in ("row", "group") and aggregation != _BY_ROW:
            yield (
                node.name,
                f"{type(loss).__name__} is a loss of whole rows, which is the same at each token, and by "
                f"aggregation={aggregation!r} long rows count more; expected the mean over rows: "
                f"edit(set={{'{node.name}.aggregation': '{_BY_ROW}'}}).",
            )


@rule("FR019", "A loss with one ratio a row takes one advantage a row.", "huggingface/trl#3811")
def _one_advantage_a_row(graph: Graph, prompts: int | None) -> Findings:
    for node, loss in _losses(graph):
        if Effect.ONE_ADVANTAGE_A_ROW in node.effects:
            for n in own_line(graph, node.name):
                by_values = of_kind(graph, n, "value") and writes(n, "advantage")
                if by_values or Effect.WEIGHS_TOKENS in n.effects:
                    fix = "as by GroupAdvantage()" if by_values else f"edit(set={{'{n.name}.level': 'geometric'}})"
                    yield (
                        node.name,
                        f"{type(loss).__name__} takes the mean of a row's advantages, and {n.name} gives each token "
                        f"its own, by {'values' if by_values else 'weights'}, which that undoes; expected one a row, "
                        f"{fix}, or a loss of tokens: UpdateActor(PPOClip()).",
                    )


@rule(
    "FR020",
    "A loss without a ratio is for one optimiser step: behind it the rows are of an older policy.",
    "huggingface/trl#2341",
)
def _one_step_without_a_ratio(graph: Graph, prompts: int | None) -> Findings:
    for node, loss in _losses(graph):
        kinds = _kinds(loss)
        if "advantage" not in kinds or any(kind.startswith("log-prob") for kind in kinds):
            continue
        epochs = max(int(parameters(now).get("ppo_epochs", 1)) for now in sample_steps(node.operator))
        size, rows = node.row_divisors.get("mini_batch"), rows_of_step(graph, node.name, prompts)
        again = [
            *([f"ppo_epochs={epochs}"] if epochs > 1 else []),
            *([f"mini_batch={size}, which is less than its {rows} rows"] if size and rows and rows > size else []),
            *([f"prior_updates={node.prior_updates}"] if node.prior_updates else []),
        ]
        if again:
            yield (
                node.name,
                f"{type(loss).__name__} has no ratio to the policy that sampled, and with {' and '.join(again)} it "
                f"goes on with rows of an older one; expected one optimiser step on new rows (ppo_epochs=1, "
                f"mini_batch=None), or a loss with a ratio: UpdateActor(PPOClip()).",
            )


@rule("FR021", "A loss over groups takes several answers to a prompt.", "camel-ai/owl#592")
def _groups_of_several(graph: Graph, prompts: int | None) -> Findings:
    for node, loss in _losses(graph):
        if loss.unit == "group" and trained_on(graph, node.name) and rows_per_prompt(graph, node.name) == 1:
            yield (
                node.name,
                f"{type(loss).__name__} compares the answers to a prompt, and there is 1; expected at least 2: put "
                f"Repeat(2) before what generates.",
            )


@rule("FR022", "A mini-batch holds whole groups where the loss is over groups.", "huggingface/trl#2858")
def _whole_groups(graph: Graph, prompts: int | None) -> Findings:
    for node, loss in _losses(graph):
        line, group = own_line(graph, node.name), rows_per_prompt(graph, node.name)
        if loss.unit != "group" or any(isinstance(n.initial_operator, Gate) for n in line):
            continue  # behind a gate, groups are of any size
        for field, size in node.row_divisors.items():
            if size % group:
                fitting = max(group, size - size % group)
                yield (
                    node.name,
                    f"{field}={size} cuts groups of {group} rows, and {type(loss).__name__} is over whole ones; "
                    f"expected a multiple: edit(set={{'{node.name}.{field}': {fitting}}}).",
                )


@rule(
    "FR030",
    "Own answers are imitated once the good ones are chosen: all of them teach nothing but to be surer.",
    "huggingface/trl#704",
)
def _chosen_before_imitated(graph: Graph, prompts: int | None) -> Findings:
    for node, loss in _losses(graph):
        roles = {role for writer, role in writers(graph, Trainer) if writer.name == node.name}
        engines = read_through(trained_on(graph, node.name), Synced)
        own = any(engines & set(n.writes) and roles & set(n.reads) for n in graph.nodes.values() if n.is_sync)
        chosen = any(isinstance(n.initial_operator, Gate) for n in own_line(graph, node.name))
        if own and not chosen and _kinds(loss) <= {"mask"}:
            yield (
                node.name,
                f"{type(loss).__name__} imitates every answer that the policy itself gave, right or wrong; expected "
                f"those that won, as by a Filter behind the reward, or a loss that reads advantages: "
                f"UpdateActor(PPOClip()).",
            )


_BY_ROW = "seq-mean-token-mean"


def _losses(graph: Graph) -> Iterator[tuple[Node, Loss]]:
    """The updates of policies that have a loss, with it."""
    for node, _ in writers(graph, Trainer):
        yield from ((node, value) for value in parameters(node.initial_operator).values() if isinstance(value, Loss))


def _kinds(loss: Loss) -> set[str]:
    """What is wired to a loss."""
    return {str(getattr(t, "kind", "")) for t in loss.signature.fields.values()}

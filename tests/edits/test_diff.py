"""`Graph.diff`: the changes by node, parameter and port."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrl import columns as c
from flowrl.core.graphs.after import After
from flowrl.core.operators.operator import Operator
from flowrl.draw.svg import svg
from flowrl.files.graph_io import save
from flowrl.graph import Graph
from flowrl.graphs import grpo, ppo
from flowrl.operators import GAE, Generate, Interact, Reward
from flowrl.references import load_object
from tests.support.errors import raises
from tests.support.kernel import BINDINGS, PPO, FakeRollout, LengthPenalty, Waits, exact, scored


def test_diff_of_ppo_and_grpo_lists_nodes_parameters_and_edges() -> None:
    diff = PPO.diff(grpo(exact, n=8))
    assert str(diff).splitlines() == [
        "ppo -> grpo",
        "+ group_advantage: GroupAdvantage()  <- reward, generate, repeat",
        "- gae: GAE()  (in its place: group_advantage)",
        "- whiten: Whiten()  (in its place: group_advantage)",
        "- update_critic: UpdateCritic()",
        "- value: Value()  (nothing reads it any more)",
        "- kl_shape: KLShape()  (nothing reads it any more)",
        "~ repeat.n: 1 -> 8",
        "~ update_actor.kl: None -> KLLoss(estimator='k3', coef=0.001, ratio=False)",
        "~ update_actor <- advantages: whiten.advantages -> group_advantage.advantages",
        "~ update_actor <- ref_log_prob: unwired -> ref_log_prob.ref_log_prob",
    ]
    assert diff.added == ("group_advantage",)
    assert set(diff.removed) == {"gae", "whiten", "update_critic"}
    assert set(diff.pruned) == {"value", "kl_shape"}
    assert repr(diff) == str(diff)


def test_diff_in_reverse_swaps_added_and_removed() -> None:
    there, back = PPO.diff(grpo(exact)), grpo(exact).diff(PPO)
    assert set(back.added) == {*there.removed, *there.pruned}
    assert {*back.removed, *back.pruned} == set(there.added)
    assert back.changed["repeat"].parameters == {"n": (8, 1)}
    assert back.changed["update_actor"].ports["ref_log_prob"] == ("ref_log_prob.ref_log_prob", None)


def test_equal_graphs_have_an_empty_diff() -> None:
    diff = PPO.diff(ppo(exact))
    assert not diff
    assert str(diff) == "ppo -> ppo: no difference"
    assert not PPO.diff(PPO.edit(name="mine"))


@pytest.mark.parametrize(
    ("verbs", "lines"),
    [
        ({"replace": {"gae": GAE(lam=0.5)}}, ["~ gae.lam: 0.95 -> 0.5"]),
        (
            {"replace": {"generate": Generate(0.5, stop_token_ids=(3,))}},
            ["~ generate.temperature: 1.0 -> 0.5", "~ generate.stop_token_ids: [] -> [3]"],
        ),
        (
            {"drop": ["whiten"]},
            [
                "- whiten: Whiten()  (in its place: gae)",
                "~ update_actor <- advantages: whiten.advantages -> gae.advantages",
            ],
        ),
        (
            {"insert": {"penalty": After("reward", LengthPenalty(0.1))}},
            [
                "+ penalty: LengthPenalty(coef=0.1)  <- reward, generate",
                "~ kl_shape <- token_level_scores: reward.token_level_scores -> penalty.token_level_scores",
            ],
        ),
        (
            {"rename": {"ref_log_prob": "ref"}},
            [
                "~ ref_log_prob -> ref (renamed)",
            ],
        ),
        ({"lag": 2}, ["~ lag of Sync -> Generate: 0 -> 2"]),
        ({"bind": {"rollout": FakeRollout(model="two")}}, ["~ role rollout: None -> FakeRollout(model='two')"]),
    ],
)
def test_each_edit_verb_has_its_diff_line(verbs: dict[str, Any], lines: list[str]) -> None:
    assert str(PPO.diff(PPO.edit(**verbs))).splitlines() == ["ppo -> ppo", *lines]


def test_renamed_nodes_are_neither_added_nor_removed() -> None:
    """An input, a chain of two, and a sink at once; what reads them has not changed."""
    names = {"batch": "data", "reward": "judge", "kl_shape": "shaped", "sync": "carry"}
    diff = PPO.diff(PPO.edit(rename=names))
    assert str(diff).splitlines() == ["ppo -> ppo", *(f"~ {old} -> {new} (renamed)" for old, new in names.items())]
    assert diff and diff.renamed == names
    assert not (diff.added or diff.removed or diff.pruned or diff.changed or diff.sinks)
    assert dict(PPO.edit(rename=names).diff(PPO).renamed) == {new: old for old, new in names.items()}


def test_node_renamed_and_changed_counts_as_removed_and_added() -> None:
    changed = PPO.diff(PPO.edit(replace={"gae": GAE(lam=0.5).named("adv")}))
    assert (changed.added, changed.removed, changed.renamed) == (("adv",), ("gae",), {})
    wired = PPO.diff(PPO.edit(rename={"whiten": "white"}, wire={"white.advantages": "clip.advantages"}, insert={
        "clip": After("gae", ClipAdvantages()),
    }))  # fmt: skip
    assert (wired.added, wired.removed, wired.renamed) == (("clip", "white"), ("whiten",), {})


def test_rename_is_detected_when_a_reader_is_dropped() -> None:
    edited = PPO.edit(rename={"gae": "adv"}, drop=["whiten"])
    assert str(PPO.diff(edited)).splitlines()[1:] == [
        "- whiten: Whiten()  (in its place: adv)",
        "~ gae -> adv (renamed)",
        "~ update_actor <- advantages: whiten.advantages -> adv.advantages",
    ]


class ClipAdvantages(Operator):
    """Rewrites advantages."""

    def __call__(self, advantages: c.Advantages) -> c.Advantages:
        return advantages.clamp(-1, 1)


def test_removed_nodes_name_their_replacements() -> None:
    graph = PPO.edit(
        insert={"judge": After("reward", Reward(exact, timeout=1.0))},
        wire={"kl_shape.token_level_scores": "judge.token_level_scores"},
    )
    diff = PPO.diff(graph)
    assert diff.replacements == {"reward": ("judge",)}
    assert "- reward: Reward(fn=tests.support.kernel:exact)  (in its place: judge)" in str(diff).splitlines()
    renamed = PPO.diff(graph.edit(rename={"kl_shape": "shape", "judge": "jury"}))
    assert renamed.replacements["reward"] == ("jury",), "although its reader was renamed"
    assert PPO.diff(PPO.edit(drop=["update_critic"])).replacements == {}, "a dropped sink has no replacement"
    assert PPO.diff(PPO.edit(replace={"sync": Waits()})).replacements == {}


def test_diff_lists_changed_sinks_and_bindings() -> None:
    more = PPO.subgraph(until=["sync", "update_critic", "value", "mismatch"])
    diff = PPO.diff(more)
    assert str(diff).splitlines()[1:] == [
        "~ sinks: sync, update_critic, mismatch -> sync, update_critic, value, mismatch"
    ]
    bound = PPO.edit(bind=BINDINGS)
    assert set(bound.diff(PPO).bindings) == set(BINDINGS)
    fewer = bound.diff(bound.edit(drop=["update_critic"]))
    assert not fewer.sinks, "a removed sink is listed only as a removed node"
    assert fewer.removed == ("update_critic",)


def test_diff_names_changed_reward_functions() -> None:
    def other(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return 0.0

    text = str(scored().diff(scored(fn=other)))
    assert "tests.support.kernel:exact" in text
    assert "other" in text


def test_another_class_with_the_same_name_is_a_change() -> None:
    own = type("GAE", (GAE,), {"__module__": __name__})
    diff = PPO.diff(PPO.edit(replace={"gae": own()}))
    assert list(diff.changed) == ["gae"]
    assert "operator" in diff.changed["gae"].parameters


def test_references_to_one_file_by_module_and_by_path_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions with the same name but different source differ, too."""
    file = tmp_path / "a_environment.py"
    file.write_text(
        "from flowrl.episodes import Environment, Reply\n\n\nclass Environment(Environment):\n"
        "    async def step(self, answer):\n        return Reply(done=True)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    by_name, by_path = (load_object(f"{where}:Environment") for where in ("a_environment", "a_environment.py"))
    one, other = (PPO.edit(replace={"generate": Interact(environment)}) for environment in (by_name, by_path))
    assert str(one.diff(other)).splitlines()[1:] == [
        "~ interact.environment: a_environment:Environment -> a_environment.py:Environment"
    ]
    first, second = (scored(fn=constant_reward(number)) for number in (1.0, 2.0))
    assert "(with another source)" in str(first.diff(second))


def constant_reward(number: float) -> Any:
    def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return number

    return score


def test_diff_and_save_refuse_objects_other_than_graphs() -> None:
    for call, fix in (
        (lambda: PPO.diff("ppo.yaml"), "Pass flowrl.load('ppo.yaml')."),  # type: ignore[arg-type]
        (lambda: PPO.diff(ppo), "Pass ppo(...)."),  # type: ignore[arg-type]
        (lambda: save(PPO.bind(), "ppo.yaml"), "Pass job.graph."),  # type: ignore[arg-type]
    ):
        with raises("graph.not-a-graph") as error:
            call()
        assert error.value.message.endswith(fix)


def test_jupyter_shows_the_diff_as_text_and_picture() -> None:
    diff = PPO.diff(grpo(exact))
    assert diff._repr_mimebundle_() == {"text/plain": str(diff), "image/svg+xml": svg(diff)}


def test_graph_read_back_from_a_dict_has_an_empty_diff() -> None:
    assert not PPO.diff(Graph.from_dict(PPO.to_dict()))

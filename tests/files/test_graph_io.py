"""Tests of `graph_io.py` and `values.py`: round trips of graphs are exact.

Unsafe data and files are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrl.core.graphs.after import After
from flowrl.core.operators.roles import Role
from flowrl.errors import BindError, FlowrlError, GraphError, ParameterError, PortError, StorageError
from flowrl.files.graph_io import save
from flowrl.graph import Graph, load
from flowrl.graphs import grpo, ppo
from flowrl.operators import GAE, AdaptiveKL, Generate, KLShape
from flowrl.references import resolve
from tests.support.errors import raises
from tests.support.kernel import BINDINGS, PPO, LengthPenalty, exact, scored, two_rewards

GRAPHS: dict[str, Callable[[], Graph]] = {
    "ppo": lambda: PPO,
    "grpo": lambda: grpo(exact),
    "a graph by path": lambda: ppo("tests.support.kernel:exact"),
    "two rewards": two_rewards,
    "names, lag, bindings": lambda: PPO.edit(rename={"gae": "gae_long"}, lag=1, bind=BINDINGS, name="mine"),
    "nested specs": lambda: PPO.edit(replace={"kl_shape": KLShape(AdaptiveKL(target=0.1))}),
    "tuples and roles": lambda: scored().edit(
        replace={"generate": Generate(stop_token_ids=(1, 2), rollout=Role("second"))}
    ),
    "a part": lambda: PPO.edit(bind=BINDINGS).subgraph(until=["reward", "value"]),
    "an inserted operator": lambda: PPO.edit(insert={"penalty": After("reward", LengthPenalty())}),
    "an input by itself": lambda: scored().subgraph(until="batch"),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("ending", ["yaml", "yml", "json"])
def test_graphs_round_trip_through_data_and_files(name: str, ending: str, tmp_path: Path) -> None:
    graph = GRAPHS[name]()
    data = graph.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert Graph.from_dict(data) == graph
    path = tmp_path / f"graph.{ending}"
    save(graph, path)
    read = load(path)
    assert read == graph
    assert read.fingerprint() == graph.fingerprint()
    assert list(read.nodes) == list(graph.nodes)
    assert repr(read) == repr(graph)


def test_the_yaml_of_a_graph_names_operators_parameters_and_inputs(tmp_path: Path) -> None:
    save(scored(), tmp_path / "g.yaml")
    data = yaml.safe_load((tmp_path / "g.yaml").read_text())
    assert data["nodes"]["repeat"] == {
        "operator": {"$type": "flowrl.operators.engines.engines:Repeat", "n": 2},
        "inputs": {"prompts": "batch"},
    }
    assert data["nodes"]["generate"]["operator"]["rollout"] == {"$role": "rollout"}
    assert data["nodes"]["reward"]["operator"]["fn"]["$function"] == "tests.support.kernel:exact"
    assert data["sinks"] == ["reward"]


OPERATOR_FILE = """
from flowrl.columns import ResponseMask, TokenLevelScores
from flowrl.core.operators.operator import Operator


class Brevity(Operator):
    coef: float = 0.01

    def __call__(self, token_level_scores: TokenLevelScores, response_mask: ResponseMask) -> TokenLevelScores:
        return token_level_scores - self.coef * response_mask


def fair(data_source, solution_str, ground_truth, extra_info=None):
    return {returned}
"""


def write_user_file(path: Path, returned: float = 0.5) -> None:
    path.write_text(OPERATOR_FILE.replace("{returned}", str(returned)))


def test_an_operator_and_a_reward_of_a_user_file_are_saved_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_user_file(tmp_path / "mine.py")
    brevity, fair = resolve("mine.py:Brevity"), resolve("mine.py:fair")
    graph = ppo(fair).edit(insert={"brevity": After("reward", brevity(0.5))})
    save(graph, "graph.yaml")
    data = yaml.safe_load(Path("graph.yaml").read_text())
    assert data["nodes"]["brevity"]["operator"] == {"$type": "mine.py:Brevity", "coef": 0.5}
    assert data["nodes"]["reward"]["operator"]["fn"]["$function"] == "mine.py:fair"
    assert load("graph.yaml").fingerprint() == graph.fingerprint()
    assert not graph.diff(load("graph.yaml"))

    write_user_file(tmp_path / "mine.py", returned=0.75)
    with raises("file.source-changed", where="reward.fn", path="mine.py:fair"):
        load("graph.yaml")
    (tmp_path / "mine.py").unlink()
    with raises("reference.missing-source", path=str(tmp_path / "mine.py")) as error:
        load("graph.yaml", imports=True)
    assert error.value.message.startswith(("reward.fn: 'mine.py:fair'", "brevity: 'mine.py:Brevity'"))


def test_an_operator_of_an_installed_module_is_saved_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_user_file(tmp_path / "their_package_of_operators.py")
    monkeypatch.syspath_prepend(tmp_path)
    brevity = resolve("their_package_of_operators:Brevity")
    graph = scored().edit(insert={"brevity": After("reward", brevity())})
    assert graph.to_dict()["nodes"]["brevity"]["operator"]["$type"] == "their_package_of_operators:Brevity"
    assert Graph.from_dict(graph.to_dict()) == graph


def test_objects_without_an_import_path_cannot_be_saved() -> None:
    def local(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return 1.0

    class Local(LengthPenalty):
        pass

    for graph, where in (
        (ppo(lambda **row: 1.0), "reward.fn"),
        (ppo(local), "reward.fn"),
        (scored().edit(insert={"local": After("reward", Local())}), "local"),
    ):
        assert graph.fingerprint() == graph.fingerprint()
        assert str(graph.diff(graph))
        with raises("file.no-import-path", where=where):
            graph.to_dict()


def damaged(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    data = PPO.edit(bind=BINDINGS).to_dict()
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d.pop("flowrl"),
            r"the data lacks 'flowrl', so this is not a flowrl graph, or it is damaged; expected",
        ),
        (lambda d: d.pop("nodes"), r"the data lacks 'nodes'"),
        (lambda d: d.pop("sinks"), r"the data lacks 'sinks'"),
        (lambda d: d.pop("lag"), r"the data lacks 'lag'"),
        (lambda d: d.update(flowrl=True), "the data has a bool under 'flowrl'"),
        (lambda d: d.update(flowrl=99), r"The graph was saved in format 99, but this version of flowrl reads format 2"),
        (lambda d: d.update(flowrl="x"), r"the data has a str under 'flowrl'"),
        (lambda d: d.update(nodes=[1]), r"the data has a list under 'nodes'.*expected a mapping, as"),
        (lambda d: d.update(sinks=[]), r"ppo has no sink"),
        (lambda d: d.update(sinks=["x"]), r"ppo has no node 'x' for a sink"),
        (lambda d: d.update(lag=-1), r"lag=-1"),
        (lambda d: d["nodes"].update(gae=None), r"nodes has a NoneType under 'gae'"),
        (lambda d: d["nodes"]["gae"].pop("operator"), r"gae lacks 'operator'"),
        (lambda d: d["nodes"]["gae"].pop("inputs"), r"gae lacks 'inputs'"),
        (lambda d: d["nodes"].pop("value"), r"gae\.values reads value\.values, which ppo does not have"),
        (lambda d: d["nodes"]["gae"]["inputs"].update(values=3), r"the inputs of gae has an int under 'values'"),
        (lambda d: d["nodes"]["gae"]["inputs"].update(values="value"), r"'value' does not name an output"),
        (
            lambda d: d["nodes"]["gae"]["inputs"].update(value="value.values"),
            r"gae has no port 'value'; it has token_le",
        ),
        (lambda d: d["nodes"]["gae"]["inputs"].pop("values"), r"gae\.values expects .* nothing is wired to it"),
        (
            lambda d: d["nodes"]["gae"]["inputs"].update(values="reward.token_level_scores"),
            r"gae\.values expects value.*, but reward\.token_level_scores is score.*did you mean value\.values",
        ),
        (
            lambda d: d["nodes"]["gae"]["operator"].update(lam=7),
            r"gae: GAE\(.*lam=7",
        ),
        (lambda d: d["nodes"]["gae"]["operator"].update(lmbda=7), r"there is no parameter 'lmbda'"),
        (
            lambda d: d["nodes"]["gae"]["operator"].update({"$type": "no.such:GAE"}),
            r"gae: '?no\.such:GAE'?",
        ),
        (
            lambda d: d["nodes"]["gae"]["operator"].update({"$type": 3}),
            r"gae has an int under '\$type'; expected a name",
        ),
        (
            lambda d: d["nodes"]["gae"]["operator"].update({"$type": "json:dumps"}),
            r"gae names json:dumps, which is not a Spec",
        ),
        (
            lambda d: d["nodes"]["gae"].update(operator=d["nodes"]["update_actor"]["operator"]["loss"]),
            r"The node gae is PPOClip\(.*\); expected an operator",
        ),
        (lambda d: d["nodes"]["reward"]["operator"]["fn"].update(source="0"), r"whose source has changed since"),
        (
            lambda d: d["nodes"]["reward"]["operator"]["fn"].update(source="0"),
            r"reward\.fn names tests\.support\.kernel:exact, wh",
        ),
        (lambda d: d["bindings"].update(judge=d["bindings"]["ref"]), r"ppo has no role 'judge' to bind"),
        (
            lambda d: d["bindings"].update(ref=d["bindings"]["rollout"]),
            r"'ref' is bound to FakeRollout, but ref_log_pro",
        ),
    ],
)
def test_damaged_data_is_refused(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises((GraphError, PortError, BindError), match=message):
        Graph.from_dict(damaged(change), imports=True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "gone.yaml",
            None,
            r"gone\.yaml cannot be read as .*No such file.*expected a file that flowrl\.save",
        ),
        ("g.json", "{", r"g\.json cannot be read as .*: line 1"),
        ("g.yaml", "a: [", r"g\.yaml cannot be read as a graph"),
        ("g.yaml", "- 1", r"g\.yaml holds a list; expected a graph or a training, as flowrl\.save"),
        ("g.yaml", "", r"g\.yaml holds a NoneType"),
        ("g.yaml", "!!python/object/apply:os.system ['true']", r"g\.yaml cannot be read as a graph"),
        ("g.yaml", "\xff", r"lacks|holds|cannot be read"),
        ("g.txt", "{}", r"g\.txt has the suffix '\.txt'; expected \.json, \.yaml or \.yml"),
    ],
)
def test_damaged_files_are_refused(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(GraphError, match=message):
        load(path)


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_a_file_truncated_anywhere_is_refused(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"g.{ending}"
    save(scored(), path)
    text = path.read_text().rstrip()
    whole = load(path)
    for size in range(0, len(text), 23):
        path.write_text(text[:size])
        try:
            assert load(path) == whole, "what loads must be the whole graph"
        except FlowrlError:
            continue


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(lags=1), r"the data has the unknown key 'lags'; expected flowrl, .* did you"),
        (lambda d: d["nodes"]["gae"].update(input={}), r"gae has the unknown key 'input'; expected"),
        (
            lambda d: d["nodes"]["reward"]["operator"]["fn"].update(sources="0"),
            r"reward\.fn has the unknown key 'sources'; expected \$function, source",
        ),
        (
            lambda d: d["nodes"]["value"]["operator"]["critic"].update(x=1),
            r"value\.critic has the unknown key 'x'; expected \$role",
        ),
        (lambda d: d["nodes"]["gae"]["operator"].update({"": 1}), r"there is no parameter ''"),
        (
            lambda d: d["nodes"]["gae"]["operator"].update(lam={"$rolle": "x"}),
            r"gae\.lam has '\$rolle'; expected",
        ),
        (lambda d: d["nodes"]["value"]["operator"].update(critic={"$role": {"a": 1}}), r"critic has a dict under"),
        (lambda d: d["nodes"]["value"]["operator"].update(critic={"$role": "a b"}), r"critic: Invalid role name 'a b'"),
        (lambda d: d["nodes"]["value"]["operator"].update(critic={"$role": None}), r"has a NoneType under '\$role';"),
        (lambda d: d["nodes"]["batch"]["operator"].update(record={"$class": []}), r"record has a list under '\$class'"),
        (
            lambda d: d["nodes"]["batch"]["operator"].update(record={"$class": "json:dumps"}),
            r"batch\.record names json:dumps, which is not a class; expected a record",
        ),
        (
            lambda d: d["nodes"]["reward"]["operator"].update(fn={"$function": {}, "source": 3}),
            r"reward\.fn has a dict under '\$function'; expected a name",
        ),
        (lambda d: d.update(sinks=[[]]), r"The sinks of the data contain a list; expected names of nodes"),
        (lambda d: d.update(sinks=[3]), r"The sinks of the data contain an int"),
        (lambda d: d.update(name="../up"), r"Invalid graph name '\.\./up'"),
        (lambda d: d.update(name=""), r"Invalid graph name ''"),
        (lambda d: d["nodes"].update({"a b": d["nodes"]["gae"]}), r"Invalid node name 'a b'"),
        (lambda d: d["nodes"].update({3: d["nodes"]["gae"]}), r"nodes has the key 3, an int; keys must be text"),
        (
            lambda d: d["nodes"]["gae"]["inputs"].update({3: "value.values"}),
            r"nodes\.gae\.inputs has the key 3, an int",
        ),
        (lambda d: d["nodes"]["gae"]["operator"].update(lam=d), r"it nests more than 64 lists and mappings"),
        (lambda d: d["nodes"]["gae"]["operator"].update(lam={1}), r"gae\.operator\.lam is a set, which JSON does not"),
    ],
)
def test_unknown_keys_and_values_are_refused(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises((GraphError, ParameterError), match=message):
        Graph.from_dict(damaged(change), imports=True)


@pytest.mark.parametrize("data", [3, None, "text", [], PPO])
def test_data_must_be_a_mapping(data: Any) -> None:
    with raises("file.malformed", where="the data", found=type(data).__name__):
        Graph.from_dict(data)


def test_loading_run_json_is_refused_with_the_call_that_loads_its_graph(tmp_path: Path) -> None:
    """The call of the message returns it."""
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"status": "finished", "identity": {}, "graph": PPO.to_dict()}))
    with raises("file.malformed", where=str(file)) as caught:
        load(file)
    call = re.findall(r"Graph\.from_dict\(.*\)", caught.value.message)[0]
    assert eval(call, {"Graph": Graph, "json": json, "Path": Path}).fingerprint() == PPO.fingerprint()
    file.write_text("{}")
    with raises("file.malformed", key="flowrl", expected="int") as caught:
        load(file)
    assert "expected an int" in caught.value.message


@pytest.mark.parametrize("given", [{"name": "grpo"}, 3, None])
def test_load_and_save_refuse_data_and_name_from_dict(given: Any) -> None:
    with raises("file.malformed", where="flowrl.load", found=type(given).__name__) as error:
        load(given)
    assert "call Graph.from_dict(data)" in error.value.message
    with raises("file.malformed", where="flowrl.save", found=type(given).__name__):
        save(ppo(exact), given)


@pytest.mark.parametrize(("key", "expected"), [("lag", "an int"), ("nodes", "a mapping"), ("name", "a str")])
def test_a_missing_key_is_named(key: str, expected: str) -> None:
    data = ppo(exact).to_dict()
    del data[key]
    with raises("file.malformed", key=key) as error:
        Graph.from_dict(data)
    assert f"expected {expected}, as" in error.value.message


def test_saving_to_a_missing_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "g.yaml"
    with pytest.raises(
        StorageError, match=r"g\.yaml cannot be written \(No such file .*\)\. Free disk space.* another folder"
    ):
        save(scored(), path)


def test_a_suffix_is_needed_to_write(tmp_path: Path) -> None:
    with raises("file.wrong-suffix", found=""):
        save(scored(), tmp_path / "graph")


def test_values_that_cannot_be_written_are_refused() -> None:
    class Odd(LengthPenalty):
        anything: Any = None

    graph = scored().edit(insert={"odd": After("reward", Odd(anything={1, 2}))})
    with raises("file.unwritable-value", where="odd.anything", found=(1, 2)):
        graph.to_dict()
    assert GAE() == GAE()


def test_a_reward_named_by_its_path_must_have_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    Path("mine.py").write_text(source)
    graph = ppo("mine.py:score")
    written, fingerprint = graph.to_dict(), graph.fingerprint()
    assert Graph.from_dict(written, imports=True)["reward"].operator.fn == "mine.py:score"  # type: ignore[attr-defined]
    Path("mine.py").write_text(source.replace("1.0", "0.0"))
    assert graph.fingerprint() != fingerprint
    with raises("file.source-changed", where="reward.fn", path="mine.py:score"):
        Graph.from_dict(written, imports=True)
    Path("mine.py").write_text("import math\n\n\n" + source + "\n\ndef other():\n    pass\n")
    assert graph.fingerprint() == fingerprint  # what else is in the file does not matter

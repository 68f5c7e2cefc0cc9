"""The command line: its output, files and exit codes; misuse prints one paragraph without a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import flowrl
from flowrl import Costs, Graph, When, load
from flowrl.app.cli import main
from flowrl.core.graphs.plan import Plan
from flowrl.errors import DefinitionError
from flowrl.graphs import grpo
from flowrl.references import load_object
from tests.support.command_line import Command, is_paragraph, write
from tests.support.errors import raises

GRAPHS = """
    from flowrl import Colocate, Split
    from flowrl.backends import TorchRollout, TorchScorer, TorchTrainer
    from flowrl.demo.verifier import compute_score
    from flowrl.graphs import grpo, ppo
    from flowrl.operators import KLLoss, UpdateActor

    first, second = ppo(compute_score), grpo(compute_score, n=4)
    broken = grpo(compute_score, n=1, mini_batch=3)
    twice = ppo(compute_score).edit(replace={"update_actor": UpdateActor(kl=KLLoss())})
    unbound = second.bind(actor=TorchTrainer("nowhere"))
    placed = second.bind(
        actor=TorchTrainer("nowhere", ranks=2), ref=TorchScorer("nowhere"), rollout=TorchRollout("nowhere"),
        place=Split(train=3, rollout=2),
    )
    crowded = second.bind(actor=TorchTrainer("nowhere", ranks=3), place=Colocate(gpus=2))
    number, nothing = 3, None

    def make_graph():
        return second

    def needs_n(n):
        return grpo(compute_score, n=n)

    def fails():
        raise RuntimeError("out of luck")
"""


@pytest.fixture
def graphs(tmp_path: Path) -> Path:
    return write(tmp_path / "graphs.py", GRAPHS)


# --------------------------------------------------------------------------------------------------- the whole program


def test_help_imports_no_heavy_package() -> None:
    code = "import sys\nfrom flowrl.app.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit as end:\n"
    code += "    assert not end.code\n    print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in ("show", "check", "plan", "diff", "run", "demo"))
    assert {"torch", "transformers", "numpy", "networkx", "pydantic"}.isdisjoint(done.stderr.split())


def test_python_m_flowrl_is_the_command_line(tmp_path: Path) -> None:
    process = [sys.executable, "-m", "flowrl", "show", "--to", "x.txt", "no.py:graph"]
    done = subprocess.run(process, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("flowrl: --to x.txt has the suffix '.txt'; expected one of .md")


def test_version_is_printed(command: Command) -> None:
    assert command("--version") == (0, f"flowrl {flowrl.__version__}\n", "")


def test_no_command_prints_help_and_fails(command: Command) -> None:
    result = command()
    assert result.code == 2 and "Usage: flowrl" in result.out + result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shwo", "x"], "No such command 'shwo'. Did you mean 'show'?"),
        (["show", "--bogus", "x"], "No such option: --bogus"),
        (["show"], "Missing argument 'TARGET'"),
        (["run", "x", "--steps", "many"], "Invalid value for '--steps'"),
    ],
)
def test_an_invalid_command_line_prints_usage(command: Command, arguments: list[str], message: str) -> None:
    result = command(*arguments)
    assert result.code == 2 and not result.out and message in result.err and "Usage: flowrl" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nowhere.py:graph"], "nowhere.py' does not exist. Correct the path. [reference.missing-source]"),
        (["show", "graphs.py"], "no object in it. Add the name, such as 'graphs.py:graph' or 'graphs.py:training'."),
        (["show", "graphs"], "expected 'package.module:name', 'path/to/file.py:name', or an algorithm"),
        (["show", "graphs.py:third"], "graphs.py does not define 'third'; it defines first, second, broken"),
        (["show", "graphs.py:first.middle"], "graphs.py does not define 'first.middle'"),
        (["show", "no_such_module:graph"], "no module 'no_such_module' is on sys.path"),
        (["show", "graphs.py:number"], "graphs.py:number is an int; expected a graph, a job, a training"),
        (
            ["show", "graphs.py:needs_n"],
            "Pass --n=... to flowrl run, or name its result in graphs.py, such as target = needs_n(...).",
        ),
        (["show", "flowrl.graphs:ppo"], "missing a required argument: 'reward_fn'. Call it as ppo(reward_fn"),
        (["check", "graphs.yaml"], "graphs.yaml cannot be read as a graph"),
        (["show", "graphs.py:first", "--to", "x"], "--to x has the suffix ''; expected one of .md, .html, .svg, .json"),
        (["show", "graphs.py:first", "--to", "graphs.py/x.md"], "--to graphs.py/x.md cannot be written"),
        (["diff", "graphs.py:first", "graphs.py:second", "--to", "x.yaml"], "expected one of .md, .html, .svg."),
        (["plan", "graphs.py:number"], "graphs.py:number is an int; expected a graph"),
        (["plan", "graphs.py:second", "--prompts", "2"], "--place, --prompts and --cost only apply to predictions"),
        (["run", "graphs.py:second", "--costs", "own"], "graphs.py:second is a Graph"),
        (["plan", "graphs.py:second", "--costs", "own"], "own holds no run"),
        (["plan", "graphs.py:crowded"], "The role 'actor' has 3 ranks, but Colocate(gpus=2) has 2 slot(s)"),
        (["run", "graphs.py:first"], "graphs.py:first is a Graph, which has neither data nor a number of steps"),
        (["run", "graphs.py:unbound"], "graphs.py:unbound is a Job"),
    ],
)
def test_misuse_prints_one_paragraph(command: Command, graphs: Path, arguments: list[str], message: str) -> None:
    result = command(*arguments)
    assert result.code == 2 and is_paragraph(result) and message in result.err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ndef f(:\n", "file.py:2 does not compile (invalid syntax)"),
        ("x = 1\n\nx.y\n", "file.py:3 raises AttributeError during import: 'int' object has no attribute"),
        ("import json\njson.loads('{')\n", "file.py:2 raises JSONDecodeError"),
        ("import no_such_module\n", "file.py:1 raises ModuleNotFoundError"),
        (
            "import sys\nsys.exit(3)\n",
            "file.py:2 exits during import. Move the call below `if __name__ == '__main__':`",
        ),
    ],
)
def test_a_file_that_cannot_be_imported_is_named_with_its_line(command: Command, source: str, message: str) -> None:
    write(Path("file.py"), source)
    result = command("show", "file.py:graph")
    assert result.code == 2 and is_paragraph(result) and message in result.err


def test_errors_of_flowrl_in_a_users_file_are_shown_unchanged(command: Command) -> None:
    source = "from flowrl.operators import GAE\ngae = GAE(gamma=2)\n"
    result = command("show", write(Path("file.py"), source).name + ":gae")
    assert result.code == 2 and result.err.startswith("flowrl: GAE(...): gamma=2")
    source = "from flowrl import Operator\nclass Empty(Operator):\n    pass\n"
    with pytest.raises(DefinitionError, match=r"file.py:2: Empty has no __call__"):
        load_object(f"{write(Path('file.py'), source)}:Empty")


def test_load_object_loads_objects_that_are_not_callable(command: Command, graphs: Path) -> None:
    assert (load_object("graphs.py:number"), load_object("graphs.py:nothing")) == (3, None)
    assert load_object("graphs.py:first.name") == "ppo"
    with raises("reference.undefined-name", name="fourth"):
        load_object("graphs.py:fourth")


def test_an_error_in_user_code_is_printed_with_its_file_and_line(command: Command, graphs: Path) -> None:
    result = command("show", "graphs.py:fails")
    line = 1 + next(i for i, text in enumerate(graphs.read_text().splitlines()) if "out of luck" in text)
    assert result.code == 1 and is_paragraph(result)
    assert result.err == f"flowrl: {graphs}:{line} raises RuntimeError: out of luck. --debug shows the traceback.\n"


@pytest.mark.parametrize("arguments", [("--debug", "show", "x.py:y"), ("show", "x.py:y", "--debug")])
def test_debug_raises_the_error_wherever_the_flag_is(command: Command, arguments: tuple[str, ...]) -> None:
    with raises("reference.missing-source", reference="x.py:y", path=os.path.abspath("x.py")):
        main(arguments)


# --------------------------------------------------------------------------------------------------- show, check, diff


def test_show_prints_mermaid_of_a_graph_a_job_and_the_result_of_a_function(command: Command, graphs: Path) -> None:
    second, unbound = load_object("graphs.py:second"), load_object("graphs.py:unbound")
    assert command("show", "graphs.py:second") == (0, f"{second.mermaid()}\n", "")
    assert command("show", "graphs.py:make_graph") == (0, f"{second.mermaid()}\n", "")
    assert command("show", "graphs.py:unbound") == (0, f"{unbound.graph.mermaid()}\n", "")


def test_brackets_in_printed_text_are_not_markup(command: Command) -> None:
    result = command("show", "[bold]x:key:.py:graph")
    assert result.code == 2 and "'[bold]x:key:.py:graph' names nothing" in result.err


def test_show_writes_the_format_of_the_suffix(command: Command, graphs: Path) -> None:
    graph: Graph = load_object("graphs.py:second")
    for ending in ("md", "html", "svg", "json", "yaml"):
        result = command("show", "graphs.py:second", "--to", f"new/folder/graph.{ending}")
        assert result == (0, f"grpo: 10 nodes, written to new/folder/graph.{ending}\n", "")
    folder = Path("new/folder")
    assert (folder / "graph.md").read_text() == f"# grpo\n\n```mermaid\n{graph.mermaid()}\n```\n"
    for ending in ("html", "svg"):
        text = (folder / f"graph.{ending}").read_text()
        assert all(name in text for name in graph.nodes)
    ElementTree.fromstring((folder / "graph.svg").read_text())
    assert load(folder / "graph.json").fingerprint() == load(folder / "graph.yaml").fingerprint() == graph.fingerprint()


def test_check_reports_a_step_in_which_no_sink_runs(command: Command, tmp_path: Path) -> None:
    idle = grpo("tests.support.kernel:exact").edit(drop=["mismatch"], when={"update_actor": When(2)})
    flowrl.save(idle, tmp_path / "idle.json")
    shown = command("check", "idle.json")
    assert shown.code == 1 and "graph.idle-step" in shown.out and "step 2" in shown.out.replace("\n", " ")


def test_check_and_diff_read_a_file_written_by_show(command: Command, graphs: Path) -> None:
    command("show", "graphs.py:second", "--to", "graph.yaml")
    assert command("check", "graph.yaml").out == "grpo: 10 nodes, all connections match and no rule is violated.\n"
    assert command("diff", "graph.yaml", "graphs.py:second").out == "grpo -> grpo: no difference\n"


def test_check_lists_every_violated_rule(command: Command, graphs: Path) -> None:
    result = command("check", "graphs.py:broken", "--prompts", "4")
    assert result.code == 1 and not result.err
    assert [line.split()[:2] for line in result.out.splitlines()] == [
        ["FR003", "group_advantage:"],
        ["FR004", "update_actor:"],
    ]
    assert [line[:5] for line in command("check", "graphs.py:broken").out.splitlines()] == ["FR003"]
    assert "FR001 update_actor: KL" in command("check", "graphs.py:twice").out


def test_check_reports_unbound_roles_of_a_job(command: Command, graphs: Path, training: Path) -> None:
    result = command("check", "graphs.py:unbound")
    assert result.code == 1 and "leaves 'rollout', 'ref' unbound" in result.out.replace(
        "'ref', 'rollout'", "'rollout', 'ref'"
    )
    result = command("check", f"{training}:training")
    fits = "grpo: 10 nodes, all connections match, all roles are bound and no rule is violated.\n"
    ends = "Responses end with <eos> (1: tokenizer, config.json, generation_config.json, chat template).\n"
    assert result == (0, fits + ends, "")


@pytest.mark.parametrize("found", ["does not exist", "has no config.json", "has a config.json that is not JSON"])
def test_check_reports_a_missing_model(command: Command, training: Path, tmp_path: Path, found: str) -> None:
    write(tmp_path / "model" / "config.json", "{")
    folder = {"does not exist": "./gone", "has no config.json": "mine"}.get(found, "model")
    source = training.read_text().replace("ref=TorchScorer(model)", f"ref=TorchScorer({folder!r})")
    result = command("check", f"{write(training.with_name('other.py'), source)}:training")
    assert result.code == 1 and result.out.startswith(f"Role 'ref': The model folder {folder!r} {found}")


def test_check_reports_a_tokenizer_that_does_not_load(command: Command, training: Path, tmp_path: Path) -> None:
    write(tmp_path / "model" / "config.json", "{}")
    write(tmp_path / "model" / "tokenizer.json", "{")
    source = training.read_text().replace("actor=TorchTrainer(model", "actor=TorchTrainer('model'")
    result = command("check", f"{write(training.with_name('other.py'), source)}:training")
    assert result.code == 1 and result.out.startswith("Cannot load a tokenizer from 'model' (") and not result.err


def test_check_of_a_training_uses_its_prompts_per_step(command: Command, training: Path) -> None:
    source = training.read_text().replace("max_new_tokens=3", "max_new_tokens=3, mini_batch=3")
    other = write(training.with_name("uneven.py"), source)
    assert command("check", f"{other}:graph").code == 0
    result = command("check", f"{other}:training")
    assert result.code == 1 and result.out.startswith("FR004 update_actor: mini_batch=3 does not divide the 4 rows")


def test_plan_prints_the_waves_and_the_processes_of_each_slot(command: Command, graphs: Path, training: Path) -> None:
    plan = str(Plan(load_object("graphs.py:second")))
    assert command("plan", "graphs.py:second") == (0, f"{plan}\n", "")
    assert command("plan", "graphs.py:make_graph") == (0, f"{plan}\n", "")
    once = "old_log_prob is the first pass of update_actor: computed once, saves a forward pass over 4 rows"
    code, out, err = command("plan", f"{training}:training")
    assert (code, err) == (0, "") and out.endswith(f"\n{once}\neverything runs in one process\n")
    assert out.count("old_log_prob ") == 1 and plan.count("old_log_prob ") > 1
    placed = """
old_log_prob is the first pass of update_actor: computed once, saves a forward pass over the rows of a step
processes of Split; those of one slot take turns:
  slot 0: actor[0]
  slot 1: actor[1]
  slot 2: ref[0]
  slot 3: rollout[0]
  slot 4: free
  no slot: general
"""
    assert command("plan", "graphs.py:placed") == (0, str(Plan(load_object("graphs.py:placed").runs)) + placed, "")


def test_plan_predicts_the_time_of_a_step_from_the_costs_of_a_run(command: Command, training: Path) -> None:
    assert command("run", f"{training}:training").code == 0
    plan = ("plan", f"{training}:training", "--costs", "own")
    result = command(*plan, "--place", "Colocate(gpus=1)", "--prompts", "6", "--cost", "reward=9")
    _, _, predicted = result.out.partition("everything runs in one process\n")
    where = [line.partition(":")[0] for line in predicted.splitlines() if not line.startswith("  ")]
    assert where == ["predicted from own, with 6 prompts per step", "in one process", "Colocate()"]
    assert all(9 < float(line.split()[-2]) < 99 for line in predicted.splitlines() if "a step takes" in line)
    twice, deep = "Colocate(gpus=1, gpus=2)", f"Colocate(gpus={'-' * 20_000}1)"
    for place in ("Colocate(2)", "Colocate(gpus=", "Elsewhere(gpus=1)", "Colocate(gpus=len(x))", twice, deep):
        assert f"flowrl: --place {place} is not a place; expected local, or" in command(*plan, "--place", place).err
    assert "--cost reward=long has no number of seconds" in command(*plan, "--cost", "reward=long").err
    assert "given(reward=nan): expected a finite number of seconds" in command(*plan, "--cost", "reward=nan").err
    assert "--cost rewrad=... names no node of grpo; it has batch, repeat" in command(*plan, "--cost", "rewrad=1").err


def test_plan_imports_a_user_defined_place_only_with_the_import_flag(command: Command, training: Path) -> None:
    assert command("run", f"{training}:training").code == 0
    described = json.loads(Path("own/run.json").read_text())
    Path("own/run.json").write_text(json.dumps({**described, "place": {"$type": "mine.py:Mine"}}))
    write(Path("mine.py"), "from flowrl import Colocate\nclass Mine(Colocate): ...\n")
    arguments = ("plan", f"{training}:training", "--costs", "own")
    result = command(*arguments)
    assert result.code == 2 and "the place in own/run.json is of the class mine.py:Mine" in result.err
    assert "or --import on the command line" in result.err
    assert "in one process: a step takes" in command(*arguments, "--import").out
    assert type(Costs.of("own").place).__name__ == "Mine"


def test_diff_prints_and_writes_the_changes(command: Command, graphs: Path) -> None:
    first, second = load_object("graphs.py:first"), load_object("graphs.py:second")
    assert command("diff", "graphs.py:first", "graphs.py:second") == (0, f"{first.diff(second)}\n", "")
    assert command("diff", "graphs.py:first", "graphs.py:first").out == "ppo -> ppo: no difference\n"
    for ending in ("md", "html", "svg"):
        result = command("diff", "graphs.py:first", "graphs.py:second", "--to", f"d.{ending}")
        assert result == (0, f"ppo -> grpo, written to d.{ending}\n", "")
        text = Path(f"d.{ending}").read_text()
        assert "group_advantage" in text and "gae" in text  # the added and the removed node


def test_help_of_diff_names_both_arguments(command: Command) -> None:
    result = command("diff", "--help")
    assert result.code == 0 and re.search(r"diff \[OPTIONS\] \W*BEFORE\W+AFTER", result.out)


def test_diff_refuses_files_that_import_different_modules_of_one_name(command: Command, tmp_path: Path) -> None:
    for folder in ("old", "new"):
        write(tmp_path / folder / "common.py", f"n = {len(folder)}\n")
        source = "import common\nfrom flowrl.graphs import grpo\ngraph = grpo('flowrl.demo.verifier:compute_score')\n"
        write(tmp_path / folder / "train.py", source)
    result = command("diff", "old/train.py:graph", "new/train.py:graph")
    assert result.code == 2 and is_paragraph(result)
    assert "old/common.py, and" in result.err and "new/common.py has the same name" in result.err
    assert command("diff", "old/train.py:graph", "old/train.py:graph").out == "grpo -> grpo: no difference\n"


def test_operators_are_not_cut_off_where_they_are_piped(command: Command) -> None:
    answer = command("operators")
    assert answer.code == 0 and "…" not in answer.out
    assert "token_level_rewards, values, response_mask" in answer.out


def test_demo_refuses_invalid_options_before_it_writes_anything(command: Command) -> None:
    result = command("demo", "--steps", "0")
    assert result.code == 2 and "Invalid value for '--steps'" in result.err and not list(Path().iterdir())
    results = [command("demo", "--folder", write(Path("file"), ""), *more) for more in ((), ("--quick",))]
    assert all(a.code == 2 and "cannot be written (Not a directory). Pass another" in a.err for a in results)


def test_a_closed_standard_output_is_named(tmp_path: Path) -> None:
    code = f"import os; os.close(1); from flowrl.app.cli import main; main(['runs', {str(tmp_path)!r}])"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("flowrl: standard output is closed.")

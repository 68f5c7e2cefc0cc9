"""``flowrl why`` and ``flowrl replay``: text, JSON, edits on the command line, exit codes, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import flowrl
from tests.look.recorded import record_algorithm
from tests.support.command_line import Command, is_paragraph

pytestmark = pytest.mark.runs


@pytest.fixture(scope="module")
def run(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of GRPO."""
    return record_algorithm("grpo", tmp_path_factory.mktemp("ask"), tiny)


def test_why_prints_the_derivation(run: Path, command: Command) -> None:
    row = flowrl.open(run).rows(2)["row_id"][0].as_py()
    address = f"2/update_actor.advantages[{row}]"
    found = command("why", run, address)
    assert found.code == 0 and found.out.strip() == str(flowrl.open(run).why(address))
    data = json.loads(command("why", run, address, "--json").out)
    assert data["links"][-1]["node"] == "batch" and data["row"]["fate"] == "trained"


def test_replay_compares_the_newest_step_or_all(run: Path, command: Command) -> None:
    found = command("replay", run)
    assert found.code == 0 and found.out.startswith("step 3: ") and "group_advantage  same bits" in found.out
    assert "reward           same bits" in found.out  # without --import, since this process has imported its function
    every = json.loads(command("replay", run, "--all", "--import", "--json").out)
    assert [one["step"] for one in every] == [1, 2, 3] and all(one["same"] for one in every)
    assert all(one["nodes"]["reward"]["same"] for one in every)
    only = json.loads(command("replay", run, "--step", "2", "--node", "group_advantage", "--json").out)
    assert list(only["nodes"]) == ["group_advantage"]


def test_a_difference_is_named_and_ends_with_exit_code_1(run: Path, command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(run, folder)
    description = json.loads((folder / "run.json").read_text())
    description["graph"]["nodes"]["group_advantage"]["operator"]["eps"] = 0.5
    (folder / "run.json").write_text(json.dumps(description))
    found = command("replay", folder, "--step", "2", "--node", "group_advantage")
    assert found.code == 1 and "DIFFERS: group_advantage.advantages[" in found.out


def test_what_if_takes_parameters_operators_and_rewards(run: Path, command: Command) -> None:
    found = json.loads(
        command("replay", run, "--step", "2", "--set", "group_advantage.normalize_std=False", "--json").out
    )
    assert found["changes"][0]["after"] == "group_advantage.advantages" and "update_actor" in found["unknown"]
    replaced = command("replay", run, "--step", "2", "--replace", "group_advantage=OPOAdvantage(leave_one_out=True)")
    assert replaced.code == 0 and "+ opo_advantage: OPOAdvantage(leave_one_out=True)" in replaced.out
    Path("stricter.py").write_text(
        "def none(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"
    )
    rescored = json.loads(command("replay", run, "--step", "2", "--set", "reward.fn=stricter.py:none", "--json").out)
    assert rescored["metrics"]["reward/mean"][1] == 0.0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--set", "eps=1"),
        ("--set", "group_advantage.eps"),
        ("--replace", "group_advantage"),
        ("--replace", "group_advantage=Unknown()"),
        ("--replace", "group_advantage=__import__('os')"),
        ("--all", "--step", "2"),
    ],
    ids=str,
)
def test_misuse_is_refused_in_a_paragraph(run: Path, command: Command, arguments: tuple[str, ...]) -> None:
    found = command("replay", run, *arguments)
    assert found.code == 2 and is_paragraph(found) and "[cli.bad-option]" in found.err


def test_control_characters_are_escaped(run: Path, command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "hostile"
    shutil.copytree(run, folder)
    text = (folder / "run.json").read_text().replace("prompts.jsonl", "prom\\u001b[31mpts.jsonl")
    (folder / "run.json").write_text(text)
    row = flowrl.open(folder).rows(2)["row_id"][0].as_py()
    found = command("why", folder, f"2/group_advantage[{row}]")
    assert "\x1b" not in found.out and "prom\\x1b[31mpts.jsonl" in found.out

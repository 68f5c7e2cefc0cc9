"""The files of ``examples/launch`` name what exists, and the script for Slurm starts what its comment says.

Slurm, Kubernetes and Docker are not here; examples/launch/README.md says how the files were checked besides.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests import ROOT
from tests.support.command_line import Command

LAUNCH = ROOT / "examples" / "launch"
TARGET = "examples/recipes/gsm8k/recipe.py:training"


def sbatch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script with a stand-in of ``srun`` that prints its arguments, one a line."""
    for name, text in {"srun": 'printf "%s\\n" "$@"', "scontrol": "echo first; echo second"}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    given = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "some", "SLURM_JOB_NUM_NODES": "2"}
    given |= {"SLURM_JOB_NAME": "flowrl", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "64", "SLURM_GPUS_ON_NODE": "8"}
    command = ["bash", str(LAUNCH / "train.sbatch"), *arguments]
    return subprocess.run(command, env=given, cwd=folder, capture_output=True, text=True)


def test_the_script_for_slurm_starts_ray_on_all_machines_and_the_run_on_the_first(tmp_path: Path) -> None:
    done = sbatch(tmp_path, TARGET, "--set", "place=Colocate(gpus=16, address='auto')")
    assert done.returncode == 0, done.stderr
    start, _, run = done.stdout.partition("--\n")
    assert start.split("\n")[:4] == ["ray", "symmetric-run", "--address", "first:6379"]
    assert "--min-nodes\n2\n" in start and "--num-cpus\n64\n" in start and "--num-gpus\n8\n" in start
    settings = ["--set", "place=Colocate(gpus=16, address='auto')"]
    assert run.splitlines() == ["flowrl", "run", TARGET, *settings, "--folder", "runs/flowrl-7", "--resume-or-start"]


def test_the_script_for_slurm_without_a_target_says_how_to_use_it(tmp_path: Path) -> None:
    done = sbatch(tmp_path)
    assert done.returncode == 2 and "usage: sbatch train.sbatch TARGET" in done.stderr


@pytest.mark.parametrize("file", ["train.sbatch", "README.md"])
def test_the_commands_of_the_comments_have_a_plan(file: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (LAUNCH / file).read_text(encoding="utf-8").replace("\n#  ", "\n").replace("\\\n", " ")
    [words] = {tuple(shlex.split(line)[2:]) for line in text.splitlines() if line.strip("# ").startswith("sbatch ")}
    monkeypatch.chdir(ROOT)
    result = command("plan", *(word for word in words if word != "examples/launch/train.sbatch"))
    assert result.code == 0 and "slot 15: actor[15], ref[15], rollout[15]" in result.out, result


def test_the_job_of_kuberay_runs_a_recipe_on_its_workers() -> None:
    job = yaml.safe_load((LAUNCH / "rayjob.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:3] == ["flowrl", "run", TARGET] and "--resume-or-start" in words
    assert (ROOT / TARGET.partition(":")[0]).is_file()
    cluster = job["spec"]["rayClusterSpec"]
    [workers] = cluster["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    gpus = workers["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert f'place=Colocate(gpus={gpus}, address="auto")' in words
    pin = re.search(r"^ray==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pin is not None and cluster["rayVersion"] == pin[1]
    for group in (cluster["headGroupSpec"], workers):
        spec = group["template"]["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} == volumes


def test_the_dockerfile_copies_what_is_there_and_installs_known_extras() -> None:
    text = (LAUNCH / "Dockerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()]
    assert copied and [name for name in copied if not (ROOT / name).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [extras] = re.findall(r"pip install \S+ '\.\[(.*)\]'", text)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()

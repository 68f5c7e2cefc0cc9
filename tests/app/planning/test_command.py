"""``flowrl plan --hardware`` (`command.py`, `memory_table.py`, `time_table.py`, `searching.py`, `search_table.py`);
others: `tests/app/test_cli.py`."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from transformers import Qwen3Config

from tests import ROOT
from tests.support.command_line import Command, is_paragraph, write

LARGE = """
    from flowrl import Colocate
    from flowrl.backends import VLLM, TorchTrainer
    from flowrl.graphs import grpo

    job = grpo("my_reward.py:score", n=8, kl_coef=0.0, max_new_tokens=3072).bind(
        actor=TorchTrainer("Qwen3-8B", dtype="bfloat16", ranks=8),
        rollout=VLLM("Qwen3-8B", ranks=8),
        place=Colocate(gpus=8),
    )
"""


def test_plan_prints_the_memory_of_each_slot(command: Command, training: Path) -> None:
    plan = ("plan", f"{training}:training", "--lengths", "prompt=64,response=64")
    result = command(*plan, "--hardware", "h100")
    assert result.code == 0
    assert "memory of each slot on H100 (79.6 GiB), in GiB, for rows of at most 64 + 64 tokens" in result.out
    assert re.search(r"^  slot 0, at its peak in \w+: 0\.5\d, fits$", result.out, re.MULTILINE)
    assert re.search(r"^    actor\+ref\+rollout: weights .*, CUDA 0\.50\*$", result.out, re.MULTILINE)


def test_the_suggested_change_fits_when_it_is_applied(command: Command, training: Path) -> None:
    small = "Hardware(memory=0.006, device='cpu')"
    plan = ("plan", f"{training}:training", "--hardware", small, "--lengths", "prompt=64,response=64")
    said = command(*plan).out
    assert "does not fit" in said
    found = re.search(r"cheapest change that fits, at [\d.e-]+: (.*)$", said, re.MULTILINE)
    assert found is not None
    changed = command(*plan, *found.group(1).split()).out
    assert ", fits\n" in changed and "does not fit" not in changed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--hardware", "V100"), "'V100' is no hardware that flowrl knows"),
        (("--hardware", "Hardware(24)"), "--hardware Hardware(24) is not hardware; expected H100, or such as"),
        (("--hardware", "H100", "--lengths", "prompt=long"), "--lengths prompt=long has no numbers of tokens"),
        (("--hardware", "H100", "--lengths", "max=9,response=4"), "--lengths max=9,response=4 has no numbers"),
        (("--hardware", "H100", "--lengths", "mean=9,max=8"), "Rows of 9 tokens on average and at most 8 cannot be"),
        (("--hardware", "Hardware(memory=24)", "--lengths", "mean=4,max=8"), "Times need the speed of own hardware"),
        (("--costs", "own", "--machine", "own"), "--machine needs --costs RUN, and two or more runs"),
        (("--lengths", "prompt=1"), "--lengths only applies to the prediction of memory"),
        (("--hardware", "H100"), "has no longest prompt"),
    ],
)
def test_misuse_is_one_paragraph(command: Command, training: Path, arguments: tuple[str, ...], expected: str) -> None:
    result = command("plan", f"{training}:training", *arguments)
    assert result.code == 2 and is_paragraph(result) and expected in result.err


def test_with_mean_lengths_plan_prints_seconds_by_stage(command: Command, training: Path) -> None:
    half = "from training import training, job\nfrom flowrl.backends import TorchTrainer\n"
    half += "job = job.edit(bind={'actor': TorchTrainer(job.graph.bindings['actor'].model, dtype='bfloat16')})\n"
    write(training.parent / "half.py", half)
    options = ("--hardware", "H100", "--lengths", "mean=40,max=64")
    result = command("plan", f"{training.parent / 'half.py'}:job", *options, "--prompts", "8")
    assert "for rows of at most 1 + 63 tokens" in result.out
    for stage, source in (("generate", "16 rows in 1 engines of"), ("update", "3 passes over 640 tokens")):
        assert re.search(rf"^  {stage}: [\d.e-]+ s\n    \w+: [\d.e-]+ s, {source}", result.out, re.MULTILINE)
    assert re.search(r"^  step, one after another: [\d.e-]+ s$", result.out, re.MULTILINE)
    assert "80 % took 0.44 to 1.29 times what this predicts" in result.out
    assert re.search(r"^    ref_log_prob: .* at 0.385 of 67 TFLOP/s of float32$", result.out, re.MULTILINE)
    assert "in float32: ref_log_prob, by the stated speed in float32; published steps compute in bfloat16" in result.out
    missing = command("plan", f"{training.parent / 'half.py'}:job", *options)
    assert missing.code == 2 and "Pass them: --prompts 128" in missing.err


def test_costs_of_a_run_replace_the_prediction(command: Command, training: Path) -> None:
    assert command("run", f"{training}:training").code == 0
    options = ("--costs", "own", "--hardware", "H100", "--lengths", "mean=40,max=64")
    result = command("plan", f"{training}:training", *options)
    assert re.search(r"^    update_actor: [\d.e-]+ s, measured in .*own$", result.out, re.MULTILINE)
    assert "of published steps" not in result.out
    plan = ("plan", f"{training}:training", "--costs", "own", "--place", "Colocate(gpus=1)")
    assert "no costs of syncs and turns between processes" in command(*plan).out
    shutil.copytree("own", "placed")  # stands in for a run at a place
    place = {"$type": "flowrl.distributed.place:Colocate"}
    described = json.loads(Path("placed/run.json").read_text(encoding="utf-8")) | {"place": place}
    Path("placed/run.json").write_text(json.dumps(described), encoding="utf-8")
    carried = command(*plan, "--machine", "placed", "--machine", "own")
    assert carried.code == 0 and "no costs of syncs" not in carried.out
    assert re.search(r"^Colocate\(\): a step takes [\d.]+ s \(80 %: [\d.]+ to [\d.]+ s\)$", carried.out, re.MULTILINE)
    same = command(*plan, "--machine", "own", "--machine", "own")
    assert same.code == 2 and is_paragraph(same) and "of 1 run(s), 1 were in one process: own." in same.err


def test_a_graph_without_backends_is_refused(command: Command) -> None:
    assert "--hardware needs a job or a training" in command("plan", "grpo", "--hardware", "H100").err


@pytest.mark.nightly
def test_the_examples_of_the_docs_are_printed_by_the_code(command: Command, tmp_path: Path) -> None:
    Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path / "Qwen3-8B")
    write(tmp_path / "my_reward.py", "def score(response: str) -> float:\n    return 1.0\n")
    write(tmp_path / "large.py", LARGE)
    options = ("--hardware", "H100", "--lengths", "prompt=1024,mean=2400", "--prompts", "128")
    printed = command("plan", "large.py:job", *options).out
    page = (ROOT / "docs" / "how-to" / "precision-and-memory.md").read_text(encoding="utf-8")
    _, heading, memory = printed.partition("memory of each slot")
    assert f"{heading}{memory}```" in page
    assert f"{command('plan', 'large.py:job', '--search', '--gpus', '8', *options).out}```" in page


def halved(training: Path) -> Path:
    """The training in bfloat16, whose times are predicted, on vLLM, whose engines may have places of their own."""
    return write(
        training.parent / "half.py",
        """
        import dataclasses

        from training import training

        from flowrl import Colocate
        from flowrl.backends import VLLM, TorchScorer, TorchTrainer

        model = training.job.graph.bindings["actor"].model
        actor, ref = TorchTrainer(model, dtype="bfloat16"), TorchScorer(model, dtype="bfloat16")
        job = training.job.edit(bind={"actor": actor, "ref": ref, "rollout": VLLM(model)})
        training = dataclasses.replace(training, job=dataclasses.replace(job, place=Colocate(gpus=1)))
        """,
    )


HARDWARE = ("--hardware", "H100", "--lengths", "mean=40,max=64")


def test_the_best_of_a_search_is_accepted_and_has_the_predicted_numbers(command: Command, training: Path) -> None:
    target = f"{halved(training)}:training"
    said = command("plan", target, "--search", "--gpus", "2", *HARDWARE).out
    best = re.search(r"^  1\. ([\d.]+) s, ([\d.]+) GiB at most: (\w+)\(.*\n     (.*)$", said, re.MULTILINE)
    assert best is not None and "published steps of other models" in said
    seconds, gib, place, options = best.groups()
    applied = command("plan", target, *shlex.split(options), *HARDWARE)
    assert applied.code == 0 and place in applied.out
    step = re.search(r"^  step, .*: ([\d.]+) s$", applied.out, re.MULTILINE)
    assert step is not None and step.group(1) == seconds
    peaks = [float(peak) for peak in re.findall(r"at its peak in \w+: ([\d.]+), fits$", applied.out, re.MULTILINE)]
    assert max(peaks) == pytest.approx(float(gib), abs=0.05)


def test_the_rank_of_the_unchanged_job_is_printed_also_if_it_does_not_fit(command: Command, training: Path) -> None:
    search = ("plan", f"{halved(training)}:training", "--search", "--lengths", "mean=40,max=64")
    ranked = command(*search, "--gpus", "2", "--hardware", "H100").out
    own = re.search(
        r"^  the unchanged job has rank (\d+) of (\d+): [\d.]+ s, [\d.]+ GiB at most(?:, [\d.]+ times as long as the "
        r"best)?: Colocate\(\), rollout: 1 x VLLM$",
        ranked,
        re.MULTILINE,
    )
    assert own is not None and 1 <= int(own.group(1)) <= int(own.group(2))
    small = "Hardware(memory=4, flops=989, bandwidth=3350)"
    unfit = command(*search, "--hardware", small).out
    assert re.search(
        r"^  the unchanged job does not fit into the 4.0 GiB of a slot at its peak in \w+: ", unfit, re.MULTILINE
    )


def test_what_a_search_does_not_predict_is_named(command: Command, training: Path) -> None:
    half = halved(training)
    half.write_text(
        half.read_text(encoding="utf-8").replace('TorchScorer(model, dtype="bfloat16")', "TorchScorer(model)")
    )
    search = ("plan", f"{half}:training", "--search", "--lengths", "mean=40,max=64", "--hardware")
    assert "in float32: ref_log_prob, by the stated speed in float32" in command(*search, "H100").out
    said = command(*search, "Hardware(memory=80, flops=989, bandwidth=3350)").out
    why = "ref computes in float32, and --hardware states no flops_float32="
    assert f"NOT predicted for any candidate: ref_log_prob ({why}); candidates are ranked by the other nodes" in said
    assert "not counted, since they run no model: repeat, reward, group_advantage" in said


def test_a_search_without_a_predicted_stage_is_refused(command: Command, training: Path) -> None:
    hardware = "Hardware(memory=80, flops=989, bandwidth=3350)"
    result = command("plan", f"{training}:training", "--search", "--lengths", "mean=40,max=64", "--hardware", hardware)
    assert result.code == 2 and is_paragraph(result) and "states no flops_float32=" in result.err
    assert "Run the job for a few steps and pass what it measured: --costs RUN." in result.err


def test_a_search_ranks_by_measured_costs_of_a_run(command: Command, training: Path) -> None:
    assert command("run", f"{training}:training").code == 0
    said = command("plan", f"{training}:training", "--search", "--costs", "own").out
    assert re.search(r"^  \d\. [\d.e-]+ s: one process\n     the unchanged job$", said, re.MULTILINE)
    assert re.search(r"^  the unchanged job has rank \d of \d: [\d.e-]+ s.*: one process$", said, re.MULTILINE)
    assert re.search(r"^  \d\. [\d.e-]+ s: Colocate\(\)\n     --set 'place=Colocate\(\)'$", said, re.MULTILINE)
    assert "seconds: measured in own" in said and "memory is not checked: pass --hardware" in said


def test_a_search_needs_seconds(command: Command, training: Path) -> None:
    missing = command("plan", f"{training}:training", "--search")
    assert missing.code == 2 and "Pass --hardware H100." in missing.err and is_paragraph(missing)
    missing = command(
        "plan", f"{training}:training", "--search", "--hardware", "H100", "--lengths", "prompt=8,response=8"
    )
    assert missing.code == 2 and "Pass --lengths mean=600,max=1536." in missing.err
    alone = command("plan", f"{training}:training", "--gpus", "2")
    assert alone.code == 2 and "--gpus only applies to the ranking of places. Pass --search" in alone.err

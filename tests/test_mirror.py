"""The tests mirror the rooms: the test of a module has its name, in the folder of its room."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from tests import ROOT
from tests.test_imports import module_files

SMALL = 100
"""Lines; a module of no more may be tested with what uses it."""

# Modules whose tests have another name, by the file that holds them: it needs Ray or an engine, or covers a family of
# modules by what they do together.
TESTED_BY: dict[str, tuple[str, ...]] = {
    "tests/files/test_graph_io.py": ("flowrl/files/values.py",),
    "tests/episodes/test_play.py": ("flowrl/episodes/chat.py", "flowrl/episodes/tools.py"),
    "tests/episodes/test_faults.py": ("flowrl/episodes/environment.py",),
    "tests/auditing/test_audit.py": ("flowrl/auditing/record.py", "flowrl/auditing/trial.py"),
    "tests/auditing/test_fitting.py": ("flowrl/auditing/objective.py",),
    "tests/core/graphs/test_algorithm.py": ("flowrl/core/operators/symbols.py", "flowrl/record_types.py"),
    "tests/rules/test_episodes.py": ("flowrl/rules/environment_source.py",),
    "tests/core/graphs/test_gate.py": ("flowrl/edits/gating.py",),
    "tests/run/engine/test_lag.py": ("flowrl/run/engine/step_snapshot.py",),
    "tests/rules/test_check.py": ("flowrl/rules/weights.py",),
    "tests/core/graphs/test_graph.py": ("flowrl/graph.py", "flowrl/protocols/backend.py"),
    "tests/graphs/test_shelf.py": ("graphs/advantages.py", "graphs/losses.py", "graphs/reinforce.py"),
    "tests/app/test_targets.py": ("graphs/variants.py",),
    "tests/data/sources/test_demos.py": ("flowrl/records.py",),
    "tests/test_spec.py": ("flowrl/parameter_errors.py",),
    "tests/test_types.py": ("flowrl/core/graphs/inference.py",),
    "tests/data/sources/test_prompts.py": ("flowrl/data/sources/file_source.py",),
    "tests/data/proto/test_dataproto.py": ("flowrl/data/proto/column_math.py",),
    "tests/draw/test_mermaid.py": ("flowrl/draw/picture.py",),
    "tests/draw/test_svg.py": ("flowrl/draw/layout.py",),
    "tests/run/prediction/test_costs.py": ("flowrl/run/prediction/cost.py",),
    "tests/run/engine/test_in_flight.py": ("flowrl/run/engine/nodes.py",),
    "tests/run/engine/test_local.py": ("flowrl/run/engine/runner.py",),
    "tests/run/training/test_validation.py": ("flowrl/run/training/validating.py",),
    "tests/sync/test_stream.py": ("flowrl/sync/group.py", "flowrl/sync/received.py"),
    "tests/on_ray/test_cluster.py": (
        "flowrl/distributed/cluster/cluster.py",
        "flowrl/distributed/cluster/host_server.py",
        "flowrl/distributed/cluster/local_cluster.py",
        "flowrl/distributed/cluster/slots.py",
    ),
    "tests/workers/test_fork_server.py": ("flowrl/workers/fork_server_process.py",),
    "tests/operators/reward/test_faults.py": ("flowrl/workers/supervisor.py",),
    "tests/on_ray/test_nodes.py": ("flowrl/distributed/hosts/host.py", "flowrl/distributed/hosts/hosts.py"),
    "tests/on_ray/test_sync.py": ("flowrl/distributed/delivery.py",),
    "tests/on_ray/test_runner.py": ("flowrl/distributed/runner.py",),
    "tests/operators/test_operators.py": ("operators/engines/engines.py", "operators/updates/update.py"),
    "tests/operators/reward/test_pool.py": ("operators/reward/worker.py",),
    "tests/backends/hosted/test_process.py": ("backends/hosted/keeper.py",),
    "tests/backends/torch/generate/test_decoder.py": ("backends/torch/generate/cache_batches.py",),
    "tests/backends/torch/train/test_fsdp.py": (
        "backends/torch/train/sharded.py",
        "backends/torch/train/shards.py",
    ),
    "tests/backends/torch/generate/test_slots.py": ("backends/torch/generate/passes.py",),
    "tests/backends/torch/train/test_trainer.py": (
        "backends/torch/score/engine.py",
        "backends/torch/train/learner.py",
        "backends/torch/score/model.py",
    ),
    "tests/engines/answers.py": ("backends/hosted/arrival.py",),
    "tests/engines/test_sglang.py": ("backends/sglang/engine.py", "backends/sglang/server.py"),
    "tests/engines/test_vllm.py": ("backends/vllm/engine.py",),
    "tests/engines/test_vllm_parallel.py": ("backends/vllm/worker.py",),
}


def mirrored(module: str) -> str:
    """Where the tests of a module are looked for, such as ``flowrl/edits/edit.py``."""
    room, _, name = module.removeprefix("flowrl/").rpartition("/")
    return f"tests/{room}/test_{name}".replace("//", "/")


def unfound(lengths: Mapping[str, int], tests: set[str], elsewhere: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """What a reader who looks for the tests of a module would not find.

    Args:
        lengths: of every module, in lines.
        tests: paths of all files of the tests.
        elsewhere: as `TESTED_BY`.
    """
    named = {module: test for test, modules in elsewhere.items() for module in modules}
    for module, lines in lengths.items():
        if lines > SMALL and module not in named and mirrored(module) not in tests:
            yield f"{module} has {lines} lines and no {mirrored(module)}; write it, or name in TESTED_BY what tests it"
    for module, test in named.items():
        if test not in tests:
            yield f"TESTED_BY names {test}, which is not there"
        if module not in lengths:
            yield f"TESTED_BY names {module}, which is not there"
        elif mirrored(module) in tests:
            yield f"{module} has a test of its own name; take it out of TESTED_BY"
        elif lengths[module] <= SMALL:
            yield f"{module} has {lengths[module]} lines; take it out of TESTED_BY"


def test_the_tests_of_every_module_are_found() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in module_files().values()
        if path.name != "__init__.py"
    }
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    findings = list(unfound(lengths, tests, TESTED_BY))
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize(
    ("lines", "tests", "elsewhere", "count"),
    [
        (101, set(), {}, 1),
        (100, set(), {}, 0),
        (101, {"tests/edits/test_edit.py"}, {}, 0),
        (101, {"tests/core/graphs/test_graph.py"}, {"tests/core/graphs/test_graph.py": ("flowrl/edits/edit.py",)}, 0),
        (101, set(), {"tests/core/graphs/test_graph.py": ("flowrl/edits/edit.py",)}, 1),
        (100, {"tests/core/graphs/test_graph.py"}, {"tests/core/graphs/test_graph.py": ("flowrl/edits/edit.py",)}, 1),
        (101, {"tests/a.py", "tests/edits/test_edit.py"}, {"tests/a.py": ("flowrl/edits/edit.py",)}, 1),
        (101, {"tests/a.py", "tests/edits/test_edit.py"}, {"tests/a.py": ("flowrl/core/gone.py",)}, 1),
    ],
)
def test_what_is_not_found_is_named(
    lines: int, tests: set[str], elsewhere: dict[str, tuple[str, ...]], count: int
) -> None:
    assert len(list(unfound({"flowrl/edits/edit.py": lines}, tests, elsewhere))) == count


@pytest.mark.parametrize(
    ("module", "test"),
    [
        ("flowrl/edits/edit.py", "tests/edits/test_edit.py"),
        ("flowrl/app/cli.py", "tests/app/test_cli.py"),
        ("backends/torch/train/trainer.py", "tests/backends/torch/train/test_trainer.py"),
    ],
)
def test_a_module_and_its_test_have_one_name(module: str, test: str) -> None:
    assert mirrored(module) == test

"""Feed flowrl malformed files and arguments: each must be accepted or refused by an error with a code.

    python benchmarks/malformed.py [INPUTS_OF_EACH] [SEED]     # 80 of each of 8 kinds by default

Every input is made by mutating a valid one, and is read in a process of its own with limits on time and memory. A fault
is an exception without a code, a process that dies or a limit that is reached; it is printed with what was mutated.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness import table  # noqa: E402

import flowrl  # noqa: E402
from flowrl import DataProto, DemoData, PreferenceData, PromptData, Training  # noqa: E402
from flowrl.app.cli import main as command_line  # noqa: E402
from flowrl.backends import TorchTrainer  # noqa: E402
from flowrl.data.text.tokenizer import ChatTokenizer  # noqa: E402
from flowrl.errors import FlowrlError  # noqa: E402
from flowrl.graphs import grpo  # noqa: E402
from tests.backends.torch.train.trainers import CONTEXT  # noqa: E402
from tests.support.desk import set_up_desk  # noqa: E402
from tests.support.jobs import PROMPTS, job_of, write_prompts  # noqa: E402
from tests.support.rewards import digits  # noqa: E402

SECONDS, GIBIBYTES = 60, 12
ACCEPTED, FAULT = "accepted", "FAULT"

Random = random.Random
Act = Callable[[Path], Any]
"""Reads the malformed input in a folder."""


# ---- mutations

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1e308,
    float("nan"),
    10**30,
    "",
    " ",
    "\x00",
    "\ud800",
    "x" * 10_000,
    "../..",
    [],
    {},
]
ODD += [
    [[]],
    {"": None},
    [1, "a", None],
    "__import__('os')",
    "nan",
    "1",
    [[[[[[[[]]]]]]]],
    {"role": "user"},
    "🦜\u202e",
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in JSON data."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def mutated(value: Any, chance: Random) -> tuple[Any, str]:
    """JSON data with one value replaced, removed, renamed or repeated, and what was done."""
    value, path = copy.deepcopy(value), chance.choice(list(places(value)))
    if not path:
        odd = chance.choice(ODD)
        return odd, f"all = {short(odd)}"
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    key, how = path[-1], chance.choice(["replace", "replace", "remove", "rename", "repeat"])
    if how == "remove":
        del parent[key]
    elif how == "rename" and isinstance(parent, dict):
        parent[f"{key}_"] = parent.pop(key)
    elif how == "repeat" and isinstance(parent, list):
        parent.append(parent[key])
    else:
        how, parent[key] = "replace", chance.choice(ODD)
        how = f"replace by {short(parent[key])}"
    return value, f"{how}: {'.'.join(map(str, path))}"


def damaged(content: bytes, chance: Random) -> tuple[bytes, str]:
    """Bytes with a part cut off, replaced, doubled or inserted, and what was done."""
    at = chance.randrange(len(content) + 1)
    to = min(len(content), at + chance.choice([1, 8, 200]))
    how = chance.choice(["cut", "flip", "remove", "double", "insert", "empty"])
    noise = chance.choice([b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\n\n", b"NaN", b"{", b"\x1b[2J", b"[" * 5000])
    made = {
        "cut": content[:at],
        "flip": content[:at] + bytes(255 - byte for byte in content[at:to]) + content[to:],
        "remove": content[:at] + content[to:],
        "double": content[:to] + content[at:],
        "insert": content[:at] + noise + content[at:],
        "empty": b"",
    }
    return made[how], f"{how} at {at} to {to} of {len(content)}"


def dump(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def damage_file(folder: Path, chance: Random) -> str:
    """Damage one of the files in a folder, any file name as likely; JSON is mutated as data in half of the cases."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    name = chance.choice(sorted({path.name for path in files}))
    path = chance.choice([path for path in files if path.name == name])
    content = path.read_bytes()
    if path.suffix == ".json" and chance.random() < 0.5:
        value, how = mutated(json.loads(content), chance)
        path.write_bytes(dump(value))
    else:
        made, how = damaged(content, chance)
        path.write_bytes(made)
    return f"{path.relative_to(folder)}: {how}"


def short(value: Any) -> str:
    return repr(value)[:60]


# ---- the kinds of input: each prepares a folder, and returns what was done and how to read it

ROWS: dict[type, dict[str, Any]] = {
    PromptData: {
        "prompt": [{"role": "user", "content": "1+1"}],
        "data_source": "test",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": 0, "more": [1, {"a": None}]},
        "chat_template_kwargs": {"enable_thinking": False},
    },
    DemoData: {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]},
    PreferenceData: {"prompt": "1+1", "chosen": [{"role": "assistant", "content": "2"}], "rejected": "3"},
}


def data_file(desk: Path, folder: Path, chance: Random) -> tuple[str, Act]:
    """Rows of prompts, demonstrations or preferences."""
    source = chance.choice(list(ROWS))
    good = dump(ROWS[source])
    value, how = mutated(ROWS[source], chance)
    content = b"\n".join([good, dump(value), good, b""])
    if chance.random() < 0.4:
        content, how = damaged(b"\n".join([good] * 3 + [b""]), chance)
    (folder / "rows.jsonl").write_bytes(content)
    tokenizer = ChatTokenizer(str(desk / "model"))
    return f"{source.__name__}: {how}", lambda place: source(str(place / "rows.jsonl")).load(tokenizer, 0).next(2)


def graph_file(desk: Path, folder: Path, chance: Random) -> tuple[str, Act]:
    """A saved graph."""
    flowrl.save(grpo("my_reward.py:score", n=2), folder / "graph.json")
    return damage_file(folder, chance), lambda place: flowrl.load(place / "graph.json").check()


def batch_folder(desk: Path, folder: Path, chance: Random) -> tuple[str, Act]:
    """A saved `DataProto`."""
    PROMPTS.save(folder / "batch")
    return damage_file(folder, chance), lambda place: DataProto.load(place / "batch")


def model_folder(desk: Path, folder: Path, chance: Random) -> tuple[str, Act]:
    """A Hugging Face folder: configuration, tokenizer and weights."""
    shutil.copytree(desk / "model", folder / "model")
    how = damage_file(folder, chance)

    def read(place: Path) -> None:
        ChatTokenizer(str(place / "model")).conversation_ids([{"role": "user", "content": "1"}])
        TorchTrainer(str(place / "model"), device="cpu").build(CONTEXT)

    return how, read


def training(desk: Path, folder: Path, **settings: Any) -> Training:
    job = job_of("grpo", str(desk / "model"), digits, n=2)
    settings = {"steps": 2, "prompts": 2, "checkpoint_every": 1, "save_model": False} | settings
    return Training(job, PromptData(str(desk / "prompts.jsonl")), folder=str(folder), **settings)


def run_folder(desk: Path, folder: Path, chance: Random) -> tuple[str, Act]:
    """A run that is resumed: run.json, metrics and checkpoints."""
    shutil.copytree(desk / "run", folder / "run")
    how = damage_file(folder, chance)
    return how, lambda place: training(desk, place / "run", steps=3, resume=True).run([])


COMMANDS = [
    "run",
    "show",
    "check",
    "plan",
    "diff",
    "fingerprint",
    "audit",
    "episodes",
    "list",
    "rules",
    "curve",
    "demo",
]
WORDS = [
    "--steps",
    "--folder",
    "--resume",
    "--prompts",
    "--seed",
    "--json",
    "--help",
    "grpo",
    "ppo",
    "graph.json",
    "x:y",
]
WORDS += ["train.jsonl", "my_reward.py", "my_reward.py:score", ".", "/", "-1", "0", "1e9", "", "\ud800"]


def command(desk: Path, folder: Path, chance: Random) -> tuple[str, Act]:
    """Arguments of the command line; a run cannot start, because no word names a training."""
    words = [
        chance.choice(COMMANDS),
        *chance.choices([*WORDS, "\ud800", "", "my_reward.py", "my_reward.py:score"], k=3),
    ]
    for name in ("my_reward.py", "train.jsonl"):
        shutil.copy(desk / name, folder)
    (folder / "graph.json").write_bytes(damaged(dump({"flowrl": 2}), chance)[0])

    def read(place: Path) -> None:
        os.chdir(place)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
            try:
                command_line(words)
            except SystemExit as end:
                if end.code == 1:  # an error that is not flowrl's
                    raise RuntimeError(told.getvalue()[-500:]) from None
                if end.code == 2:
                    raise FlowrlError("refused", code="data.invalid-row") from None

    return " ".join(map(short, words)), read


def settings(desk: Path, folder: Path, chance: Random) -> tuple[str, Act]:
    """A parameter of an algorithm, a backend or a run."""
    odd = chance.choice(ODD)
    of: dict[str, Callable[[], Any]] = {}
    for name in ("n", "kl_coef", "max_new_tokens", "mini_batch", "clip", "lag", "temperature"):
        of[name] = lambda name=name: job_of("grpo", str(desk / "model"), digits, **{name: odd})
    for name in ("steps", "prompts", "checkpoint_every", "seed", "validation", "costs", "rollouts_every"):
        of[name] = lambda name=name: training(desk, folder / "run", **{name: odd})
    for name in ("optimizer", "schedule", "dtype", "device", "max_grad_norm", "micro_batch", "attention"):
        of[name] = lambda name=name: TorchTrainer(str(desk / "model"), **{name: odd}).build(CONTEXT)
    name = chance.choice(list(of))
    return f"{name}={short(odd)}", lambda place: of[name]()


def reward_value(desk: Path, folder: Path, chance: Random) -> tuple[str, Act]:
    """What a reward function returns."""
    odd = chance.choice(
        [*ODD, {"score": None}, {"score": 1.0, "": 2}, {"score": 1.0, "x": "y" * 10_000}, object(), b"1"]
    )

    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
        return odd

    def read(place: Path) -> None:
        job = job_of("grpo", str(desk / "model"), score, n=2)
        data = PromptData(str(desk / "prompts.jsonl"))
        Training(job, data, steps=1, prompts=2, save_model=False, folder=str(place / "run")).run([])

    return f"reward {short(odd)}", read


KINDS = [data_file, graph_file, batch_folder, model_folder, run_folder, command, settings, reward_value]


# ---- one process an input


def verdict(act: Act, folder: Path) -> str:
    """The code of the error, "accepted", or a fault."""
    try:
        act(folder)
    except FlowrlError as error:
        return error.code or f"{FAULT}: {type(error).__name__} without a code: {error}"
    except BaseException:
        return f"{FAULT}: {traceback.format_exc()[-700:]}"
    return ACCEPTED


def in_a_process(act: Act, folder: Path) -> str:
    """`verdict` in a forked process with limits."""
    file = folder / "verdict"
    pid = os.fork()
    if not pid:
        resource.setrlimit(resource.RLIMIT_AS, (GIBIBYTES << 30, GIBIBYTES << 30))
        signal.alarm(SECONDS)
        quiet = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        file.write_text(verdict(act, folder), encoding="utf-8", errors="backslashreplace")
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == -signal.SIGALRM:
        return f"{FAULT}: took more than {SECONDS} s"
    return file.read_text() if not status else f"{FAULT}: the process ended with status {status}"


def main(each: int, seed: int) -> None:
    rows, faults = [], []
    with tempfile.TemporaryDirectory() as place:
        desk = set_up_desk(Path(place, "desk").absolute())
        write_prompts(desk / "prompts.jsonl")
        training(desk, desk / "run").run([])
        os.chdir(desk)
        for kind in KINDS:
            chance, found = Random(f"{seed} {kind.__name__}"), Counter[str]()
            for number in range(each):
                folder = Path(place, f"{kind.__name__}-{number}")
                folder.mkdir()
                how, act = kind(desk, folder, chance)
                result = in_a_process(act, folder)
                found[FAULT if result.startswith(FAULT) else ACCEPTED if result == ACCEPTED else "refused"] += 1
                if result.startswith(FAULT):
                    faults.append(f"{kind.__name__} {number}, {how}\n  {result}")
                shutil.rmtree(folder)
            rows.append([kind.__name__, str(each), *(str(found[one]) for one in ("refused", ACCEPTED, FAULT))])
            print(*rows[-1], flush=True)
    table(f"Malformed inputs at seed {seed}", ["kind", "inputs", "refused", "accepted", "faults"], rows)
    print(*faults, sep="\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main(*map(int, [*sys.argv[1:], *["80", "0"][len(sys.argv) - 1 :]]))

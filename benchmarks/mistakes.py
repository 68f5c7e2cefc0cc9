"""Make the mistakes of a newcomer, each as it is typed: which end in an error with a code, and which do not?

    python benchmarks/mistakes.py     # 149 mistakes, in one process; about a minute

A mistake is a line of Python or a command line. Each has to be refused by an error of flowrl with a code, or by a
finding of `Graph.check`; a raw exception and silence are faults.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from harness import table  # noqa: E402

import flowrl  # noqa: E402
from flowrl import backends, columns, graphs, operators, records, schedules  # noqa: E402
from flowrl.app.cli import main as command_line  # noqa: E402
from flowrl.data.text.tokenizer import ChatTokenizer  # noqa: E402
from flowrl.errors import FlowrlError  # noqa: E402
from tests.backends.torch.train.trainers import CONTEXT  # noqa: E402
from tests.support.desk import set_up_desk  # noqa: E402

PYTHON = """
grpo("my_reward.py:scores")
grpo("rewards.py:score")
grpo("my_rewards:score")
grpo([score, score])
dr_grpo(None).bind(actor=TorchTrainer("model"), rollout=TorchRollout("model")).refuse_missing()
grpo(3)
grpo()
grpo(score, 8)
grpo(score, num_generations=8)
grpo(score, n="eight")
grpo(score, n=0)
grpo(score, n=1).check()
grpo(score, n=True)
grpo(score, temperature=-1)
grpo(score, temperature=0).check()
grpo(score, beta=0.1)
grpo(score, kl=0.1)
grpo(score, learning_rate=1e-6)
grpo(score, max_length=512)
grpo(score, max_new_tokens=0)
grpo(score, clip=-0.2)
grpo(score, mini_batch=0)
grpo(score, mini_batch=6).check(prompts=4)
grpo(score, reward_fn=score)
gropo(score)
ppo(score, lam=2.0)
ppo(score, gamma=-1)
dapo(score, groups=0)
dapo(score, groups=64).check(prompts=4)
raft(score, n=1)
pass_at_k(score, k=16, n=8).check()
grpo(score).edit(set={"lr": 1e-5})
grpo(score).edit(set={"update_actor.lr": 1e-5})
grpo(score).edit(set={"generate.temprature": 0.7})
grpo(score).edit(set={"generate.temperature": "warm"})
grpo(score).edit(set={"generate": 0.7})
grpo(score).edit(set=("generate.temperature", 0.7))
grpo(score).edit({"generate.temperature": 0.7})
grpo(score).edit(drop="reward")
grpo(score).edit(drop=["rewards"])
grpo(score).edit(drop=["sync"]).check()
grpo(score).edit(drop=["batch"])
grpo(score).edit(insert={"gae": GAE()})
grpo(score).edit(insert={"gae": After("generate", GAE())})
grpo(score).edit(insert={"whiten": After("group_advantage", Whiten)})
grpo(score).edit(insert={"whiten": After("group_advantage", Whiten())}).check()
grpo(score).edit(insert={"kl": After("reward", KLShape())})
grpo(score).edit(replace={"group_advantage": GAE()})
grpo(score).edit(replace={"group_advantage": "gae"})
grpo(score).edit(replace={"group_advantages": RLOOAdvantage()})
grpo(score).edit(wire={"update_actor.advantages": "reward"})
grpo(score).edit(wire={"update_actor.advantages": "reward.token_level_scores"})
grpo(score).edit(wire={"update_actor": "group_advantage.advantages"})
grpo(score).edit(rename={"generate": "reward"})
grpo(score).edit(lag=-1)
grpo(score).edit(lag=1).check()
grpo(score).edit(lag="1")
grpo(score).edit(lr=1e-5)
grpo(score).edit(allow={"FR7": "because"})
grpo(score).edit(allow={"FR007": ""})
grpo(score).edit(allow={"FR007 generator": "because"})
grpo(score).edit(when={"sync": 2})
grpo(score).edit(when={"sync": When(every=0)})
grpo(score).edit(when={"sync": When(every=2)}).check()
grpo(score).bind(model="model")
grpo(score).bind(actor="model")
grpo(score).bind(actor=TorchTrainer)
grpo(score).bind(policy=TorchTrainer("model"))
grpo(score).bind(actor=TorchRollout("model"))
grpo(score).bind(rollout=TorchTrainer("model"))
grpo(score).bind(actor=TorchTrainer("model")).refuse_unready()
dr_grpo(score).bind(actor=TorchTrainer("model"), rollout=TorchRollout("model"), ref=TorchScorer("model"))
dr_grpo(score).bind(actor=TorchTrainer("nowhere"), rollout=TorchRollout("nowhere")).refuse_missing()
TorchTrainer()
TorchTrainer("model", learning_rate=1e-5)
TorchTrainer("model", lr=-1)
TorchTrainer("model", lr="1e-5")
TorchTrainer("model", schedule="cosine")
TorchTrainer("model", optimizer="adam8bit")
TorchTrainer("model", dtype="fp16")
TorchTrainer("model", ranks=0)
TorchTrainer("model", device="gpu").build(CONTEXT)
TorchRollout("model", gpu_memory_utilization=0.9)
Linear(0.1, 0.0)
Linear(0.1, 0.0, steps=0)
Training(grpo(score), PromptData("train.jsonl"))
Training(job, "train.jsonl", prompts=2, steps=2, folder="run")
Training(job, [{"prompt": "1+1"}], prompts=2, steps=2, folder="run")
Training(job, PromptData("promts.jsonl"), steps=2, prompts=2, folder="run").run([])
Training(job, PromptData("train.jsonl"), epochs=3, prompts=2, steps=2, folder="run")
Training(job, PromptData("train.jsonl"), steps=0, prompts=2, folder="run")
Training(job, PromptData("train.jsonl"), steps="ten", prompts=2, folder="run")
Training(job, PromptData("train.jsonl"), steps=2, batch_size=4, prompts=2, folder="run")
Training(job, PromptData("train.jsonl"), steps=2, prompts=0, folder="run")
Training(job, PromptData("train.jsonl"), steps=2, seed="x", prompts=2, folder="run")
Training(job, PromptData("train.jsonl"), steps=2, resume="yes", prompts=2, folder="run")
Training(job, PromptData("train.jsonl"), steps=2, checkpoint_every=0, prompts=2, folder="run")
Training(job, PromptData("train.jsonl"), steps=2, validation=PromptData("train.jsonl"), prompts=2, folder="run")
Training(job, DemoData("train.jsonl"), steps=2, prompts=2, folder="run")
Training(job, data={"prompts": PromptData("train.jsonl")}, steps=2, prompts=2, folder="run")
Training(job, PromptData("train.jsonl"), steps=2, folder="gone", resume=True, prompts=2).run([])
PromptData("prompts.csv").load(TOKENIZER, 0).next(2)
PromptData()
PromptData("train.jsonl", shufle=True)
PromptData(["train.jsonl"], 3).load(TOKENIZER, 0).next(2)
flowrl.load("gone.yaml")
flowrl.load("train.jsonl")
flowrl.save(grpo(score), "graph.txt")
flowrl.save("graph.yaml", grpo(score))
grpo(score)["generator"]
grpo(score).diff("ppo")
grpo(score).subgraph("rewards")
grpo(score).check(prompts="4")
Reward(score, timeout=-1)
Reward(lambda text: 1.0)
Reward("length")
UpdateActor("ppo")
UpdateActor(PPOClip)
UpdateActor(kl=0.1)
UpdateActor(aggregation="mean")
KLLoss("kl")
Generate(top_p=0)
Generate(top_p=2)
Generate(temp=0.7)
Interact()
Filter(0.5)
Collect(Spread, 32)
Operator()
Repeat(4)(3)
"""

COMMANDS = """
run
run nothing.py
run train.jsonl
run my_reward.py
run my_reward.py:score
run train.py:trainng
train train.py
check grpoo
check graph.yml
check my_reward.py:score
plan grpo --prompts many
plan grpo --costs nowhere
show grpo --to graph.pdf
diff grpo
diff grpo dappo
audit grpoo
episodes train.py
list --all
curve nowhere
demo --steps -1
"""


def python(line: str, names: dict[str, Any]) -> str:
    """How a line of Python ends."""
    try:
        found = eval(line, dict(names))
    except FlowrlError as error:
        return f"refused {error.code}" if error.code else f"RAW {type(error).__name__}: {error}"
    except NameError as error:
        return "refused" if "gropo" in str(error) else f"RAW {error}"
    except Exception as error:
        return f"RAW {type(error).__name__}: {str(error)[:150]}"
    return "refused" if ".check(" in line and found else "SILENT"


def command(words: list[str]) -> str:
    """How a command line ends."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            command_line(words)
        except SystemExit as end:
            text = told.getvalue() + out.getvalue()
            raw = "Traceback" in text
            return f"RAW {text[-150:]}" if raw else "refused" if end.code else "SILENT"
        except Exception as error:
            return f"RAW {type(error).__name__}: {str(error)[:150]}"
    return "SILENT"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        desk = Path(folder)
        set_up_desk(desk)
        os.chdir(desk)
        sys.path.insert(0, str(desk))
        names = {**vars(columns), **vars(records), **vars(schedules)}
        for room in (flowrl, backends, operators, graphs):
            names |= {name: getattr(room, name) for name in room.__all__}
        names["flowrl"], names["score"] = flowrl, score
        bound = graphs.dr_grpo(score).bind(
            actor=backends.TorchTrainer("model", device="cpu"), rollout=backends.TorchRollout("model", device="cpu")
        )
        names |= {"job": bound, "CONTEXT": CONTEXT, "TOKENIZER": ChatTokenizer("model")}
        lines, words = PYTHON.strip().splitlines(), COMMANDS.strip().splitlines()
        ends = {line: python(line, names) for line in lines} | {
            f"flowrl {line}": command(line.split()) for line in words
        }
        os.chdir(ROOT)
    counts = Counter(end.split()[0] for end in ends.values())
    kinds = ["refused", "RAW", "SILENT"]
    table("Mistakes of a newcomer", ["made", *kinds], [[str(len(ends)), *(str(counts[kind]) for kind in kinds)]])
    print(*(f"{line}\n    {end}" for line, end in ends.items() if not end.startswith("refused")), sep="\n")
    sys.exit(counts["refused"] < len(ends))


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """A reward as a newcomer writes it."""
    return float(solution_str == ground_truth)


if __name__ == "__main__":
    main()

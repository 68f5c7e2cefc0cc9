"""Write docs/reference/command-line.md, the page of all commands, from the program itself:
``python docs/commands.py``."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main
from typer.core import TyperArgument

from flowrl.app.cli import app

PAGE = Path(__file__).resolve().parent / "reference" / "command-line.md"
HEAD = """# Command line

`flowrl COMMAND --help` prints what this page lists. Some commands need an [extra](../start/install.md#extras).

```sh
flowrl show examples/think.py:graph --to graph.html   # or .md, .svg, .json, .yaml; without --to: Mermaid
flowrl check examples/think.py:training               # the rules, and whether mini-batches divide
flowrl plan examples/think_on_ray.py:training         # what runs where, and what can run in parallel
flowrl diff grpo gspo                                 # built-in algorithms are targets by name
flowrl run run.yaml --set actor.optimizer.lr=1e-6     # the file of a training, and settings by path
flowrl sweep run.yaml --set repeat.n=4,8 --seeds 3    # a grid, or --set lr=log:1e-7..1e-5 --trials 20
flowrl evaluate runs/grpo-001 test.jsonl --k 1,4      # pass@k, maj@k and avg@n of a model or a run
flowrl serve runs/grpo-001 --parser hermes            # a model to a program that speaks OpenAI's API
flowrl runs runs --where "reward > 0.5"               # the runs in a folder
flowrl look runs/grpo-001                             # a run in a browser, live
flowrl rows runs/grpo-001 --worst 3                   # its rows with the lowest scores
flowrl alarms runs/grpo-001                           # what went wrong, and the command that shows it
flowrl blame runs/grpo-001 kl/ref --step 17           # the rows that make a metric
flowrl why runs/grpo-001 "17/gae.advantages[0/5/0#1]" # where a number of a recorded step comes from
flowrl replay runs/grpo-001 --step 17 --set gae.lam=0.5  # what another parameter would have given
flowrl compare runs/a-* runs/b-*                      # what differs, and what it changed
flowrl export runs/grpo-001 --to wandb                # a run that is over, to a tracker
flowrl push runs/grpo-001 org/name                    # the trained model to the Hugging Face Hub
```

A TARGET is `FILE.py:name`, `module:name`, a `.yaml` or `.json` file of a graph or a training, or the name of a built-in
algorithm. Invalid usage prints one paragraph and exits with 2; `--debug`, at any place, shows the traceback.

<!-- written by docs/commands.py from flowrl/app -->
"""


def page() -> str:
    """The page as Markdown."""
    group = typer.main.get_command(app)
    parts = [HEAD]
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        context = typer.Context(command, info_name=f"flowrl {name}")
        usage = f"flowrl {name} {' '.join(command.collect_usage_pieces(context))}"
        parts.append(f"## flowrl {name}\n\n{_text(command.help)}\n\n```text\n{usage}\n```\n")
        records = [(p, p.get_help_record(context)) for p in command.get_params(context) if p.name != "help"]
        shown = [(p, record) for p, record in records if record]
        rows = [f"| `{record[0].strip()}` | {_text(record[1]).replace('|', chr(92) + '|')} |" for _, record in shown]
        title = "argument or option" if any(isinstance(p, TyperArgument) for p, _ in shown) else "option"
        parts += ["\n".join(["<!-- options -->\n", f"| {title} | |", "|---|---|", *rows]) + "\n"] if rows else []
    return "\n".join(parts)


def _text(help: str) -> str:
    """A help text as Markdown: on one line for each paragraph, with no HTML."""
    paragraphs = [" ".join(one.split()) for one in help.split("\n\n")]
    return re.sub(r"([<*])", r"\\\1", "\n\n".join(paragraphs))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

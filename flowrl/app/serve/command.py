"""``flowrl serve``: serves a model on the loopback, to debug a program before it is an `Endpoint` of a training."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from flowrl.app.changes.changes import Import, engine_of
from flowrl.app.evaluate.models import LAST, model_of
from flowrl.errors import ParameterError

Served = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Model folder, name on the Hub, or run folder; or a job or training with an Endpoint, FILE.py:name or a "
        "file, of which the sampling and the parser count.",
        show_default=False,
    ),
]
Parser = Annotated[str | None, typer.Option(help="Format of tool calls. [default: hermes, or that of the job]")]
Port = Annotated[int, typer.Option(help="Port of the loopback; 0 is a free one.", min=0, max=65535)]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy. [default: 1, or that of the job]")]
Length = Annotated[int | None, typer.Option(help="Most tokens of an answer. [default: 1024, or that of the job]")]
Window = Annotated[int | None, typer.Option(help="Most tokens of a conversation. [default: 4096, or that of the job]")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse requests with other sampling.")]
Seed = Annotated[int, typer.Option(help="Random seed of the sampling.")]
Engine = Annotated[str, typer.Option(help="Engine of a model: vllm, sglang or torch.")]
Checkpoint = Annotated[str, typer.Option(help="Of a run: last, best, or a step.")]
RoleName = Annotated[str | None, typer.Option(help="Of a run: the trained role, if there are several.")]


def add_to(app: typer.Typer, out: Console) -> None:
    """Add the command to a command line that prints to `out`."""

    @app.command()
    def serve(
        model: Served,
        parser: Parser = None,
        port: Port = 0,
        temperature: Temperature = None,
        max_new_tokens: Length = None,
        context: Window = None,
        strict: Strict = False,
        seed: Seed = 0,
        engine: Engine = "torch",
        checkpoint: Checkpoint = LAST,
        role: RoleName = None,
        imports: Import = False,
    ) -> None:
        """Serve a policy to programs that speak OpenAI's API, without training; prints URL and key. Ctrl-C ends it."""
        from flowrl.app.changes.engine import kinds
        from flowrl.app.serve.serving import of_job, of_model, serve_forever

        if ".py:" in model or model.endswith((".yaml", ".yml", ".json")):
            if engine != "torch" or checkpoint != LAST or role is not None:
                raise ParameterError(
                    "--engine, --checkpoint and --role choose a model, and a job has its own. Leave them out.",
                    code="cli.bad-option",
                    option="--engine",
                )
            backend, episodes = of_job(model, imports)
        else:
            kind = kinds()[engine_of(engine)]
            backend, episodes = of_model(kind(model_of(model, checkpoint, role), frozen=True))
        given: dict[str, Any] = {"temperature": temperature, "max_new_tokens": max_new_tokens, "context": context}
        serve_forever(
            backend,
            episodes,
            {name: value for name, value in given.items() if value is not None},
            {"strict": True} if strict else {},
            parser,
            port,
            seed,
            lambda line: out.print(line, markup=False),
        )

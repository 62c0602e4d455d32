"""The verbs of the `meshwright` command, each with examples in its help.

Only the verb that is run is imported: the start of a command is most of what a short one takes.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

VERBS: dict[str, tuple[str, ...]] = {
    "show": ("show onef1b -w 4 -n 8", "show zero_bubble --option variant=h2 --format json -o plan.json"),
    "check": ("check plan.json", "show gpipe --format json -o plan.json && meshwright check plan.json"),
    "simulate": ("simulate chimera -w 4 -n 8 --send 0.1", "simulate plan.json --costs costs.json --json"),
    "compare": (
        "compare -w 8 -n 32 --memory 8",
        "compare plan.json --costs costs.json --memory 80GB",
        "compare --tensor --batch 8 --sequence 1024 --hidden 4096 --ranks 8 --memory 40GB",
        "compare --tensor gpt-small --batch 8 --ranks 8",
    ),
    "plan": (
        "plan gpt-small --cluster laptop --batch 32 -o plan.json",
        "plan --profile bert-24.txt --cluster cluster.toml --microbatches 16",
    ),
    "cluster": ("cluster", "cluster show 8xdgx-a100", "cluster discover -o cluster.toml"),
    "profile": (
        "profile gpt-small --length 128 -o profile.json",
        "profile gpt-small --cluster cluster.toml --precision bf16 -o profile.json",
    ),
    "schedules": ("schedules", "schedules --json"),
    "inspect": (
        "inspect gpt-small --stages 4",
        "inspect mine:build --batch-function mine:batch --check",
        "inspect gpt-tiny --box 2,2,1",
    ),
    "verify": (
        "verify gpt-small --schedule chimera --pp 4",
        "verify mine:build --batch-function mine:batch --plan plan.toml",
        "verify gpt-tiny --tp 2 --sequence-parallel",
    ),
    "train": ("train gpt-tiny --pp 2 --dataset notes.txt --max-steps 100 --trace trace.json", "train job.toml"),
    "measure": ("measure gpt-small --pp 4 --schedule chimera -o costs.json", "measure trainer_output --trace both.json"),
}
"""The examples of each verb. A verb is the function of its own name in the file of that name, or a group of verbs, `app`."""


def _version(asked: bool) -> None:
    if asked:
        from meshwright import __version__

        typer.echo(f"meshwright {__version__}")
        raise typer.Exit


def _command(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Plan, prove, simulate and run multi-dimensional parallel training of ordinary PyTorch models."""


def _examples(*lines: str) -> str:
    """Returns the end of a verb's help; blank lines keep the lines separate."""
    return "\n\n".join(["Examples:", *(f"  meshwright {line}" for line in lines)])


def command_line(verb: str = "") -> typer.Typer:
    """Returns the command with this verb alone; with all verbs if there is no such verb, for the help and for messages."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=_examples(
            "schedules",
            "show chimera --workers 4 --microbatches 8",
            "train gpt-tiny --pp 2 --max-steps 20",
            "measure gpt-tiny --pp 2",
        ),
    )
    app.callback()(_command)
    for name in (verb,) if verb in VERBS else VERBS:
        module = import_module(f"meshwright.cli.{name}")
        epilog = _examples(*VERBS[name])
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name, epilog=epilog)
        else:
            app.command(name, epilog=epilog, context_settings=getattr(module, "CONTEXT", None))(getattr(module, name))
    return app

"""The verbs of the `meshwright` command, each with examples in its help."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.cli import check, cluster, compare, inspect, measure, plan, profile, schedules, show, simulate, train, verify


def _version(asked: bool) -> None:
    if asked:
        from meshwright import __version__

        typer.echo(f"meshwright {__version__}")
        raise typer.Exit


def command(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Plan, prove, simulate and run multi-dimensional parallel training of ordinary PyTorch models."""


def _examples(*lines: str) -> str:
    """Returns the end of a verb's help; blank lines keep the lines separate."""
    return "\n\n".join(["Examples:", *(f"  meshwright {line}" for line in lines)])


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
app.callback()(command)
app.command("show", epilog=_examples("show onef1b -w 4 -n 8", "show zero_bubble --option variant=h2 --format json -o plan.json"))(
    show.show
)
app.command("check", epilog=_examples("check plan.json", "show gpipe --format json -o plan.json && meshwright check plan.json"))(
    check.check
)
app.command(
    "simulate", epilog=_examples("simulate chimera -w 4 -n 8 --send 0.1", "simulate plan.json --costs costs.json --json")
)(simulate.simulate)
app.command(
    "compare",
    epilog=_examples(
        "compare -w 8 -n 32 --memory 8",
        "compare plan.json --costs costs.json --memory 80GB",
        "compare --tensor --batch 8 --sequence 1024 --hidden 4096 --ranks 8 --memory 40GB",
        "compare --tensor gpt-small --batch 8 --ranks 8",
    ),
)(compare.compare)
app.command(
    "plan",
    epilog=_examples(
        "plan gpt-small --cluster laptop --batch 32 -o plan.json",
        "plan --profile bert-24.txt --cluster cluster.toml --microbatches 16",
    ),
)(plan.plan)
app.add_typer(
    cluster.app,
    name="cluster",
    epilog=_examples("cluster", "cluster show 8xdgx-a100", "cluster discover -o cluster.toml"),
)
app.command(
    "profile",
    epilog=_examples(
        "profile gpt-small --length 128 -o profile.json",
        "profile gpt-small --cluster cluster.toml --precision bf16 -o profile.json",
    ),
)(profile.profile)
app.command("schedules", epilog=_examples("schedules", "schedules --json"))(schedules.schedules)
app.command(
    "inspect",
    epilog=_examples(
        "inspect gpt-small --stages 4", "inspect mine:build --batch-function mine:batch --check", "inspect gpt-tiny --box 2,2,1"
    ),
)(inspect.inspect)
app.command(
    "verify",
    epilog=_examples(
        "verify gpt-small --schedule chimera --pp 4",
        "verify mine:build --batch-function mine:batch --plan plan.toml",
        "verify gpt-tiny --tp 2 --sequence-parallel",
    ),
)(verify.verify)
app.command(
    "train",
    context_settings=train.CONTEXT,
    epilog=_examples("train gpt-tiny --pp 2 --dataset notes.txt --max-steps 100 --trace trace.json", "train job.toml"),
)(train.train)
app.command(
    "measure",
    context_settings=train.CONTEXT,
    epilog=_examples("measure gpt-small --pp 4 --schedule chimera -o costs.json", "measure trainer_output --trace both.json"),
)(measure.measure)

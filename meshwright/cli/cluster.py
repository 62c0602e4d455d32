"""`meshwright cluster`: lists the clusters that come with the package, shows one, or measures this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli._parts import inputs, outputs

app = typer.Typer(add_completion=False)
Toml = Annotated[bool, inputs.output_option("--toml", help="Print a cluster file instead, to edit it.")]


@app.callback(invoke_without_command=True)
def presets(context: typer.Context, as_json: inputs.Json = False) -> None:
    """List the clusters that come with the package, show one, or measure this machine and write its file."""
    if context.invoked_subcommand is not None:
        return
    from meshwright.ir.files.cluster_file import preset_names, read_cluster
    from meshwright.report.cluster_text import cluster_data, cluster_text

    clusters = {name: read_cluster(name) for name in preset_names()}
    if as_json:
        typer.echo(json.dumps([cluster_data(name, cluster) for name, cluster in clusters.items()]))
        return
    for name, cluster in clusters.items():
        typer.echo(cluster_text(name, cluster))
    typer.echo("Use a name with --cluster; 8xNAME is eight of it. Your own: meshwright cluster discover -o cluster.toml")


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="PRESET|FILE", help="A cluster by name, 8xNAME for eight of it, or a file.")],
    as_json: inputs.Json = False,
    toml: Toml = False,
    output: inputs.Output = None,
) -> None:
    """Show the devices and links of a cluster, or print its file."""
    from meshwright.ir.files.cluster_file import preset_names, preset_text, read_cluster
    from meshwright.report.cluster_text import cluster_data, cluster_text

    cluster = read_cluster(name)
    if toml:
        from meshwright.ir.files.cluster_writer import cluster_to_toml

        text = preset_text(name) if name in preset_names() and not Path(name).exists() else cluster_to_toml(cluster)
    else:
        text = json.dumps(cluster_data(name, cluster)) if as_json else cluster_text(name, cluster)
    outputs.give(text, output)


@app.command()
def discover(
    workers: Annotated[
        int | None, inputs.size_option("--workers", "-w", help="Local processes: one for each GPU, or each core.")
    ] = None,
    output: inputs.Output = None,
) -> None:
    """Measure this machine, or under torchrun the whole cluster: devices, memory, FLOP/s, and the link of each pair."""
    if "RANK" not in os.environ:  # one process: refused before torch is loaded
        outputs.refuse_output(output)
    from meshwright.report.cluster_text import cluster_text
    from meshwright.runtime.discover.discover import discover as measure

    found = measure(workers=workers, ready=lambda: outputs.refuse_output(output))
    if found is None:  # another rank than the first
        return
    typer.echo(cluster_text("found", found.cluster), err=True)
    outputs.give(found.text, output)

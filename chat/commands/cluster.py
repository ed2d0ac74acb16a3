"""Declares `hybrid-memory cluster`, which deploys fleets on a running Ray. The package `cluster` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybridmem.chat.commands.fleet_options import find_cluster
from hybridmem.chat.commands.start import one_line_errors

File = Annotated[
    Path,
    typer.Argument(help="A YAML file with options of `serve` by name, and Ray's `address`.", metavar="CONFIG.yaml"),
]
cluster = typer.Typer(name="cluster", help="Deploy replicas on a running Ray.", no_args_is_help=True)


@cluster.command()
def deploy(config: File) -> None:
    """Deploy a fleet, or change the one that runs under its name. Replicas are replaced one after the other."""
    with one_line_errors():
        find_cluster("commands.deploy").deploy(config)


@cluster.command()
def remove(config: File) -> None:
    """Let a fleet finish its replies, then remove it."""
    with one_line_errors():
        find_cluster("commands.deploy").remove(config)

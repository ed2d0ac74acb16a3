"""Deploys a fleet on a running Ray, for `hybrid-memory cluster deploy CONFIG.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from hybridmem.chat.commands.fleet_options import FLEET, is_fleet
from hybridmem.chat.commands.option_table import Chosen
from hybridmem.chat.commands.serve_options import SERVE
from hybridmem.chat.commands.start import name_of
from hybridmem.chat.server import ServerOptions
from hybridmem.cluster.commands.serve import check_options
from hybridmem.cluster.commands.shared import check_shared, machines_of_ray
from hybridmem.cluster.serving.fleet_options import FleetOptions
from hybridmem.memory import SpecError

OF_THE_FILE = ("address", "name")
"""The keys of the file that are not options of `serve`: Ray's address, and the application's name."""


def read_config(path: Path) -> tuple[Chosen, dict[str, str]]:
    """Read a file that holds options of `serve` by their names, and the options `address` and `name`.

    Raises SpecError.
    """
    import yaml

    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise SpecError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(given, Mapping):
        raise SpecError(f"{path} holds no options; write one a line, such as replicas: 3")
    about = {key: str(given[key]) for key in OF_THE_FILE if key in given}
    rows = {row.name: row for row in SERVE + FLEET}
    values: dict[str, Any] = {name: row.default for name, row in rows.items()}
    for key, value in given.items():
        if key in OF_THE_FILE:
            continue
        if key not in rows:
            raise SpecError(
                f"{path}: there is no option {key!r}; `hybrid-memory serve --help` lists them, with _ for -"
            )
        try:
            values[key] = rows[key].read(value)
        except ValueError as wanted:
            raise SpecError(f"{path}: {key}: {value!r}; give {wanted}") from None
    return Chosen(SERVE + FLEET, values), about


def deploy(path: Path) -> None:
    """Deploy the fleet that a file describes, or change the running fleet of that name.

    The fleet keeps running when this returns.

    Raises SpecError for a wrong file, if there is no Ray at its address, or for a folder of sessions that the machines
    do not share.
    """
    chosen, about = read_config(path)
    is_fleet(chosen)
    check_options(chosen)
    ServerOptions(**chosen.arguments_of("server"))
    if chosen["host"] not in ("127.0.0.1", "localhost", "::1") and chosen["api_key"] is None:
        raise SpecError(f"{path}: host: {chosen['host']} can be reached from other machines; give an api_key")
    import ray
    from ray import serve

    from hybridmem.cluster.serving.application import make_application

    name = _connect(about)
    try:
        if chosen["sessions"] is not None:
            check_shared(chosen["sessions"], machines_of_ray())
        serve.start(http_options={"host": chosen["host"], "port": chosen["port"]})
        serve.run(make_application(FleetOptions.of(chosen)), name=name, route_prefix="/")
        typer.echo(f"{name_of(chosen['model'])} answers at http://{chosen['host']}:{chosen['port']}/v1 as {name}")
    finally:
        ray.shutdown()


def remove(path: Path) -> None:
    """Let the fleet of a file finish its replies, and remove it. Raises SpecError if there is no Ray at its address."""
    _, about = read_config(path)
    import ray
    from ray import serve

    name = _connect(about)
    try:
        serve.delete(name)
    finally:
        ray.shutdown()


def _connect(about: Mapping[str, str]) -> str:
    """Connect to the Ray that a file names. Return the name of the fleet there. Raises SpecError if there is no Ray."""
    import ray

    address = about.get("address", "auto")
    try:
        ray.init(address=address, logging_level="warning", log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise SpecError(
            f"no Ray at address {address!r} ({error}); name one that runs, or start one: ray start --head"
        ) from error
    return about.get("name", "hybrid-memory")

"""Runs a fleet on a Ray on this machine, for `hybrid-memory serve --replicas N`."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import typer

from hybridmem.chat.commands.option_table import Chosen
from hybridmem.chat.commands.serve_options import SERVE
from hybridmem.chat.commands.start import name_of
from hybridmem.chat.server import bind
from hybridmem.cluster.serving.fleet_options import FleetOptions
from hybridmem.cluster.store.place import Place
from hybridmem.memory import SpecError

log = logging.getLogger("hybrid_memory.cluster")
OF_ONE_SERVER = ("max_connections", "max_peer_connections", "prefixes", "save_every")
"""Options that only one server has. In a fleet, Ray's proxy or the store does this work."""
APPLICATION = "hybrid-memory"
OBJECT_STORE_BYTES = 200 << 20


def check_options(chosen: Chosen) -> None:
    """Raise SpecError for an option that would have no effect."""
    for row in SERVE:
        if row.name in OF_ONE_SERVER and chosen[row.name] != row.default:
            raise SpecError(f"{row.flag} is of one server; leave it out with --replicas (prefixes are kept by --store)")
    if (chosen["max_replicas"] or chosen["replicas"]) < chosen["replicas"]:
        raise SpecError(f"--max-replicas={chosen['max_replicas']} is less than --replicas={chosen['replicas']}")
    _ = FleetOptions.of(chosen).quota  # This raises SpecError for wrong limits.


def _check_store(url: str) -> None:
    """Raise SpecError for a store that no replica could use.

    A store that does not answer now is accepted, because it may answer later.
    """
    try:
        Place(url)
    except OSError as error:
        raise SpecError(f"--store={url!r} cannot be used: {error}; give a folder, or a URL that fsspec opens") from None


def run_local(chosen: Chosen) -> None:
    """Serve until a signal says to stop. Raises SpecError."""
    check_options(chosen)
    if chosen["store"] is not None:
        _check_store(chosen["store"])
    with bind(chosen["host"], chosen["port"], has_key=bool(chosen["api_key"] or chosen["keys"])) as listener:
        host, port = listener.getsockname()[:2]
    with shared_sessions(chosen) as options, fleet(options, host, port):
        url = f"http://{host}:{port}"
        typer.echo(f"{name_of(chosen['model'])} answers at {url}/v1, and shows its page at {url}/", err=True)
        _wait_for_signal()


@contextmanager
def shared_sessions(chosen: Chosen) -> Iterator[FleetOptions]:
    """Give all replicas one folder of sessions, because each must find the sessions that others have stored.

    Without --sessions, the folder holds no checkpoints and is deleted when the fleet ends.
    """
    if chosen["sessions"] is not None:
        yield FleetOptions.of(chosen)
        return
    with TemporaryDirectory(prefix="hybrid-memory-") as folder:
        yield FleetOptions.of({**chosen, "sessions": folder, "prefix_bytes": chosen["prefix_bytes"] or "0"})


@contextmanager
def fleet(options: FleetOptions, host: str, port: int) -> Iterator[None]:
    """Run a Ray on this machine, with a fleet on it, while the block runs.

    All replicas share a folder of stored sessions. Unless the options name a folder, it is deleted when the fleet ends.
    """
    with local_ray(options), TemporaryDirectory(prefix="hybrid-memory-sessions-") as folder:
        from ray import serve

        from hybridmem.cluster.serving.application import make_application

        serve.start(http_options={"host": host, "port": port})
        serve.run(make_application(options.with_sessions(folder)), name=APPLICATION, route_prefix="/")
        try:
            yield
        finally:
            _finish_replies(options["grace"])
            serve.shutdown()


def _finish_replies(grace_seconds: float) -> None:
    """Let replies in progress go on for the seconds of `--grace`. New requests get 404 from Ray's proxy meanwhile."""
    from ray import serve
    from ray.exceptions import RayError

    until = time.monotonic() + grace_seconds
    while True:
        try:
            serve.delete(APPLICATION)  # Replicas and gateways end when they have answered all requests.
            return
        except TimeoutError:  # Ray itself waits for a minute only.
            if time.monotonic() > until:
                return
        except RayError as error:  # Ray's controller has ended already.
            log.warning("replies were not waited for: %s", error)
            return


@contextmanager
def local_ray(options: FleetOptions) -> Iterator[None]:
    """Run Ray on this machine. Only this machine can reach it."""
    # This is Ray's own switch to bind its ports to 127.0.0.1. Despite its name, it works on Linux, too.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    most = options["max_replicas"] or options["replicas"]
    n_cpus = math.ceil(most * options["cpus"] + options["gateways"] + 1)
    ray.init(
        num_cpus=n_cpus, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False, logging_level="warning",
        log_to_driver=False,
    )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


def _wait_for_signal() -> None:
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()

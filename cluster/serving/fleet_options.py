"""Holds the chosen options, in the form that is sent to the processes of a fleet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from hybridmem.chat.commands.fleet_options import FLEET
from hybridmem.chat.commands.option_table import Chosen, read_bytes
from hybridmem.chat.commands.serve_options import SERVE
from hybridmem.chat.server import ServerOptions
from hybridmem.cluster.routing.policy import Bounds
from hybridmem.cluster.store.sequences import Quota

REPLICA_DEPLOYMENT = "replica"
GATEWAY_DEPLOYMENT = "gateway"


@dataclass(frozen=True)
class FleetOptions:
    """Holds the options of `serve` and of a fleet, by name, and the fleet's name."""

    values: dict[str, Any]

    @property
    def chosen(self) -> Chosen:
        return Chosen(SERVE + FLEET, self.values)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def server(self) -> ServerOptions:
        """Return the options of one replica's server. Raises SpecError."""
        return ServerOptions(**self.chosen.arguments_of("server"))

    @property
    def gateway_server(self) -> ServerOptions:
        """Return the options of a gateway. It answers as many requests at once as all replicas together.

        Requests are spread evenly over the gateways, so each gateway gets its share of a key's limits.
        """
        most, n = self["max_replicas"] or self["replicas"], self["gateways"]
        keys = tuple(
            replace(
                key, max_requests=_share(key.max_requests, n), tokens_per_minute=_share(key.tokens_per_minute, n)
            )
            for key in self.server.keys
        )  # fmt: skip
        return replace(self.server, max_requests=self.server.max_requests * most, keys=keys)

    @property
    def of_replica(self) -> FleetOptions:
        """Return the options of a replica's own server. The gateway writes the log, and enforces the limits of keys."""
        keys = [replace(key, max_requests=None, tokens_per_minute=None) for key in self.server.keys]
        return FleetOptions({**self.values, "access_log": "off", "keys": keys})

    @property
    def sessions(self) -> str | None:
        """Return the folder of stored sessions that all replicas share, or None."""
        return self["sessions"] or self.values.get("shared_sessions")

    @property
    def quota(self) -> Quota:
        """Return the limits of the store. Raises SpecError."""
        (row,) = (row for row in FLEET if row.name == "store_bytes")
        return Quota(read_bytes(row, self["store_bytes"]), self["store_days"] * 86400)

    @property
    def bounds(self) -> Bounds:
        """Return the bounds of the routing policy."""
        return Bounds(imbalance=self["imbalance"])

    def with_sessions(self, folder: str) -> FleetOptions:
        """Return these options with a folder of stored sessions, unless they have one.

        The folder lasts as long as the fleet.
        """
        return FleetOptions({**self.values, "shared_sessions": folder})

    @staticmethod
    def of(chosen: Mapping[str, Any]) -> FleetOptions:
        """Return the options of a new fleet, which gets a name of its own."""
        return FleetOptions({**chosen, "fleet": uuid4().hex[:12]})


def _share(limit: int | None, n: int) -> int | None:
    return None if limit is None else math.ceil(limit / n)

"""Holds the chosen options as they travel to the processes of a fleet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from chat.commands.fleet import FLEET
from chat.commands.option_table import Chosen, read_bytes
from chat.commands.serve_options import SERVE
from chat.server import ServerOptions
from cluster.routing.policy import Bounds
from cluster.store.sequences import Quota

REPLICA_DEPLOYMENT = "replica"
GATEWAY_DEPLOYMENT = "gateway"


@dataclass(frozen=True)
class FleetOptions:
    """Holds the options of `serve` and of a fleet, by name, and the fleet's own name."""

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
        """Return the options of a gateway, which answers as many requests at once as all replicas together."""
        most = self["max_replicas"] or self["replicas"]
        return replace(self.server, max_requests=self.server.max_requests * most)

    @property
    def quota(self) -> Quota:
        """Return the limits of the store. Raises SpecError."""
        (row,) = (row for row in FLEET if row.name == "store_bytes")
        return Quota(read_bytes(row, self["store_bytes"]), self["store_days"] * 86400)

    @property
    def bounds(self) -> Bounds:
        """Return the numbers of the routing policy."""
        return Bounds(imbalance=self["imbalance"])

    @staticmethod
    def of(chosen: Mapping[str, Any]) -> FleetOptions:
        """Return the options of a new fleet, which gets a name of its own."""
        return FleetOptions({**chosen, "fleet": uuid4().hex[:12]})

"""Lets Ray Serve route by a policy of `cluster.routing`, which a subclass of Ray's `RequestRouter` asks."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from hybridmem.cluster.routing.policies import make_policy
from hybridmem.cluster.routing.prompts import TokenPrompt
from hybridmem.cluster.routing.route import Route

NOTHING = TokenPrompt()


class PolicyRouter(RequestRouter):  # type: ignore[misc]  # of Ray, which mypy skips
    """Ranks replicas by a policy of `cluster.routing`.

    A call's first argument is the prompt. Its second argument is a dict, to which the router adds its reason for each
    replica.
    """

    def initialize_state(self, **options: Any) -> None:
        """Make the policy. Ray calls this with the options of `request_router_kwargs`."""
        self._policy = make_policy(**options)
        self._reported: dict[str, int] = {}
        self._sent: dict[str, str] = {}  # This maps the id of a request to the replica that got it.

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Read the reports of replicas, and forget replicas that are gone.

        Ray calls this whenever anything has changed.
        """
        super().update_replicas(replicas)
        now = time.monotonic()
        names = {replica.replica_id.unique_id: replica for replica in replicas}
        for name in self._reported.keys() - names.keys():
            self._policy.leave(name)
            del self._reported[name]
        for name, replica in names.items():
            stats = replica.routing_stats
            if stats and self._reported.get(name) != stats.get("number"):
                self._policy.report(name, stats, now)
            self._reported[name] = stats.get("number", 0) if stats else 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the policy's order, each as a rank of its own."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not by_name:
            return []
        prompt, why = _arguments(pending_request)
        route = self._policy.choose(prompt, list(by_name), time.monotonic())
        if prompt.pinned is not None and prompt.pinned in by_name:
            route = replace(route, first=prompt.pinned, reason="pinned")
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        self._explain(route, why)
        return [[by_name[name]] for name in route.order]

    def _explain(self, route: Route, why: dict[str, Any]) -> None:
        why.clear()
        why.update({name: route.why(name) for name in route.order})

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Record to which replica a request went. Ray calls this when the replica has accepted it."""
        name = replica_id.unique_id
        self._policy.sent(_arguments(pending_request)[0], name, time.monotonic())
        result.add_done_callback(lambda _: self._policy.done(name))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that has died. Ray calls this before other parts of Ray notice the death."""
        super().on_replica_actor_died(replica_id)
        self._policy.leave(replica_id.unique_id)
        self._reported.pop(replica_id.unique_id, None)


def _arguments(pending: PendingRequest | None) -> tuple[TokenPrompt, dict[str, Any]]:
    if pending is None or len(pending.args) < 2 or not isinstance(pending.args[0], TokenPrompt):
        return NOTHING, {}
    return pending.args[0], pending.args[1]

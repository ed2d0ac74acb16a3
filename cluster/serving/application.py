"""Combines replicas and gateways to an application of Ray Serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message

from hybridmem.chat.prompts import load_tokenizer
from hybridmem.chat.server.owners import Owners
from hybridmem.cluster.routing.prompts import TokenPrompt
from hybridmem.cluster.serving.fleet_options import GATEWAY_DEPLOYMENT, REPLICA_DEPLOYMENT, FleetOptions
from hybridmem.cluster.serving.gateway import Gateway, ReplicaLostError
from hybridmem.cluster.serving.reading import PromptReader
from hybridmem.cluster.serving.replica import ReplicaServer
from hybridmem.cluster.serving.request import ForwardedRequest
from hybridmem.cluster.store.place import Place
from hybridmem.models.loading.folders import find_folder

STATS_SECONDS = 1.0
_GATEWAY_CPUS = 0.5
_HASH_ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
_SPARE_REQUESTS = 64
"""A replica takes this many requests for health and metrics beside those for replies."""


class Replica:
    """Implements the deployment of a replica. Ray calls its methods."""

    async def __init__(self, values: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        name = serve.get_replica_context().replica_id.unique_id
        self._server = ReplicaServer(FleetOptions(values), name)
        await self._server.start()
        self._n_reports = 0

    async def answer(
        self, prompt: TokenPrompt, whys: dict[str, Any], request: ForwardedRequest
    ) -> AsyncIterator[list[Message]]:
        """Yield the messages of a response. `whys` holds, for each replica, the router's reason for choosing it."""
        # Ray's own routers give no reason.
        reason = {"reason": "hash", "resumable_tokens": 0, "prompt_tokens": prompt.n_tokens}
        why = whys.get(self._server.name) or {**reason, "replica": self._server.name}
        alive = whys.keys() if whys else None
        async for messages in self._server.answer(request, prompt, why, alive):
            yield messages

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the replica's report for routers. Ray asks for it and sends it to them."""
        self._n_reports += 1
        return {**await self._server.stats(), "number": self._n_reports}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the numbers from which the number of replicas is decided. Ray asks for them."""
        return self._server.scaling_stats()

    async def metrics(self) -> tuple[str, str]:
        """Return the replica's name and its metrics as text for Prometheus."""
        return self._server.name, await self._server.metrics()

    async def check_health(self) -> None:
        """Raise if the replica should be replaced."""
        self._server.check_health()

    async def __del__(self) -> None:
        if (server := getattr(self, "_server", None)) is not None:
            await server.stop()


class _Handle:
    """Sends requests through a handle of Ray, whose router chooses the replica."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def answer(self, prompt: TokenPrompt, request: ForwardedRequest) -> AsyncIterator[list[Message]]:
        call = self._handle.options(stream=True, method_name="answer", session_id=prompt.session or "")
        response = call.remote(prompt, {}, request)
        try:
            async for messages in response:
                yield messages
        except (ActorDiedError, ActorUnavailableError, RayActorError) as error:
            raise ReplicaLostError(str(error)) from error
        finally:
            response.cancel()

    async def metrics(self) -> dict[str, str]:
        return dict(await self._handle.broadcast("metrics").results_async())


@serve.ingress()
class GatewayIngress:
    """Implements the deployment of a gateway."""

    def __init__(self, values: dict[str, Any], replicas: DeploymentHandle[Any]) -> None:
        options = FleetOptions(values)
        server = options.gateway_server
        tokenizer = load_tokenizer(find_folder(options["model"]))
        reader = PromptReader(
            tokenizer,
            parse_special=server.parse_special,
            max_requests=server.max_requests,
            owners=Owners.of(server),
        )
        shelf = None if options["store"] is None else Place(options["store"])
        keeps_sessions = options.sessions is not None
        self._gateway = Gateway(_Handle(replicas), reader, server, shelf, keeps_sessions=keeps_sessions)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._gateway


def make_application(options: FleetOptions) -> serve.Application:
    """Return the application, which consists of gateways and the replicas to which they forward requests."""
    values = options.values
    replica = serve.deployment(
        Replica,
        name=REPLICA_DEPLOYMENT,
        max_ongoing_requests=options.server.max_requests + _SPARE_REQUESTS,
        ray_actor_options={"num_cpus": options["cpus"], "num_gpus": options["gpus"]},
        request_router_config=_router_config(options),
        graceful_shutdown_timeout_s=options["grace"] + 10,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        **_scale(options),
    ).bind(values)
    gateway = serve.deployment(
        GatewayIngress,
        name=GATEWAY_DEPLOYMENT,
        num_replicas=options["gateways"],
        max_ongoing_requests=options.gateway_server.max_requests + _SPARE_REQUESTS,
        ray_actor_options={"num_cpus": _GATEWAY_CPUS},
        # When the application is deployed again, the new replicas start before the old ones end.
        max_surge_percent=100,
        graceful_shutdown_timeout_s=options["grace"] + 10,
    )
    return gateway.bind(values, replica)


def _router_config(options: FleetOptions) -> RequestRouterConfig:
    if options["router"] == "consistent-hash":
        return RequestRouterConfig(request_router_class=_HASH_ROUTER)
    return RequestRouterConfig(
        request_router_class="hybridmem.cluster.serving.router:PolicyRouter",
        request_router_kwargs={"name": options["router"], **vars(options.bounds)},
        request_routing_stats_period_s=STATS_SECONDS,
    )


def _scale(options: FleetOptions) -> dict[str, Any]:
    most = options["max_replicas"] or options["replicas"]
    if most <= options["replicas"]:
        return {"num_replicas": options["replicas"]}
    policy = AutoscalingPolicy(policy_function="hybridmem.cluster.serving.scaling:scale")
    return {"autoscaling_config": AutoscalingConfig(min_replicas=options["replicas"], max_replicas=most, policy=policy)}

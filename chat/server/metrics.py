"""Counts for Prometheus: requests, their latency, and bytes of the memory.

Every app has a registry of its own, so that one process can hold several.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chat.engine.engine import Engine

_PREFIX = "hybrid_memory"
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN_TOKENS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class Metrics:
    """Holds what a server counts itself, beside the counters of the engine and its memory."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            f"{_PREFIX}_requests",
            "Requests answered; 499: the client went away.",
            ["path", "code"],
            registry=self.registry,
        )
        self.refused_connections = Counter(
            f"{_PREFIX}_refused_connections",
            "Connections closed without a request, by the reason.",
            ["code"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            f"{_PREFIX}_prompt_tokens", "Tokens of prompts, reused ones included.", registry=self.registry
        )
        self.first_token_seconds = Histogram(
            f"{_PREFIX}_time_to_first_token_seconds",
            "From a request's arrival to the first token of a choice.",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.between_tokens_seconds = Histogram(
            f"{_PREFIX}_inter_token_seconds",
            "Between two tokens of a choice.",
            buckets=_BETWEEN_TOKENS_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_EngineCollector(engine))
        ProcessCollector(registry=self.registry)  # resident memory among others: what the budget does not count

    def render(self) -> bytes:
        """Return the text that Prometheus reads. It waits for the step in progress: call it in a thread of its own."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads the counters of engine and memory whenever Prometheus asks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        with engine.lock:
            yield from [*self._tokens(), *self._generations(), *self._bytes()]

    def _tokens(self) -> Iterator[Metric]:
        stats = self._engine.stats
        counts = {
            "computed": (stats.n_fed, "Tokens that the model computed: of prompts and generated ones."),
            "generated": (stats.n_generated, "Tokens generated."),
            "reused": (stats.n_reused, "Tokens of prompts that were taken from the prefix cache."),
            "recomputed": (
                sum(stats.recomputed.values()),
                "Tokens that the prefix cache knew and that were computed again.",
            ),
        }
        for name, (n, what) in counts.items():
            yield CounterMetricFamily(f"{_PREFIX}_{name}_tokens", what, value=n)
        yield CounterMetricFamily(f"{_PREFIX}_steps", "Steps of the model.", value=stats.n_steps)
        yield CounterMetricFamily(
            f"{_PREFIX}_preemptions", "Times that a generation had to make room.", value=stats.n_preempted
        )

    def _generations(self) -> Iterator[Metric]:
        engine = self._engine
        now = GaugeMetricFamily(f"{_PREFIX}_generations", "Generations that have not ended.", labels=["state"])
        load = engine.load
        counts = {"running": load.running, "waiting": load.waiting, "swapped": load.preempted}
        for state, n in counts.items():
            now.add_metric([state], n)
        yield now
        ended = CounterMetricFamily(
            f"{_PREFIX}_generations_ended", "Generations that have ended, by the reason.", labels=["reason"]
        )
        for reason, n in self._engine.stats.finished.items():
            ended.add_metric([reason], n)
        yield ended

    def _bytes(self) -> Iterator[Metric]:
        usage = self._engine.memory.usage()
        by_kind = GaugeMetricFamily(
            f"{_PREFIX}_used_bytes", "Bytes of the budget in use, cached prefixes included.", labels=["kind"]
        )
        for kind, n_bytes in usage.by_kind.items():
            by_kind.add_metric([kind], n_bytes)
        yield by_kind
        yield GaugeMetricFamily(f"{_PREFIX}_budget_bytes", "Bytes that the memory may use.", value=usage.budget_bytes)
        yield GaugeMetricFamily(
            f"{_PREFIX}_free_bytes", "Bytes of the budget that nothing holds.", value=self._engine.memory.free_bytes
        )
        swapped = GaugeMetricFamily(f"{_PREFIX}_swapped_bytes", "Bytes swapped out of the budget.", labels=["place"])
        swapped.add_metric(["host"], usage.host_bytes)
        swapped.add_metric(["disk"], usage.disk_bytes)
        yield swapped

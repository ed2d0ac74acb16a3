"""Counts requests, their latency, and the bytes of the memory, for Prometheus.

Every app has a registry of its own, so that one process can hold several.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hybridmem.chat.engine.engine import Engine, Generation
from hybridmem.chat.server.exposition import exposition
from hybridmem.chat.server.metric_names import PREFIX, BothNames
from hybridmem.chat.server.process_metrics import ProcessMetrics

_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN_TOKENS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class Metrics:
    """Holds the server's own counters. The engine and its memory have counters of their own.

    Args:
        model: the model's name, for the label that vLLM's dashboards read.
    """

    def __init__(self, engine: Engine, model: str = "") -> None:
        # This is the latest generation that has ended. The page's view reads it.
        self.last_generation: Generation | None = None
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests answered; 499: the client went away.", "path", "code")
        self.refused_connections = self._counter(
            "refused_connections", "Connections closed without a request, by the reason.", "code"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts, reused ones included.")
        seconds = _FIRST_TOKEN_BUCKETS
        self.first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to the first token of a choice.", seconds
        )
        self.between_tokens_seconds = self._histogram(
            "inter_token_seconds", "Between two tokens of a choice.", _BETWEEN_TOKENS_BUCKETS
        )
        self.request_seconds = self._histogram(
            "request_seconds", "From a request's arrival to its last token.", seconds
        )
        self.queue_seconds = self._histogram("queue_seconds", "Until a choice takes part in the steps.", seconds)
        self.prefill_seconds = self._histogram("prefill_seconds", "From then on until its first token.", seconds)
        self.decode_seconds = self._histogram("decode_seconds", "From its first token to its last.", seconds)
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKEN_BUCKETS)
        self.request_generated_tokens = self._histogram(
            "request_generated_tokens", "Tokens of a choice's reply.", _TOKEN_BUCKETS
        )
        ours = [metric for metric in vars(self).values() if isinstance(metric, Counter | Histogram)]
        self.registry.register(BothNames([*ours, _EngineCollector(engine)], model))
        # These numbers include the resident memory of the process, which the budget does not count.
        self.process = ProcessMetrics(self.registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", what, labels, registry=None)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", what, buckets=buckets, registry=None)

    def observe_end(self, generation: Generation, seconds: float) -> None:
        """Count a choice that has ended `seconds` after its request came."""
        self.last_generation = generation
        self.request_seconds.observe(seconds)
        self.request_prompt_tokens.observe(generation.n_base + generation.n_prompt)
        self.request_generated_tokens.observe(len(generation.token_ids))
        submitted, admitted = generation.submitted_at, generation.admitted_at
        first, finished = generation.first_token_at, generation.finished_at
        if admitted is not None:
            self.queue_seconds.observe(admitted - submitted)
            if first is not None:
                self.prefill_seconds.observe(first - admitted)
        if first is not None and finished is not None:
            self.decode_seconds.observe(finished - first)

    def render(self) -> bytes:
        """Return the text that Prometheus reads. It waits for no step. Cost: a millisecond or two."""
        return exposition(self.registry)


class _EngineCollector(Collector):
    """Reads the counters of engine and memory whenever Prometheus asks.

    It takes no lock, so it waits for no step. Each count is read as it is at that moment, and two of them may be a step
    apart.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        yield from [*self._tokens(), *self._generations(), *self._bytes()]

    def _tokens(self) -> Iterator[Metric]:
        stats = self._engine.stats
        counts = {
            "computed": (stats.n_fed, "Tokens that the model computed: of prompts and generated ones."),
            "generated": (stats.n_generated, "Tokens generated."),
            "reused": (stats.n_reused, "Tokens of prompts that were taken from the prefix cache."),
            "forked": (stats.n_forked, "Tokens of prompts that were taken from another choice of the request."),
            "recomputed": (
                sum(dict(stats.recomputed).values()),
                "Tokens that the prefix cache knew and that were computed again.",
            ),
            "drafted": (stats.n_drafted, "Tokens that were drafted and verified."),
            "accepted": (stats.n_accepted, "Drafted tokens that were right."),
            "taken_back": (stats.n_discarded, "Generated tokens that were taken back, with calls of tools."),
        }
        for name, (n, what) in counts.items():
            yield CounterMetricFamily(f"{PREFIX}_{name}_tokens", what, value=n)
        yield CounterMetricFamily(f"{PREFIX}_drafts", "Drafts that were verified.", value=stats.n_drafts)
        places = CounterMetricFamily(
            f"{PREFIX}_accepted_tokens_by_position", "Drafted tokens that were right, by their place in the draft.",
            labels=["position"],
        )  # fmt: skip
        for place in sorted(dict(stats.drafted_at)):
            places.add_metric([str(place)], stats.accepted_at[place])
        yield places
        yield GaugeMetricFamily(
            f"{PREFIX}_drafts_saved_seconds", "Time that drafts have saved; negative if they lost time.",
            value=stats.saved_seconds,
        )  # fmt: skip
        yield CounterMetricFamily(
            f"{PREFIX}_calls_taken_back", "Calls of tools that broke their schemas and were drawn again.",
            value=stats.n_taken_back,
        )  # fmt: skip
        yield CounterMetricFamily(f"{PREFIX}_steps", "Steps of the model.", value=stats.n_steps)
        yield CounterMetricFamily(
            f"{PREFIX}_preemptions", "Times that a generation had to make room.", value=stats.n_preempted
        )

    def _generations(self) -> Iterator[Metric]:
        engine = self._engine
        now = GaugeMetricFamily(f"{PREFIX}_generations", "Generations that have not ended.", labels=["state"])
        load = engine.load
        counts = {"running": load.running, "waiting": load.waiting, "swapped": load.preempted}
        for state, n in counts.items():
            now.add_metric([state], n)
        yield now
        ended = CounterMetricFamily(
            f"{PREFIX}_generations_ended", "Generations that have ended, by the reason.", labels=["reason"]
        )
        for reason, n in dict(engine.stats.finished).items():
            ended.add_metric([reason], n)
        yield ended

    def _bytes(self) -> Iterator[Metric]:
        counters = self._engine.memory.counters
        by_kind = GaugeMetricFamily(
            f"{PREFIX}_used_bytes", "Bytes of the budget in use, cached prefixes included.", labels=["kind"]
        )
        for kind, n_bytes in counters.bytes_by_pool().items():
            by_kind.add_metric([kind], n_bytes)
        yield by_kind
        budget, used = counters.budget_bytes, counters.used_bytes
        yield GaugeMetricFamily(f"{PREFIX}_budget_bytes", "Bytes that the memory may use.", value=budget)
        free = counters.free_bytes
        yield GaugeMetricFamily(f"{PREFIX}_free_bytes", "Bytes of the budget that nothing holds.", value=free)
        share = used / budget
        yield GaugeMetricFamily(f"{PREFIX}_budget_use_ratio", "Share of the budget in use, 0 ... 1.", value=share)
        swapped = GaugeMetricFamily(f"{PREFIX}_swapped_bytes", "Bytes swapped out of the budget.", labels=["place"])
        for place, n_bytes in zip(("host", "disk"), counters.swapped_bytes, strict=True):
            swapped.add_metric([place], n_bytes)
        yield swapped

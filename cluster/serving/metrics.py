"""Joins the metrics of a gateway and its replicas. Each sample of a replica gets a label with the replica's name."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from hybridmem.cluster.store.health import StoreHealth


def join_metrics(own: CollectorRegistry, texts: dict[str, str]) -> str:
    """Return one text for Prometheus.

    Args:
        own: the registry of the gateway.
        texts: replica -> the text of its own /metrics.
    """
    families: dict[str, Metric] = {}
    for replica, text in sorted(texts.items()):
        for family in text_string_to_metric_families(text):
            joined = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                joined.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
    together = CollectorRegistry()
    together.register(_Given(families))
    return (generate_latest(own) + generate_latest(together)).decode()


class _Given(Collector):
    def __init__(self, families: dict[str, Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return list(self._families.values())


class StoreCollector(Collector):
    """Reports whether the store is up, and how many sequences, tokens and bytes were moved."""

    def __init__(self, health: StoreHealth) -> None:
        self._health = health

    def collect(self) -> Iterator[Metric]:
        is_up = float(self._health.error is None)
        yield GaugeMetricFamily("hybrid_memory_store_up", "1 if the last call of the store succeeded.", value=is_up)
        events = CounterMetricFamily(
            "hybrid_memory_store_events", "What happened with the store: sequences, bytes, failures.", labels=["event"]
        )
        for name, n in sorted(self._health.counts.items()):
            events.add_metric([name], n)
        yield events

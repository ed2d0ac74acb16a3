"""Joins the metrics of a gateway and its replicas: each sample of a replica says which one it is of."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def join_metrics(own: CollectorRegistry, texts: dict[str, str]) -> str:
    """Return one text for Prometheus.

    Args:
        own: the gateway's registry.
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

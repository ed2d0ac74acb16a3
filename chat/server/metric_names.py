"""Gives metrics the names that vLLM's dashboards read, in addition to this library's names.

Nothing is counted or read twice. Each family is read once when Prometheus asks, and written under each of its names.
vLLM's names get the label `model_name`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

PREFIX = "hybrid_memory"
THEIRS = "vllm:"

_SAME: dict[str, tuple[str, ...]] = {
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "request_seconds": ("e2e_request_latency_seconds",),
    "queue_seconds": ("request_queue_time_seconds",),
    "prefill_seconds": ("request_prefill_time_seconds",),
    "decode_seconds": ("request_decode_time_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_generated_tokens": ("request_generation_tokens",),
    "prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),
    "reused_tokens": ("prefix_cache_hits",),
    "generated_tokens": ("generation_tokens",),
    "preemptions": ("num_preemptions",),
    "drafts": ("spec_decode_num_drafts",),
    "accepted_tokens_by_position": ("spec_decode_num_accepted_tokens_per_pos",),
    "drafted_tokens": ("spec_decode_num_draft_tokens",),
    "accepted_tokens": ("spec_decode_num_accepted_tokens",),
    "generations_ended": ("request_success",),
    "budget_use_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
}
"""Our family of metrics -> the families of vLLM that mean the same."""
_BY_STATE = {"running": "num_requests_running", "waiting": "num_requests_waiting", "swapped": "num_requests_swapped"}
_LABELS = {"reason": "finished_reason"}


class BothNames(Collector):
    """Shows families of metrics under this library's names and under vLLM's.

    Args:
        ours: the registry whose families are shown.
        model: the value of the label `model_name`.
    """

    def __init__(self, ours: Iterable[Collector], model: str) -> None:
        self._ours = tuple(ours)
        self._model = model

    def describe(self) -> list[Metric]:
        return []  # Nothing is collected when this is registered.

    def collect(self) -> Iterator[Metric]:
        for collector in self._ours:
            for family in collector.collect():
                yield family
                name = family.name.removeprefix(f"{PREFIX}_")
                for theirs in _SAME.get(name, ()):
                    yield self._renamed(family, theirs)
                if name == "generations":
                    yield from self._by_state(family)

    def _renamed(self, family: Metric, theirs: str) -> Metric:
        renamed = Metric(THEIRS + theirs, family.documentation, family.type)
        for sample in family.samples:
            name = THEIRS + theirs + sample.name.removeprefix(family.name)
            labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
            renamed.samples.append(sample._replace(name=name, labels={"model_name": self._model, **labels}))
        return renamed

    def _by_state(self, family: Metric) -> Iterator[Metric]:
        for sample in family.samples:
            name = THEIRS + _BY_STATE[sample.labels["state"]]
            gauge = Metric(name, family.documentation, "gauge")
            gauge.add_sample(name, {"model_name": self._model}, sample.value)
            yield gauge

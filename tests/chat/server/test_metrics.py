"""Prometheus reads our metrics, those of vLLM's dashboards, and ours for Grafana. It waits for no step."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server.metrics import Metrics
from hybridmem.memory import HybridMemory
from hybridmem.models import LanguageModel
from tests.chat.servers import MODEL, Running, running

DASHBOARD = Path(__file__).parents[3] / "docs" / "how-to" / "grafana-dashboard.json"


def samples(server: Running) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = server.call("GET", "/metrics").body.decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_names_of_vllm_say_the_same_as_ours(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    with running(embedded, tokenizer) as server:
        for _ in range(3):
            server.chat()
        found = samples(server)
        model = frozenset({("model_name", MODEL)})

        def pair(ours: str, theirs: str) -> tuple[float, float]:
            return found[f"hybrid_memory_{ours}", frozenset()], found[f"vllm:{theirs}", model]

        for ours, theirs in (
            ("time_to_first_token_seconds_count", "time_to_first_token_seconds_count"),
            ("request_seconds_count", "e2e_request_latency_seconds_count"),
            ("queue_seconds_count", "request_queue_time_seconds_count"),
            ("decode_seconds_sum", "request_decode_time_seconds_sum"),
            ("prompt_tokens_total", "prompt_tokens_total"),
            ("reused_tokens_total", "prefix_cache_hits_total"),
            ("generated_tokens_total", "generation_tokens_total"),
        ):
            a, b = pair(ours, theirs)
            assert a == b > 0, theirs
        assert found["vllm:request_success_total", model | {("finished_reason", "stop")}] == 3
        assert found["vllm:num_requests_running", model] == found["vllm:num_requests_waiting", model] == 0
        assert 0 < found["vllm:kv_cache_usage_perc", model] < 1

        names = {name for name, _ in found}
        dashboard = json.loads(DASHBOARD.read_text())
        read = {
            name
            for panel in dashboard["panels"]
            for target in panel["targets"]
            for name in re.findall(r"(?:vllm:|hybrid_memory_|process_)\w+", target["expr"])
        }
        assert len(read) > 20 and read <= names


def test_metrics_wait_for_no_step(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    with running(embedded, tokenizer) as server:
        server.chat()
        with server.engine.lock:  # A step holds this lock, too.
            assert server.call("GET", "/metrics").status == 200


def test_the_text_is_what_the_library_writes(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    """This also holds for labels that must be escaped, and for numbers that change between two readings."""
    metrics = Metrics(Engine(embedded, HybridMemory(embedded.memory_spec, "16MiB"), tokenizer), 'a "quoted" name\\')
    for n in (0, 1, 12_345_678):
        metrics.requests.labels("/v1/chat\n", "200").inc(n)
        metrics.first_token_seconds.observe(0.03 * n)
        assert metrics.render() == generate_latest(metrics.registry)

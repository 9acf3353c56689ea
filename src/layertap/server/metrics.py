"""What Prometheus is told, in a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from layertap.outputs import RequestOutput
from layertap.server.engine import AsyncEngine
from layertap.server.storage import Storage

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

_ENGINE_GAUGES = {
    "num_running": ("requests_running", "Requests in the running batch"),
    "num_waiting": ("requests_waiting", "Requests that wait to be scheduled: the queue's depth"),
    "num_storing": ("requests_storing", "Requests whose states are being stored"),
    "num_blocks": ("cache_blocks", "Blocks of the KV and hidden-state cache"),
    "num_free_blocks": ("cache_blocks_free", "Blocks that are free or only cached"),
}
_ENGINE_COUNTERS = {
    "num_steps": ("steps", "Steps of the engine"),
    "num_computed_tokens": ("computed_tokens", "Tokens computed"),
    "num_preemptions": ("preemptions", "Requests preempted for want of blocks"),
    "prefix_cache_queries": ("prefix_cache_queries_tokens", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_cache_hits_tokens", "Prompt tokens found in the prefix cache"),
}
_CONNECTOR_GAUGES = {
    "requests_queued": ("store_requests_queued", "Requests that wait for a writer"),
    "requests_writing": ("store_requests_writing", "Requests being written"),
    "staging_buffers": ("staging_buffers", "Buffers of the staging ring"),
    "staging_buffers_in_use": ("staging_buffers_in_use", "Buffers of the staging ring that hold a chunk"),
}
_CONNECTOR_COUNTERS = {
    "bytes_written": ("stored_bytes", "Bytes of hidden states stored"),
    "tokens_written": ("stored_tokens", "Tokens whose hidden states were stored"),
    "requests_completed": ("stored_requests", "Records stored"),
    "requests_failed": ("store_failures", "Records that could not be stored, or were given up"),
    "gather_seconds": ("gather_seconds", "Time that writer threads spent copying rows out of the cache"),
    "write_seconds": ("write_seconds", "Time that writer threads spent in the sink"),
    "staging_wait_seconds": ("staging_wait_seconds", "Time spent waiting for a staging buffer"),
}


class Metrics:
    """Counters and histograms of requests; gauges of engines and storage are read when they are asked for."""

    def __init__(self, engine: AsyncEngine, storage: Storage | None) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine, storage))
        self.http = Counter(
            "layertap_http_requests", "HTTP requests", ["method", "route", "status"], registry=self.registry
        )
        self.in_flight = Gauge(
            "layertap_http_in_flight", "HTTP requests being answered", registry=self.registry
        )
        self.requests = Counter(
            "layertap_requests", "Prompts that ended, by how", ["finish_reason"], registry=self.registry
        )
        self.failures = Counter(
            "layertap_request_failures", "Prompts that failed, by kind", ["kind"], registry=self.registry
        )
        self.prompt_tokens = Counter("layertap_prompt_tokens", "Prompt tokens", registry=self.registry)
        self.generation_tokens = Counter(
            "layertap_generation_tokens", "Generated tokens", registry=self.registry
        )
        self.prompt_length = Histogram(
            "layertap_request_prompt_tokens", "Tokens of a prompt", buckets=_TOKENS, registry=self.registry
        )
        self.queue_time = self._seconds("queue_time_seconds", "From arrival to the first step")
        self.first_token = self._seconds("time_to_first_token_seconds", "From arrival to the first token")
        self.to_file = self._seconds("time_to_file_seconds", "From arrival to a readable record")
        self.latency = self._seconds("request_seconds", "From arrival to the end")

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(f"layertap_{name}", text, buckets=_SECONDS, registry=self.registry)

    def finished(self, output: RequestOutput) -> None:
        """Count a prompt that has ended."""
        if output.error is not None:
            self.failures.labels(output.error.kind).inc()
            self.requests.labels("error" if output.error.kind != "aborted" else "abort").inc()
            return
        self.requests.labels(output.outputs[0].finish_reason or "").inc()
        self.prompt_tokens.inc(len(output.prompt_token_ids))
        self.prompt_length.observe(len(output.prompt_token_ids))
        self.generation_tokens.inc(sum(len(o.token_ids) for o in output.outputs))
        times = output.metrics
        if times is None:
            return
        pairs = (
            (self.queue_time, times.first_scheduled),
            (self.first_token, times.first_token),
            (self.to_file, times.stored),
            (self.latency, time.monotonic()),
        )
        for histogram, moment in pairs:
            if moment is not None:
                histogram.observe(max(0.0, moment - times.arrival))

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads engines and storage at each scrape."""

    def __init__(self, engine: AsyncEngine, storage: Storage | None) -> None:
        self._engine = engine
        self._storage = storage

    def describe(self) -> Iterator[Metric]:
        return iter(())  # nothing is read at registration

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from _families(stats, _ENGINE_GAUGES, GaugeMetricFamily)
        yield from _families(stats, _ENGINE_COUNTERS, CounterMetricFamily)
        connectors = {name: s.get("connector", {}) for name, s in stats.items()}
        yield from _families(connectors, _CONNECTOR_GAUGES, GaugeMetricFamily)
        yield from _families(connectors, _CONNECTOR_COUNTERS, CounterMetricFamily)
        usage = GaugeMetricFamily(
            "layertap_cache_usage", "Share of blocks in use, 0 to 1", labels=["replica"]
        )
        rate = GaugeMetricFamily(
            "layertap_prefix_cache_hit_rate", "Share of prompt tokens found", labels=["replica"]
        )
        for name, s in stats.items():
            if s.get("num_blocks"):
                usage.add_metric([name], 1 - s["num_free_blocks"] / s["num_blocks"])
                rate.add_metric([name], s["prefix_cache_hits"] / max(1, s["prefix_cache_queries"]))
        yield usage
        yield rate
        if any("restarts" in s for s in stats.values()):
            yield from _families(
                stats, {"restarts": ("replica_restarts", "Engine processes restarted")}, CounterMetricFamily
            )
        if self._storage is not None:
            yield GaugeMetricFamily(
                "layertap_storage_bytes", "Bytes of records in the folder", self._storage.used_bytes
            )
            yield CounterMetricFamily(
                "layertap_storage_expired", "Records aged out unread", self._storage.expired
            )
            if self._storage.max_bytes is not None:
                yield GaugeMetricFamily("layertap_storage_max_bytes", "max_bytes", self._storage.max_bytes)


def _families(
    stats: dict[str, dict[str, Any]], names: dict[str, tuple[str, str]], family: type[Any]
) -> Iterator[Metric]:
    for key, (name, text) in names.items():
        metric = family(f"layertap_{name}", text, labels=["replica"])
        for replica, values in stats.items():
            if key in values:
                metric.add_metric([replica], values[key])
        yield metric

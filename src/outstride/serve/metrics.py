"""Prometheus metrics, and the log: one JSON object per request, without any text of it."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from outstride.serve.ipc import EngineFault, Gauges
from outstride.serve.responses import ResponseBuilder

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


def make_log() -> logging.Logger:
    """The log: JSON lines on standard error."""
    log = logging.Logger("outstride.serve", logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    return log


class ProcessCollector:
    """Metrics that are read when they are asked for: of this process, and the engine's gauges."""

    def __init__(self) -> None:
        self.gauges: Gauges | None = None

    def collect(self) -> Iterator[Metric]:
        gauges = self.gauges
        yield GaugeMetricFamily(
            "outstride_engine_ready", "Whether the engine answers", float(gauges is not None)
        )
        yield CounterMetricFamily(
            "outstride_http_cpu_seconds",
            "Processor time of the HTTP process",
            value=time.process_time(),
        )
        if gauges is None:
            return
        used = 1.0 - gauges.pages_free / gauges.pages if gauges.pages else 0.0
        for name, value, about in (
            ("num_requests_running", gauges.running, "Answers that take part in passes"),
            ("num_requests_waiting", gauges.waiting, "Answers that wait in the engine's queue"),
            ("kv_cache_pages", gauges.pages, "Pages of the KV cache"),
            ("kv_cache_pages_free", gauges.pages_free, "Pages that are free or can be evicted"),
            ("kv_cache_usage_ratio", used, "Share of the KV cache's pages in use"),
            ("kv_cache_consistent", gauges.intact, "Whether all integrity checks passed"),
            ("engine_resident_memory_bytes", gauges.rss, "Memory of the engine process"),
        ):
            yield GaugeMetricFamily(f"outstride_{name}", about, float(value))
        for name, total, about in (
            ("engine_steps", gauges.steps, "Passes of the target model"),
            ("engine_step_cpu_seconds", gauges.cpu_steps, "Processor time in engine steps"),
            ("engine_cpu_seconds", gauges.cpu_all, "Processor time of the engine process"),
        ):
            yield CounterMetricFamily(f"outstride_{name}", about, value=float(total))
        verbs = CounterMetricFamily(
            "outstride_engine_step_seconds", "Time in engine steps, by verb", labels=["verb"]
        )
        for verb, seconds in gauges.seconds.items():
            verbs.add_metric([verb], seconds)
        yield verbs


class Metrics:
    """Counts requests in the HTTP process, and shows what the engine reports."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.log = make_log()
        self._engine = ProcessCollector()
        own.register(self._engine)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"outstride_{name}", about, labels, registry=own)

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"outstride_{name}", about, registry=own)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"outstride_{name}", about, buckets=buckets, registry=own)

        self.http_requests = counter(
            "http_requests", "HTTP requests, by route and status", "route", "status"
        )
        self.requests_rejected = counter("requests_rejected", "Requests that met a full queue")
        self.engine_restarts = counter("engine_restarts", "Engine processes that died")
        self.in_flight = gauge("num_requests_in_flight", "Answers that run or wait")
        self.latency = histogram(
            "e2e_request_latency_seconds", "From admission to the end of a request", _SECONDS
        )
        self.first_token = histogram(
            "time_to_first_token_seconds", "Until the first output of a stream", _SECONDS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds",
            "Between two outputs of a streamed answer; one pass may bring several tokens",
            _TOKEN_SECONDS,
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.cached_tokens = counter(
            "prompt_tokens_cached", "Prompt tokens found in the prefix cache"
        )
        self.hit_ratio = gauge(
            "prefix_cache_hit_ratio", "Cached prompt tokens per prompt token, since the start"
        )
        self.generation_tokens = counter("generation_tokens", "Tokens of answers")
        self.decode_passes = counter(
            "decode_passes", "Target passes that emitted tokens, summed over answers"
        )
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Drafted tokens")
        self.accepted_tokens = counter(
            "spec_decode_num_accepted_tokens", "Accepted draft tokens, by drafter", "drafter"
        )
        self.time_saved = gauge(
            "estimated_time_saved_seconds", "Saved against plain decoding: an estimate"
        )

    def finished(
        self, response: ResponseBuilder, seconds: float, time_to_first_token: float | None
    ) -> None:
        """Counts a request that has ended."""
        usage = response.usage()
        own = usage["outstride"]
        self.latency.observe(seconds)
        if time_to_first_token is not None:
            self.first_token.observe(time_to_first_token)
        self.prompt_tokens.inc(usage["prompt_tokens"])
        self.cached_tokens.inc(usage["prompt_tokens_details"]["cached_tokens"])
        self.generation_tokens.inc(usage["completion_tokens"])
        self.decode_passes.inc(own["passes"])
        self.draft_tokens.inc(own["proposed"])
        for drafter, count in own["sources"].items():
            self.accepted_tokens.labels(drafter).inc(count)
        self.time_saved.inc(own["time_saved"]["seconds"])

    def log_fault(self, error_id: str, fault: EngineFault) -> None:
        """Logs why a request failed; its client gets the id."""
        self.log.error(
            json.dumps(
                {
                    "time": round(time.time(), 3),
                    "error": error_id,
                    "kind": fault.kind,
                    "message": fault.message,
                }
            )
        )

    def text(self, gauges: Gauges | None) -> bytes:
        """All metrics in Prometheus' text format; `gauges` is None while no engine answers."""
        self._engine.gauges = gauges
        total, cached = self.prompt_tokens._value.get(), self.cached_tokens._value.get()
        self.hit_ratio.set(cached / total if total else 0.0)
        return generate_latest(self.registry)

    def log_request(self, values: dict[str, Any]) -> None:
        """Writes the line of one request."""
        self.log.info(json.dumps(values))

"""Figures for Prometheus, and the log: one line per request, without a word of what it said."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outstride.serve.answers import Answer
from outstride.serve.wire import Fault, Gauges

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


def make_log() -> logging.Logger:
    """The log: JSON lines on standard error."""
    log = logging.Logger("outstride.serve", logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    return log


class Metrics:
    """What is counted in the HTTP process, and what the engine reports of itself."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.log = make_log()
        self.requests = Counter(
            "outstride_requests", "Requests, by route and status", ["route", "status"], registry=own
        )
        self.refused = Counter("outstride_refused", "Requests refused: full queue", registry=own)
        self.restarts = Counter("outstride_engine_restarts", "Engines that died", registry=own)
        self.running = Gauge("outstride_answers_open", "Answers under way or waiting", registry=own)
        self.seconds = Histogram(
            "outstride_request_seconds", "Whole requests", buckets=_SECONDS, registry=own
        )
        self.first = Histogram(
            "outstride_first_token_seconds", "Until the first text", buckets=_SECONDS, registry=own
        )
        self.prompt = Counter("outstride_prompt_tokens", "Tokens of prompts", registry=own)
        self.cached = Counter(
            "outstride_cached_tokens", "Prompt tokens found in the prefix tree", registry=own
        )
        self.hit_rate = Gauge(
            "outstride_prefix_hit_rate", "Cached prompt tokens per prompt token", registry=own
        )
        self.generated = Counter("outstride_generated_tokens", "Tokens of answers", registry=own)
        self.passes = Counter(
            "outstride_answer_passes", "Target passes that emitted, per answer", registry=own
        )
        self.proposed = Counter("outstride_proposed_tokens", "Drafted tokens", registry=own)
        self.accepted = Counter(
            "outstride_accepted_tokens",
            "Drafted tokens that held, by drafter",
            ["drafter"],
            registry=own,
        )
        self.saved = Gauge(
            "outstride_time_saved_seconds",
            "Saved against plain decoding: an estimate",
            registry=own,
        )
        self.ready = Gauge("outstride_ready", "Whether the engine answers", registry=own)
        self._engine = {
            name: Gauge(f"outstride_engine_{name}", about, registry=own)
            for name, about in (
                ("steps", "Passes of the target"),
                ("running", "Sequences that take part in passes"),
                ("waiting", "Sequences that wait for a place"),
                ("pages", "Pages of the cache"),
                ("pages_free", "Pages that can be had"),
                ("rss", "Bytes of memory that the engine process holds"),
                ("cpu_steps", "Processor seconds of the engine process in steps"),
                ("cpu_all", "Processor seconds of the engine process"),
                ("intact", "Whether the cache agreed with itself when last idle"),
            )
        }
        self._verbs = Gauge(
            "outstride_engine_seconds", "Seconds of steps, by verb", ["verb"], registry=own
        )
        self._http = Gauge(
            "outstride_http_cpu_seconds", "Processor seconds of the HTTP process", registry=own
        )

    def answered(self, answer: Answer, seconds: float, first: float | None) -> None:
        """Enters a request that is over."""
        usage = answer.usage()
        own = usage["outstride"]
        self.seconds.observe(seconds)
        if first is not None:
            self.first.observe(first)
        self.prompt.inc(usage["prompt_tokens"])
        self.cached.inc(usage["prompt_tokens_details"]["cached_tokens"])
        self.generated.inc(usage["completion_tokens"])
        self.passes.inc(own["passes"])
        self.proposed.inc(own["proposed"])
        for drafter, count in own["sources"].items():
            self.accepted.labels(drafter).inc(count)
        self.saved.inc(own["time_saved"]["seconds"])

    def fault(self, name: str, fault: Fault) -> None:
        """A request that failed by no fault of its own."""
        self.log.error(
            json.dumps(
                {
                    "time": round(time.time(), 3),
                    "error": name,
                    "kind": fault.kind,
                    "message": fault.message,
                }
            )
        )

    def text(self, gauges: Gauges | None) -> bytes:
        """Everything, as Prometheus reads it."""
        self.ready.set(gauges is not None)
        self._http.set(time.process_time())
        total, cached = self.prompt._value.get(), self.cached._value.get()
        self.hit_rate.set(cached / total if total else 0.0)
        if gauges is not None:
            for name, gauge in self._engine.items():
                gauge.set(getattr(gauges, name))
            for verb, seconds in gauges.seconds.items():
                self._verbs.labels(verb).set(seconds)
        return generate_latest(self.registry)

    def line(self, values: dict[str, Any]) -> None:
        """Writes the line of one request."""
        self.log.info(json.dumps(values))

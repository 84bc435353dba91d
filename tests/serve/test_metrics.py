"""Prometheus metrics: latencies, draft tokens, and the table of the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.running import CAP, MESSAGES, Running, wait_until

PAGE = Path(__file__).parents[2] / "docs" / "server.md"


def samples(server: Running) -> dict[str, float]:
    """All samples, summed over their labels."""
    server.metric("outstride_num_requests_running")  # waits while the engine is too busy to report
    text = httpx.get(f"{server.url}/metrics", headers=server.headers, timeout=CAP).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_latencies_are_those_of_streams(client: openai.OpenAI, server: Running) -> None:
    sampling: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    sampling["logit_bias"] = {"70": 100}
    extra: Any = {"ignore_eos": True, "outstride": {"method": "plain"}}
    before = samples(server)
    client.chat.completions.create(**sampling, extra_body=extra)
    between = samples(server)
    list(client.chat.completions.create(**sampling, stream=True, extra_body=extra))
    whole = "outstride_e2e_request_latency_seconds_count"
    wait_until(lambda: samples(server)[whole] == before[whole] + 2, "the stream is counted")
    after = samples(server)
    first, between_tokens = (
        "outstride_time_to_first_token_seconds",
        "outstride_inter_token_latency_seconds",
    )
    for name in (first, between_tokens):
        assert between[f"{name}_count"] == before[f"{name}_count"]
    assert after[f"{first}_count"] == before[f"{first}_count"] + 1
    added = after[f"{between_tokens}_count"] - before[f"{between_tokens}_count"]
    assert added == 19  # between 20 tokens, one per pass
    tokens = "outstride_generation_tokens_total"
    assert after[tokens] == before[tokens] + 40


def test_the_acceptance_rate_follows_from_draft_tokens(
    client: openai.OpenAI, server: Running
) -> None:
    names = [f"outstride_spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted")]
    before = samples(server)
    found: Any = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=48,
        temperature=0,
        logit_bias={"70": 100},
        extra_body={"ignore_eos": True, "outstride": {"method": "ngram"}},
    )
    after = samples(server)
    own = found.usage.outstride
    counted = [after[name] - before.get(name, 0.0) for name in names]
    assert counted == [own["proposed"], own["accepted"]]
    assert counted[1] > 0
    assert 0 <= after["outstride_kv_cache_usage_ratio"] <= 1


def test_the_documentation_lists_every_metric(server: Running) -> None:
    rows = re.search(r"^## Metrics$(.*?)^## ", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert rows
    cells = [row.split("|")[1] for row in rows[1].splitlines() if row.startswith("| `")]
    documented = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    exported = {name for name in samples(server) if not name.endswith("_created")}
    names = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported}
    assert documented == {name.removeprefix("outstride_") for name in names}

"""The passes that a stream shows agree with the trace of its tokens."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.serve.running import CAP, MESSAGES, Running

FEW = {str(token): 30.0 for token in range(65, 69)}
"""Only these tokens are likely, so that some drafts are accepted and some are not."""


def chunks(server: Running, method: str, **more: Any) -> list[dict[str, Any]]:
    """The passes and the trace of a stream."""
    body = {
        "messages": MESSAGES,
        "max_tokens": 48,
        "logit_bias": FEW,
        "stream": True,
        "outstride": {"method": method, "trace": True, "graphs": True},
        **more,
    }
    url, found = f"{server.url}/v1/chat/completions", []
    with httpx.stream("POST", url, json=body, headers=server.headers, timeout=CAP) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
                found.append(choices[0]["outstride"])
    return found


@pytest.mark.parametrize("method", ["plain", "ngram", "suffix", "recycle", "lookahead"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_accepted_nodes_are_the_drafted_tokens(
    server: Running, method: str, temperature: float
) -> None:
    accepted = rejected = 0
    for found in chunks(server, method, temperature=temperature, seed=3):
        if not found["trace"]:
            continue  # the last chunk of a stream may have no tokens
        nodes, trace = found["pass"]["nodes"], found["trace"]
        assert {row["pass"] for row in trace} == {found["pass"]["pass"]}
        assert nodes[0]["state"] == "given"
        assert nodes[0]["parent"] == -1
        assert all(0 <= node["parent"] < i for i, node in enumerate(nodes) if i)
        path, at = [], 0
        while accepted_children := [
            i
            for i, node in enumerate(nodes)
            if i and node["parent"] == at and node["state"] == "accepted"
        ]:
            assert len(accepted_children) == 1, "siblings cannot both be accepted"
            at = accepted_children[0]
            path.append((nodes[at]["token"], nodes[at]["source"]))
        drafted = [(row["token"], row["source"]) for row in trace if row["kind"] == "drafted"]
        assert path == drafted
        accepted += len(path)
        rejected += sum(node["state"] in ("rejected", "probe") for node in nodes)
    if method == "plain":
        assert accepted == rejected == 0
    else:
        assert accepted
        assert rejected


def test_graphs_need_a_stream(server: Running) -> None:
    body = {"messages": MESSAGES, "outstride": {"graphs": True}}
    url = f"{server.url}/v1/chat/completions"
    found = httpx.post(url, json=body, headers=server.headers, timeout=CAP)
    assert found.status_code == 400
    assert "stream" in found.json()["error"]["message"]

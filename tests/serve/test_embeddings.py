"""`/v1/embeddings`, `/version`, `/tokenizer_info` and the ids of requests."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

import outstride
from outstride import LLM, SamplingParams, registry
from outstride.core.pooling import PooledStates
from outstride.errors import InvalidParams
from tests.conformance.harness import PLAIN, Bench
from tests.serve.running import CAP, Running

TEXTS = ["the thing", "in the box " * 40, "a", "the thing in the box"]


def embed(client: openai.OpenAI, texts: Any, pooling: str = "mean", **options: Any) -> Any:
    body = {"model": "tiny", "input": texts, "encoding_format": "float"} | options
    return client.embeddings.create(**body, extra_body={"pooling": pooling})


def test_the_same_bits_alone_and_in_a_batch(client: openai.OpenAI) -> None:
    for pooling in ("mean", "last"):
        together = embed(client, TEXTS, pooling)
        assert [item.index for item in together.data] == [0, 1, 2, 3]
        alone = [embed(client, text, pooling).data[0].embedding for text in TEXTS]
        assert [item.embedding for item in together.data] == alone
        assert all(abs(sum(v * v for v in vector) - 1) < 1e-5 for vector in alone)
        again = embed(client, TEXTS[1], pooling)  # its prefix is cached by now
        assert again.data[0].embedding == alone[1]
        assert together.usage.prompt_tokens == together.usage.total_tokens > 100


def test_the_vectors_are_those_of_transformers(client: openai.OpenAI, model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModel.from_pretrained(model, dtype=torch.float32)
    with LLM(str(model), weights="fp32") as llm:
        for text in TEXTS:
            ids = llm.encode(text)
            with torch.no_grad():
                states = oracle(torch.tensor([ids])).last_hidden_state[0].double().numpy()
            for pooling, row in (("mean", states.mean(axis=0)), ("last", states[-1])):
                params = SamplingParams(max_tokens=1, pooling=pooling)
                sequence = llm.engine.submit(ids, params, llm.method("plain"))
                while llm.engine.busy:
                    llm.engine.step()
                assert sequence.pooled is not None
                exact, expected = sequence.pooled.vector(), row / np.linalg.norm(row)
                assert exact is not None
                assert np.abs(exact - expected).max() < 1e-4
                served = np.array(embed(client, text, pooling).data[0].embedding)
                assert np.dot(served, expected) > 0.95  # int8 weights


def test_formats(client: openai.OpenAI, server: Running) -> None:
    plain = embed(client, "the thing").data[0].embedding
    default = client.embeddings.create(model="tiny", input="the thing").data[0].embedding
    assert np.allclose(default, plain)  # the client asks for base64 by itself
    with httpx.Client(base_url=server.url, timeout=CAP) as http:
        body = {"input": "the thing", "encoding_format": "base64"}
        found = http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
        assert np.frombuffer(base64.b64decode(found), "<f4").tolist() == plain
        ids = http.post("/tokenize", json={"prompt": "the thing"}).json()["tokens"]
    assert embed(client, ids).data[0].embedding == plain
    assert embed(client, [ids, ids]).data[1].embedding == plain
    short = embed(client, "the thing", dimensions=8).data[0].embedding
    assert len(short) == 8
    assert np.allclose(short, np.array(plain[:8]) / np.linalg.norm(plain[:8]), atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": ""}, "empty"),
        ({"input": []}, "input"),
        ({"input": "a", "dimensions": 10**6}, "dimensions"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x " * 5000}, "input"),
    ],
)
def test_wrong_requests(server: Running, fields: dict[str, Any], named: str) -> None:
    answer = httpx.post(f"{server.url}/v1/embeddings", json=fields, timeout=CAP)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert named in f"{error['message']} {error['param']}"


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_pooled_states_do_not_depend_on_chunks(pooling: str) -> None:
    rows = np.random.default_rng(1).normal(size=(50, 8)).astype(np.float32)
    whole = PooledStates(pooling, 50)
    whole.add(np.arange(50), rows)
    cut = PooledStates(pooling, 50)
    cut.add(np.arange(7), rows[:7])
    cut.add(np.arange(30), rows[:30])  # computed again after a preemption
    assert cut.vector() is None
    cut.add(np.arange(30, 50), rows[30:])
    found, expected = cut.vector(), whole.vector()
    assert found is not None
    assert expected is not None
    assert found.tobytes() == expected.tobytes()
    row = rows.astype(np.float64).mean(axis=0) if pooling == "mean" else rows[-1]
    assert np.allclose(found, row / np.linalg.norm(row), atol=1e-6)


def test_the_loop_returns_them_under_preemption() -> None:
    prompts = [[1, 2, 3, 4, 5] * 8, [7, 8], [1, 2, 3, 4, 5] * 8]
    params = SamplingParams(max_tokens=1, pooling="mean")
    vectors = []
    for bench in (Bench(), Bench(shake=9, nodes=16)):
        found = bench.run(prompts, PLAIN, params)
        for sequence in found:
            assert sequence.pooled is not None
            vector = sequence.pooled.vector()
            assert vector is not None
            vectors.append(vector.tobytes())
    assert vectors[:3] == vectors[3:]
    assert vectors[0] == vectors[2] != vectors[1]
    with pytest.raises(InvalidParams, match="plain"):
        Bench().engine.submit([1], params, registry.build("draft:model=draft"))
    with pytest.raises(InvalidParams, match="pooling"):
        SamplingParams(pooling="max")


def test_version_and_tokenizer_info(server: Running) -> None:
    with httpx.Client(base_url=server.url, timeout=CAP) as http:
        assert http.get("/version").json() == {"version": outstride.__version__}
        info = http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["bos_token"] == "<|end|>"
    assert "<|im_start|>" in info["chat_template"]
    assert info["model_max_length"] == 4096


def test_ids_of_requests(server: Running) -> None:
    with httpx.Client(base_url=server.url, timeout=CAP) as http:
        given = http.get("/health", headers={"x-request-id": "my-id.7"})
        assert given.headers["x-request-id"] == "my-id.7"
        first, second = (http.get("/health").headers["x-request-id"] for _ in range(2))
        assert first.startswith("req_")
        assert first != second
        wrong = http.get("/nowhere", headers={"x-request-id": "two words"})
        assert wrong.headers["x-request-id"].startswith("req_")
        body = {"prompt": "the", "max_tokens": 2, "stream": True}
        stream = http.post("/v1/completions", json=body, headers={"x-request-id": "s"})
        assert stream.headers["x-request-id"] == "s"

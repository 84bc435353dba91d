"""POST /v1/outstride/prove: one request, twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from outstride import LLM, SamplingParams
from outstride.serve.ipc import RequestEnd
from outstride.serve.prove import first_divergence
from outstride.serve.responses import ChoiceBuilder
from tests.serve import tiny
from tests.serve.running import CAP, MESSAGES, Running, start

PATH = "/v1/outstride/prove"


def ask(server: Running, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{PATH}", json=body, headers=server.headers, timeout=CAP)


def proof(server: Running, **body: Any) -> dict[str, Any]:
    answer = ask(server, **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("method", ["ngram", "suffix", "auto"])
def test_an_exact_method_is_equal(client: openai.OpenAI, server: Running, method: str) -> None:
    sampling: Any = {"temperature": 0.9, "seed": 3, "max_tokens": 24, "n": 2}
    found = proof(server, messages=MESSAGES, outstride={"method": method}, **sampling)
    assert (found["equal"], found["broken"], found["exactness"]) == (True, False, "exact")
    assert (found["method"], found["baseline"], found["seed"]) == (method, "plain", 3)
    answers: Any = client.chat.completions.create(model="tiny", messages=MESSAGES, **sampling)
    assert [choice["text"] for choice in found["choices"]] == [
        choice.message.content for choice in answers.choices
    ]
    for choice in found["choices"]:
        assert choice["divergence"] is None
        assert choice["passes"]["method"] <= choice["passes"]["plain"] == choice["tokens"]


def test_a_completion_without_a_seed_gets_one_for_both(server: Running) -> None:
    found = proof(server, prompt="the box in the box", outstride={"method": "ngram"}, max_tokens=16)
    assert found["equal"]
    assert isinstance(found["seed"], int)
    regex = {"type": "regex", "regex": "[ab]{3,9}c"}
    found = proof(
        server, prompt="x", response_format=regex, outstride={"method": "ngram"}, max_tokens=16
    )
    assert found["equal"]
    assert set(found["choices"][0]["text"]) <= set("abc")


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model with other weights."""
    return tiny.make(tmp_path_factory.mktemp("smaller") / "other", seed=5)


@pytest.fixture(scope="module")
def with_draft_model(
    model: Path, smaller: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A server with a draft model and a key."""
    folder = tmp_path_factory.mktemp("with_draft_model")
    options = ("--draft-model", str(smaller), "--api-key", "secret", "--pages", "512")
    with start(model, folder / "log", *options, key="secret") as running:
        yield running


def test_a_lossy_method_shows_where_it_diverges(
    with_draft_model: Running, model: Path, smaller: Path
) -> None:
    method = f"typical:model={smaller},epsilon=0.0001,delta=0.0001"
    body = {"messages": MESSAGES, "max_tokens": 24, "temperature": 1.0, "seed": 5}
    found = proof(with_draft_model, **body, outstride={"method": method})
    assert (found["equal"], found["broken"], found["exactness"]) == (False, False, "lossy")
    [choice] = found["choices"]
    divergence = choice["divergence"]
    with LLM(str(model)) as llm:
        prompt = llm.encode(MESSAGES)
        params = SamplingParams(max_tokens=24, temperature=1.0, seed=5, logprobs=0)
        [plain] = llm.generate([prompt], params)
        at = divergence["position"]
        assert divergence["plain"]["token"] == plain.token_ids[at]
        assert divergence["method"]["token"] != plain.token_ids[at]
        assert plain.logprobs is not None
        assert divergence["plain"]["logprob"] == plain.logprobs[at].logprob
        extended = [*prompt, *plain.token_ids[:at], divergence["method"]["token"]]
        [looked] = llm.generate([extended], SamplingParams(max_tokens=1, prompt_logprobs=0))
        assert looked.prompt_logprobs is not None
        last = looked.prompt_logprobs[-1]
        assert last is not None
        assert divergence["method"]["logprob"] == last.logprob
    assert divergence["gap"] == divergence["plain"]["logprob"] - divergence["method"]["logprob"]


def test_a_proof_needs_the_api_key(with_draft_model: Running) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4}
    assert httpx.post(f"{with_draft_model.url}{PATH}", json=body, timeout=CAP).status_code == 401
    assert proof(with_draft_model, **body)["method"] == "auto"  # the default method


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "either prompt or messages"),
        ({"prompt": "a", "messages": MESSAGES}, "either prompt or messages"),
        ({"prompt": "a", "stream": True}, "leave stream out"),
        ({"prompt": "a", "max_tokens": 0}, "at least 1"),
        ({"prompt": "a", "n": 17}, "n may be"),
        ({"prompt": "a", "outstride": {"method": "ngrm"}}, "did you mean ngram"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"messages": MESSAGES, "outstride": {"method": "steps"}}, "mask"),
    ],
)
def test_a_wrong_request_is_a_400_that_names_the_cause(
    server: Running, body: dict[str, Any], said: str
) -> None:
    answer = ask(server, **body)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


def test_a_proof_counts_twice_for_the_queue(server: Running) -> None:
    answer = ask(server, prompt="a", n=9, outstride={"method": "ngram"})  # 18 of 16
    assert answer.status_code == 400
    assert "18 answers" in answer.json()["error"]["message"]


def choice(tokens: list[int], reason: str = "length", text: str = "") -> ChoiceBuilder:
    return ChoiceBuilder(
        0, text=text, end=RequestEnd(reason, {"passes": 1}, 0, "plain", 0.0, tokens)
    )


def test_the_first_divergence() -> None:
    assert first_divergence(choice([1, 2, 3]), choice([1, 2, 3])) is None
    assert first_divergence(choice([1, 2, 3]), choice([1, 4, 3])) == 1
    assert first_divergence(choice([1, 2, 3]), choice([1, 2])) == 2
    assert first_divergence(choice([1, 2]), choice([1, 2], "stop")) == 2
    assert first_divergence(choice([1, 2], text="a"), choice([1, 2], text="b")) == 2

"""Full queues, clients that disconnect or read slowly, deadlines, API keys, CORS."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serve.running import CAP, MESSAGES, Running, start

KEY = "a-key-that-nobody-guesses"
LONG: dict[str, Any] = {
    "model": "tiny",
    "messages": MESSAGES,
    "max_tokens": 3900,
    "ignore_eos": True,
    "temperature": 1.0,
    "outstride": {"method": "plain"},
}


@pytest.fixture(scope="module")
def small(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two running requests, one more in the queue, and API keys."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "keys").write_text(f"{KEY}\nanother-one\n")
    options = ["--max-sequences", "2", "--queue", "1", "--pages", "2048"]
    options += ["--api-key-file", str(folder / "keys"), "--origin", "http://page.example"]
    environment = {"OUTSTRIDE_API_KEY": "from-the-environment"}
    with start(model, folder / "log", *options, key=KEY, slow=True, **environment) as found:
        yield found


@pytest.fixture
def http(small: Running) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=small.url, headers=headers, timeout=CAP) as client:
        yield client


@pytest.fixture
def nothing_left(small: Running) -> Iterator[None]:
    """Checks afterwards that no request and no page is left."""
    yield
    small.until("outstride_num_requests_running", 0)
    small.until("outstride_num_requests_in_flight", 0)
    pages = small.metric("outstride_kv_cache_pages")
    assert small.metric("outstride_kv_cache_pages_free") == pages


def stream(http: httpx.Client, **changes: Any) -> Any:
    return http.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True, **changes})


@pytest.mark.usefixtures("nothing_left")
def test_a_full_queue_is_a_429_at_once(http: httpx.Client, small: Running) -> None:
    with stream(http) as one, stream(http) as two:
        lines = [
            one.iter_lines(),
            two.iter_lines(),
        ]  # a stream that is garbage-collected disconnects
        assert all(next(line).startswith("data: ") for line in lines)
        waiting = threading.Thread(
            target=lambda: http.post("/v1/chat/completions", json={**LONG, "max_tokens": 1})
        )
        waiting.start()
        small.until("outstride_num_requests_in_flight", 3)
        refused = http.post("/v1/chat/completions", json=LONG)  # while all three still run or wait
        assert small.metric("outstride_num_requests_in_flight") == 3
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["code"] == "queue_full"
        assert http.get("/health").status_code == 200
        too_many = http.post("/v1/chat/completions", json={**LONG, "n": 4})
        assert too_many.status_code == 400
    waiting.join(CAP)
    assert not waiting.is_alive()
    assert small.metric("outstride_requests_rejected_total") == 1


@pytest.mark.usefixtures("nothing_left")
def test_a_client_that_disconnects_frees_its_pages(http: httpx.Client, small: Running) -> None:
    with stream(http, n=2) as one:
        lines = one.iter_lines()
        next(lines)
        assert small.metric("outstride_num_requests_running") == 2
    small.until("outstride_num_requests_running", 0)
    steps = small.metric("outstride_engine_steps_total")
    time.sleep(0.2)
    assert small.metric("outstride_engine_steps_total") == steps  # nothing steps without requests


@pytest.mark.usefixtures("nothing_left")
def test_a_disconnect_cancels_a_request_that_does_not_stream(
    http: httpx.Client, small: Running
) -> None:
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/chat/completions", json=LONG, timeout=0.5)
    small.until("outstride_num_requests_running", 0)


@pytest.mark.usefixtures("nothing_left")
def test_a_client_that_does_not_read_delays_no_other(http: httpx.Client, small: Running) -> None:
    with stream(http, logprobs=True, top_logprobs=20, max_tokens=800) as slow:
        time.sleep(0.5)  # its socket fills up meanwhile
        quick = http.post("/v1/chat/completions", json={**LONG, "max_tokens": 50})
        assert quick.json()["usage"]["completion_tokens"] == 50
        small.until("outstride_num_requests_running", 0)  # the engine does not wait for it
        tokens = 0
        for line in slow.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                tokens += len(choice["logprobs"]["content"])
        assert tokens == 800  # and the slow client gets everything in the end


@pytest.mark.usefixtures("nothing_left")
def test_deadlines(http: httpx.Client, small: Running) -> None:
    own = {"method": "plain", "deadline": 0.3}
    late = http.post("/v1/chat/completions", json={**LONG, "outstride": own})
    assert late.status_code == 408
    assert late.json()["error"]["code"] == "deadline_exceeded"
    for deadline in (0.3, 1.0, 3.0, 9.0):  # the answer takes at least 12 s: 3 ms for each token
        with stream(http, outstride={**own, "deadline": deadline}) as cut:
            events = [line[6:] for line in cut.iter_lines() if line]
        if cut.status_code == 200:  # else the machine is too busy for a first token by then
            break
    assert json.loads(events[-2])["error"]["code"] == "deadline_exceeded"
    assert events[-1] == "[DONE]"


@pytest.mark.usefixtures("nothing_left")
def test_the_client_sees_an_error_in_a_stream(small: Running) -> None:
    with small.client(KEY) as client:
        stream = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=3900,
            stream=True,
            extra_body={"ignore_eos": True, "outstride": {"method": "plain", "deadline": 0.3}},
        )
        with pytest.raises(openai.APIError, match="longer than"):
            list(stream)


def test_bodies_have_a_maximum_size(http: httpx.Client) -> None:
    as_json = {"content-type": "application/json"}
    big = http.post("/v1/chat/completions", content=b" " * (5 << 20))
    assert big.status_code == 413

    def chunks() -> Iterator[bytes]:
        for _ in range(80):
            yield b" " * (64 << 10)

    assert http.post("/v1/chat/completions", content=chunks(), headers=as_json).status_code == 413
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"messages": "\\ud800"}']
)
def test_a_malformed_body_is_a_400(http: httpx.Client, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    found = http.post("/v1/chat/completions", content=body, headers=headers)
    assert found.status_code == 400
    assert found.json()["error"]["message"]


def test_every_route_but_health_needs_a_key(small: Running) -> None:
    with httpx.Client(base_url=small.url, timeout=CAP) as http:
        assert http.get("/health").status_code == 200
        for path in ("/", "/ready", "/metrics", "/v1/models", "/openapi.json", "/nowhere"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic !"}):
                refused = http.get(path, headers=headers)
                assert refused.status_code == 401, path
                assert "www-authenticate" in refused.headers
                assert KEY not in refused.text
        for key in (KEY, "another-one", "from-the-environment"):
            good = http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert good.status_code == 200
        assert http.get("/v1/models", auth=("anybody", KEY)).status_code == 200
    assert KEY not in small.log.read_text()


def test_api_keys_do_not_share_cached_prefixes(small: Running) -> None:
    talk = [{"role": "user", "content": "what only one tenant has said so far " * 3}]
    cached = []
    for key in (KEY, KEY, "another-one"):
        with small.client(key) as client:
            found = client.chat.completions.create(model="tiny", messages=talk, max_tokens=2)  # type: ignore[arg-type]
            details = found.usage and found.usage.prompt_tokens_details
            cached.append(details and details.cached_tokens)
    assert cached[0] == cached[2] == 0
    assert cached[1]


def test_only_named_origins_may_call(http: httpx.Client, server: Running) -> None:
    asked = {"origin": "http://page.example", "access-control-request-method": "POST"}
    named = http.get("/v1/models", headers={"origin": "http://page.example"})
    assert named.headers["access-control-allow-origin"] == "http://page.example"
    stranger = http.get("/v1/models", headers={"origin": "http://other.example"})
    assert "access-control-allow-origin" not in stranger.headers
    with httpx.Client(base_url=server.url, timeout=CAP) as plain:
        assert "access-control-allow-origin" not in plain.get("/health", headers=asked).headers


def test_a_preflight_needs_no_key(small: Running) -> None:
    asked = {
        "origin": "http://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    with httpx.Client(base_url=small.url, timeout=CAP) as browser:
        found = browser.options("/v1/chat/completions", headers=asked)
        assert found.status_code in (200, 204)
        assert found.headers["access-control-allow-origin"] == "http://page.example"
        assert "POST" in found.headers["access-control-allow-methods"]
        allowed = found.headers["access-control-allow-headers"].lower()
        assert all(name in allowed for name in ("authorization", "content-type", "x-stainless"))
        stranger = browser.options(
            "/v1/chat/completions", headers={**asked, "origin": "http://other.example"}
        )
        assert "access-control-allow-origin" not in stranger.headers
        assert not stranger.is_success
        without = browser.options("/v1/chat/completions")  # no preflight: an ordinary request
        assert without.status_code == 401


def test_errors_carry_cors_headers(http: httpx.Client, small: Running) -> None:
    origin = {"origin": "http://page.example"}
    answers = [
        httpx.get(f"{small.url}/v1/models", headers=origin, timeout=CAP),
        http.get("/nowhere", headers=origin),
        http.post("/v1/chat/completions", headers=origin, json={"messages": []}),
        http.post("/v1/chat/completions", headers=origin, content=b" " * (5 << 20)),
        http.post("/v1/chat/completions", headers=origin, json={**LONG, "n": 4}),
    ]
    assert [answer.status_code for answer in answers] == [401, 404, 400, 413, 400]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        assert "retry-after" in answer.headers["access-control-expose-headers"].lower()


def test_the_page_may_load_nothing_from_outside(server: Running) -> None:
    found = httpx.get(f"{server.url}/", timeout=CAP)
    assert found.status_code in (200, 404)  # a build may come without the page
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "http" not in policy
    assert found.headers["x-content-type-options"] == "nosniff"

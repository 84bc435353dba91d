"""LoRA adapters in the server: models of their own names, in one batch with the base model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from outstride.models.load import load
from tests.models.lora_files import linear_shapes, write_lora
from tests.serve.running import Running, start, wait_until

NAMES = ("tiny", "french", "legal")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("adapters")
    shapes = linear_shapes(load(str(model), weights="fp32", pages=8).model.config)
    for seed, name in enumerate(NAMES[1:]):
        write_lora(top / name, shapes, seed=seed)
    return {name: top / name for name in NAMES[1:]}


@pytest.fixture(scope="module")
def lora_server(
    model: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    options = [part for name, at in adapters.items() for part in ("--adapter", f"{name}={at}")]
    log = tmp_path_factory.mktemp("log") / "server.log"
    with start(model, log, "--pages", "256", *options) as running:
        yield running


def ask(client: openai.OpenAI, name: str) -> openai.types.Completion:
    return client.completions.create(
        model=name,
        prompt="the box",
        max_tokens=16,
        temperature=0,
        extra_body={"ignore_eos": True},
    )


def test_models_list_adapters_with_their_parent(lora_server: Running) -> None:
    with lora_server.client() as client:
        listed = {item.id: item.to_dict() for item in client.models.list()}
        one = client.models.retrieve("french").to_dict()
    assert list(listed) == list(NAMES)
    assert [item["parent"] for item in listed.values()] == [None, "tiny", "tiny"]
    assert len({item["system_fingerprint"] for item in listed.values()}) == 3
    assert one == listed["french"]


def test_requests_choose_by_model(lora_server: Running) -> None:
    """Together and one after the other; after a restart of the engine, too."""
    with lora_server.client() as client:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda name: ask(client, name), NAMES * 2))
        texts = [answer.choices[0].text for answer in answers]
        assert texts[:3] == texts[3:]
        assert len(set(texts)) == 3
        assert [answer.model for answer in answers[:3]] == list(NAMES)
        prints = {item.id: item.to_dict()["system_fingerprint"] for item in client.models.list()}
        assert [answer.system_fingerprint for answer in answers[:3]] == [prints[n] for n in NAMES]
        before = lora_server.engine()
        os.kill(before, signal.SIGKILL)

        def restarted() -> bool:
            try:
                return lora_server.engine() != before
            except (OSError, AssertionError, StopIteration, LookupError):
                return False

        wait_until(restarted, "a new engine")
        lora_server.until_ready()
        assert [ask(client, name).choices[0].text for name in NAMES] == texts[:3]


def test_chats_and_responses_name_their_adapter(lora_server: Running) -> None:
    with lora_server.client() as client:
        chat = client.chat.completions.create(
            model="french", messages=[{"role": "user", "content": "x"}], max_tokens=4
        )
        response = client.responses.create(model="french", input="x", max_output_tokens=16)
    assert chat.model == response.model == "french"


def test_an_unknown_model_names_the_known_ones(lora_server: Running) -> None:
    body = {"model": "german", "prompt": "x", "max_tokens": 1}
    found = httpx.post(f"{lora_server.url}/v1/completions", json=body, timeout=60)
    assert found.status_code == 404
    assert "it has tiny, french, legal" in found.json()["error"]["message"]

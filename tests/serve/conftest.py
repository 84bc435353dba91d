"""Servers as users start them: in processes of their own, on loopback, on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.serve import tiny
from tests.serve.running import Running, start


@pytest.fixture(scope="package", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Converted weights of models that are gone tomorrow do not stay in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTSTRIDE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="package")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The server that most tests share."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    with start(model, log, "--max-sequences", "8", "--queue", "8", "--pages", "2048") as running:
        yield running


@pytest.fixture(scope="package")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as found:
        yield found

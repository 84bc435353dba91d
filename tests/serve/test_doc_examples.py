"""The client's examples of the documentation, against a running server."""

from __future__ import annotations

import pytest

from tests.serve.running import Running
from tests.test_docs import PYTHON

CLIENTS = [block for block in PYTHON if block.mark == "client"]


@pytest.mark.parametrize("block", CLIENTS, ids=str)
def test_clients_run(block: object, server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    text = getattr(block, "text", "")
    text = text.replace("http://127.0.0.1:8000", server.url).replace('"smollm2"', '"tiny"')
    text = text.replace("temperature=0,", "temperature=0, max_tokens=8,")
    namespace: dict[str, object] = {}
    exec(compile(text, str(block), "exec"), namespace)
    client = namespace.get("client")
    if hasattr(client, "close"):
        client.close()
    assert "tokens_per_pass" in capsys.readouterr().out

"""Other people's clients, unchanged: LangChain, LlamaIndex and lm-eval.

They run where their packages are installed: in this environment, or in the one whose interpreter
`OUTSTRIDE_CLIENT_PYTHON` names. OpenAI's own client is used by all tests around this one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.running import CAP, Running

SCRIPTS = Path(__file__).parent / "client_scripts"


@pytest.mark.parametrize(
    ("script", "package"),
    [
        ("use_langchain", "langchain_openai"),
        ("use_llama_index", "llama_index.llms.openai_like"),
        ("use_lm_eval", "lm_eval.models.openai_completions"),
    ],
)
def test_a_client(server: Running, script: str, package: str) -> None:
    python = os.environ.get("OUTSTRIDE_CLIENT_PYTHON", sys.executable)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "LANGSMITH_TRACING": "false"}
    found = subprocess.run(
        [python, "-c", f"import importlib; importlib.import_module({package!r})"],
        capture_output=True,
        check=False,
        timeout=CAP,
        env=environment,
    )
    if found.returncode != 0:
        pytest.skip(f"{package} is not installed")
    done = subprocess.run(
        [python, str(SCRIPTS / f"{script}.py"), server.url],
        capture_output=True,
        text=True,
        check=False,
        timeout=CAP,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("ok\n")

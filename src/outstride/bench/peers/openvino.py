"""OpenVINO GenAI. It loads GGUF files and folders that were exported for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from outstride.bench import clock
from outstride.bench.peers.peer import PeerSetup, library

PACKAGE = "openvino_genai"
RUNTIME = "openvino"
CHECKED = {"INFERENCE_PRECISION_HINT": "f32"}
"""For processors that announce bfloat16 and do not permit it."""
_PROBE = """
import sys
import numpy, openvino, openvino_genai
pipeline = openvino_genai.LLMPipeline(sys.argv[1], "CPU")
config = openvino_genai.GenerationConfig()
config.max_new_tokens = 2
tokens = openvino.Tensor(numpy.ones((1, 4), dtype=numpy.int64))
pipeline.generate(openvino_genai.TokenizedInputs(tokens, tokens), config)
"""
"""By default OpenVINO computes in bfloat16 where the processor announces it. On virtual machines
that announce instructions and do not permit them, this crashes the process: so a child process
tries it.
"""


def survives(path: str) -> bool:
    """Whether it runs a model with its default format."""
    tried = subprocess.run([sys.executable, "-c", _PROBE, path], capture_output=True, check=False)
    return tried.returncode == 0


class OpenVino:
    """A pipeline of OpenVINO GenAI on the CPU."""

    name = "openvino"

    def __init__(self, setup: PeerSetup) -> None:
        self._lib = lib = library(PACKAGE, "pip install openvino-genai to compare with it")
        self._runtime = library(RUNTIME, "it comes with openvino-genai")
        options: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": setup.threads,
        } | ({} if survives(str(setup.path)) else CHECKED)
        self._pipeline = lib.LLMPipeline(str(setup.path), "CPU", **options)
        self.settings = {"version": str(lib.get_version()), **options}

    def fits(self, count: int) -> bool:
        return count > 0

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        tokens = np.zeros((len(prompts), longest), dtype=np.int64)
        mask = np.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        tensor = self._runtime.Tensor
        config = self._lib.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output, True, False
        found = self._pipeline.generate(
            self._lib.TokenizedInputs(tensor(tokens), tensor(mask)), config
        )
        return [[int(token) for token in row] for row in found.tokens]

    def once(self, nodes: int, cached: int) -> clock.Case | None:
        del nodes, cached
        return None  # passes cannot be called one by one

    def close(self) -> None:
        self._pipeline = None


def open_all(setup: PeerSetup) -> list[OpenVino]:
    """Opens the one pipeline."""
    return [OpenVino(setup)]

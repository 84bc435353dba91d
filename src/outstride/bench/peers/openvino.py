"""OpenVINO GenAI. It reads GGUF files and folders that were exported for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outstride.bench import clock
from outstride.bench.peers.peer import Ground, library

PACKAGE = "openvino_genai"
RUNTIME = "openvino"


class OpenVino:
    """A pipeline of OpenVINO GenAI on the CPU."""

    name = "openvino"

    def __init__(self, ground: Ground) -> None:
        self._lib = lib = library(PACKAGE, "pip install openvino-genai to compare with it")
        self._runtime = library(RUNTIME, "it comes with openvino-genai")
        options: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": ground.threads,
        }
        self._pipeline = lib.LLMPipeline(str(ground.path), "CPU", **options)
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


def open_all(ground: Ground) -> list[OpenVino]:
    """The one pipeline."""
    return [OpenVino(ground)]

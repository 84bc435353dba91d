"""vLLM, alone and with its n-gram speculation. It loads checkpoint folders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from outstride.bench import clock
from outstride.bench.peers import transformers
from outstride.bench.peers.peer import PeerSetup, library

PACKAGE = "vllm"
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
"""The example of its documentation."""
SPACE = "1"
"""Gigabytes of KV cache for each engine; its default is far larger."""


class Vllm:
    """An engine of vLLM on the CPU."""

    def __init__(self, setup: PeerSetup, speculation: dict[str, Any] | None) -> None:
        self._lib = lib = library(PACKAGE, "it is left out")
        self.name = "vllm, n-gram" if speculation else "vllm"
        options: dict[str, Any] = {
            "max_model_len": setup.max_length,
            "max_num_seqs": setup.max_batch,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "dtype": str(transformers.formats()[-1]).removeprefix("torch."),
        }
        if speculation:
            options["speculative_config"] = speculation
        self._engine = lib.LLM(model=str(setup.path), **options)
        self.settings = {"version": str(lib.__version__), "threads": setup.threads, **options}

    def fits(self, count: int) -> bool:
        return count > 0

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        params = self._lib.SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False
        )
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        found = self._engine.generate(given, params, use_tqdm=False)
        return [list(request.outputs[0].token_ids) for request in found]

    def once(self, nodes: int, cached: int) -> clock.Case | None:
        del nodes, cached
        return None  # passes cannot be called one by one

    def close(self) -> None:
        self._engine = None


def open_all(setup: PeerSetup) -> list[Vllm]:
    """Both engines."""
    library(PACKAGE, "install its build for CPUs to compare with it: `make peers`")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "auto")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", SPACE)
    return [Vllm(setup, speculation) for speculation in (None, NGRAM)]

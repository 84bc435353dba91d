"""transformers `generate`, by itself and with its prompt lookup."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import partial
from typing import Any

import numpy as np
import torch

from outstride.bench import clock
from outstride.bench.peers.peer import PeerSetup, library

PACKAGE = "transformers"
LOOKUP = 10
"""Draft length of prompt lookup in its documentation."""
SETTLE = 0.02
TRIALS = 3


class Transformers:
    """One model, two ways to generate; single passes belong to the first."""

    def __init__(self, setup: PeerSetup, model: Any, lookup: int = 0) -> None:
        self.name = "transformers, prompt lookup" if lookup else "transformers"
        self._lib, self._model, self._lookup = library(PACKAGE, ""), model, lookup
        self._vocabulary = setup.vocabulary
        self._random = np.random.default_rng(0)
        self.settings = {
            "version": str(self._lib.__version__),
            "weights": str(model.dtype).removeprefix("torch."),
            "attention": str(getattr(model.config, "_attn_implementation", "")),
            "threads": setup.threads,
        } | ({"prompt_lookup_num_tokens": lookup} if lookup else {})

    def fits(self, count: int) -> bool:
        return not self._lookup or count == 1  # it refuses more

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        tokens = [[0] * (longest - len(p)) + list(p) for p in prompts]
        mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
        options = {"prompt_lookup_num_tokens": self._lookup} if self._lookup else {}
        with torch.inference_mode():
            found = self._model.generate(
                input_ids=torch.tensor(tokens),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                max_new_tokens=output,
                min_new_tokens=output,
                pad_token_id=0,
                **options,
            )
        return [[int(token) for token in row[longest : longest + output]] for row in found]

    def _tokens(self, count: int) -> torch.Tensor:
        return torch.from_numpy(self._random.integers(self._vocabulary, size=(1, count)))

    def once(self, nodes: int, cached: int) -> clock.Case | None:
        if self._lookup:
            return None

        @contextmanager
        def case() -> Iterator[Callable[[], object]]:
            with torch.inference_mode():
                cache = self._lib.DynamicCache(config=self._model.config)
                self._model(input_ids=self._tokens(cached), past_key_values=cache, use_cache=True)

                def call() -> None:
                    self._model(
                        input_ids=self._tokens(nodes), past_key_values=cache, use_cache=True
                    )

                call()
                cache.crop(-nodes)
                time.sleep(SETTLE)
                yield call

        return case

    def close(self) -> None:
        self._model = None


_PROBE = """
import torch
layer = torch.nn.Linear(576, 1536, bias=False).to(torch.bfloat16)
with torch.inference_mode():
    for rows in (1, 2, 8, 64, 512):
        layer(torch.randn(rows, 576, dtype=torch.bfloat16))
"""
"""Virtual machines may announce instructions that they do not permit, which crashes the process."""


def formats() -> list[torch.dtype]:
    """Formats that this processor computes in; a child process tries bfloat16."""
    tried = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, check=False)
    return [torch.float32] if tried.returncode else [torch.float32, torch.bfloat16]


def _quicker(model: Any, vocabulary: int) -> Any:
    """The model in the format in which a pass over one token is faster on this processor."""
    times: dict[torch.dtype, float] = {}
    tokens = torch.randint(vocabulary, (1, 1))
    for kind in formats():
        once = partial(model.to(kind), input_ids=tokens)
        with torch.inference_mode():
            times[kind] = min(clock.timed(once) for _ in range(TRIALS))
    return model.to(min(times, key=lambda kind: times[kind]))


def open_all(setup: PeerSetup) -> list[Transformers]:
    """Both ways, on one model."""
    lib = library(PACKAGE, "pip install 'outstride[dev]' brings it")
    torch.set_num_threads(setup.threads)
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(setup.path)}
    if setup.path.suffix == ".gguf":
        place = {
            "pretrained_model_name_or_path": str(setup.path.parent),
            "gguf_file": setup.path.name,
        }
    lib.utils.logging.set_verbosity_error()
    with redirect_stderr(io.StringIO()):  # bars of its own
        model = lib.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    model = _quicker(model, setup.vocabulary)
    return [Transformers(setup, model), Transformers(setup, model, LOOKUP)]

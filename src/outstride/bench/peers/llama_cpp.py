"""llama.cpp, through llama-cpp-python.

It is called through the low-level functions, so that none of its Python adds time: batches are
filled through numpy views, and the next token is one argmax over the returned row of logits.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from outstride.bench import clock
from outstride.bench.peer_environments import site_packages
from outstride.bench.peers import build
from outstride.bench.peers.peer import PeerSetup
from outstride.bench.step import StepCase
from outstride.core.graph import IntArray
from outstride.errors import OutstrideError

PACKAGE = "llama_cpp"
"""Not a dependency, so it is imported by name and only when needed."""
BATCH = 512
"""Tokens per prefill batch: llama.cpp's default for a physical batch."""
SETTLE = 0.02
"""Seconds before a turn, in which the other engine's threads stop spinning."""


def library(environments: Path | None = None) -> Any:
    """llama-cpp-python, if it is installed: the build for the instruction set that is forced.

    Such a build comes from an environment of its own. It is loaded into this process, so that its
    passes are timed like ours; `environments` is the folder of those environments.
    """
    isa = build.forced_isa()
    name = build.own_environment(isa)
    folder = None if name is None else site_packages(name, environments)
    if folder is not None and not (folder / PACKAGE).is_dir():
        folder = None  # its build was interrupted
    if name is not None and folder is None and build.this_machine(isa) != build.this_machine():
        raise OutstrideError(
            f"llama.cpp is not built for {isa}, which OUTSTRIDE_ISA forces; `make llama ISA={isa}` "
            "builds it"
        )
    path = list(sys.path)
    if folder is not None:
        sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(PACKAGE)
    except ImportError as error:
        raise OutstrideError(
            f"llama-cpp-python cannot be imported ({error}); `make bench` builds and installs it"
        ) from error
    finally:
        sys.path[:] = path


def enabled(info: str) -> str:
    """The instruction sets and features that a build has, from llama.cpp's description of itself."""
    parts = (part.rpartition(":")[2].strip() for part in info.split("|"))
    return " ".join(part.partition(" = ")[0] for part in parts if part.endswith(" = 1"))


def _quiet(lib: Any) -> Any:
    """Silences llama.cpp, which logs every tensor. The result must live as long as its model."""

    @lib.llama_log_callback  # type: ignore[untyped-decorator]
    def ignore(level: int, text: bytes, data: object) -> None:
        del level, text, data

    lib.llama_log_set(ignore, ctypes.c_void_p(0))
    return ignore


class LlamaContext:
    """A llama.cpp context for a number of sequences of a number of tokens."""

    def __init__(
        self, lib: Any, model: Any, *, sequences: int, tokens: int, threads: int, vocabulary: int
    ) -> None:
        self._lib = lib
        self._vocabulary = vocabulary
        params = lib.llama_context_default_params()
        params.n_ctx = -(-tokens // 256) * 256 * sequences
        params.n_batch = params.n_ubatch = BATCH
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        if hasattr(params, "n_outputs_max_per_seq"):
            params.n_outputs_max_per_seq = 0  # as many as the batch has
        self.unified = bool(params.kv_unified)
        self._context = lib.llama_init_from_model(model, params)
        if not self._context:
            raise OutstrideError("llama.cpp could not create a context")
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(BATCH, 0, 1)
        view = np.ctypeslib.as_array
        self._tokens = view(self._batch.token, (BATCH,))
        self._positions = view(self._batch.pos, (BATCH,))
        self._wanted = view(self._batch.logits, (BATCH,))
        self._sequences = [view(self._batch.seq_id[i], (1,)) for i in range(BATCH)]
        view(self._batch.n_seq_id, (BATCH,))[:] = 1

    def fill(
        self,
        tokens: Sequence[int] | IntArray,
        positions: Sequence[int] | IntArray,
        sequences: Sequence[int],
        wanted: Sequence[int],
    ) -> None:
        """Fills a batch; `wanted` are the rows whose logits are computed."""
        count = len(tokens)
        self._batch.n_tokens = count
        self._tokens[:count] = tokens
        self._positions[:count] = positions
        self._wanted[:count] = 0
        self._wanted[list(wanted)] = 1
        for row, sequence in enumerate(sequences):
            self._sequences[row][0] = sequence

    def decode(self) -> None:
        """One pass over the batch."""
        code = self._lib.llama_decode(self._context, self._batch)
        if code:
            raise OutstrideError(f"llama.cpp: llama_decode returned {code}")

    def best(self, row: int) -> int:
        """The most likely token after a row of the batch."""
        pointer = self._lib.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(pointer, (self._vocabulary,)).argmax())

    def touch(self, row: int) -> None:
        """Waits until a row of logits is computed."""
        self._lib.llama_get_logits_ith(self._context, row)

    def cut(self, sequence: int, length: int) -> None:
        """Drops the KV of a sequence after its first `length` tokens."""
        if not self._lib.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise OutstrideError("llama.cpp could not drop KV")

    def clear(self) -> None:
        self._lib.llama_memory_clear(self._memory, False)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Prefills one prompt per sequence, one by one; returns the most likely next tokens.

        A batch of prompts of several lengths is not faster: llama.cpp splits it into equal parts.
        """
        found = []
        for sequence, prompt in enumerate(prompts):
            for start in range(0, len(prompt), BATCH):
                part = prompt[start : start + BATCH]
                wanted = [len(part) - 1] if start + len(part) == len(prompt) else []
                positions = list(range(start, start + len(part)))
                self.fill(part, positions, [sequence] * len(part), wanted)
                self.decode()
            found.append(self.best(len(part) - 1))
        return found

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        """Continues prompts greedily in one batch, each by `output` tokens."""
        self.clear()
        answers = [[token] for token in self.prefill(prompts)]
        rows = range(len(prompts))
        for step in range(output - 1):
            positions = [len(prompt) + step for prompt in prompts]
            self.fill([answer[-1] for answer in answers], positions, rows, rows)
            self.decode()
            for row in rows:
                answers[row].append(self.best(row))
        return answers

    def close(self) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)


class LlamaCpp:
    """A model in llama.cpp, with one context for a long sequence and one for a batch of short ones."""

    def __init__(
        self,
        path: Path,
        *,
        threads: int,
        long: int,
        short: int,
        sequences: int,
        environments: Path | None = None,
    ) -> None:
        self._lib = lib = library(environments)
        self._quiet = _quiet(lib)
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise OutstrideError(f"llama.cpp could not load {path}")
        vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._contexts: list[LlamaContext] = []
        for count, tokens in ((1, long), (sequences, short)):
            self._contexts.append(
                LlamaContext(
                    lib,
                    self._model,
                    sequences=count,
                    tokens=tokens,
                    threads=threads,
                    vocabulary=vocabulary,
                )
            )
        self.single, self.batched = self._contexts

    def describe(self) -> dict[str, Any]:
        """Its version and how it was built."""
        info = self._lib.llama_print_system_info()
        text = info.decode() if isinstance(info, bytes) else str(info)
        return {
            "version": str(getattr(self._lib, "__version__", "unknown")),
            "build": text,
            "enabled": enabled(text),
            "batch": BATCH,
            "unified": self.batched.unified,
        }

    def close(self) -> None:
        for context in self._contexts:
            context.close()
        self._lib.llama_model_free(self._model)


class LlamaPasses:
    """Passes of llama.cpp of the same shapes as ours."""

    def __init__(self, peer: LlamaCpp, vocabulary: int, seed: int) -> None:
        self._peer = peer
        self._vocabulary = vocabulary
        self._random = np.random.default_rng(seed)
        self._long: list[int] = []
        self._length = 0

    def _tokens(self, count: int) -> list[int]:
        return [int(t) for t in self._random.integers(self._vocabulary, size=count)]

    def prepare(self, longest: int, sequences: int, cached: int) -> None:
        """Fills real KV: a long sequence, which is cut for each case, and a batch of sequences."""
        self._peer.single.clear()
        self._long = self._tokens(longest)
        self._peer.batched.clear()
        self._peer.batched.prefill([self._tokens(cached) for _ in range(sequences)])
        self._length = 0

    def _grow(self, length: int) -> None:
        context = self._peer.single
        if length < self._length:
            context.cut(0, length)
            self._length = length
        while self._length < length:
            part = self._long[self._length : min(length, self._length + BATCH)]
            positions = range(self._length, self._length + len(part))
            context.fill(part, list(positions), [0] * len(part), ())
            context.decode()
            self._length += len(part)

    @contextmanager
    def once(self, case: StepCase, all_rows: bool = True) -> Iterator[Callable[[], object]]:
        """One pass to time, after one that is not timed; its KV is dropped again."""
        if case.sequences == 1:
            self._grow(case.cached)
        context = self._peer.single if case.sequences == 1 else self._peer.batched
        time.sleep(SETTLE)
        count = case.nodes * case.sequences
        sequences = [i // case.nodes for i in range(count)]
        positions = [case.cached + i % case.nodes for i in range(count)]
        wanted = range(count) if all_rows else [count - 1]

        def drop() -> None:
            for sequence in range(case.sequences):
                context.cut(sequence, case.cached)

        def call() -> None:
            context.decode()
            context.touch(count - 1)

        context.fill(self._tokens(count), positions, sequences, wanted)
        call()
        drop()
        context.fill(self._tokens(count), positions, sequences, wanted)
        yield call
        drop()


class LlamaPeer:
    """llama.cpp as one of several peers."""

    name = "llama.cpp"

    def __init__(self, setup: PeerSetup) -> None:
        self._llama = LlamaCpp(
            setup.path,
            threads=setup.threads,
            long=setup.max_length,
            short=setup.max_length,
            sequences=max(2, setup.max_batch),
            environments=setup.environments,
        )
        self._passes = LlamaPasses(self._llama, setup.vocabulary, 0)
        self._longest = setup.max_length
        self._prepared = False
        self.settings = {**self._llama.describe(), "threads": setup.threads}

    def fits(self, count: int) -> bool:
        return count > 0

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        context = self._llama.single if len(prompts) == 1 else self._llama.batched
        return context.generate(prompts, output)

    def once(self, nodes: int, cached: int) -> clock.Case | None:
        if not self._prepared:
            self._passes.prepare(cached, 1, 1)
            self._prepared = True
        return lambda: self._passes.once(StepCase("nodes", nodes, cached))

    def close(self) -> None:
        self._llama.close()


def open_all(setup: PeerSetup) -> list[LlamaPeer]:
    """Opens the one llama.cpp peer."""
    library(setup.environments)
    if setup.path.suffix != ".gguf":
        raise OutstrideError("llama.cpp reads GGUF files only")
    return [LlamaPeer(setup)]

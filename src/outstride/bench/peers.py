"""Beside llama.cpp: the same file, the same threads, in turns, in one run on one machine.

llama.cpp is called through the low-level functions of llama-cpp-python, so that no Python of its own
stands in its way: batches are filled through numpy views, and the next token is one argmax over the
row of logits that it returns. Both sides read the same tokens. Where both sides score several nodes
of a pass, both score all of them; a second row shows what llama.cpp saves by scoring only the last.

`python -m outstride.bench.peers` prints the CMake options to build llama.cpp with on this machine.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from outstride.bench import clock
from outstride.bench.clock import Series
from outstride.bench.prompts import built_in
from outstride.bench.step import Bed, StepCase, Watch
from outstride.core.graph import IntArray
from outstride.core.params import SamplingParams
from outstride.errors import InvalidParams, OutstrideError

if TYPE_CHECKING:
    from outstride.llm import LLM

PEERS = ("llama.cpp",)
PACKAGE = "llama_cpp"
"""Not among the dependencies, so it is imported by name and only when asked for."""
CACHED, LONG, PROMPT, OUTPUT, CROWD = 128, 4096, 1024, 128, 16
BATCH = 512
"""Tokens that llama.cpp reads at once: its own default for a physical batch."""
SETTLE = 0.02
"""Seconds before a turn, in which the other side's threads stop waiting actively."""
PASSES = 3
"""Passes are short and vary: so many times the runs of what takes seconds."""


# --- how to build it ------------------------------------------------------------------------------

_OPTIONS = {
    "GGML_SSE42": ("sse4_2",),
    "GGML_AVX": ("avx",),
    "GGML_AVX2": ("avx2",),
    "GGML_BMI2": ("bmi2",),
    "GGML_FMA": ("fma",),
    "GGML_F16C": ("f16c",),
    "GGML_AVX_VNNI": ("avx_vnni",),
    "GGML_AVX512": ("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"),
    "GGML_AVX512_VBMI": ("avx512vbmi",),
    "GGML_AVX512_VNNI": ("avx512_vnni",),
}


def build_options(machine: str, cpuinfo: str) -> list[str]:
    """CMake options for this processor.

    A native build takes all that the processor announces. Virtual machines may announce AMX without
    letting anybody use it, and such a build dies at the first pass; so on x86 everything that helps
    is named, and AMX is not. AVX-VNNI is left out beside AVX-512, which has the same instructions.
    """
    if machine.lower() not in ("x86_64", "amd64"):
        return ["-DGGML_NATIVE=ON"]
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = next((set(rest.split()) for name, _, rest in lines if name.strip() == "flags"), set())
    if not flags:
        return ["-DGGML_NATIVE=ON"]
    has = {option: flags.issuperset(needed) for option, needed in _OPTIONS.items()}
    for option in has:
        if option.startswith("GGML_AVX512"):
            has[option] &= has["GGML_AVX512"]
    has["GGML_AVX_VNNI"] &= not has["GGML_AVX512"]
    return ["-DGGML_NATIVE=OFF", *(f"-D{o}={'ON' if on else 'OFF'}" for o, on in has.items())]


def _this_machine() -> list[str]:
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        cpuinfo = ""
    return build_options(platform.machine(), cpuinfo)


# --- llama.cpp ------------------------------------------------------------------------------------


def cores() -> int:
    """How many cores this process may use; both sides have as many threads."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def library() -> Any:
    """llama-cpp-python, if it is installed."""
    try:
        return importlib.import_module(PACKAGE)
    except ImportError as error:
        raise OutstrideError(
            f"llama-cpp-python cannot be imported ({error}); `make bench` builds and installs it"
        ) from error


def gguf_of(name: str) -> Path:
    """The file that both sides read."""
    from outstride.models.load import locate

    path = locate(name)
    if path.suffix != ".gguf":
        raise InvalidParams(f"llama.cpp reads GGUF files, and {name} is not one")
    return path


def _quiet(lib: Any) -> Any:
    """Silences llama.cpp, which tells of every tensor. The result must live as long as its model."""

    @lib.llama_log_callback  # type: ignore[untyped-decorator]
    def ignore(level: int, text: bytes, data: object) -> None:
        del level, text, data

    lib.llama_log_set(ignore, ctypes.c_void_p(0))
    return ignore


class Room:
    """A context of llama.cpp for so many sequences of so many tokens."""

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
            raise OutstrideError("llama.cpp could not make a context")
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
        """Sets a batch up; `wanted` are the rows whose logits are computed."""
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
        """The likeliest token behind a row of the batch."""
        pointer = self._lib.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(pointer, (self._vocabulary,)).argmax())

    def touch(self, row: int) -> None:
        """Waits until a row of logits is there."""
        self._lib.llama_get_logits_ith(self._context, row)

    def cut(self, sequence: int, length: int) -> None:
        """Forgets what a sequence has behind its first tokens."""
        if not self._lib.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise OutstrideError("llama.cpp could not drop entries")

    def clear(self) -> None:
        self._lib.llama_memory_clear(self._memory, False)

    def read(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Reads a prompt for each sequence, one by one; returns the likeliest tokens behind them.

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
        """Continues prompts greedily, all at once, each by as many tokens."""
        self.clear()
        told = [[token] for token in self.read(prompts)]
        rows = range(len(prompts))
        for step in range(output - 1):
            positions = [len(prompt) + step for prompt in prompts]
            self.fill([tokens[-1] for tokens in told], positions, rows, rows)
            self.decode()
            for row in rows:
                told[row].append(self.best(row))
        return told

    def close(self) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)


class LlamaCpp:
    """A model in llama.cpp, with room for one long sequence and for a crowd of short ones."""

    def __init__(self, path: Path, *, threads: int, long: int, short: int, crowd: int) -> None:
        self._lib = lib = library()
        self._quiet = _quiet(lib)
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise OutstrideError(f"llama.cpp could not load {path}")
        vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._rooms: list[Room] = []
        for sequences, tokens in ((1, long), (crowd, short)):
            self._rooms.append(
                Room(
                    lib,
                    self._model,
                    sequences=sequences,
                    tokens=tokens,
                    threads=threads,
                    vocabulary=vocabulary,
                )
            )
        self.alone, self.crowd = self._rooms

    def describe(self) -> dict[str, Any]:
        """What it is and how it was built."""
        info = self._lib.llama_print_system_info()
        return {
            "version": str(getattr(self._lib, "__version__", "unknown")),
            "build": info.decode() if isinstance(info, bytes) else str(info),
            "batch": BATCH,
            "unified": self.crowd.unified,
        }

    def close(self) -> None:
        for room in self._rooms:
            room.close()
        self._lib.llama_model_free(self._model)


# --- what is compared -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bound:
    """What a row must be: at most or at least a number, of the ratio or of our figure itself."""

    limit: float
    most: bool = True
    of: str = "ratio"

    def met(self, value: float) -> bool:
        return value <= self.limit if self.most else value >= self.limit

    def __str__(self) -> str:
        return f"{'<=' if self.most else '>='} {self.limit:g}"


@dataclass(slots=True)
class Row:
    """One line of the comparison."""

    name: str
    unit: str
    ours: float
    theirs: float | None = None
    bound: Bound | None = None
    other: str = ""
    """Who `theirs` is."""
    raw: dict[str, list[float]] = field(default_factory=dict)
    """Durations of each run in seconds, or other values as they were read."""

    @property
    def ratio(self) -> float | None:
        return None if not self.theirs else self.ours / self.theirs

    @property
    def met(self) -> bool | None:
        if self.bound is None:
            return None
        value = self.ratio if self.bound.of == "ratio" else self.ours
        return None if value is None else self.bound.met(value)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": round(self.ours, 4),
            "theirs": None if self.theirs is None else round(self.theirs, 4),
            "other": self.other,
            "ratio": None if self.ratio is None else round(self.ratio, 4),
            "bound": None if self.bound is None else f"{self.bound.of} {self.bound}",
            "met": self.met,
            "raw": {side: [round(v, 7) for v in values] for side, values in self.raw.items()},
        }


@dataclass(slots=True)
class PeerReport:
    """All rows; what could not be measured, with the reason."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    peer: dict[str, Any] = field(default_factory=dict)

    def samples(self) -> list[dict[str, Any]]:
        return [row.to_dict() for row in self.rows]

    def summary(self) -> dict[str, Any]:
        judged = [row for row in self.rows if row.met is not None]
        return {
            "met": sum(bool(row.met) for row in judged),
            "bounds": len(judged),
            "missed": [row.name for row in judged if not row.met],
            "ratios": {row.name: round(row.ratio, 4) for row in self.rows if row.ratio is not None},
            "skipped": [{"name": name, "reason": why} for name, why in self.skipped.items()],
            "peer": self.peer,
        }


# --- passes and generations -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured; tests take less."""

    cached: int = CACHED
    long: int = LONG
    prompt: int = PROMPT
    output: int = OUTPUT
    crowd: int = CROWD
    nodes: tuple[int, ...] = (1, 8, 16)
    many: int = 64


_PASS_BOUNDS = {1: 0.85, 8: 0.35, 16: 0.31}


def _pass_name(case: StepCase) -> str:
    if case.sequences > 1:
        return f"{case.sequences} sequences of {case.nodes} node"
    plural = "" if case.nodes == 1 else "s"
    behind = f", {case.cached:,} cached" if case.sweep == "cached" else ""
    return f"pass over {case.nodes} node{plural}{behind}"


class _Passes:
    """Passes of llama.cpp of the same shapes as ours."""

    def __init__(self, peer: LlamaCpp, vocabulary: int, seed: int) -> None:
        self._peer = peer
        self._vocabulary = vocabulary
        self._random = np.random.default_rng(seed)
        self._long: list[int] = []
        self._length = 0

    def _tokens(self, count: int) -> list[int]:
        return [int(t) for t in self._random.integers(self._vocabulary, size=count)]

    def prepare(self, longest: int, crowd: int, cached: int) -> None:
        """Real entries: a long sequence, which is cut for each case, and a crowd."""
        self._peer.alone.clear()
        self._long = self._tokens(longest)
        self._peer.crowd.clear()
        self._peer.crowd.read([self._tokens(cached) for _ in range(crowd)])
        self._length = 0

    def _grow(self, length: int) -> None:
        room = self._peer.alone
        if length < self._length:
            room.cut(0, length)
            self._length = length
        while self._length < length:
            part = self._long[self._length : min(length, self._length + BATCH)]
            positions = range(self._length, self._length + len(part))
            room.fill(part, list(positions), [0] * len(part), ())
            room.decode()
            self._length += len(part)

    @contextmanager
    def once(self, case: StepCase, all_rows: bool = True) -> Iterator[Callable[[], object]]:
        """One pass to be timed, after one that is not; entries are dropped again."""
        if case.sequences == 1:
            self._grow(case.cached)
        room = self._peer.alone if case.sequences == 1 else self._peer.crowd
        time.sleep(SETTLE)
        count = case.nodes * case.sequences
        sequences = [i // case.nodes for i in range(count)]
        positions = [case.cached + i % case.nodes for i in range(count)]
        wanted = range(count) if all_rows else [count - 1]

        def drop() -> None:
            for sequence in range(case.sequences):
                room.cut(sequence, case.cached)

        def call() -> None:
            room.decode()
            room.touch(count - 1)

        room.fill(self._tokens(count), positions, sequences, wanted)
        call()
        drop()
        room.fill(self._tokens(count), positions, sequences, wanted)
        yield call
        drop()


@contextmanager
def _ours(bed: Bed, case: StepCase) -> Iterator[Callable[[], object]]:
    """One pass of ours to be timed, after one that is not."""
    time.sleep(SETTLE)
    with bed.once(case) as call:
        call()
    with bed.once(case) as call:
        yield call


class _Prompts:
    """Prompts by turn: both sides get the same ones, and no turn finds its own in a cache."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self._texts = [llm.encode(p.text, chat=True) for p in built_in()]
        self._vocabulary = llm.model.vocab_size
        self._seed = seed

    def random(self, turn: int, count: int) -> list[int]:
        source = np.random.default_rng((self._seed, turn, count))
        return [int(t) for t in source.integers(self._vocabulary, size=count)]

    def texts(self, turn: int, count: int) -> list[list[int]]:
        """Built-in prompts behind a token of their own, which no other prompt begins with."""
        first = self.random(turn, count)
        return [[first[i], *self._texts[i % len(self._texts)]] for i in range(count)]

    @property
    def longest(self) -> int:
        return 1 + max(map(len, self._texts))


def _case(
    prompts: Callable[[int], list[list[int]]], call: Callable[[int, list[list[int]]], object]
) -> clock.Case:
    """A case whose prompts follow from how often it has run."""
    turns = itertools.count()

    @contextmanager
    def case() -> Iterator[Callable[[], object]]:
        turn = next(turns)
        given = prompts(turn)
        time.sleep(SETTLE)
        yield lambda: call(turn, given)

    return case


def compare(
    llm: LLM,
    path: Path,
    *,
    repeat: int = 5,
    seed: int = 0,
    sizes: Sizes | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PeerReport:
    """Passes and generations of both sides, in turns. The engine of `llm` must be idle."""
    if repeat < 1:
        raise InvalidParams("repeat must be at least 1")
    sizes = sizes or Sizes()
    context = llm.model.context
    report = PeerReport()
    prompts = _Prompts(llm, seed)
    long = max(sizes.long, sizes.prompt, prompts.longest + sizes.output, sizes.cached)
    cases = [
        *(StepCase("nodes", nodes, sizes.cached) for nodes in sizes.nodes),
        StepCase("sequences", 1, sizes.cached, sizes.crowd),
        StepCase("cached", 1, sizes.long),
    ]
    if longest := [_pass_name(c) for c in cases if c.cached + c.nodes > context]:
        report.skipped = dict.fromkeys(longest, f"the model's context holds {context}")
    peer = LlamaCpp(
        path,
        threads=cores(),
        long=min(long + max(sizes.nodes) + 1, context),
        short=max(prompts.longest + sizes.output, sizes.cached) + 2,
        crowd=sizes.crowd,
    )
    watch = Watch(progress)
    with closing(peer):
        report.peer = peer.describe()
        cases = [c for c in cases if _pass_name(c) not in report.skipped]
        last_only = sum(c.nodes > 1 for c in cases)
        watch.expected = (1 + PASSES * repeat) * (2 * len(cases) + last_only)
        watch.expected += (1 + repeat) * 7
        report.rows += _compare_passes(llm, peer, cases, repeat, seed, watch, report)
        report.rows += _compare_generation(llm, peer, prompts, repeat, sizes, watch, report)
    return report


def _compare_passes(
    llm: LLM,
    peer: LlamaCpp,
    cases: Sequence[StepCase],
    repeat: int,
    seed: int,
    watch: Watch,
    report: PeerReport,
) -> list[Row]:
    bed = Bed(llm.engine.passes, seed, watch)
    theirs = _Passes(peer, llm.model.vocab_size, seed)
    try:
        bed.prepare(cases)
        obstacles = {case: reason for case in cases if (reason := bed.obstacle(case))}
        report.skipped |= {_pass_name(case): reason for case, reason in obstacles.items()}
        cases = [case for case in cases if case not in obstacles]
        crowd = max((case.sequences for case in cases if case.sequences > 1), default=1)
        cached = min((case.cached for case in cases), default=0)
        theirs.prepare(max((case.cached for case in cases), default=0), crowd, cached)
        runs: dict[tuple[str, StepCase], clock.Case] = {}
        for case in cases:
            runs["ours", case] = _bind(_ours, bed, case)
            runs["theirs", case] = _bind(theirs.once, case)
            if case.nodes > 1:
                runs["last", case] = _bind(theirs.once, case, False)
        short = {key: run for key, run in runs.items() if key[1].sweep != "cached"}
        long = {key: run for key, run in runs.items() if key[1].sweep == "cached"}
        series = clock.in_turns(short, repeat=PASSES * repeat, tick=watch.tick)
        series |= clock.in_turns(long, repeat=PASSES * repeat, tick=watch.tick)
    finally:
        bed.close()
    rows = []
    for case in cases:
        name, mine = _pass_name(case), series["ours", case]
        limit = 1.0 if case.sweep == "cached" else _PASS_BOUNDS.get(case.nodes * case.sequences)
        bound = None if limit is None else Bound(limit)
        rows.append(_row(name, mine, series["theirs", case], bound))
        if case.nodes > 1:
            rows.append(_row(f"{name}, theirs scoring the last", mine, series["last", case], None))
    return rows


def _bind(function: Callable[..., Any], *arguments: Any) -> clock.Case:
    return lambda: function(*arguments)


def _row(name: str, ours: Series, theirs: Series, bound: Bound | None) -> Row:
    return Row(
        name,
        "ms",
        ours.median * 1e3,
        theirs.median * 1e3,
        bound,
        other="llama.cpp",
        raw={"ours": ours.seconds, "theirs": theirs.seconds},
    )


def _compare_generation(
    llm: LLM,
    peer: LlamaCpp,
    prompts: _Prompts,
    repeat: int,
    sizes: Sizes,
    watch: Watch,
    report: PeerReport,
) -> list[Row]:
    output, crowd = sizes.output, sizes.crowd
    greedy = SamplingParams(max_tokens=output, ignore_eos=True)

    def ours(params: SamplingParams) -> Callable[[int, list[list[int]]], object]:
        def call(_turn: int, given: list[list[int]]) -> None:
            for result in llm.generate(given, params):
                if result.error is not None:
                    raise result.error
                if len(result.outputs[0].token_ids) != params.max_tokens:
                    raise OutstrideError("an answer of another length than was asked for")

        return call

    def sampled(turn: int, given: list[list[int]]) -> None:
        params = SamplingParams(
            max_tokens=output, ignore_eos=True, temperature=0.8, top_p=0.95, seed=turn
        )
        ours(params)(turn, given)

    def reading(turn: int) -> list[list[int]]:
        return [prompts.random(turn, sizes.prompt)]

    def alone(turn: int) -> list[list[int]]:
        return prompts.texts(turn, 1)

    def again(turn: int) -> list[list[int]]:
        return prompts.texts(turn + 500_000, 1)  # what greedy decoding read is in the cache by now

    def several(turn: int) -> list[list[int]]:
        return prompts.texts(turn + 1_000_000, crowd)

    def read(_turn: int, given: list[list[int]]) -> None:
        peer.alone.clear()
        peer.alone.read(given)

    runs: dict[str, clock.Case] = {
        "read ours": _case(reading, ours(SamplingParams(max_tokens=1, ignore_eos=True))),
        "read theirs": _case(reading, read),
        "alone ours": _case(alone, ours(greedy)),
        "alone theirs": _case(alone, lambda _, given: peer.alone.generate(given, output)),
        "sampled ours": _case(again, sampled),
        "crowd ours": _case(several, ours(greedy)),
        "crowd theirs": _case(several, lambda _, given: peer.crowd.generate(given, output)),
    }
    context = llm.model.context
    if sizes.prompt + 1 > context:
        report.skipped[f"prompt of {sizes.prompt:,} tokens"] = f"the context holds {context}"
        runs = {name: run for name, run in runs.items() if not name.startswith("read")}
    series = clock.in_turns(runs, repeat=repeat, tick=watch.tick)

    def rate(name: str, tokens: int, ours: str, theirs: str, bound: Bound, other: str) -> Row:
        mine, others = series[ours], series[theirs]
        return Row(
            name,
            "tok/s",
            tokens / mine.median,
            tokens / others.median,
            bound,
            other=other,
            raw={"ours": mine.seconds, "theirs": others.seconds},
        )

    rows = []
    if "read ours" in runs:
        name = f"prompt of {sizes.prompt:,} tokens"
        least = Bound(1.0, most=False)
        rows.append(rate(name, sizes.prompt, "read ours", "read theirs", least, "llama.cpp"))
    name = f"greedy, one request, {output} tokens"
    least = Bound(1.2, most=False)
    rows.append(rate(name, output, "alone ours", "alone theirs", least, "llama.cpp"))
    name, least = f"{crowd} requests at once", Bound(2.7, most=False)
    rows.append(rate(name, crowd * output, "crowd ours", "crowd theirs", least, "llama.cpp"))
    name, least = "temperature 0.8, top-p 0.95, seeded", Bound(0.92, most=False)
    rows.append(rate(name, output, "sampled ours", "alone ours", least, "our greedy"))
    return rows


# --- start and memory -----------------------------------------------------------------------------

_CHILD = """
import json, os, subprocess, sys, time
start = time.perf_counter()
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
first = child.stdout.read(1)
seconds = time.perf_counter() - start
child.stdout.read()
errors = child.stderr.read().decode(errors="replace")
_, status, usage = os.wait4(child.pid, 0)
code = os.waitstatus_to_exitcode(status)
print(json.dumps([code, bool(first), seconds, usage.ru_maxrss, errors[-500:]]))
"""
"""Starts a program and watches it. A process of its own, because a child's peak of memory begins
with what its parent had."""


def watch_child(command: Sequence[str]) -> tuple[float, float]:
    """Seconds until a program says something, and its peak of memory in bytes."""
    ran = subprocess.run(
        [sys.executable, "-I", "-c", _CHILD, *command], capture_output=True, text=True, check=True
    )
    code, spoke, seconds, peak, errors = json.loads(ran.stdout)
    if code or not spoke:
        raise OutstrideError(f"{command[0]} ended with {code}: {errors.strip()}")
    return float(seconds), float(peak) * (1 if sys.platform == "darwin" else 1024)


def start(
    command: Sequence[str],
    *,
    repeat: int = 3,
    watcher: Callable[[Sequence[str]], Any] = watch_child,
) -> list[Row]:
    """How long `command` takes to its first output, and what memory it needs, once files are warm."""
    found = [watcher(command) for _ in range(repeat + 1)][1:]
    seconds, peaks = [s for s, _ in found], [p / 1e6 for _, p in found]
    return [
        Row(
            "start to first token",
            "s",
            median(seconds),
            None,
            Bound(3.0, of="value"),
            raw={"ours": seconds},
        ),
        Row("peak memory", "MB", max(peaks), None, Bound(900.0, of="value"), raw={"ours": peaks}),
    ]


def load_average() -> list[float]:
    """How busy the machine is."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else []


if __name__ == "__main__":
    print(" ".join(_this_machine()))

"""The comparison with llama.cpp, on a fake of it that checks how it is used."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outstride.bench import comparison_rows, decode, host, result
from outstride.bench.comparison_rows import Bound, PeerReport, Row
from outstride.bench.peers import (
    bounds,
    build,
    llama_cpp,
    llama_cpp_comparison,
    llama_cpp_generation,
    start,
)
from outstride.bench.peers.llama_cpp import LlamaCpp
from outstride.bench.peers.llama_cpp_comparison import Sizes
from outstride.errors import InvalidParams, OutstrideError
from tests.bench import fake
from tests.cli.shell import Shell

VOCABULARY = len(fake.ALPHABET)
SMALL = Sizes(cached=8, long=40, prompts=(20, 30), output=4, concurrency=3, nodes=(1, 2))


class FakeBatch:
    def __init__(self, size: int) -> None:
        self.n_tokens = 0
        self.token = (ctypes.c_int32 * size)()
        self.pos = (ctypes.c_int32 * size)()
        self.n_seq_id = (ctypes.c_int32 * size)()
        self.seq_id = [(ctypes.c_int32 * 1)() for _ in range(size)]
        self.logits = (ctypes.c_int8 * size)()


class FakeContext:
    def __init__(self, params: Any) -> None:
        self.params = params
        self.entries: dict[int, list[int]] = {i: [] for i in range(params.n_seq_max)}
        self.wanted: set[int] = set()
        self.rows: dict[int, Any] = {}


class FakeLlama:
    """llama-cpp-python's low-level functions. The token behind a sequence is its sum, modulo."""

    __version__ = "0.0.fake"

    def __init__(self) -> None:
        self.contexts: list[FakeContext] = []
        self.batches: list[tuple[int, int, int]] = []
        """Tokens, sequences and wanted rows of every pass."""
        self.alive = 0
        self.fail = 0

    @staticmethod
    def llama_log_callback(function: Any) -> Any:
        return function

    def llama_log_set(self, callback: Any, data: Any) -> None:
        del callback, data

    def llama_backend_init(self) -> None: ...

    def llama_model_default_params(self) -> Any:
        return SimpleNamespace(n_gpu_layers=-1)

    def llama_model_load_from_file(self, path: bytes, params: Any) -> object | None:
        assert params.n_gpu_layers == 0
        self.alive += 1
        return None if b"broken" in path else object()

    def llama_model_get_vocab(self, model: object) -> object:
        return model

    def llama_vocab_n_tokens(self, vocabulary: object) -> int:
        del vocabulary
        return VOCABULARY

    def llama_model_free(self, model: object) -> None:
        del model
        self.alive -= 1

    def llama_context_default_params(self) -> Any:
        return SimpleNamespace(kv_unified=False, n_outputs_max_per_seq=1)

    def llama_init_from_model(self, model: object, params: Any) -> FakeContext:
        del model
        assert params.n_threads == params.n_threads_batch == comparison_rows.cores()
        self.alive += 1
        self.contexts.append(FakeContext(params))
        return self.contexts[-1]

    def llama_get_memory(self, context: FakeContext) -> FakeContext:
        return context

    def llama_free(self, context: FakeContext) -> None:
        del context
        self.alive -= 1

    def llama_batch_init(self, size: int, embd: int, n_seq_max: int) -> FakeBatch:
        assert (embd, n_seq_max) == (0, 1)
        self.alive += 1
        return FakeBatch(size)

    def llama_batch_free(self, batch: FakeBatch) -> None:
        del batch
        self.alive -= 1

    def llama_decode(self, context: FakeContext, batch: FakeBatch) -> int:
        if self.fail:
            return self.fail
        count, wanted, sequences = batch.n_tokens, 0, set()
        context.rows.clear()
        for i in range(count):
            assert batch.n_seq_id[i] == 1
            sequence = batch.seq_id[i][0]
            entries = context.entries[sequence]
            assert batch.pos[i] == len(entries), "positions follow each other"
            entries.append(batch.token[i])
            assert len(entries) <= context.params.n_ctx // context.params.n_seq_max
            sequences.add(sequence)
            if batch.logits[i]:
                wanted += 1
                row = (ctypes.c_float * VOCABULARY)()
                row[sum(entries) % VOCABULARY] = 1.0
                context.rows[i] = row
        self.batches.append((count, len(sequences), wanted))
        return 0

    def llama_get_logits_ith(self, context: FakeContext, row: int) -> Any:
        return ctypes.cast(context.rows[row], ctypes.POINTER(ctypes.c_float))

    def llama_memory_seq_rm(self, memory: FakeContext, sequence: int, low: int, high: int) -> bool:
        assert high == -1
        del memory.entries[sequence][low:]
        return True

    def llama_memory_clear(self, memory: FakeContext, data: bool) -> None:
        assert not data
        for entries in memory.entries.values():
            entries.clear()

    def llama_print_system_info(self) -> bytes:
        return b"a fake"


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> FakeLlama:
    """A fake in the place of llama-cpp-python; turns need no rest."""
    module = FakeLlama()
    monkeypatch.setitem(sys.modules, llama_cpp.PACKAGE, module)
    monkeypatch.setattr(llama_cpp, "SETTLE", 0.0)
    monkeypatch.setattr(llama_cpp_comparison, "SETTLE", 0.0)
    monkeypatch.setattr(llama_cpp_generation, "SETTLE", 0.0)
    monkeypatch.delenv("OUTSTRIDE_ISA", raising=False)
    return module


def test_greedy_generation_of_several(llama: FakeLlama) -> None:
    peer = LlamaCpp(Path("x.gguf"), threads=comparison_rows.cores(), long=64, short=32, sequences=2)
    prompts = [[3, 4, 5], list(range(20))]

    def expected(prompt: Sequence[int]) -> list[int]:
        tokens = list(prompt)
        for _ in range(5):
            tokens.append(sum(tokens) % VOCABULARY)
        return tokens[len(prompt) :]

    assert peer.batched.generate(prompts, 5) == [expected(p) for p in prompts]
    assert peer.single.generate(prompts[1:], 5) == [expected(prompts[1])]
    assert llama.batches[:3] == [(3, 1, 1), (20, 1, 1), (2, 2, 2)]  # only what is needed is scored
    peer.close()
    assert llama.alive == 0


def test_long_prompts_are_prefilled_in_batches(llama: FakeLlama) -> None:
    peer = LlamaCpp(
        Path("x.gguf"), threads=comparison_rows.cores(), long=2000, short=8, sequences=2
    )
    prompt = [i % VOCABULARY for i in range(1100)]
    assert peer.single.prefill([prompt]) == [sum(prompt) % VOCABULARY]
    assert llama.batches == [(512, 1, 0), (512, 1, 0), (76, 1, 1)]


def test_failures_of_llama(llama: FakeLlama) -> None:
    with pytest.raises(OutstrideError, match="could not load"):
        LlamaCpp(Path("broken.gguf"), threads=comparison_rows.cores(), long=8, short=8, sequences=2)
    peer = LlamaCpp(Path("x.gguf"), threads=comparison_rows.cores(), long=8, short=8, sequences=2)
    llama.fail = 1
    with pytest.raises(OutstrideError, match="llama_decode returned 1"):
        peer.single.prefill([[1]])


def test_all_rows_are_measured(llama: FakeLlama) -> None:
    ticks: list[tuple[int, int]] = []
    with fake.make_llm(pages=1024, context=1024) as llm:
        free = llm.engine.pool().available
        report = llama_cpp_comparison.compare(
            llm, Path("x.gguf"), repeat=2, sizes=SMALL, progress=lambda *now: ticks.append(now)
        )
        assert llm.engine.pool().available == free
    assert [row.name for row in report.rows] == [
        "pass over 1 node",
        "pass over 2 nodes",
        "pass over 2 nodes, theirs scoring the last",
        "3 sequences of 1 node",
        "pass over 1 node, 40 cached",
        "greedy, one request, 4 tokens",
        "3 requests at once",
        "temperature 0.8, top-p 0.95, seeded",
        "prompt of 20 tokens",
        "prompt of 30 tokens",
    ]
    assert report.skipped == {}
    assert ticks[-1][0] == ticks[-1][1]
    assert all(row.ours > 0 and row.theirs for row in report.rows)
    assert len(report.rows[0].raw["ours"]) == 2 * llama_cpp_comparison.PASSES
    assert len(report.rows[-1].raw["ours"]) == 2
    assert report.rows[-3].other == "our greedy"
    assert {(2, 1, 2), (2, 1, 1), (3, 3, 3)} <= set(llama.batches)
    assert llama.alive == 0
    assert report.peer["version"] == "0.0.fake"


@pytest.mark.usefixtures("llama")
def test_what_does_not_fit_is_left_out() -> None:
    sizes = Sizes(cached=8, long=4096, prompts=(5000,), output=2, concurrency=2, nodes=(1,))
    with fake.make_llm(pages=1024, context=1024) as llm:
        report = llama_cpp_comparison.compare(llm, Path("x.gguf"), repeat=1, sizes=sizes)
    assert set(report.skipped) == {"pass over 1 node, 4,096 cached", "prompt of 5,000 tokens"}
    assert len(report.rows) == 5


def test_only_some_parts(llama: FakeLlama) -> None:
    ticks: list[tuple[int, int]] = []
    with fake.make_llm(pages=1024, context=1024) as llm:
        report = llama_cpp_comparison.compare(
            *(llm, Path("x.gguf")),
            parts=("passes", "prompts"),
            repeat=1,
            sizes=SMALL,
            progress=lambda *now: ticks.append(now),
        )
    assert [row.name for row in report.rows] == [
        "pass over 1 node",
        "pass over 2 nodes",
        "pass over 2 nodes, theirs scoring the last",
        "prompt of 20 tokens",
        "prompt of 30 tokens",
    ]
    assert ticks[-1][0] == ticks[-1][1]
    assert llama.contexts[0].params.n_ctx == 256, "no more context than the prompts need"
    assert not any(sequences > 1 for _, sequences, _ in llama.batches)


def test_long_prompts_run_less_often() -> None:
    runs = {n: llama_cpp_generation.prompt_runs(n, 5) for n in (20, 1024, 4096, 8185)}
    assert runs == {20: (5, 1), 1024: (4, 1), 4096: (1, 0), 8185: (1, 0)}


def test_bounds_depend_on_the_build_and_on_the_model() -> None:
    def model(name: str, config: object = None) -> Any:
        return SimpleNamespace(model=SimpleNamespace(ops=SimpleNamespace(name=name), config=config))

    large = SimpleNamespace(shapes=lambda: {"a": (1000, 1000, 600)})
    assert bounds.bounds_of(model("cpu avx512-vnni int8, cache int8")) is bounds.GENERAL
    assert bounds.bounds_of(model("cpu avx2 int8, cache int8")) is bounds.AVX2
    assert bounds.bounds_of(model("cpu avx2 int8, cache int8", large)) is bounds.LARGE_MODEL
    with fake.make_llm() as llm:
        assert bounds.bounds_of(llm) is bounds.GENERAL


def test_bounds() -> None:
    assert Row("a", "ms", 8.4, 10.0, Bound(0.85)).met is True
    assert Row("a", "ms", 8.6, 10.0, Bound(0.85)).met is False
    assert Row("a", "tok/s", 12.0, 10.0, Bound(1.2, at_most=False)).met is True
    assert Row("a", "s", 3.1, None, Bound(3.0, of="value")).met is False
    assert Row("a", "ms", 1.0, 2.0).met is None
    assert Row("a", "ms", float("nan"), 2.0, Bound(1.0)).met is False
    report = PeerReport([Row("a", "s", 3.1, None, Bound(3.0, of="value")), Row("b", "ms", 1, 2)])
    summary = report.summary()
    assert (summary["met"], summary["bounds"], summary["missed"]) == (0, 1, ["a"])
    assert summary["ratios"] == {"b": 0.5}


def test_host_work_is_what_passes_leave() -> None:
    with fake.make_llm() as llm:
        found = host.host(llm, sequences=(1, 3), steps=30)
    assert [row.name for row in found] == [
        "host work per step, 1 sequence",
        "host work per step, 3 sequences",
    ]
    assert all(row.ours > 0 for row in found)
    assert len(found[0].raw["ours"]) >= 20


def test_a_child_is_watched() -> None:
    code = "import sys, time; x = bytearray(60_000_000); print('hi', flush=True); time.sleep(0.05)"
    seconds, peak = start.watch_child([sys.executable, "-c", code])
    assert seconds > 0
    assert 60e6 < peak < 200e6  # its own, not that of this process
    with pytest.raises(OutstrideError, match="no such thing"):
        start.watch_child([sys.executable, "-c", "import sys; sys.exit('no such thing')"])


def test_start_ignores_the_first_run() -> None:
    found = iter([(9.0, 1e6), (1.0, 2e6), (3.0, 4e6), (2.0, 3e6)])
    first, memory = start.start(["x"], watcher=lambda _: next(found))
    assert (first.ours, memory.ours) == (2.0, 4.0)


# --- how it is built ------------------------------------------------------------------------------

AVX512 = "avx512f avx512cd avx512bw avx512dq avx512vl"


@pytest.mark.parametrize(
    ("machine", "flags", "on"),
    [
        (
            "x86_64",
            "sse4_2 avx avx2 fma f16c bmi2",
            {"SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2"},
        ),
        ("x86_64", "sse4_2 avx", {"SSE42", "AVX"}),
        ("x86_64", "avx2 avx_vnni", {"AVX2", "AVX_VNNI"}),
        ("x86_64", f"avx2 avx_vnni {AVX512} amx_int8", {"AVX2", "AVX512"}),
        ("AMD64", f"{AVX512} avx512_vnni avx512vbmi", {"AVX512", "AVX512_VNNI", "AVX512_VBMI"}),
        ("x86_64", "avx512f avx512_vnni", set()),
    ],
)
def test_build_options(machine: str, flags: str, on: set[str]) -> None:
    found = build.build_options(machine, f"processor\t: 0\nflags\t\t: {flags}\n")
    assert found[0] == "-DGGML_NATIVE=OFF"
    assert {o[len("-DGGML_") : -len("=ON")] for o in found if o.endswith("=ON")} == on
    assert not any("AMX" in option for option in found)
    assert all(o.endswith(("=ON", "=OFF")) for o in found)


@pytest.mark.parametrize(
    ("isa", "on"),
    [
        ("portable", set()),
        ("avx2", {"AVX2", "FMA"}),
        ("avx-vnni", {"AVX2", "FMA", "AVX_VNNI"}),
        ("avx512-vnni", {"AVX2", "FMA", "AVX512", "AVX512_VNNI"}),
        ("amx", {"AVX2", "FMA", "AVX512", "AVX512_VNNI"}),
    ],
)
def test_build_options_for_one_instruction_set(isa: str, on: set[str]) -> None:
    flags = f"flags : avx2 fma avx_vnni avx512_vnni amx_int8 {AVX512}"
    found = build.build_options("x86_64", flags, isa)
    assert {o[len("-DGGML_") : -len("=ON")] for o in found if o.endswith("=ON")} == on
    assert found[0] == "-DGGML_NATIVE=OFF"


def test_a_forced_instruction_set_has_its_own_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTSTRIDE_ISA", "avx2")
    monkeypatch.delitem(sys.modules, llama_cpp.PACKAGE, raising=False)
    monkeypatch.setattr(build, "this_machine", lambda isa=None: [str(isa)])
    folder = tmp_path / "llama-avx2" / "lib" / "python3.11" / "site-packages"
    for place in (None, folder, folder / llama_cpp.PACKAGE):
        with pytest.raises(OutstrideError, match="`make llama ISA=avx2` builds it"):
            llama_cpp.library(tmp_path)
        if place is not None:
            place.mkdir(parents=True)
    (folder / llama_cpp.PACKAGE / "__init__.py").write_text("from llama_helper import name")
    (folder / "llama_helper.py").write_text("name = 'built for AVX2'")
    path = list(sys.path)
    try:
        assert llama_cpp.library(tmp_path).name == "built for AVX2"
    finally:
        for name in (llama_cpp.PACKAGE, "llama_helper"):
            sys.modules.pop(name, None)
    assert sys.path == path


def test_the_ordinary_build_serves_where_it_is_the_same(
    tmp_path: Path, llama: FakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "this_machine", lambda isa=None: ["the same"])
    monkeypatch.setenv("OUTSTRIDE_ISA", "avx2")
    assert llama_cpp.library(tmp_path) is llama
    monkeypatch.setattr(build, "this_machine", lambda isa=None: [str(isa)])
    monkeypatch.setenv("OUTSTRIDE_ISA", "amx")
    assert llama_cpp.library(tmp_path) is llama


def test_what_a_build_has_is_named() -> None:
    info = "CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | OPENMP = 1 | "
    assert llama_cpp.enabled(info) == "SSE3 AVX2 OPENMP"
    assert llama_cpp.enabled("a fake") == ""


def test_elsewhere_the_build_is_native() -> None:
    assert build.build_options("aarch64", "Features : fp asimd\n") == ["-DGGML_NATIVE=ON"]
    assert build.build_options("x86_64", "") == ["-DGGML_NATIVE=ON"]


# --- the command ----------------------------------------------------------------------------------


def test_the_command(
    shell: Shell, llama: FakeLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    monkeypatch.setattr(start, "start", lambda _: [Row("start to first token", "s", 1.0)])
    monkeypatch.setattr(host, "host", lambda _: [Row("host work per step", "ms", 0.1)])
    monkeypatch.setattr(llama_cpp_comparison, "Sizes", lambda: SMALL)
    out = tmp_path / "out.json"
    arguments = ("--against", "llama.cpp", "--model", str(file), "--repeat", "1")
    ran = shell("bench", "step", *arguments, "--out", str(out), context=1024, pages=1024)
    assert (ran.code, ran.err) == (0, "")
    values = result.validate(json.loads(ran.last))
    assert values["kind"] == "against"
    assert values["settings"]["against"] == "llama.cpp"
    assert "must be" in ran.out
    assert [row["name"] for row in values["samples"]][-2:] == [
        *("start to first token", "host work per step")
    ]
    assert result.read(out).to_dict() == values
    assert llama.alive == 0
    more = ("--only", "passes,prompts", "--nodes", "3", "--prompts", "12")
    ran = shell("bench", "step", *arguments, *more, context=1024, pages=1024)
    assert [row["name"] for row in json.loads(ran.last)["samples"]] == [
        "pass over 3 nodes",
        "pass over 3 nodes, theirs scoring the last",
        "prompt of 12 tokens",
    ]
    assert "ours: unknown; llama.cpp: a fake" in ran.out
    ran = shell("bench", "step", *arguments, "--only", "passes other")
    assert ran.code == 1
    assert "there is no part 'other'; parts are passes," in ran.err


def test_decode_against_llama(
    shell: Shell, llama: FakeLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "SETTLE", 0.0)
    file, prompts = tmp_path / "model.gguf", tmp_path / "prompts.jsonl"
    file.touch()
    rows = [{"prompt": p, "group": g} for p, g in (("abcabc", "x"), ("hey you", "y"))]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("bench", "decode", "--against", "llama.cpp", "--prompts", str(prompts))
    ran = shell(*arguments, "--model", str(file), "--max-tokens", "6")
    assert ran.code == 0, ran.err
    values = result.validate(json.loads(ran.last))
    assert {line["method"] for line in values["summary"]["lines"]} == {"plain", "auto", "llama.cpp"}
    assert values["settings"]["peer"]["version"] == "0.0.fake"
    said = " ".join(ran.out.split())
    assert "x llama.cpp, lowest group" in said
    assert "ours: unknown; llama.cpp 0.0.fake: a fake" in said
    assert llama.alive == 0
    ran = shell(*arguments, "--model", str(file), "--temperature", "0.8")
    assert ran.code == 1
    assert "compares greedy answers" in ran.err


def test_only_gguf_files(shell: Shell, llama: FakeLlama, tmp_path: Path) -> None:
    del llama
    (tmp_path / "config.json").write_text("{}")
    ran = shell("bench", "step", "--against", "llama.cpp", "--model", str(tmp_path))
    assert ran.code == 1
    assert "reads GGUF files" in ran.err
    with pytest.raises(InvalidParams):
        llama_cpp_comparison.gguf_of(str(tmp_path))


def test_a_missing_peer_says_how_to_get_it(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    monkeypatch.setitem(sys.modules, llama_cpp.PACKAGE, None)
    ran = shell("bench", "step", "--against", "llama.cpp", "--model", str(file))
    assert ran.code == 1
    assert "`make bench` builds and installs it" in ran.err


def test_other_peers_are_unknown(shell: Shell) -> None:
    ran = shell("bench", "step", "--against", "other")
    assert ran.code == 2
    assert "llama.cpp" in ran.err

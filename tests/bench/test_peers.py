"""All engines in one run: same tokens in, as many out, and what is missing is left out with a word."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outstride.bench import comparison_rows, result
from outstride.bench.peers import (
    engine_comparison,
    llama_cpp,
    openvino,
    ours,
    subprocess_peer,
    transformers,
    vllm,
)
from outstride.bench.peers.engine_comparison import ComparisonPlan, EngineComparisonReport
from outstride.bench.peers.peer import PeerSetup
from outstride.bench.prompts import BenchPrompt
from outstride.errors import InvalidParams, OutstrideError
from tests.bench import fake
from tests.bench.test_comparison import VOCABULARY, FakeLlama
from tests.cli.shell import Shell

PROMPTS = [BenchPrompt("a", "g", "abcabc"), BenchPrompt("b", "g", "hello hello you")]
SMALL = ComparisonPlan(output=5, batches=(1, 2), nodes=(1, 4), cached=8, passes=2)
GROUND = PeerSetup(Path("x.gguf"), VOCABULARY, threads=1, max_length=600, max_batch=2)


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (llama_cpp, ours, engine_comparison, transformers):
        monkeypatch.setattr(module, "SETTLE", 0.0)
    monkeypatch.delenv("OUTSTRIDE_ISA", raising=False)


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is installed in other environments."""
    monkeypatch.setattr(subprocess_peer, "_LOOK", "import sys; sys.exit(1)")


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> FakeLlama:
    module = FakeLlama()
    monkeypatch.setitem(sys.modules, llama_cpp.PACKAGE, module)
    monkeypatch.setattr("tests.bench.test_comparison.comparison_rows.cores", lambda: 1)
    return module


@pytest.mark.usefixtures("nobody")
def test_all_engines_get_the_same_prompts(llama: FakeLlama) -> None:
    ticks: list[tuple[int, int]] = []
    with fake.make_llm(pages=512) as llm:
        given = [llm.encode(prompt.text, chat=True) for prompt in PROMPTS]
        report = engine_comparison.compare_engines(
            llm,
            GROUND,
            ["plain", "ngram"],
            ["llama.cpp", "vllm"],
            PROMPTS,
            SMALL,
            progress=lambda *now: ticks.append(now),
        )
    assert ticks[-1][0] == ticks[-1][1]
    assert list(report.settings) == ["outstride, plain", "outstride, ngram", "llama.cpp"]
    assert report.settings["llama.cpp"]["version"] == "0.0.fake"
    assert "vllm cannot be imported" in report.skipped["vllm"]
    answers = [s for s in report.samples() if s["what"] == "answer"]
    for name in report.settings:
        mine = [s for s in answers if s["peer"] == name]
        assert [(s["batch"], s["prompts"], s["tokens"]) for s in mine] == [
            *((1, ["a"], 5), (1, ["b"], 5), (2, ["a", "b"], 10))
        ]
        assert [s["prompt_tokens"] for s in mine] == [
            len(given[0]),
            len(given[1]),
            sum(map(len, given)),
        ]
    passes = [s for s in report.samples() if s["what"] == "pass"]
    assert {(s["peer"], s["nodes"]) for s in passes} == {
        *(("outstride, plain", 1), ("outstride, plain", 4), ("llama.cpp", 1), ("llama.cpp", 4))
    }
    assert len(passes) == 2 * 4
    summary = report.summary()
    assert set(summary["tokens_per_second"]["llama.cpp"]) == {"1", "2"}
    assert set(summary["first_against"]) == {"outstride, ngram", "llama.cpp"}
    assert llama.alive == 0


def test_our_own_turns_find_nothing_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompt again is read again, by a method that has forgotten it."""
    with fake.make_llm(pages=512) as llm:
        stats: list[tuple[int, int]] = []
        usual = llm.generate

        def generate(*arguments: Any, **options: Any) -> Any:
            found = usual(*arguments, **options)
            stats.append((found[0].stats.reused, found[0].stats.passes))
            return found

        monkeypatch.setattr(llm, "generate", generate)
        peer = ours.OutstridePeer(llm, "suffix", 1)
        prompt = llm.encode("abcabcabc " * 8, chat=True)
        assert peer.generate([prompt], 20) == peer.generate([prompt], 20)
        assert stats[0] == stats[1]
        assert stats[0][0] == 0


def test_answers_of_another_length_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Short:
        name, settings = "short", dict[str, Any]()

        def generate(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
            return [[1] * (output - 1) for _ in prompts]

        def once(self, nodes: int, cached: int) -> None:
            del nodes, cached

        def fits(self, count: int) -> bool:
            return count > 0

        def close(self) -> None: ...

    monkeypatch.setitem(engine_comparison.PEERS, "short", lambda _: [Short()])
    report = EngineComparisonReport()
    with fake.make_llm() as llm, pytest.raises(OutstrideError, match="short gave an answer"):
        engine_comparison.compare_engines(
            llm, GROUND, ["plain"], ["short"], PROMPTS, SMALL, report=report
        )
    assert report.samples(), "what was measured before stays"
    with fake.make_llm() as llm, pytest.raises(InvalidParams):
        engine_comparison.compare_engines(llm, GROUND, [], ["short"], PROMPTS, SMALL)


# --- transformers, for real -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.serve import tiny

    return tiny.make(tmp_path_factory.mktemp("peers") / "tiny")


def test_transformers(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "formats", lambda: [torch.float32])
    config = json.loads((checkpoint / "config.json").read_text())
    ground = PeerSetup(checkpoint, config["vocab_size"], threads=1, max_length=200, max_batch=2)
    plain, lookup = transformers.open_all(ground)
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 7]]
    alone = [plain.generate([prompt], 12)[0] for prompt in prompts]
    assert [len(tokens) for tokens in alone] == [12, 12]
    assert plain.generate(prompts, 12) == alone, "padding changes nothing"
    assert lookup.generate(prompts[:1], 12) == alone[:1]
    assert (plain.fits(2), lookup.fits(1), lookup.fits(2)) == (True, True, False)
    assert lookup.settings["prompt_lookup_num_tokens"] == transformers.LOOKUP
    assert plain.settings["weights"] == "float32"
    case = plain.once(3, 8)
    assert case is not None
    with case() as call:
        call()
    assert lookup.once(3, 8) is None
    plain.close()


def test_a_processor_that_refuses_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "_PROBE", "import os; os.abort()")
    assert transformers.formats() == [torch.float32]
    monkeypatch.setattr(transformers, "_PROBE", "")
    assert transformers.formats() == [torch.float32, torch.bfloat16]


# --- vLLM and OpenVINO GenAI, as documented ---------------------------------------------------------


class FakeVllm(ModuleType):
    """What is used of vLLM's interface; the answer is the prompt's first token, repeated."""

    __version__ = "0.fake"

    def __init__(self) -> None:
        super().__init__(vllm.PACKAGE)
        self.engines: list[dict[str, Any]] = []

    def SamplingParams(self, **options: Any) -> Any:  # noqa: N802
        assert options.pop("temperature") == 0.0
        assert options.pop("ignore_eos")
        return SimpleNamespace(**options)

    def LLM(self, **options: Any) -> Any:  # noqa: N802
        self.engines.append(options)

        def generate(prompts: list[dict[str, list[int]]], params: Any, use_tqdm: bool) -> list[Any]:
            assert not use_tqdm
            return [
                SimpleNamespace(
                    outputs=[
                        SimpleNamespace(token_ids=[p["prompt_token_ids"][0]] * params.max_tokens)
                    ]
                )
                for p in prompts
            ]

        return SimpleNamespace(generate=generate)


def test_vllm(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeVllm()
    monkeypatch.setattr(transformers, "formats", lambda: [torch.float32, torch.bfloat16])
    monkeypatch.setitem(sys.modules, vllm.PACKAGE, module)
    ground = PeerSetup(checkpoint, 100, threads=2, max_length=99, max_batch=4)
    plain, speculating = vllm.open_all(ground)
    assert plain.generate([[3, 4], [5]], 2) == [[3, 3], [5, 5]]
    assert (plain.name, speculating.name) == ("vllm", "vllm, n-gram")
    assert [e.get("speculative_config") for e in module.engines] == [None, vllm.NGRAM]
    assert all(e["model"] == str(checkpoint) for e in module.engines)
    assert all(not e["enable_prefix_caching"] and e["max_num_seqs"] == 4 for e in module.engines)
    assert all(e["dtype"] == "bfloat16" for e in module.engines)
    assert plain.once(1, 1) is None
    plain.close()


class FakeOpenVino(ModuleType):
    """What is used of OpenVINO GenAI; the answer is the prompt's last token, repeated."""

    def __init__(self) -> None:
        super().__init__(openvino.PACKAGE)
        self.opened: list[tuple[str, str, dict[str, Any]]] = []

    def get_version(self) -> str:
        return "0.fake"

    def GenerationConfig(self) -> Any:  # noqa: N802
        return SimpleNamespace()

    def TokenizedInputs(self, tokens: Any, mask: Any) -> Any:  # noqa: N802
        return SimpleNamespace(tokens=tokens, mask=mask)

    def LLMPipeline(self, path: str, device: str, **options: Any) -> Any:  # noqa: N802
        self.opened.append((path, device, options))

        def generate(given: Any, config: Any) -> Any:
            assert config.ignore_eos
            assert not config.do_sample
            assert (given.mask.sum(axis=1) > 0).all()
            assert (given.tokens[given.mask == 0] == 0).all()
            return SimpleNamespace(
                tokens=[[row[-1]] * config.max_new_tokens for row in given.tokens]
            )

        return SimpleNamespace(generate=generate)


def test_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeOpenVino()
    runtime = ModuleType(openvino.RUNTIME)
    runtime.Tensor = np.asarray  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, openvino.PACKAGE, module)
    monkeypatch.setitem(sys.modules, openvino.RUNTIME, runtime)
    monkeypatch.setattr(openvino, "_PROBE", "import sys; assert sys.argv[1] == 'x.gguf'")
    [peer] = openvino.open_all(GROUND)
    assert peer.generate([[3, 4, 5], [6]], 2) == [[5, 5], [6, 6]]
    assert module.opened[0][:2] == ("x.gguf", "CPU")
    assert module.opened[0][2] == {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": 1}
    monkeypatch.setattr(openvino, "_PROBE", "import os; os.abort()")
    [careful] = openvino.open_all(GROUND)
    assert careful.settings["INFERENCE_PRECISION_HINT"] == "f32"
    assert peer.once(1, 1) is None
    peer.close()


# --- engines in processes of their own --------------------------------------------------------------

ENGINE = """
import os, signal
class GenerationConfig: pass
def get_version(): return "0.fake"
def TokenizedInputs(tokens, mask): return tokens
class LLMPipeline:
    def __init__(self, path, device, **options):
        print("engines print", flush=True)
        if path.endswith("broken.gguf"): raise RuntimeError("no such tensor")
    def generate(self, tokens, config):
        if tokens[0][-1] == 13: raise ValueError("unlucky")
        if tokens[0][-1] == 14: os.kill(os.getpid(), signal.SIGILL)
        self.tokens = [[int(row[-1])] * config.max_new_tokens for row in tokens]
        return self
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PeerSetup:
    """An environment that holds an engine which this one lacks."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "openvino_genai.py").write_text(ENGINE)
    (tmp_path / "lib" / "openvino.py").write_text("def Tensor(values): return values")
    python = tmp_path / "openvino" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{tmp_path}/lib:$PYTHONPATH" exec {sys.executable} "$@"'
    )
    python.chmod(0o755)
    monkeypatch.setattr(subprocess_peer, "EXIT_TIMEOUT", 5.0)
    return replace(GROUND, environments=tmp_path)


def test_an_engine_in_another_environment(elsewhere: PeerSetup) -> None:
    [peer] = engine_comparison.PEERS["openvino"](elsewhere)
    with closing(peer):
        assert peer.name == "openvino"
        assert peer.settings["version"] == "0.fake"
        assert (peer.fits(2), peer.once(1, 1)) == (True, None)
        assert peer.generate([[3, 4, 5], [6]], 2) == [[5, 5], [6, 6]]
        with pytest.raises(OutstrideError, match="ValueError: unlucky"):
            peer.generate([[13]], 2)
        assert peer.generate([[7]], 1) == [[7]], "an error is no end"
        with pytest.raises(OutstrideError, match=r"Illegal instruction; it uses .* not permit"):
            peer.generate([[14]], 2)
        with pytest.raises(OutstrideError, match="openvino ended"):
            peer.generate([[7]], 1)
    peer.close()


def test_what_cannot_be_opened_is_said(elsewhere: PeerSetup) -> None:
    with pytest.raises(OutstrideError, match="RuntimeError: no such tensor"):
        engine_comparison.PEERS["openvino"](replace(elsewhere, path=Path("broken.gguf")))
    with pytest.raises(
        OutstrideError, match="cannot be imported: it is not installed; `make peers`"
    ):
        subprocess_peer.opener("openvino", "no_such_package")(elsewhere)


class Dying:
    """An engine that ends after so many answers."""

    def __init__(self, name: str, answers: int) -> None:
        self.name, self.settings, self._left = name, dict[str, Any](), answers

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        self._left -= 1
        if self._left < 0:
            raise OutstrideError(f"{self.name} ended: Killed")
        return [[1] * output for _ in prompts]

    def once(self, nodes: int, cached: int) -> None:
        del nodes, cached

    def fits(self, count: int) -> bool:
        return count > 0

    def close(self) -> None: ...


def test_who_dies_is_out_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engine_comparison.PEERS, "early", lambda _: [Dying("early", 0)])
    monkeypatch.setitem(
        engine_comparison.PEERS, "late", lambda _: [Dying("late", 2), Dying("healthy", 99)]
    )
    with fake.make_llm(pages=512) as llm:
        report = engine_comparison.compare_engines(
            llm, GROUND, ["plain"], ["early", "late"], PROMPTS, SMALL
        )
    summary = report.summary()
    assert summary["skipped"] == {"early": "early ended: Killed", "late": "late ended: Killed"}
    assert list(summary["settings"]) == ["outstride, plain", "late", "healthy"]
    assert set(summary["tokens_per_second"]["healthy"]) == {"1", "2"}
    assert set(summary["first_against"]["late"]) == {"1"}, "on what both answered"


def test_a_slow_moment_spoils_no_figure() -> None:
    report = EngineComparisonReport(settings={"outstride, plain": {}, "other": {}})
    for slow in (1.0, 1.0, 9.0):
        for peer, seconds in (("outstride, plain", 2.0 * slow), ("other", 4.0)):
            for name in ("a", "b"):
                report.found.append(
                    {"what": "answer", "peer": peer, "batch": 1, "prompts": [name]}
                    | {"tokens": 8, "seconds": seconds}
                )
    assert report.rates() == {"outstride, plain": {"1": 4.0}, "other": {"1": 2.0}}
    assert report.against() == {"other": {"1": 2.0}}


@pytest.mark.parametrize(
    ("package", "opened"),
    [
        (vllm.PACKAGE, vllm.open_all),
        (openvino.PACKAGE, openvino.open_all),
        (transformers.PACKAGE, transformers.open_all),
        (llama_cpp.PACKAGE, llama_cpp.open_all),
    ],
)
def test_what_is_not_installed(package: str, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(OutstrideError, match="cannot be imported"):
        opened(GROUND)


def test_llama_cpp_loads_gguf_files_only(llama: FakeLlama, checkpoint: Path) -> None:
    with pytest.raises(OutstrideError, match="GGUF"):
        llama_cpp.open_all(PeerSetup(checkpoint, 10, 1, 10, 1))
    assert llama.alive == 0


# --- the command ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nobody")
def test_the_command(
    shell: Shell, llama: FakeLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(comparison_rows, "cores", lambda: 1)
    monkeypatch.setitem(sys.modules, transformers.PACKAGE, None)
    file = tmp_path / "model.gguf"
    file.touch()
    options = ("--limit", "2", "--batch", "1,2", "--tokens", "4", "--nodes", "1,2", "--cached", "4")
    more = ("--repeat", "1", "--rounds", "2", "--out", str(tmp_path / "out.json"))
    ran = shell("bench", "peers", "--model", str(file), *options, *more, context=2048, pages=2048)
    assert ran.code == 0, ran.err
    values = result.validate(json.loads(ran.last))
    assert values["kind"] == "peers"
    assert set(values["summary"]["skipped"]) == {"transformers", "vllm", "openvino"}
    assert "left out: vllm: vllm cannot be imported" in " ".join(ran.out.split())
    assert "llama.cpp: version 0.0.fake" in ran.out
    assert result.read(tmp_path / "out.json").to_dict() == values
    assert llama.alive == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--peers", "other"), "no peer 'other'; known are llama.cpp"),
        (("--tokens", "0"), "start at 1"),
        (("--methods", "ngrm"), "did you mean ngram"),
    ],
)
def test_bad_requests(shell: Shell, options: tuple[str, str], said: str) -> None:
    ran = shell("bench", "peers", *options, pages=0)
    assert ran.code == 1
    assert said in ran.err

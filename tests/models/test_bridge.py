"""Architectures without a native family run through transformers, over pages and token graphs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from outstride import LLM, SamplingParams
from outstride.bench.prompts import BenchPrompt
from outstride.bench.prove import prove
from outstride.core.graph import FloatArray, chain, tree
from outstride.errors import CorruptModel, UnknownArchitecture, UnknownMethod, UnsupportedModel
from outstride.models.bridge import paged
from outstride.models.bridge.invariant import ROWS, RowInvariant
from outstride.models.decoder import Decoder
from outstride.models.load import Loaded, load
from tests.models.bridge_models import ARCHITECTURES, checkpoint, make
from tests.models.checkpoints import expected
from tests.models.drive import Hand, logits, tokens

PROMPTS = [tokens(7, seed=1), tokens(33, seed=2), [5, 6, 7, 8] * 5]
METHODS = ["ngram", "suffix", "recycle", "trigram", "lookahead", "mix"]
"""Chains, trees and Jacobi windows."""
ANSWER = SamplingParams(max_tokens=32, ignore_eos=True)
CLEAR = 1e-3
"""A greedy token must be that of transformers where its logit is ahead by this much."""


@pytest.fixture(params=ARCHITECTURES, scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of transformers, and the same checkpoint loaded here."""
    model = make(request.param)
    folder = checkpoint(model, tmp_path_factory.mktemp("checkpoint"))
    return model, load(str(folder), pages=14)


def test_logits_are_those_of_transformers(pair: tuple[Any, Loaded]) -> None:
    """A prompt in chunks that do not fit batches, then a tree, along every path."""
    model, loaded = pair
    hand, prompt = Hand(loaded.model, [5, 3, 8, 1, 2]), tokens(37, seed=3)
    found = hand.read(prompt, 21)
    np.testing.assert_allclose(found, expected(model, prompt), atol=1e-4, rtol=0)
    graph = tree(tokens(6, seed=4), [-1, 0, 0, 1, 2, 2], len(prompt))
    scored = logits(hand.run(graph))
    for path in ([0, 1, 3], [0, 2, 4], [0, 2, 5]):
        text = prompt + [int(graph.tokens[node]) for node in path]
        reference = expected(model, text)[len(prompt) :]
        np.testing.assert_allclose(scored[path], reference, atol=1e-4, rtol=0)


def test_text_is_that_of_transformers_and_methods_agree(pair: tuple[Any, Loaded]) -> None:
    """Greedy tokens; all methods in one batch, on too few pages for all, in small chunks."""
    model, loaded = pair
    with LLM(loaded, max_nodes=40) as llm:
        plain = [r.outputs[0].token_ids for r in llm.generate(PROMPTS, ANSWER, method="plain")]
        for prompt, answer in zip(PROMPTS, plain, strict=True):
            rows = expected(model, [*prompt, *answer])[len(prompt) - 1 : -1]
            top, best = rows.topk(2).values, rows.argmax(-1).tolist()
            clear = (top[:, 0] - top[:, 1] > CLEAR).tolist()
            assert sum(clear) > 16
            assert all(a == b for a, b, c in zip(answer, best, clear, strict=True) if c)
        found = llm.generate(
            [prompt for prompt in PROMPTS for _ in METHODS], ANSWER, method=METHODS * len(PROMPTS)
        )
        for i, result in enumerate(found):
            assert result.error is None
            assert result.outputs[0].token_ids == plain[i // len(METHODS)], METHODS[
                i % len(METHODS)
            ]
        llm.engine.check_integrity()


def test_rows_have_the_same_bits_in_any_batch(pair: tuple[Any, Loaded]) -> None:
    model = pair[1].model
    assert model.ops.row_invariant
    prompt, other = tokens(20, seed=5), tokens(45, seed=6)
    alone = Hand(model, [0, 1, 2]).read(prompt)
    assert np.array_equal(Hand(model, [7, 6, 9]).read(prompt, 7), alone)
    hands = [Hand(model, [3, 4, 5]), Hand(model, [10, 12, 11])]
    work = [hands[1].work(chain(other)), hands[0].work(chain(prompt))]
    assert np.array_equal(logits(model.forward(work).wait()[1]), alone)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(make("starcoder2"), tmp_path_factory.mktemp("starcoder2"))


def test_a_line_says_that_it_runs_through_transformers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load(str(folder))
    assert (loaded.device, loaded.weights, loaded.context) == ("cpu", "fp32", 256)
    said = capsys.readouterr().err
    assert "Starcoder2ForCausalLM has no native family: it runs through transformers" in said
    assert "transformers" in loaded.model.build


def test_sampling_prefix_hits_and_prove(folder: Path) -> None:
    sampled = SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True, n=2)
    with LLM(folder) as llm:
        first = llm.generate(PROMPTS, sampled, method="plain")
        again = llm.generate(PROMPTS, sampled, method="suffix")
        assert [[o.token_ids for o in r.outputs] for r in first] == [
            [o.token_ids for o in r.outputs] for r in again
        ]
        assert sum(o.stats.reused for r in again for o in r.outputs) > 0
        prompts = [BenchPrompt("1", "words", "w5 w6 w7 w8 w5"), BenchPrompt("2", "words", "w1 w9")]
        report = prove(llm, "suffix", prompts, SamplingParams(max_tokens=12), raw=True)
        assert report.equal
        assert not report.rounding
        assert report.mixed is not None
        assert "early-exit" not in report.mixed.methods


def test_preempted_requests_have_the_same_text(folder: Path) -> None:
    prompts = [tokens(30, seed=seed) for seed in range(8)]
    with LLM(folder, pages=200) as llm:
        plain = [r.outputs[0].token_ids for r in llm.generate(prompts, ANSWER, method="plain")]
    with LLM(folder, pages=10, max_nodes=24) as llm:
        found = llm.generate(prompts, ANSWER, method="recycle")
        assert sum(result.outputs[0].stats.preempted for result in found) > 0
        assert [result.outputs[0].token_ids for result in found] == plain


def test_methods_that_run_some_layers_are_refused(folder: Path, tmp_path: Path) -> None:
    with LLM(folder) as llm:
        for method in ("early-exit", "prune", "skip-layers"):
            with pytest.raises(UnknownMethod, match="runs through transformers as a whole"):
                llm.generate(PROMPTS[0], ANSWER, method=method)
        with pytest.raises(UnsupportedModel, match="takes no draft heads"):
            llm.method(f"eagle:from={tmp_path}")


def test_an_ignored_tree_mask_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the attention: every node sees all nodes before it, as in a chain."""
    from outstride.ops.attention_plan import plan as real

    loaded = load(str(folder))

    def as_chains(spans: Any, **options: Any) -> Any:
        from dataclasses import replace

        flat = [replace(s, graph=chain(s.graph.tokens, positions=s.graph.positions)) for s in spans]
        return real(flat, **options)

    monkeypatch.setattr(paged, "plan", as_chains)
    with pytest.raises(UnsupportedModel, match="depend on nodes of other branches"):
        load(str(folder))
    hand, graph = Hand(loaded.model, [0, 1]), tree(tokens(5, seed=1), [-1, 0, 0, 1, 2], 0)
    model = make("starcoder2")
    path = [0, 2, 4]
    reference = expected(model, [int(graph.tokens[node]) for node in path])
    assert not np.allclose(logits(hand.run(graph))[path], reference, atol=1e-4)


def test_models_that_are_exact_up_to_rounding_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outstride.models.bridge.load.check", lambda model, layers: False)
    folder = checkpoint(make("gpt2", {}, "GPT2LMHeadModel"), tmp_path)
    with LLM(folder) as llm:
        assert not llm.model.ops.row_invariant
        assert "exact up to rounding" in capsys.readouterr().err
        prompts = [BenchPrompt("1", "words", "w5 w6 w7 w8 w5"), BenchPrompt("2", "words", "w1 w9")]
        report = prove(llm, "suffix", prompts, SamplingParams(max_tokens=12), raw=True)
        assert report.rounding
        assert not report.broken
        assert report.summary()["exactness"] == "exact up to rounding"


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("BloomForCausalLM", {"n_layer": 2, "n_head": 6}, "attention interface"),
    "mpt": ("MptForCausalLM", {"d_model": 48, "n_layers": 2, "n_heads": 6}, "attention interface"),
    "gptj": ("GPTJForCausalLM", {"rotary_dim": 4}, "attention interface"),
    "falcon": ("FalconForCausalLM", {}, "attention interface"),
    "mamba": ("MambaForCausalLM", {}, "recurrent state"),
    "rwkv": ("RwkvForCausalLM", {}, "recurrent state"),
    "lfm3": ("Lfm3ForCausalLM", {}, "convolution"),
    "diffllama": ("DiffLlamaForCausalLM", {}, "attend 4 times"),
    "doge": ("DogeForCausalLM", {}, "changes its attention mask"),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 48, "d_kv": 8, "d_ff": 80, "num_layers": 2, "num_heads": 6},
        "encoder-decoder",
    ),
    "bert": ("BertLMHeadModel", {}, "causal"),
    "llama4_text": (
        "Llama4ForCausalLM",
        {
            "attention_chunk_size": 32,
            "head_dim": 8,
            "num_local_experts": 2,
            "intermediate_size_mlp": 80,
        },
        "neither causal nor a sliding window",
    ),
    "arcee": (
        "ArceeForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "longest position of a batch",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals_give_the_reason(kind: str, tmp_path: Path) -> None:
    name, changes, reason = REFUSED[kind]
    folder = checkpoint(make(kind, changes, name), tmp_path)
    with pytest.raises(UnsupportedModel, match=f"not supported.*{reason}"):
        load(str(folder))


def test_other_devices_and_weights_are_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="device cpu and weights fp32"):
        load(str(folder), weights="int8")


def test_without_transformers_the_error_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedModel, match=r"pip install outstride\[transformers\]"):
        load(str(folder))


def test_a_gguf_file_has_no_bridge(tmp_path: Path) -> None:
    from outstride.models.bridge.load import bridged

    with pytest.raises(UnknownArchitecture, match="other"):
        bridged(
            UnknownArchitecture("other"), "x", tmp_path / "x.gguf", None, (), "auto", "auto", False
        )


def test_missing_and_broken_tensors(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    tensors = load_file(folder / "model.safetensors")
    lost = dict(tensors)
    lost.pop("model.layers.1.mlp.c_fc.weight")
    save_file(lost, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptModel, match=r"model.layers.1.mlp.c_fc.weight"):
        load(str(tmp_path))
    tensors["model.layers.0.mlp.c_fc.weight"][3, 4] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptModel, match="NaN"):
        load(str(tmp_path))


def test_code_of_a_repository_needs_trust(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "homemade",
        "architectures": ["HomemadeForCausalLM"],
        "auto_map": {
            "AutoConfig": "homemade.HomemadeConfig",
            "AutoModelForCausalLM": "homemade.HomemadeForCausalLM",
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "homemade.py").write_text(
        "from transformers import Starcoder2Config, Starcoder2ForCausalLM\n\n\n"
        "class HomemadeConfig(Starcoder2Config):\n    model_type = 'homemade'\n\n\n"
        "class HomemadeForCausalLM(Starcoder2ForCausalLM):\n    config_class = HomemadeConfig\n"
    )
    with pytest.raises(UnsupportedModel, match="--trust-remote-code"):
        load(str(tmp_path))
    loaded = load(str(tmp_path), trust_remote_code=True)
    prompt = tokens(9)
    ours = Hand(loaded.model, [0, 1]).read(prompt)
    np.testing.assert_allclose(ours, expected(make("starcoder2"), prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("threads", [1, 3, 6])
def test_operations_have_the_same_bits_at_every_place(threads: int) -> None:
    """At sizes where torch splits a buffer among threads in the middle of a row."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        row = torch.randn(11008, generator=torch.Generator().manual_seed(0)) * 2
        x = row.repeat(1, ROWS, 1)
        with RowInvariant():
            found = [
                torch.nn.functional.silu(x),
                torch.nn.functional.gelu(x),
                torch.nn.functional.gelu(x, approximate="tanh"),
                torch.nn.functional.softplus(x),
                torch.sigmoid(x),
                x.sigmoid(),
            ]
        for result in found:
            assert bool((result == result[:, :1]).all())
        plain = torch.nn.functional
        for ours, theirs in zip(
            found, [plain.silu(x), plain.gelu(x), plain.gelu(x, approximate="tanh")], strict=False
        ):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_products_have_one_row_count() -> None:
    source = torch.Generator().manual_seed(1)
    x, weight = torch.randn(37, 512, generator=source), torch.randn(300, 512, generator=source)
    with RowInvariant():
        whole = torch.nn.functional.linear(x, weight)
        for rows in (slice(0, 1), slice(3, 10), slice(20, 37), slice(5, 5)):
            part: FloatArray = torch.nn.functional.linear(x[rows], weight).numpy()
            assert np.array_equal(part, whole[rows].numpy())


def test_transformers_is_imported_for_a_bridged_model_only() -> None:
    import subprocess

    code = (
        "import sys; from outstride.models import load; import outstride.models.bridge.load;"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_model_is_left_as_transformers_made_it(folder: Path) -> None:
    """Its own attention works elsewhere in the process while a bridged model is loaded."""
    loaded = load(str(folder))
    assert isinstance(loaded.model, Decoder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = tokens(9)
    ours = Hand(loaded.model, [0, 1]).read(prompt)
    np.testing.assert_allclose(ours, expected(model, prompt), atol=1e-4, rtol=0)

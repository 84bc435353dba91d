"""Models with recurrent layers: equal to transformers, and equal to themselves however they are run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outstride import LLM, SamplingParams
from outstride.bench.prompts import BenchPrompt
from outstride.bench.prove import prove
from outstride.core.contracts import PassInput
from outstride.core.graph import FloatArray, chain
from outstride.core.proposal import Proposal, Wants
from outstride.core.recurrent import StateAdvance, StateSpec
from outstride.core.sequence import BlockTable
from outstride.errors import UnknownMethod
from outstride.models import load as loading
from outstride.models.decoder import Decoder
from outstride.ops import recurrent_plan
from outstride.ops.cpu import native
from outstride.ops.recurrent_states import RecurrentStates
from tests.models import checkpoints
from tests.models.hybrids import HYBRIDS, make_hybrid

LENGTH, NEAR = 32, 1e-3
METHODS = ("ngram:length=4,shortest=1", "recycle", "lookahead", "suffix", "auto")
"""Chains, trees, a window of independent guesses, and what `auto` makes of them."""
FEW = SamplingParams(max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Every variant: the model of transformers, and its checkpoint."""
    found = {}
    for variant in HYBRIDS:
        model = make_hybrid(variant)
        folder = tmp_path_factory.mktemp(variant.replace(" ", "-"))
        found[variant] = model, checkpoints.save(model, folder)
    return found


@pytest.fixture(autouse=True)
def _frequent_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "SNAPSHOT_TOKENS", 16)


def prompts(*lengths: int) -> list[list[int]]:
    """Prompts that repeat themselves, so that lookups find drafts."""
    rng = np.random.default_rng(5)
    found = []
    for length in lengths:
        words = rng.integers(3, 97, 7)
        found.append([int(w) for w in np.resize(np.append(words, rng.integers(3, 97, 2)), length)])
    return found


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, weights="fp32", **options)


def logits_of(model: Decoder, ids: list[int]) -> FloatArray:
    """The logits of a text that is read in one pass."""
    wants = Wants(nodes=tuple(range(len(ids))), logits=True)
    work = PassInput(
        Proposal(chain(ids), len(ids), wants=wants),
        BlockTable(pages=list(range(8))),
        np.arange(len(ids)),
    )
    found = model.forward([work]).wait()[0].logits
    assert found is not None
    return found


@pytest.mark.parametrize("variant", HYBRIDS)
def test_logits_are_those_of_transformers(
    variant: str, folders: dict[str, tuple[Any, Path]]
) -> None:
    model, folder = folders[variant]
    (ids,) = prompts(70)
    found = logits_of(loading.load(str(folder), weights="fp32", pages=8).model, ids)
    expected = checkpoints.expected(model, ids).numpy()
    assert np.abs(found - expected).max() < 1e-3
    assert np.abs(expected).max() > 0.5


@pytest.mark.parametrize("variant", HYBRIDS)
def test_greedy_text_is_that_of_transformers(
    variant: str, folders: dict[str, tuple[Any, Path]]
) -> None:
    model, folder = folders[variant]
    asked = prompts(5, 21, 40)
    with open_llm(folder, pages=64) as llm:
        results = llm.generate(asked, FEW, method="plain")
    for prompt, result in zip(asked, results, strict=True):
        ours = result.token_ids
        logits = checkpoints.expected(model, prompt + ours[:-1])[len(prompt) - 1 :]
        for token, row in zip(ours, logits, strict=True):
            assert float(row.max() - row[token]) <= NEAR
        assert len(ours) == LENGTH


@pytest.mark.parametrize("variant", HYBRIDS)
def test_every_method_gives_the_text_of_plain(
    variant: str, folders: dict[str, tuple[Any, Path]]
) -> None:
    """Alone, in one batch with others, in small chunks, and with so few pages that some wait."""
    asked = prompts(5, 21, 40, 9)
    with open_llm(folders[variant][1], pages=64) as llm:
        plain = [llm.generate([p], FEW, method="plain")[0].token_ids for p in asked]
        for method in METHODS:
            found = llm.generate(asked, FEW, method=method)
            assert [r.token_ids for r in found] == plain, method
    with open_llm(folders[variant][1], pages=9, max_nodes=24) as llm:
        found = llm.generate(asked, FEW, method="recycle")
        assert [r.token_ids for r in found] == plain


def bits(result: Any) -> list[tuple[int, float]]:
    return [(row.token_id, row.logprob) for row in result.logprobs]


@pytest.mark.skipif(native.library_path() is None, reason="no native kernels were built")
@pytest.mark.parametrize("variant", ["qwen3.5", "lfm2", "granite hybrid dense"])
def test_packed_weights_are_near_those_they_stand_for(variant: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 192, "intermediate_size": 256, "initializer_range": 0.02}
    sizes: dict[str, dict[str, Any]] = {
        "qwen3.5": {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 32},
        "granite hybrid dense": {"mamba_d_head": 48, "shared_intermediate_size": 256},
    }
    folder = checkpoints.save(make_hybrid(variant, **{**wide, **sizes.get(variant, {})}), tmp_path)
    (ids,) = prompts(70)
    config, open_model, _ = loading.opened(folder)
    rounded = Decoder.from_tensors(
        config,
        open_model().read(),
        pages=8,
        make_ops=loading.rounded_reference,
        states=StateSpec(2, 16),
    )
    exact = logits_of(loading.load(str(folder), weights="fp32", pages=8).model, ids)
    for weights, expected, limit in (
        ("int8", exact, 0.03),
        ("int4", logits_of(rounded, ids), 0.08),
    ):
        loaded = loading.load(str(folder), weights=weights, pages=8)
        assert loaded.weights == weights
        error = np.square(logits_of(loaded.model, ids) - expected).mean()
        assert np.sqrt(error / np.square(expected).mean()) < limit, weights


@pytest.mark.skipif(native.library_path() is None, reason="no native kernels were built")
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("variant", ["qwen3.5 moe", "lfm2 biases", "granite hybrid"])
def test_packed_weights_give_one_text(
    variant: str, weights: str, folders: dict[str, tuple[Any, Path]]
) -> None:
    asked = prompts(5, 21, 40)
    with LLM(folders[variant][1], weights=weights, pages=64) as llm:
        alone = [llm.generate([p], FEW, method="plain")[0].token_ids for p in asked]
        for method in ("recycle", "ngram:length=4,shortest=1"):
            assert [r.token_ids for r in llm.generate(asked, FEW, method=method)] == alone


def test_drafts_are_accepted(folders: dict[str, tuple[Any, Path]]) -> None:
    """The other tests would prove nothing if no draft was ever accepted."""
    asked = prompts(40, 60)
    for variant in ("qwen3.5", "lfm2", "granite hybrid"):
        with open_llm(folders[variant][1], pages=64) as llm:
            plain = llm.generate(asked, FEW, method="plain")
            drafted = llm.generate(asked * 2, FEW, method="recycle")
            passes = [sum(r.stats.passes for r in results) for results in (plain, drafted)]
            assert passes[1] < 2 * passes[0]


def test_a_prefix_is_found_at_its_last_snapshot(folders: dict[str, tuple[Any, Path]]) -> None:
    (long,) = prompts(75)
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0)
    for variant in ("qwen3.5", "lfm2", "granite hybrid"):
        with open_llm(folders[variant][1], pages=64) as llm:
            first = llm.generate([long], params, method="plain")[0]
            again = llm.generate([long[:70]], params, method="recycle")[0]
            once_more = llm.generate([long], params, method="recycle")[0]
            assert once_more.token_ids == first.token_ids
            assert bits(once_more) == bits(first)
            assert once_more.stats.reused == 64
            assert again.stats.reused == 64
            pool = llm.engine.idle_runner().pools["target"]
            pool.check_integrity([])


def test_samples_of_one_request_fork_at_the_prompt(folders: dict[str, tuple[Any, Path]]) -> None:
    (prompt,) = prompts(37)
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=7, n=4)
    for variant in ("qwen3.5", "lfm2", "granite hybrid"):
        texts = []
        for method in ("plain", "recycle"):
            for nodes in (256, 20):
                with open_llm(folders[variant][1], pages=64, max_nodes=nodes) as llm:
                    (result,) = llm.generate([prompt], params, method=method)
                    texts.append([output.token_ids for output in result.outputs])
        assert all(text == texts[0] for text in texts)
        assert len({tuple(ids) for ids in texts[0]}) > 1


def test_few_state_slots_make_sequences_wait(
    folders: dict[str, tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(20, 30, 40, 50, 25)
    _, folder = folders["qwen3.5"]
    with open_llm(folder, pages=64) as llm:
        plain = [r.token_ids for r in llm.generate(asked, FEW, method="plain")]
    monkeypatch.setattr(loading, "_MAX_STATES", 2)
    with open_llm(folder, pages=64) as llm:
        assert [r.token_ids for r in llm.generate(asked, FEW, method="recycle")] == plain
        llm.engine.idle_runner().pools["target"].check_integrity([])


def test_a_hybrid_draft_model_follows_its_target(folders: dict[str, tuple[Any, Path]]) -> None:
    """A draft model keeps a state of its own, over several rounds of a step."""
    asked, (_, folder) = prompts(21, 40), folders["qwen3.5"]
    with open_llm(folder, pages=64) as llm:
        plain = llm.generate(asked, FEW, method="plain")
        drafted = llm.generate(asked, FEW, method=f"draft:model={folder},length=4")
        assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
        assert sum(r.stats.passes for r in drafted) < sum(r.stats.passes for r in plain) / 2


@pytest.mark.parametrize("variant", ["qwen3 next", "lfm2", "granite hybrid"])
def test_prove_holds(variant: str, folders: dict[str, tuple[Any, Path]]) -> None:
    """Bit for bit: in batches, alone, and among other methods on so few pages that some wait."""
    texts = [" ".join(f"w{token}" for token in ids) for ids in prompts(12, 30, 45)]
    cases = [BenchPrompt(str(i), "words", text) for i, text in enumerate(texts)]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with open_llm(folders[variant][1], pages=64) as llm:
        report = prove(llm, "recycle", cases, params, raw=True)
    assert report.equal
    assert not report.broken
    assert report.integrity is None
    assert len(report.answered) == len(cases)


@pytest.mark.parametrize("method", ["early_exit", "prune", "skip_layers", "threshold"])
def test_methods_that_a_state_does_not_allow_are_refused(
    method: str, folders: dict[str, tuple[Any, Path]]
) -> None:
    with (
        open_llm(folders["qwen3.5"][1], pages=64) as llm,
        pytest.raises(UnknownMethod, match=r"recurrent state|mask token"),
    ):
        llm.generate(prompts(9), FEW, method=method.replace("_", "-"))


def test_a_state_that_is_not_rolled_back_is_caught(
    folders: dict[str, tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: a pass leaves the state after its last drafted node."""
    asked = prompts(21, 40)
    update = RecurrentStates.update
    plan = recurrent_plan._Planner._add

    def faulty_add(self: Any, number: int, span: Any, stored: int) -> None:
        plan(self, number, span, stored)
        if span.state is not None and len(span.graph) > span.state.given:
            level, place = len(self._levels) - 1, 0
            self._levels[level][2].append((place, span.state.slot))

    def faulty_update(self: Any, updates: Any) -> None:
        update(self, [item for item in updates if not isinstance(item, StateAdvance)])

    with open_llm(folders["qwen3.5"][1], pages=64) as llm:
        plain = [r.token_ids for r in llm.generate(asked, FEW, method="plain")]
        monkeypatch.setattr(recurrent_plan._Planner, "_add", faulty_add)
        monkeypatch.setattr(RecurrentStates, "update", faulty_update)
        found = [r.token_ids for r in llm.generate(asked, FEW, method="recycle")]
    assert found != plain


def test_a_nested_config_is_read_as_text(
    folders: dict[str, tuple[Any, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As published: the text model in a module of its own, with vision and MTP tensors."""
    from safetensors.torch import load_file, save_file

    _, folder = folders["qwen3.5"]
    tensors = load_file(folder / "model.safetensors")
    nested = {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()}
    nested["mtp.norm.weight"] = torch.ones(48)
    nested["model.visual.patch.weight"] = torch.ones(3, 3)
    save_file(nested, tmp_path / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "text_config": text}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    (ids,) = prompts(20)
    with open_llm(folder, pages=16) as flat, open_llm(tmp_path, pages=16) as deep:
        texts = [llm.generate([ids], FEW, method="plain")[0].token_ids for llm in (flat, deep)]
    assert texts[0] == texts[1]
    assert (
        "2 tensors of vision, audio or multi-token prediction are skipped"
        in capsys.readouterr().err
    )
